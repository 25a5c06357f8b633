"""Triton's launchers, extension modules of one name, loaded so that none becomes another.

In: the file of a module. Out: the module, this file's alone. CPython gives an extension module that
it loads a second time out of the module that has its name in sys.modules, whatever file that came
from, and overwrites what is in it. So where a kernel's launcher was loaded before, loading it again
put its `launch` into the module that another thread had loaded last and not looked at yet, and that
thread's kernel was then launched with another kernel's arguments. Used by ahead.py.
"""

import sys
import threading
from collections.abc import Callable
from types import ModuleType

from triton.runtime import build

_LOADING = threading.Lock()

Load = Callable[[str, str], ModuleType]


def loading_apart(load: Load) -> Load:
    """As `load`, a function of a module's name and file, but one at a time, and no module stays in
    sys.modules.
    """

    def load_alone(name: str, path: str) -> ModuleType:
        with _LOADING:
            before = sys.modules.pop(name, None)
            try:
                return load(name, path)
            finally:
                sys.modules.pop(name, None)
                if before is not None:
                    sys.modules[name] = before

    return load_alone


def _load_launchers_apart() -> None:
    """From now on, in this process, whoever uses Triton."""
    load = getattr(build, "_load_module_from_path", None)
    if load is not None:  # a later Triton may have launchers of another kind
        build._load_module_from_path = loading_apart(load)


_load_launchers_apart()
