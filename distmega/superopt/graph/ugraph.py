"""uGraphs: a tensor program at kernel, block and thread level at once.

A kernel is a block program that runs for every point of a grid, with a loop inside: `grid` divides
axes among blocks, `loop` divides one more among iterations. Every load says which dim of a tensor
each grid axis divides (imap) and which the loop does (fmap), every store how the blocks' parts lie
in the whole (omap); an axis that a tensor lacks maps to no dim, the block then takes all of it. An
op stands `before`, in the `body` of or `after` the loop; one of the body that reduces the loop's
axis is an accumulator. A chain of pointwise ops is one `map`, what threads do in registers.

In: what search.py or text.py make. Out: what interpret.py runs, rewrite.py turns into ops and
verify.py checks. Next: verify.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distmega.program import expr
from distmega.program.dtypes import item_bytes
from distmega.superopt.graph.named import Dims

Stage = Literal["before", "body", "after"]
STAGES: tuple[Stage, ...] = ("before", "body", "after")
OP_KINDS = ("map", "contract", "sum", "max", "min", "cat")

SHARED_BYTES = 227 * 1024
"""Shared memory that one block may have on compute capability 9.0."""
LOOPS = (2, 4, 8, 16, 32, 64)
"""Iterations of a kernel's loop that are tried, beside none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor:
    """A tensor in memory: an input or weight of the program, or what a kernel stores."""

    name: str
    dtype: str
    dims: Dims
    role: Literal["input", "weight", "temp"]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of all dims, outer first."""
        return tuple(name for dim in self.dims for name in dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A block's part of a tensor: `dims` are the axes by which it is read. imap: for each grid axis
    the dim that it divides, -1 for none. fmap: the dim that the loop divides, -1 for none.
    """

    name: str
    tensor: str
    dims: Dims
    imap: tuple[int, ...]
    fmap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOp:
    """An op within a block, on parts of tensors.

    map: `expr` of its operands. contract: the sum over `reduced` of the product of two. sum, max,
    min: along `reduced`. cat: two operands side by side, `reduced` their axes, `joined` the new
    one. axes: of the result.
    """

    name: str
    kind: str
    args: tuple[str, ...]
    axes: tuple[str, ...]
    stage: Stage
    reduced: tuple[str, ...] = ()
    expr: str = ""
    joined: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What leaves a block: op's value, as part of the tensor of the same name. omap: for each grid
    axis the dim in which the parts lie side by side. fmap: the same for the loop, -1 after it.
    """

    name: str
    omap: tuple[int, ...]
    fmap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A launch. grid, loop: axes and the number of parts of each."""

    name: str
    grid: tuple[tuple[str, int], ...]
    loop: tuple[str, int] | None
    loads: tuple[Load, ...]
    ops: tuple[BlockOp, ...]
    stores: tuple[Store, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of a launch."""
        return math.prod(parts for _, parts in self.grid)

    @property
    def parts(self) -> dict[str, int]:
        """In how many parts each divided axis is."""
        return dict(self.grid) | ({self.loop[0]: self.loop[1]} if self.loop else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class UGraph:
    """extents of the axes, tensors in memory, kernels in order, names of the outputs."""

    name: str
    extents: tuple[tuple[str, int], ...]
    tensors: tuple[GraphTensor, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[str, ...]

    def tensor_map(self) -> dict[str, GraphTensor]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}


def joint_extents(graph: UGraph) -> dict[str, int]:
    """Extents of all axes, those that `cat` makes included."""
    found = dict(graph.extents)
    for kernel in graph.kernels:
        for op in kernel.ops:
            if op.kind == "cat":
                found[op.joined] = sum(found.get(axis, 0) for axis in op.reduced)
    return found


def tile_extents(kernel: Kernel, extents: Mapping[str, int]) -> dict[str, int]:
    """Extents of the axes as one iteration of one block sees them."""
    parts = kernel.parts
    return {axis: extent // parts.get(axis, 1) for axis, extent in extents.items()}


def is_accumulator(kernel: Kernel, op: BlockOp) -> bool:
    """Whether an op gathers its value over the loop's iterations."""
    return kernel.loop is not None and op.stage == "body" and kernel.loop[0] in op.reduced


def shared_bytes(graph: UGraph, kernel: Kernel) -> int:
    """Shared memory of a block: what it loads, twice where the loop changes it (the next one comes
    while this one is used), and what its contractions and reductions leave, in f32.
    """
    tiles = tile_extents(kernel, joint_extents(graph))
    tensors, total = graph.tensor_map(), 0
    for load in kernel.loads:
        elements = math.prod(tiles[name] for dim in load.dims for name in dim)
        stages = 2 if load.fmap >= 0 else 1
        total += stages * elements * item_bytes(tensors[load.tensor].dtype)
    for op in kernel.ops:
        if op.kind in ("contract", "sum", "max", "min"):
            total += 4 * math.prod(tiles[name] for name in op.axes)
    return total


def rescaling_operands(text: str) -> tuple[int, int] | None:
    """Which operand less which other one a map takes exp of, for exp(a - b) and exp(c (a - b)) with
    a constant c above 0; None for other expressions.
    """
    match expr.parse(text):
        case expr.Call(fn="exp", args=(inner,)):
            pass
        case _:
            return None
    if isinstance(inner, expr.Call) and inner.fn == "mul":
        constants = [a.value for a in inner.args if isinstance(a, expr.Const)]
        others = [a for a in inner.args if not isinstance(a, expr.Const)]
        if len(constants) != 1 or constants[0] <= 0.0:
            return None
        inner = others[0]
    match inner:
        case expr.Call(fn="sub", args=(expr.Arg(index=a), expr.Arg(index=b))):
            return a, b
    return None


def rescalings(kernel: Kernel) -> set[str]:
    """Names of the ops of a body that rescale: exp(a - M), M the accumulated maximum of a's. They
    need M before the loop is over; an accumulator that multiplies by them is kept relative to the
    maximum so far and rescaled when it grows.
    """
    if kernel.loop is None:
        return set()
    tops = {
        op.name: op.args[0]
        for op in kernel.ops
        if op.kind == "max" and op.reduced == (kernel.loop[0],) and is_accumulator(kernel, op)
    }
    found = set()
    for op in kernel.ops:
        if op.kind == "map" and op.stage == "body" and len(op.args) == 2:
            pair = rescaling_operands(op.expr)
            if pair and tops.get(op.args[pair[1]]) == op.args[pair[0]]:
                found.add(op.name)
    return found
