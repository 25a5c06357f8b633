"""Starting the ranks: `launch` calls a function on each of them, see launchers.py. Its options, and
what it yields, are of contract.py.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.launch.contract import Emitted, LauncherOptions, RayOptions, Result
    from distmega.launch.launchers import is_under_torchrun, launch

__all__ = [
    "Emitted",
    "LauncherOptions",
    "RayOptions",
    "Result",
    "is_under_torchrun",
    "launch",
]

__getattr__ = late_imports(__name__)
