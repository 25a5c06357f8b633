"""Starting the ranks: a function comes in, and runs on each of them; what they emit, and the result
of the first, go out.

Start at launchers.py, whose `launch` chooses who starts ranks: local.py, torchrun.py or on_ray/.
worker.py is what a rank does under all of them, supervise.py says which one failed. Options, and
what a launch yields, are of contract.py; host/ has processes, sockets and stores of one machine.
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
