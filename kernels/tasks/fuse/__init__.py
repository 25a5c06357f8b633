"""From the ops of a segment to the kinds of work that one persistent kernel does.

A segment (a Program) comes in; fused ops go out, each after what it reads, or an UnsupportedError
that names an op. Start at types.py, then segment.py, whose docstring has the rules and whose table
RULES names them; rows.py, products.py, experts.py, attention.py and choice.py are what they do.
Names are loaded when they are first used: queues that are kept name types alone.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.kernels.tasks.fuse.formulas import canonical, substitute
    from distmega.kernels.tasks.fuse.segment import first_that_fits, fuse_segment
    from distmega.kernels.tasks.fuse.state import Joining
    from distmega.kernels.tasks.fuse.types import (
        IDENTITY,
        ExpertSlots,
        Fused,
        FusedAttention,
        FusedChoice,
        FusedContraction,
        FusedEmbedding,
        FusedGather,
        FusedPointwise,
        FusedRouting,
        FusedRowAttention,
        FusedSample,
        HeadsOfRows,
        InputNorm,
        WeightStream,
        attention_extents,
        norms_of,
        taken_by,
    )
    from distmega.kernels.tasks.fuse.views import Shown, shown_by_views

__all__ = [
    "IDENTITY",
    "ExpertSlots",
    "Fused",
    "FusedAttention",
    "FusedChoice",
    "FusedContraction",
    "FusedEmbedding",
    "FusedGather",
    "FusedPointwise",
    "FusedRouting",
    "FusedRowAttention",
    "FusedSample",
    "HeadsOfRows",
    "InputNorm",
    "Joining",
    "Shown",
    "WeightStream",
    "attention_extents",
    "canonical",
    "first_that_fits",
    "fuse_segment",
    "norms_of",
    "shown_by_views",
    "substitute",
    "taken_by",
]

__getattr__ = late_imports(__name__)
