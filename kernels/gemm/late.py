"""The matmul kernel and what runs beside it, which need Triton: imported when they are used. See
distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.gemm import overlap, peer_collectives
    from distmega.kernels.gemm.device import start
    from distmega.kernels.gemm.pushed import PushedCollectives, pushed_by
    from distmega.kernels.gemm.workspace import StandInWorkspace, Workspace, workspace_of

__all__ = [
    "PushedCollectives",
    "StandInWorkspace",
    "Workspace",
    "overlap",
    "peer_collectives",
    "pushed_by",
    "start",
    "workspace_of",
]

__getattr__ = late_imports(__name__)
