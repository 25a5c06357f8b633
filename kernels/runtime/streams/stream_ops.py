"""What a stream can do besides launching kernels, by the CUDA driver: copy, wait for a word, write
a word. Copies run on copy engines, between GPUs too, and leave the SMs alone.

In: addresses as ints, CUDA streams. Out: work queued on the stream; LaunchError if the driver
refuses. Next: gemm/workspace.py.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from distmega.errors import LaunchError

_WORD_MASK = 0xFFFFFFFF
_AT_LEAST = 0
"""Flag of a wait: until word - value >= 0 as int32."""
_NO_FLAGS = 0
_WRITE_32 = 2
"""CU_STREAM_MEM_OP_WRITE_VALUE_32."""
_MOST_AT_ONCE = 255
"""Operations of a batch."""
_DEVICE_MEMORY = 2
"""CU_MEMORYTYPE_DEVICE."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, name: str) -> None:
    if status:
        raise LaunchError(
            f"CUDA driver's {name} gave error {status}",
            expected="0",
            remedy="see that GPUs of one host with peer access and stream memory operations run it",
        )


def copy_bytes(target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copies device memory, this GPU's or a peer's."""
    status = _driver().cuMemcpyAsync(
        ctypes.c_uint64(target),
        ctypes.c_uint64(source),
        ctypes.c_size_t(num_bytes),
        ctypes.c_void_p(stream.cuda_stream),
    )
    _check(status, "cuMemcpyAsync")


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver."""

    _fields_ = (
        *(
            (f"{side}_{name}", kind)
            for side in ("src", "dst")
            for name, kind in (
                ("x_in_bytes", ctypes.c_size_t),
                ("y", ctypes.c_size_t),
                ("memory_type", ctypes.c_uint),
                ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64),
                ("array", ctypes.c_void_p),
                ("pitch", ctypes.c_size_t),
            )
        ),
        ("width_in_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_columns(
    target: int, source: int, width: int, pitch: int, rows: int, stream: torch.cuda.Stream
) -> None:
    """As copy_bytes, of the first `width` bytes of each of `rows`, `pitch` bytes apart."""
    if width == pitch:
        copy_bytes(target, source, width * rows, stream)
        return
    copy = _Copy2D(width_in_bytes=width, height=rows)
    copy.src_memory_type = copy.dst_memory_type = _DEVICE_MEMORY
    copy.src_device, copy.dst_device = source, target
    copy.src_pitch = copy.dst_pitch = pitch
    status = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream.cuda_stream))
    _check(status, "cuMemcpy2DAsync")


def wait_word(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """What is queued later runs once the int32 at `address` has reached `value`."""
    status = _driver().cuStreamWaitValue32_v2(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value & _WORD_MASK),
        ctypes.c_uint(_AT_LEAST),
    )
    _check(status, "cuStreamWaitValue32")


def write_word(address: int, value: int, stream: torch.cuda.Stream) -> None:
    """Writes the int32 at `address`, this GPU's or a peer's, after all that was queued before."""
    status = _driver().cuStreamWriteValue32_v2(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value & _WORD_MASK),
        ctypes.c_uint(_NO_FLAGS),
    )
    _check(status, "cuStreamWriteValue32")


class _Write(ctypes.Structure):
    """CUstreamBatchMemOpParams of the driver, as it is for writing a word."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def write_words(addresses: Sequence[int], value: int, stream: torch.cuda.Stream) -> None:
    """As write_word, many at once."""
    for start in range(0, len(addresses), _MOST_AT_ONCE):
        some = addresses[start : start + _MOST_AT_ONCE]
        writes = (_Write * len(some))(
            *(_Write(operation=_WRITE_32, address=at, value=value & _WORD_MASK) for at in some)
        )
        status = _driver().cuStreamBatchMemOp_v2(
            ctypes.c_void_p(stream.cuda_stream),
            ctypes.c_uint(len(some)),
            writes,
            ctypes.c_uint(_NO_FLAGS),
        )
        _check(status, "cuStreamBatchMemOp")
