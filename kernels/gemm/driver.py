"""What a stream can do besides launching kernels, by the CUDA driver: copy, wait for a word, write
a word. Copies run on copy engines, between GPUs too, and leave the SMs alone.

In: addresses as ints, CUDA streams. Out: work queued on the stream; LaunchError if the driver
refuses. Next: workspace.py.
"""

import ctypes
from functools import cache

import torch

from distmega.errors import LaunchError

_WORD_MASK = 0xFFFFFFFF
_AT_LEAST = 0
"""Flag of a wait: until word - value >= 0 as int32."""
_NO_FLAGS = 0


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
