"""What a task writes, by the reference of its op: the elements of its tile, and no others.

Comes in: an EventGraph, tensors by name, a task. Goes out: the tensors changed. The op's reference
(hostir/library) runs on whatever the operands hold; of its results the tile is kept, so that
what had not been written in time is seen in it. Used by interpret.py.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from distmega.hostir.library.ops import IN_PLACE, compile_op, op_operands
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.events.graph import EventGraph, TaskId
from distmega.program.types import Access, Index, Op


class TileReference:
    """The tensors of one launch. Those that tasks write start as NaN, or the largest integer."""

    def __init__(self, graph: EventGraph, given: dict[str, Tensor]) -> None:
        """given: inputs, weights and states by name."""
        self.graph = graph
        self.ops = {op.name: op for op in graph.program.ops}
        self.tensors = dict(given)
        for tensor in graph.program.tensors:
            if tensor.name not in given:
                dtype = torch_dtype(tensor.dtype)
                floats = dtype.is_floating_point
                fill = float("nan") if floats else torch.iinfo(dtype).max
                self.tensors[tensor.name] = torch.full(tensor.shape, fill, dtype=dtype)

    def starts(self, name: str) -> list[int]:
        """A vector of starts as it is now."""
        found: list[int] = self.tensors[name].tolist()
        return found

    def run(self, task: TaskId) -> None:
        """Executes a task."""
        op = self.ops[task[0]]
        operands = [self.tensors[name] for name in op_operands(op)]
        if op.kind in IN_PLACE:
            operands[-1] = operands[-1].clone()
        results = compile_op(op, {})(operands)
        for access, result in zip(op.writes, results, strict=True):
            places = self._places(op, access, task)
            if places is None:
                self.tensors[access.tensor] = result
            else:
                self.tensors[access.tensor][places] = result[places]

    def _places(self, op: Op, access: Access, task: TaskId) -> tuple[Tensor, ...] | None:
        """Indices of the elements that a task writes; None for all."""
        grid = self.graph.grid_of[op.name]
        if not grid.dims:
            return None
        extents = op.extents
        tile = {name: range(extent) for name, extent in extents.items()}
        for dim, at in zip(grid.dims, self.graph.coordinates[op.name][task[1]], strict=True):
            tile[dim.axis] = range(at * dim.size, min((at + 1) * dim.size, dim.extent))
        dims = [self._dim_places(op, index, tile) for index in access.dims]
        return tuple(torch.from_numpy(each) for each in np.ix_(*dims))

    def _dim_places(self, op: Op, index: Index, tile: dict[str, range]) -> Sequence[int]:
        if index.is_grouped:
            starts = self.starts(op.reads[index.starts].tensor)
            groups, rows = (tile[name] for name in index.axes)
            return [
                starts[group] + row
                for group in groups
                for row in rows
                if row < starts[group + 1] - starts[group]
            ]
        places = []
        for digits in product(*(tile[name] for name in index.axes)):
            flat = 0
            for name, digit in zip(index.axes, digits, strict=True):
                flat = flat * op.extents[name] + digit
            places.append(index.offset + index.stride * flat)
        return places
