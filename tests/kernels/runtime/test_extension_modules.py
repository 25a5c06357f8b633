"""Launchers, which all have one name, keep what they are when another is loaded again."""

import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime import build

import distmega.kernels.runtime.ahead  # noqa: F401  says how modules are loaded

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
