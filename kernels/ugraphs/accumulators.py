"""What the loop of a kernel of a uGraph gathers, as Triton source: sums, products and extremes.

In: the ops of the loop's body. Out: lines of an iteration, of what comes before the loop, and of
what names the values behind it. An accumulator of a rescaling (ugraph.rescalings) is relative to
the maximum so far. Used by source.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distmega.kernels.ugraphs.block_ops import EXTREMES, BlockOps, formula
from distmega.kernels.ugraphs.values import BlockValue, Groups, Piece
from distmega.superopt.graph.ugraph import (
    BlockOp,
    is_accumulator,
    rescaling_operands,
    rescalings,
)

LAZY_ELEMENTS = 32
"""Elements a thread, at most, of an accumulator that is reduced once, after the loop."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A value that a loop gathers, under name `acc` until it is over. wide: not yet reduced along
    the axes that go; groups: its form as tensor cores leave it, empty for others.
    """

    op: BlockOp
    acc: str
    axes: tuple[str, ...]
    wide: tuple[str, ...] = ()
    groups: Groups = ()


class Accumulators:
    """Writes the accumulators of one kernel, beside the ops that they belong to."""

    def __init__(self, ops: BlockOps, num_warps: int) -> None:
        self.ops, self.out, self.num_warps = ops, ops.out, num_warps
        self.late = rescalings(ops.kernel)

    def put_body(self, start: int) -> list[Accumulator]:
        """The loop's ops. Accumulators start before the loop, which begins with line number
        `start`, in forms that are known only now.
        """
        starts: list[str] = []
        ends: list[str] = []
        found: list[Accumulator] = []
        for op in self.ops.kernel.ops:
            if op.stage != "body":
                continue
            if not is_accumulator(self.ops.kernel, op):
                self.ops.put_op(op)
                continue
            made = self.accumulate(op, f"{self.ops.names[op.name]}_acc", ends)
            found.append(made)
            groups = made.groups or tuple((axis,) for axis in made.wide or made.axes)
            shape = tuple(self.ops.layout.elements(group) for group in groups)
            first = EXTREMES[op.kind][2] if op.kind in EXTREMES else "0.0"
            starts.append(f"    {made.acc} = tl.full({shape}, {first}, tl.float32)")
        for line in ends:
            self.out.put(line)
        self.out.lines[start:start] = starts
        return found

    def accumulate(self, op: BlockOp, acc: str, ends: list[str]) -> Accumulator:
        """Puts one iteration of an accumulator."""
        args = [self.ops.values[arg] for arg in op.args]
        alpha = self.rescaling(op)
        pieces = [value.pieces[0] for value in args]
        if not any(value.joined for value in args):
            if op.kind == "contract" and (groups := self.ops.matrix_groups(pieces, op.reduced)):
                return self.accumulate_product(op, acc, pieces, groups, alpha)
            text, axes = self.ops.unreduced(op, pieces, op.reduced)
            threads = 32 * self.num_warps
            is_small = self.ops.layout.elements(axes) <= LAZY_ELEMENTS * threads
            if is_small and not alpha and not self.is_top(op):
                self.out.put(f"{acc} = {self.combined(op, acc, text)}")
                left = tuple(axis for axis in axes if axis not in op.reduced)
                return Accumulator(op, acc, left, wide=axes)
        ((text, axes),) = self.ops.computed(op)
        if self.is_top(op):
            new = self.ops.names[op.name]
            self.out.put(f"{new} = {self.combined(op, acc, text)}")
            self.ops.values[op.name] = BlockValue((Piece(new, axes, "", zeroed=False),))
            ends.append(f"{acc} = {new}")
            return Accumulator(op, acc, axes)
        for factor, mine in alpha:
            self.out.put(f"{acc} = {acc} * {self.ops.layout.spread(factor, mine, axes)}")
        self.out.put(f"{acc} = {self.combined(op, acc, text)}")
        return Accumulator(op, acc, axes)

    def accumulate_product(
        self,
        op: BlockOp,
        acc: str,
        pieces: Sequence[Piece],
        groups: Groups,
        alpha: Sequence[tuple[str, tuple[str, ...]]],
    ) -> Accumulator:
        """One iteration of a contraction by tensor cores, in the form in which they leave it."""
        text, form = self.ops.product(pieces, groups, acc)
        axes = self.ops.layout.dims([axis for group in form for axis in group])
        for factor, mine in alpha:
            whole = self.ops.layout.spread(factor, mine, axes)
            if mine and any(len(group) != 1 for group in form):
                whole = f"tl.broadcast_to({whole}, {self.ops.layout.shape(axes)})"
            if mine:
                whole = self.ops.layout.to_matrix(whole, axes, form)
            self.out.put(f"{acc} = {acc} * {whole}")
        self.out.put(f"{acc} = {text}")
        return Accumulator(op, acc, axes, groups=form)

    def combined(self, op: BlockOp, acc: str, text: str) -> str:
        if op.kind in EXTREMES:
            return f"{EXTREMES[op.kind][1]}({acc}, {text})"
        return f"{acc} + {text}"

    def is_top(self, op: BlockOp) -> bool:
        """Whether an accumulated maximum is needed while the loop runs."""
        late = (other for other in self.ops.kernel.ops if other.name in self.late)
        return any(op.name in other.args for other in late)

    def rescaling(self, op: BlockOp) -> list[tuple[str, tuple[str, ...]]]:
        """What the sums of the iterations before are multiplied by, as the maximum has grown: the
        rescaling itself of the maximum before, with its axes.
        """
        found = []
        for name in dict.fromkeys(arg for arg in op.args if arg in self.late):
            late = next(other for other in self.ops.kernel.ops if other.name == name)
            pair = rescaling_operands(late.expr)
            assert pair, "rescalings are such"
            top = late.args[pair[1]]
            (piece,) = self.ops.values[top].pieces
            operands = [piece.name, piece.name]
            operands[pair[0]] = f"{piece.name}_acc"
            made = f"{self.ops.names[name]}_more"
            if not any(line.lstrip().startswith(f"{made} = ") for line in self.out.lines):
                self.out.put(f"{made} = {formula(late.expr, operands)}")
            count = op.args.count(name)
            found += [(made, piece.axes)] * count
        return found

    def finish(self, one: Accumulator) -> None:
        """Names an accumulator's value after the loop."""
        name, text = self.ops.names[one.op.name], one.acc
        if one.wide:
            text, _ = self.ops.reduced(one.op.kind, text, one.wide, one.op.reduced)
        elif one.groups:
            text = self.ops.layout.from_matrix(text, one.groups)
        self.out.put(f"{name} = {text}")
        piece = Piece(name, one.axes, "", zeroed=not self.ops.layout.is_padded(one.axes))
        self.ops.values[one.op.name] = BlockValue((piece,))
