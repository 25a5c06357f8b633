"""A driver for Triton that stands in for a Hopper GPU: what code launches within `offline` is
compiled for sm_90a and kept, and nothing runs.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from distmega.kernels.runtime.memory import ACCESS_BYTES
from tests.kernels.sm90 import SHARED_BYTES, Machine, read_machine

NUM_SMS = 132
_indices = itertools.count(90)
"""Of stand-ins, none that of a real device: Triton keeps the kernels of each apart."""


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": NUM_SMS}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024

    def fill_tma_descriptor(self, *fields: object) -> object:
        return fields


def check_descriptor(given: TensorDescriptor | GluonDescriptor) -> None:
    """That the driver takes it: the first element and what lies behind a step of each dim but the
    last are at multiples of 16 bytes, and elements of the last side by side.
    """
    item_bytes = given.base.dtype.itemsize
    assert given.base.data_ptr() % ACCESS_BYTES == 0
    assert given.strides[-1] == 1
    for stride in given.strides[:-1]:
        assert stride > 0
        assert stride * item_bytes % ACCESS_BYTES == 0


class _Launcher:
    """Takes what a launcher takes: nine things of Triton's, then every argument."""

    def __init__(self, source: object, metadata: object) -> None:
        self.num_arguments = len(source.signature)

    def __call__(self, *given: object) -> None:
        assert len(given) == 9 + self.num_arguments
        for each in given:
            if isinstance(each, TensorDescriptor | GluonDescriptor):
                check_descriptor(each)


class _Driver:
    utils = _Utils()
    launcher_cls = _Launcher

    def __init__(self) -> None:
        self._index = next(_indices)

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machine]]:
    """The kernels that were launched first within, in that order; arguments are CPU tensors.

    torch says that there is an H200.
    """
    found: list[Machine] = []

    def keep(module: object, function: object, name: str, files: dict[str, str], key: str) -> None:
        found.append(read_machine(files))

    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=NUM_SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: h200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: h200.name)
    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_end_hook", keep)
    monkeypatch.setattr(driver, "_active", _Driver())
    yield found
