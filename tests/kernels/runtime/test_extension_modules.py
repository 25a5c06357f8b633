"""Launchers, which all have one name, keep what they are when another is loaded again; they are
made beside their kernels, and are those that the kernels need.
"""

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import make_launcher
from triton.runtime import build, driver

from distmega.kernels.library.streamed_products import stream_product
from distmega.kernels.library.streamed_tiles import StreamedTiles
from distmega.kernels.runtime.ahead import launch, launching_nothing
from distmega.kernels.runtime.extension_modules import make_launcher_beside
from tests.kernels.offline import offline

NAME = "__distmega_test_launcher"
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___distmega_test_launcher(void) { return PyModule_Create(&module); }
"""
BUILDS = shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").is_file()


@pytest.mark.skipif(not BUILDS, reason="no C compiler with Python's headers")
def test_a_module_loaded_again_leaves_others_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def load(number: int) -> ModuleType:
        found: ModuleType = build.compile_module_from_src(SOURCE % number, NAME)
        return found

    first, second = load(1), load(2)
    again = load(1)
    assert (first.launch(), second.launch(), again.launch()) == (1, 2, 1)


@triton.jit
def copy(x, y, num, spec: tl.constexpr):
    at = tl.arange(0, spec)
    tl.store(y + at, tl.load(x + at, mask=at < num, other=0.0), mask=at < num)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """C code of launchers, in the order in which they are made."""
    found: list[str] = []
    with offline(monkeypatch):

        class Launcher(driver.active.launcher_cls):
            def __init__(self, source: object, metadata: object) -> None:
                super().__init__(source, metadata)
                found.append(code_of(source, metadata.tensordesc_meta))

        monkeypatch.setattr(type(driver.active), "launcher_cls", Launcher)
        yield found


def code_of(source: object, descriptors: list[object]) -> str:
    constants = {
        (source.fn.arg_names.index(at),) if isinstance(at, str) else at: value
        for at, value in source.constants.items()
    }
    return str(make_launcher(constants, source.signature, descriptors))


def test_the_launcher_beside_a_kernel_is_that_of_the_kernel(made: list[str]):
    arguments, given = (torch.zeros(64), torch.zeros(64), 50), {"spec": 64, "num_warps": 4}
    thread = make_launcher_beside(copy, arguments, given)
    assert thread is not None
    thread.join()
    assert len(made) == 1
    compiled = copy.warmup(*arguments, grid=(1,), **given)
    assert compiled.run is not None
    assert len(made) == 2
    assert made[0] == made[1]


def test_a_kernel_that_gives_no_source_has_its_launcher_from_triton():
    kernel = SimpleNamespace(device_caches={})
    assert make_launcher_beside(kernel, (), {}) is None


def test_what_a_rehearsal_launches_has_its_launcher_beside_it(made: list[str]):
    """Once a kernel, with descriptors too."""
    x, y, weight = torch.zeros(64), torch.zeros(64), torch.zeros(64, 128).bfloat16()
    tiles = StreamedTiles(boxes=(32,), parts=1, terms=128, stages=3)
    with launching_nothing(torch.device("cpu")):
        for _ in range(2):
            stream_product(torch.zeros(20, 128).bfloat16(), [weight], tiles)
            launch(copy, (1,), x, y, 50, spec=64)
    assert len(made) == 4
    assert [made.count(code) for code in made] == [2, 2, 2, 2]
    assert sum("CUtensorMap" in code for code in made) > 0
