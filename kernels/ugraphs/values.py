"""What a name of an emitted kernel stands for: a block of a tensor along named axes.

In: axes and tile extents of a kernel. Out: Layout, which writes index expressions and changes of
form as Triton source. An axis of which a block has one element has no dim; one whose extent is no
power of two is padded to the next one, since Triton's blocks are powers of two. Next: source.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmega.superopt.graph.cost import are_halves
from distmega.superopt.graph.ugraph import Kernel, UGraph, joint_extents, tile_extents

LEAST_DOT = 16
"""Elements along the reduced axes that tensor cores take at once."""

MATRIX_ROWS, MATRIX_COLUMNS = 64, 16
"""The least product whose rows a Hopper GPU's tensor cores read from shared memory themselves."""

LEAST_COLUMNS = 8
"""Columns of a product that a warp's tensor cores take at once."""

HALVES = {"bf16": "tl.bfloat16", "f16": "tl.float16"}
"""Types of 16 bits, as Triton calls them."""

Groups = tuple[tuple[str, ...], ...]
"""Axes of each dim of a matrix form, such as rows and columns."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A Triton block (or scalar) by its name in the source. axes: of its dims, in the layout's
    order. exact: the 16-bit type that holds its elements exactly, "" for f32. zeroed: whether
    elements in the padding are 0.
    """

    name: str
    axes: tuple[str, ...]
    exact: str
    zeroed: bool


@dataclass(frozen=True, slots=True)
class BlockValue:
    """One piece, or several that lie side by side along axis `joined`; inner: what that axis is
    called in each.
    """

    pieces: tuple[Piece, ...]
    joined: str = ""
    inner: tuple[str, ...] = ()


def is_wide(graph: UGraph) -> bool:
    """Whether a tensor of the program is of more than 16 bits, so that products are in f32."""
    own = (t.dtype for t in graph.tensors if t.role != "temp" or t.name in graph.outputs)
    return not are_halves(own)


def padded_sizes(graph: UGraph, kernel: Kernel) -> dict[str, int]:
    """Elements of a block along each axis with their padding: the next power of two, and 8 columns
    of a product that has fewer, 16 in a loop over one of at least 64 rows.

    Triton takes fewer than 8 through registers, in an order that no thread has room for: an MLP of
    2 rows spilled 1600 bytes a thread, and a layer of it took 131 us instead of 30. With fewer than
    16 it takes the rows through registers too, and does not copy them to shared memory ahead: an
    attention of 4 heads to a cache took 2.5 us for each 64 KB of an SM's keys and values, where
    memory brings them in 1.8.
    """
    tiles = tile_extents(kernel, joint_extents(graph))
    sizes = {axis: 1 << (size - 1).bit_length() for axis, size in tiles.items()}
    along = {load.name: {axis for dim in load.dims for axis in dim} for load in kernel.loads}
    along |= {op.name: set(op.axes) for op in kernel.ops}

    def count(axes: set[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    for op in kernel.ops if not is_wide(graph) else ():
        if op.kind != "contract" or count(set(op.reduced)) < LEAST_DOT:
            continue
        a, b = (along[arg] - set(op.reduced) for arg in op.args)
        columns, rows = sorted((a - b, b - a), key=count)
        is_tall = count(rows) >= MATRIX_ROWS
        if is_tall and op.stage != "body":
            continue  # rows come through registers anyhow
        least = MATRIX_COLUMNS if is_tall else LEAST_COLUMNS
        if 1 < count(columns) < least:
            widest = max(sorted(columns), key=sizes.__getitem__)
            sizes[widest] *= least // count(columns)
    return sizes


class BlockLayout:
    """Axes in their order, and how many elements a block has along each."""

    def __init__(
        self, order: Sequence[str], tiles: Mapping[str, int], sizes: Mapping[str, int]
    ) -> None:
        """tiles: extents of a block. sizes: the same with their padding (padded_sizes)."""
        self._position = {axis: number for number, axis in enumerate(order)}
        self._tiles, self._sizes = tiles, sizes

    def tile(self, axis: str) -> int:
        """Elements of a block along an axis."""
        return self._tiles[axis]

    def size(self, axis: str) -> int:
        """The same with its padding."""
        return self._sizes[axis]

    def is_padded(self, axes: Sequence[str]) -> bool:
        """Whether a block along these axes has padding."""
        return any(self.size(axis) != self.tile(axis) for axis in axes)

    def dims(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes that have a dim, in order."""
        kept = {axis for axis in axes if self.size(axis) > 1}
        return tuple(sorted(kept, key=self._position.__getitem__))

    def shape(self, axes: Sequence[str]) -> list[int]:
        """Padded extents."""
        return [self.size(axis) for axis in axes]

    def elements(self, axes: Sequence[str]) -> int:
        """Of a block along these axes, padding included."""
        return math.prod(self.shape(axes))

    def spread(self, text: str, axes: Sequence[str], wanted: Sequence[str]) -> str:
        """An expression along `axes` with a dim for each of the axes `wanted`."""
        if not axes or list(axes) == list(wanted):
            return text
        return f"{text}[{', '.join(':' if axis in axes else 'None' for axis in wanted)}]"

    def inside(self, axes: Sequence[str], wanted: Sequence[str]) -> str:
        """The condition for elements that are no padding along `axes`; "" if there is none."""
        return " & ".join(
            f"({self.spread(f'r_{axis}', (axis,), wanted)} < {self.tile(axis)})"
            for axis in axes
            if self.is_padded((axis,))
        )

    def to_matrix(self, text: str, axes: Sequence[str], groups: Groups) -> str:
        """A block along `axes`, some of extent 1 by then, with a dim for each of the groups."""
        wanted = [axis for group in groups for axis in group]
        if list(axes) != wanted:
            positions = [list(axes).index(axis) for axis in wanted]
            text = f"tl.permute({text}, {positions})"
        if any(len(group) != 1 for group in groups):
            text = f"tl.reshape({text}, {[self.elements(group) for group in groups]})"
        return text

    def from_matrix(self, text: str, groups: Groups) -> str:
        """The opposite: dims in the layout's order."""
        made = [axis for group in groups for axis in group]
        wanted = list(self.dims(made))
        if any(len(group) != 1 for group in groups):
            text = f"tl.reshape({text}, {self.shape(made)})"
        if made != wanted:
            text = f"tl.permute({text}, {[made.index(axis) for axis in wanted]})"
        return text
