"""What tells of a hang, or of where the time of steps goes: imported when it is asked. See
distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.hopper.diagnosis import explain_batch_hang, explain_hang
    from distmega.kernels.hopper.timeline import batch_spans, timeline_spans

__all__ = ["batch_spans", "explain_batch_hang", "explain_hang", "timeline_spans"]

__getattr__ = late_imports(__name__)
