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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distmega.errors import ProgramError, counted
from distmega.program import expr
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.kinds import POSITIVE_OR_ZERO, AttrRule, Misfit, OpKind, define, one_of
from distmega.program.ops.axis_views import is_plain
from distmega.program.ops.compute import FORMULA
from distmega.program.types import Op, Tensor, accesses, contracts

MAX_READS = 8
MAX_WRITES = 4
MAX_FLOPS = 64
"""What a kernel of formulas or of rows takes: operands, results, and function applications an
element.
"""


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

    @property
    def values(self) -> tuple[int, ...]:
        """The values that it takes, x first."""
        return self.x, self.weight, self.bias

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


def _all_of(fits: Callable[[object], bool], what: str) -> AttrRule:
    """At least one value that fits, in brackets."""

    def are(values: object) -> bool:
        return isinstance(values, tuple) and len(values) > 0 and all(map(fits, values))

    return AttrRule(are, f"{what}, in brackets")


def _is_step(text: object) -> bool:
    try:
        step = _step(text) if isinstance(text, str) else None
    except (ProgramError, ValueError):
        return False
    return step is not None and (not isinstance(step, NormStep) or step.norm in STEP_NORMS)


STEP_NORMS = "rms_norm", "layer_norm", "softmax"
FORMULAS = _all_of(FORMULA.fits, "expressions of a0, a1, ...")
STEPS = _all_of(_is_step, "expressions of a0, a1, ... and norms")
TYPES = _all_of(lambda value: value in ITEM_BYTES, f"words of {', '.join(ITEM_BYTES)}")
NUMBERS = _all_of(lambda value: type(value) is int, "numbers of values")


def _typed_misfit(op: Op, writes: Sequence[Tensor], values: str) -> tuple[str, str] | None:
    """Whether each result has one of an op's `values`, and its type."""
    found, dtypes = op.attr(values), op.attr("dtypes")
    assert isinstance(found, tuple), "as TYPES and the others say"
    if len(found) != len(writes):
        return f"has {len(found)} {values} of {counted(len(writes), 'result')}", "one each"
    if dtypes != tuple(x.dtype for x in writes):
        return f"has dtypes={dtypes!r}", "those of its results"
    return None


def _formulas_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    most = max(map(expr.num_args, op_exprs(op)))
    if most > len(reads):
        return f"has exprs of {counted(len(reads), 'operand')}", f"{most}"
    return _typed_misfit(op, writes, "exprs")


def _rows_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """Whether each step takes operands and values of steps before it."""
    plan = row_steps(op)
    for known, step in enumerate(plan.steps, start=len(reads)):
        used = (expr.num_args(step) - 1,) if not isinstance(step, NormStep) else step.values
        if not (min(used) >= -1 and max(used) < known and used[0] >= 0):
            return f"has step {str(step)!r} of {counted(known, 'value')}", "values before it"
    if not 0 <= min(plan.outs) <= max(plan.outs) < len(reads) + len(plan.steps):
        return f"has outs={plan.outs}", f"values below {len(reads) + len(plan.steps)}"
    return _typed_misfit(op, writes, "outs")


def _products_misfit(num_args: int, least: int, most: int) -> Misfit:
    """Of formulas of so many products, by how many operands."""

    def misfit(op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> tuple[str, str] | None:
        if not least <= len(reads) <= most or len(writes) != 1:
            found = f"{counted(len(reads), 'operand')} and {counted(len(writes), 'result')}"
            return f"is {op.kind} of {found}", f"{least} to {most}, and one"
        if expr.num_args(expr.parse(str(op.attr("expr")))) > num_args:
            return f"has expr={op.attr('expr')!r}"[:200], f"one of {counted(num_args, 'product')}"
        return None

    return misfit


define(
    OpKind(
        name="fused_pointwise",
        origin="internal",
        is_elementwise=True,
        attrs={"exprs": FORMULAS, "dtypes": TYPES},
        misfit=_formulas_misfit,
    )
)
define(
    OpKind(
        name="fused_norm",
        origin="internal",
        is_norm=True,
        attrs={"norm": one_of("rms_norm", "layer_norm"), "eps": POSITIVE_OR_ZERO},
    )
)
define(OpKind(name="fused_heads", origin="internal", inplace=True))
define(
    OpKind(
        name="fused_linear",
        origin="internal",
        attrs={"expr": FORMULA},
        misfit=_products_misfit(2, 3, 3),
        flops=lambda op, work: 4 * work.points,
    )
)
define(
    OpKind(
        name="fused_groups",
        origin="internal",
        reads_whole=True,
        host_reads="where groups start",
        attrs={"expr": FORMULA},
        misfit=_products_misfit(2, 4, 4),
        grouped_flops=lambda op, points: 4 * points,
    )
)
define(
    OpKind(
        name="fused_product",
        origin="internal",
        attrs={"expr": FORMULA},
        misfit=_products_misfit(1, 2, 3),
        flops=lambda op, work: 2 * work.points,
    )
)
define(OpKind(name="split_linear", origin="internal", flops=lambda op, work: 2 * work.points))
define(
    OpKind(
        name="fused_rows",
        origin="internal",
        attrs={"steps": STEPS, "outs": NUMBERS, "dtypes": TYPES},
        misfit=_rows_misfit,
    )
)
