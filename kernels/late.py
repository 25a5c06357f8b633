"""What the kernels' top needs of those that need Triton: imported when it is used, so that all else
runs where there is none. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.hopper.batch.runner import BatchRunner
    from distmega.kernels.hopper.one_row.runner import RowRunner
    from distmega.kernels.records.runner import RecordRunner

__all__ = ["BatchRunner", "RecordRunner", "RowRunner"]

__getattr__ = late_imports(__name__)
