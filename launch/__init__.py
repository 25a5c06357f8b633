"""Starting the ranks: `launch` calls a function on each of them, see launchers.py. Its options, and
what it yields, are of contract.py.
"""

from typing import TYPE_CHECKING

from distmega.lazy import names_from

if TYPE_CHECKING:
    from distmega.launch.contract import Emitted as Emitted
    from distmega.launch.contract import LauncherOptions as LauncherOptions
    from distmega.launch.contract import RayOptions as RayOptions
    from distmega.launch.contract import Result as Result
    from distmega.launch.launchers import is_under_torchrun as is_under_torchrun
    from distmega.launch.launchers import launch as launch

_HOMES = {
    "launch": "launch.launchers",
    "is_under_torchrun": "launch.launchers",
    "LauncherOptions": "launch.contract",
    "RayOptions": "launch.contract",
    "Emitted": "launch.contract",
    "Result": "launch.contract",
}
"""Public name -> its module."""

__all__ = [*_HOMES]
__getattr__ = names_from(__name__, _HOMES)
