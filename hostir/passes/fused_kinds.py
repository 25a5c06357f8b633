"""Op kinds that one kernel of pointwise ops or norms does, those that fuse.py makes among them.

- fused_pointwise: `exprs` over its reads, one a write, in `dtypes`.
- fused_norm: a `norm` ("rms_norm" or "layer_norm") of x + residual; reads x and residual, each by
  element and by row, weight and maybe bias, writes the result and the sum.
- fused_heads: heads of a row normalised, rotated, kept in a tensor or appended to a cache, for up
  to MAX_PARTS tensors of heads; see fuse_heads.py.
- fused_linear: `expr` of a0 and a1, products of x with a row of one weight and of another of its
  shape, or with a row of a weight and the one half of all rows behind it; reads x and both weights,
  or the upper and the lower half of the one. See mix_columns.py.
- fused_groups: as fused_linear, of rows sorted by group, each with two matrices of its group; reads
  x, both tensors of matrices, and where groups start.
- fused_product: `expr` of a0, a product of x and a weight, plus a bias if it reads one. See
  join_formulas.py.
- split_linear: a product, each of its results a part of the sums in f32, the first terms in the
  first; with no bias. See split_sums.py.
- fused_rows: `steps` over rows, formulas and norms in turn, of which it writes the values `outs` in
  `dtypes`. See join_rows.py and split_sums.py.

Next: fuse.py.
"""

from dataclasses import dataclass

from distmega.program import expr
from distmega.program.kinds import OpKind, define
from distmega.program.ops.axis_views import is_plain
from distmega.program.types import Op, accesses, contracts

MAX_READS = 8
MAX_WRITES = 4
MAX_FLOPS = 64
"""What a kernel of formulas or of rows takes: operands, results, and function applications an
element.
"""

define(OpKind(name="fused_pointwise", origin="internal", is_elementwise=True))
define(OpKind(name="fused_norm", origin="internal", is_norm=True))
define(OpKind(name="fused_heads", origin="internal", inplace=True))
define(OpKind(name="fused_linear", origin="internal", flops=lambda op, work: 4 * work.points))
define(
    OpKind(
        name="fused_groups",
        origin="internal",
        reads_whole=True,
        host_reads="where groups start",
        grouped_flops=lambda op, points: 4 * points,
    )
)
define(OpKind(name="fused_product", origin="internal", flops=lambda op, work: 2 * work.points))
define(OpKind(name="split_linear", origin="internal", flops=lambda op, work: 2 * work.points))
define(OpKind(name="fused_rows", origin="internal"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStep:
    """A step of rows: the norm ("rms_norm", "layer_norm" or "softmax") of value x, times value
    `weight` plus value `bias`, -1 where there is none.
    """

    norm: str
    x: int
    weight: int = -1
    bias: int = -1
    eps: float = 0.0

    def __str__(self) -> str:
        return f"norm {self.norm} {self.x} {self.weight} {self.bias} {self.eps!r}"


Step = expr.Expr | NormStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSteps:
    """Values of rows: first the operands, then what each step makes of values before it, an
    argument of a formula being the value of that number. outs: those that leave.
    """

    steps: tuple[Step, ...]
    outs: tuple[int, ...]


def row_steps(op: Op) -> RowSteps:
    """What an op of kind fused_rows computes."""
    texts, outs = op.attr("steps"), op.attr("outs")
    assert isinstance(texts, tuple), "join_rows.py writes tuples"
    assert isinstance(outs, tuple), "join_rows.py writes tuples"
    return RowSteps(steps=tuple(map(_step, map(str, texts))), outs=tuple(int(str(n)) for n in outs))


def _step(text: str) -> Step:
    if not text.startswith("norm "):
        return expr.parse(text)
    _, norm, x, weight, bias, eps = text.split()
    return NormStep(norm=norm, x=int(x), weight=int(weight), bias=int(bias), eps=float(eps))


def op_exprs(op: Op) -> tuple[expr.Expr, ...]:
    """What an op of an elementwise kind computes, one an output."""
    if op.kind == "pointwise":
        return (expr.parse(str(op.attr("expr"))),)
    texts = op.attr("exprs")
    assert isinstance(texts, tuple), "fuse.py writes a tuple"
    return tuple(expr.parse(str(text)) for text in texts)


def is_product(op: Op) -> bool:
    """Whether an op is x [rows, sums] times w [columns, sums], each of any number of dims but for
    the columns, with a bias of each column or none.
    """
    if not contracts(op) or not 2 <= len(op.reads) <= 3 or not all(map(is_plain, accesses(op))):
        return False
    (x, w, *bias), (out,) = op.reads, op.writes
    if len(out.dims) < 2:
        return False
    rows, columns = out.dims[:-1], out.dims[-1:]
    return (
        x.dims == (*rows, *w.dims[1:])
        and w.dims[:1] == columns
        and all(each.dims == columns for each in bias)
    )
