"""What a task writes, by the reference of its op: the elements of its tile, and no others.

Comes in: an EventGraph, tensors by name, a task. Goes out: the tensors changed. The op's reference
(hostir/library) runs on whatever the operands hold, on the tile's part of them where that is a part
of dims; of its results the tile is kept, so that what had not been written in time is seen in it.
An axis of a symbol ends where the symbol does, in tiles and in sums. Used by interpret.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from distmega.errors import ProgramError
from distmega.hostir.ir.uses import storage_of
from distmega.hostir.library.ops import compile_op, op_operands
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.events.graph import EventGraph, TaskId
from distmega.kernels.tasks.regions import index_ranges
from distmega.program.dtypes import INTEGER_BITS, is_integer
from distmega.program.kinds import kind_of
from distmega.program.types import Access, Index, Op, accesses

COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
"""How ranks' parts, stacked in their order, become one."""


class TileReference:
    """The tensors of one launch. Those that tasks write start as NaN, or the largest integer, those
    that are given too as copies, and states that are left out as zeros. Where ranks share groups
    out and somebody reads all rows, those of other ranks' groups are zeros from the start on, since
    the rank has no task that writes them.
    """

    def __init__(
        self,
        graph: EventGraph,
        given: dict[str, Tensor],
        at: Mapping[str, int],
        symbols: Mapping[str, int],
    ) -> None:
        """given: inputs, weights and states by name. at: the rank's coordinate. symbols: values."""
        self.graph, self.at, self.symbols = graph, at, symbols
        self.ops = {op.name: op for op in graph.program.ops}
        sources = {
            op.writes[0].tensor: op.reads[0].tensor for op in graph.program.ops if op.is_view
        }
        written = {
            storage_of(access.tensor, sources)
            for op in graph.program.ops
            if not op.is_view
            for access in op.writes
        }
        shared = _shared_rows(graph)
        self.tensors = {n: x.clone() if n in written else x for n, x in given.items()}
        for tensor in graph.program.tensors:
            if tensor.name not in given:
                zeros = tensor.role == "state" or tensor.name in shared
                fill = 0 if zeros else _unwritten(tensor.dtype)
                self.tensors[tensor.name] = torch.full(
                    tensor.shape, fill, dtype=torch_dtype(tensor.dtype), device="cpu"
                )
        for op in graph.program.ops:
            if op.is_view:  # shows the storage of its source
                operands = [self.tensors[name] for name in op_operands(op)]
                (self.tensors[op.writes[0].tensor],) = compile_op(op, at)(operands)

    def starts(self, name: str) -> list[int]:
        """A vector of starts as it is now."""
        found: list[int] = self.tensors[name].tolist()
        return found

    def run(self, task: TaskId, team: Sequence["TileReference"] = ()) -> None:
        """Executes a task. team: all ranks, in order, whose memory collectives read."""
        op = self.ops[task[0]]
        if kind_of(op).communicates:
            self._communicate(op, task, team)
            return
        tile = self._tile(op, task)
        if any(not part and op.axis(name).role == "parallel" for name, part in tile.items()):
            return
        for name, used in tile.items():
            least = _least_in_use(op, name)
            if len(used) < least:
                what = op.axis(name).combine if least == 1 else op.kind
                raise ProgramError(
                    f"the {what} along axis {name!r} of op {op.name!r}, of which"
                    f" {len(used) or 'nothing'} is in use",
                    expected=f"a symbol of at least {least}",
                    remedy="run nothing where there is nothing",
                )
        narrowed = {name: part for name, part in tile.items() if _can_narrow(op, name)}
        in_use = self._in_use(op) | narrowed
        operands = [self.tensors[name] for name in op_operands(op)]
        if kind_of(op).inplace:
            operands[-1] = operands[-1].clone()
        if kind_of(op).counts_rows:
            narrowed, in_use = {}, {}
            rows = op.reads[0].dims[0].axes[0]
            if rows in tile and len(operands) == 1:
                operands.append(torch.tensor([len(tile[rows])], dtype=torch.int32, device="cpu"))
        for position, read in enumerate(op.reads):
            for dim, index in enumerate(read.dims):
                cut = in_use.get(index.axes[0]) if index.axes else None
                if cut is not None:
                    operands[position] = operands[position].narrow(dim, cut.start, len(cut))
        axes = (
            replace(axis, extent=len(in_use[axis.name])) if axis.name in in_use else axis
            for axis in op.axes
        )
        results = compile_op(replace(op, axes=tuple(axes)), self.at)(operands)
        for access, result in zip(op.writes, results, strict=True):
            if not tile:
                self.tensors[access.tensor].copy_(result)
                continue
            there = self._positions(op, access, tile)
            inner = {name: range(len(part)) for name, part in narrowed.items()}
            here = self._positions(op, access, tile | inner)
            self.tensors[access.tensor][there] = result[here]

    def _communicate(self, op: Op, task: TaskId, team: Sequence["TileReference"]) -> None:
        """A collective's part of this rank, read off all ranks' memory in their order."""
        if not kind_of(op).reaches_all or op.get("combine", "") == "argmax":
            raise ProgramError(
                f"op {op.name!r} of kind {op.kind!r} on virtual SMs",
                expected="an all_reduce of one tensor or an all_gather",
                remedy="plan the program for one rank",
            )
        parts = [rank.tensors[op.reads[0].tensor] for rank in team]
        if kind_of(op).gathers_all:
            dim = int(str(op.attr("dim")))
            whole = torch.cat(parts, dim).narrow(dim, 0, int(str(op.attr("extent"))))
        else:
            whole = COMBINE[str(op.attr("combine"))](torch.stack(parts))
        positions = self._positions(op, op.writes[0], self._tile(op, task))
        self.tensors[op.writes[0].tensor][positions] = whole[positions]

    def _in_use(self, op: Op) -> dict[str, range]:
        """What symbols say of axes that are dims of all operands: of a softmax along one, say."""
        axes = self.graph.axis_symbols[op.name].items()
        return {name: range(self.symbols[symbol]) for name, symbol in axes if _is_dims(op, name)}

    def _tile(self, op: Op, task: TaskId) -> dict[str, range]:
        """The part of each axis that is cut, or of which a symbol says how much is in use."""
        grid = self.graph.grid_of[op.name]
        positions = self.graph.coordinates[op.name][task[1]]
        symbols = self.graph.axis_symbols[op.name]
        tile = {name: range(self.symbols[symbol]) for name, symbol in symbols.items()}
        for dim, at in zip(grid.dims, positions, strict=True):
            stop = min((at + 1) * dim.size, len(tile.get(dim.axis, range(dim.extent))))
            tile[dim.axis] = range(at * dim.size, stop)
        return tile

    def _positions(self, op: Op, access: Access, tile: dict[str, range]) -> tuple[Tensor, ...]:
        """Indices of the elements that a tile writes."""
        whole = {name: range(extent) for name, extent in op.extents.items()}
        shape = self.tensors[access.tensor].shape
        dims = [
            self._dim_positions(op, index, whole | tile, extent)
            for index, extent in zip(access.dims, shape, strict=True)
        ]
        return tuple(torch.from_numpy(each) for each in np.ix_(*dims))

    def _dim_positions(
        self, op: Op, index: Index, tile: dict[str, range], extent: int
    ) -> Sequence[int]:
        if index.is_grouped:
            starts = self.starts(op.reads[index.starts].tensor)
            groups, rows = (tile[name] for name in index.axes)
            base = 0
            if axis := str(op.get("group_axis", "")):
                base = self.at[axis] * op.extents[index.axes[0]]
            starts = starts[base:]
            return [
                starts[group] + row
                for group in groups
                if group + 1 < len(starts)
                for row in rows
                if row < starts[group + 1] - starts[group]
            ]
        return list(chain(*index_ranges(index, tile, op.extents, extent)))


def _unwritten(dtype: str) -> float:
    """What an element holds before a task writes it: NaN, or the largest that the type has."""
    return 2 ** (INTEGER_BITS[dtype] - 1) - (dtype != "bool") if is_integer(dtype) else math.nan


def _least_in_use(op: Op, axis: str) -> int:
    """Elements along an axis without which an op has no result: those that it picks."""
    if op.axis(axis).role != "reduce":
        return 0
    if kind_of(op).picks_elements:
        return op.extents["c"]
    return int(op.axis(axis).combine in ("max", "min", "argmax"))


def _shared_rows(graph: EventGraph) -> set[str]:
    """Tensors of rows by groups that ranks share out, of which somebody reads all rows."""
    whole = {op.name: op for op in graph.tasks.ops}
    return {
        access.tensor
        for op in graph.program.ops
        if op.get("group_axis", "")
        for access, seen in zip(op.writes, whole[op.name].writes, strict=True)
        if len(access.dims) == len(seen.dims) and any(dim.is_grouped for dim in access.dims)
    }


def _can_narrow(op: Op, axis: str) -> bool:
    """Whether a part of an axis is a part of one dim of every operand, read in one way, so that the
    op on these parts gives that part of its results; what is updated in place stays whole.
    """
    seen: dict[str, tuple[int, ...]] = {}
    for access in accesses(op):
        dims = tuple(dim for dim, index in enumerate(access.dims) if axis in index.axes)
        if seen.setdefault(access.tensor, dims) != dims:
            return False
    return _is_dims(op, axis)


def _is_dims(op: Op, axis: str) -> bool:
    """Whether an axis is a dim by itself wherever it is in one, and none that is updated in
    place.
    """
    if kind_of(op).inplace and any(axis in i.axes for a in op.writes for i in a.dims):
        return False
    indices = [index for access in accesses(op) for index in access.dims]
    return all(index == Index(axes=(axis,)) for index in indices if axis in index.axes)
