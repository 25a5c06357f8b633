"""Ops of a kernel of a uGraph as Triton source: expressions over blocks.

In: ops whose operands are BlockValues (values.py). Out: lines of the kernel, and values of what the
ops make. Contractions of two operands that both have axes of their own go to tensor cores, others
are multiplied and added; operands side by side (`cat`) are taken piece by piece and never copied.

Contractions are as exact as the proof takes them to be: a value that no 16-bit type holds is given
to tensor cores as the sum of two bf16 values, and as f32 where the program's own tensors are f32.
Next: accumulators.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distmega.errors import UnsupportedError
from distmega.kernels.ugraphs.values import (
    LEAST_DOT,
    BlockLayout,
    BlockValue,
    Groups,
    Piece,
    is_wide,
)
from distmega.program import expr
from distmega.superopt.graph.ugraph import BlockOp, Kernel, UGraph

LOWEST = "-3.0e38"
"""What a maximum starts from: finite, so that differences of maxima are never nan."""

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
EXTREMES = {"max": ("tl.max", "tl.maximum", LOWEST), "min": ("tl.min", "tl.minimum", "3.0e38")}


@dataclass(slots=True)
class Lines:
    """The lines of a function so far, and how far the next one is indented."""

    lines: list[str] = field(default_factory=list)
    indent: str = "    "

    def put(self, line: str) -> None:
        """Adds a line."""
        self.lines.append(self.indent + line)


class BlockOps:
    """Writes the ops of one kernel. values: of loads and ops so far, by name."""

    def __init__(self, graph: UGraph, kernel: Kernel, layout: BlockLayout, out: Lines) -> None:
        self.graph, self.kernel, self.layout, self.out = graph, kernel, layout, out
        self.names = {op.name: f"v{n}" for n, op in enumerate(kernel.ops)}
        self.values: dict[str, BlockValue] = {}
        self.is_wide = is_wide(graph)

    def put_op(self, op: BlockOp) -> None:
        """An op that is no accumulator."""
        if op.kind == "cat":
            self.values[op.name] = self.joined(op)
            return
        made = self.computed(op)
        pieces = []
        for number, (text, axes) in enumerate(made):
            name = self.names[op.name] + (f"_{number}" if len(made) > 1 else "")
            self.out.put(f"{name} = {text}")
            pieces.append(Piece(name, axes, "", zeroed=not self.layout.is_padded(axes)))
        args = [self.values[arg] for arg in op.args]
        beside = next((value for value in args if value.joined), None)
        if beside is not None and len(pieces) > 1:
            self.values[op.name] = BlockValue(tuple(pieces), beside.joined, beside.inner)
        else:
            self.values[op.name] = BlockValue(tuple(pieces))

    def joined(self, op: BlockOp) -> BlockValue:
        """Two operands side by side: nothing is moved."""
        args = [self.values[arg] for arg in op.args]
        if any(value.joined for value in args):
            raise self.unsupported(f"{op.name!r} joins what is joined")
        return BlockValue(tuple(value.pieces[0] for value in args), op.joined, op.reduced)

    def computed(self, op: BlockOp) -> list[tuple[str, tuple[str, ...]]]:
        """Expressions of an op's pieces with their axes; one if it reduces the joined axis."""
        args = [self.values[arg] for arg in op.args]
        beside = next((value for value in args if value.joined), None)
        if beside is None:
            return [self.expression(op, [value.pieces[0] for value in args], op.reduced)]
        parts = []
        for number, inner in enumerate(beside.inner):
            pieces = [v.pieces[number] if v.joined else v.pieces[0] for v in args]
            reduced = tuple(inner if axis == beside.joined else axis for axis in op.reduced)
            parts.append(self.expression(op, pieces, reduced))
        if beside.joined not in op.reduced:
            return parts
        axes = parts[0][1]
        if op.kind in EXTREMES:
            return [(f"{EXTREMES[op.kind][1]}({', '.join(text for text, _ in parts)})", axes)]
        return [(" + ".join(text for text, _ in parts), axes)]

    def expression(
        self, op: BlockOp, pieces: Sequence[Piece], reduced: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """One op on one piece of each operand."""
        if op.kind == "map":
            axes = self.layout.dims([axis for piece in pieces for axis in piece.axes])
            return formula(op.expr, [self.wide(piece, axes) for piece in pieces]), axes
        if op.kind == "contract":
            groups = self.matrix_groups(pieces, reduced)
            if groups:
                text, groups = self.product(pieces, groups, "")
                axes = self.layout.dims([axis for group in groups for axis in group])
                return f"{self.layout.from_matrix(text, groups)}", axes
        text, axes = self.unreduced(op, pieces, reduced)
        return self.reduced(op.kind, text, axes, reduced)

    def wide(self, piece: Piece, axes: Sequence[str]) -> str:
        """A piece in f32 with dims for `axes`."""
        text = f"{piece.name}.to(tl.float32)" if piece.exact else piece.name
        return self.layout.spread(text, piece.axes, axes)

    def unreduced(
        self, op: BlockOp, pieces: Sequence[Piece], reduced: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """What a reduction reduces, with nothing in its padding that counts."""
        axes = self.layout.dims([axis for piece in pieces for axis in piece.axes])
        text = " * ".join(self.wide(piece, axes) for piece in pieces)
        inside = self.layout.inside([a for a in axes if a in reduced], axes)
        is_clean = op.kind in ("contract", "sum") and all(piece.zeroed for piece in pieces)
        if inside and not is_clean:
            neutral = EXTREMES[op.kind][2] if op.kind in EXTREMES else "0.0"
            text = f"tl.where({inside}, {text}, {neutral})"
        absent = [a for a in reduced if a not in axes and self.layout.tile(a) > 1]
        if absent and op.kind in ("contract", "sum"):
            raise self.unsupported(f"{op.name!r} reduces {absent}, along which nothing varies")
        return text, axes

    def reduced(
        self, kind: str, text: str, axes: Sequence[str], reduced: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """A block reduced along some of its axes, the last one first."""
        call = EXTREMES[kind][0] if kind in EXTREMES else "tl.sum"
        for number in reversed(range(len(axes))):
            if axes[number] in reduced:
                text = f"{call}({text}, {number})"
        return text, tuple(axis for axis in axes if axis not in reduced)

    def matrix_groups(self, pieces: Sequence[Piece], reduced: Sequence[str]) -> Groups:
        """Batch, rows, columns and reduced axes of a product for tensor cores; () for others."""
        a, b = (set(piece.axes) for piece in pieces)
        gone = [axis for axis in self.layout.dims(tuple(a | b)) if axis in reduced]
        fits = set(gone) <= a & b and self.layout.elements(gone) >= LEAST_DOT
        both, one, two = (
            self.layout.dims(tuple(found - set(gone))) for found in (a & b, a - b, b - a)
        )
        return (both, one, two, tuple(gone)) if fits and one and two else ()

    def product(self, pieces: Sequence[Piece], groups: Groups, acc: str) -> tuple[str, Groups]:
        """A product by tensor cores, added to `acc` if there is one; its form."""
        both, one, two, gone = groups
        a, b = pieces
        if self.layout.elements(one) < self.layout.elements(two):
            one, two, a, b = two, one, b, a
        batch = (both,) if both else ()
        left = self.factors(a, (*batch, one, gone), gone)
        right = self.factors(b, (*batch, gone, two), gone)
        precision = ', input_precision="ieee"' if self.is_wide else ""
        for x_number, x in enumerate(left):
            for y_number, y in enumerate(right):
                if x_number + y_number < 2:
                    acc = f"tl.dot({x}, {y}{f', {acc}' if acc else ''}{precision})"
        return acc, (*batch, one, two)

    def factors(self, piece: Piece, groups: Groups, gone: Sequence[str]) -> list[str]:
        """A block as a matrix for tensor cores; as the sum of several of 16 bits."""
        text = piece.name
        inside = self.layout.inside([axis for axis in piece.axes if axis in gone], piece.axes)
        if inside and not piece.zeroed:
            text = f"tl.where({inside}, {text}, 0.0)"
        text = self.layout.to_matrix(text, piece.axes, groups)
        if self.is_wide:
            return [f"{text}.to(tl.float32)" if piece.exact else text]
        if piece.exact == "bf16":
            return [text]
        name = f"m{len(self.out.lines)}"
        self.out.put(f"{name} = {text}{'.to(tl.float32)' if piece.exact else ''}")
        self.out.put(f"{name}_high = {name}.to(tl.bfloat16)")
        self.out.put(f"{name}_low = ({name} - {name}_high.to(tl.float32)).to(tl.bfloat16)")
        return [f"{name}_high", f"{name}_low"]

    def unsupported(self, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"graph {self.graph.name!r}, kernel {self.kernel.name!r}: {found}",
            expected="ops on blocks along axes of their own",
            remedy="run the program by library ops",
        )


def formula(text: str, operands: Sequence[str]) -> str:
    """An expression as Triton source over f32 blocks."""
    return _formula(expr.parse(text), operands)


def _formula(tree: expr.Expr, operands: Sequence[str]) -> str:
    match tree:
        case expr.Arg(index):
            return operands[index]
        case expr.Const(value):
            return f"({float(value)!r})"
        case expr.Call(fn, args):
            parts = [_formula(arg, operands) for arg in args]
            if fn in INFIX:
                return f"({parts[0]} {INFIX[fn]} {parts[1]})"
            if fn == "where":
                return f"tl.where({parts[0]} != 0.0, {parts[1]}, {parts[2]})"
            texts = [f"tl.cast({p}, tl.float32)" if isinstance(a, expr.Const) else p
                     for p, a in zip(parts, args, strict=True)]  # fmt: skip
            return f'{"unary" if len(args) == 1 else "binary"}("{fn}", {", ".join(texts)})'
