"""The launchers, of which two need torch or Ray, and what asks torch: imported when they are used.
See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.launch.host.devices import num_gpus
    from distmega.launch.local import run_local
    from distmega.launch.on_ray.actors import run_ray
    from distmega.launch.torchrun import claim_report, run_torchrun

__all__ = ["claim_report", "num_gpus", "run_local", "run_ray", "run_torchrun"]

__getattr__ = late_imports(__name__)
