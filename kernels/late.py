"""What the kernels' top needs of those that need Triton: imported when it is used, so that all else
runs where there is none; and what makes queues, which an earlier process may have left behind, or
serves CPUs or several GPUs. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.gemm.host import PeerMatmuls
    from distmega.kernels.hopper.batch.runner import BatchRunner
    from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
    from distmega.kernels.hopper.one_row.runner import RowRunner
    from distmega.kernels.hopper.row_plan.queues import build_queues
    from distmega.kernels.isa.lowering import is_encodable
    from distmega.kernels.records.runner import RecordRunner
    from distmega.kernels.ugraphs.geometry import pays

__all__ = [
    "BatchRunner",
    "PeerMatmuls",
    "RecordRunner",
    "RowRunner",
    "build_batch_queues",
    "build_queues",
    "is_encodable",
    "pays",
]

__getattr__ = late_imports(__name__)
