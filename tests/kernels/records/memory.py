"""Memory of the host for one rank's kernel of records."""

from collections.abc import Sequence

import torch
from torch import Tensor

from distmega.hostir.ir.nodes import segment_args
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.program.types import Program


def allocate_tensors(
    segment: Program, layouts: Sequence[ArenaLayout]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """An arena a layout, and by name the tensors in them and, of zeros, all other arguments."""
    arenas = [allocate_arena(layout) for layout in layouts]
    tensors = {
        name: view
        for layout, arena in zip(layouts, arenas, strict=True)
        for name, view in arena_views(layout, arena).items()
    }
    for tensor in segment_args(segment):
        empty = torch.zeros(tensor.shape, dtype=torch_dtype(tensor.dtype))
        tensors.setdefault(tensor.name, empty)
    return arenas, tensors
