"""Op kinds that one kernel of pointwise ops or norms does, those that fuse.py makes among them.

- fused_pointwise: `exprs` over its reads, one a write, in `dtypes`.
- fused_norm: a `norm` ("rms_norm" or "layer_norm") of x + residual; reads x and residual, each by
  element and by row, weight and maybe bias, writes the result and the sum.
- fused_heads: heads of a row normalised, rotated, kept in a tensor or appended to a cache, for up
  to MAX_PARTS tensors of heads; see fuse_heads.py.
- fused_attention: a fused_heads of queries, keys and values of one row of each sequence, and the
  attention over the caches that it appends to; see fuse_attention.py.
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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distmega.errors import ProgramError, counted
from distmega.hostir.passes.fuse_attention import restated_attention
from distmega.hostir.passes.fuse_heads import STEPS as HEAD_STEPS
from distmega.hostir.passes.fuse_heads import restated_heads
from distmega.program import expr
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.kinds import (
    COUNT,
    NUMBER,
    POSITIVE_OR_ZERO,
    AttrRule,
    OpKind,
    define,
    one_of,
)
from distmega.program.ops import norms
from distmega.program.ops.attention import attention_flops
from distmega.program.ops.axis_views import is_plain
from distmega.program.ops.compute import FORMULA
from distmega.program.ops.experts import restated_product
from distmega.program.ops.parts import Built, as_stated, bad_op
from distmega.program.types import Access, Op, Tensor, accesses, contracts

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
    return _multiplies(x, w, bias, out)


def _multiplies(x: Access, w: Access, bias: Sequence[Access], out: Access) -> bool:
    rows, columns = out.dims[:-1], out.dims[-1:]
    return (
        len(rows) > 0
        and x.dims == (*rows, *w.dims[1:])
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


def _is_part(text: object) -> bool:
    """Whether a text names steps of heads, one at least, in their order."""
    if not isinstance(text, str) or not (found := text.split()):
        return False
    return found == [step for step in HEAD_STEPS if step in found]


STEP_NORMS = "rms_norm", "layer_norm", "softmax"
FORMULAS = _all_of(FORMULA.fits, "expressions of a0, a1, ...")
STEPS = _all_of(_is_step, "expressions of a0, a1, ... and norms")
TYPES = _all_of(lambda value: value in ITEM_BYTES, f"words of {', '.join(ITEM_BYTES)}")
PARTS = _all_of(_is_part, f"one or some of {', '.join(HEAD_STEPS)}, in this order")
FLAG = AttrRule(lambda value: isinstance(value, bool), "True or False")
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


def _formula_misfit(op: Op, num_args: int) -> tuple[str, str] | None:
    """Whether an op has a formula of so many products."""
    if expr.num_args(expr.parse(str(op.attr("expr")))) > num_args:
        return f"has expr={op.attr('expr')!r}"[:200], f"one of {counted(num_args, 'product')}"
    return None


def _count_misfit(op: Op, least: int, most: int, results: int = 1) -> tuple[str, str] | None:
    """Whether an op has so many operands and results, any number of these if results is 0."""
    counts = len(op.reads), len(op.writes)
    if least <= counts[0] <= most and counts[1] == (results or max(1, counts[1])):
        return None
    found = f"is {op.kind} of {counted(counts[0], 'operand')} and {counted(counts[1], 'result')}"
    expected = str(least) if least == most else f"{least} to {most}"
    return found, f"{expected}, and {results or 'as many as there are parts'}"


def _product_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor], result: str
) -> tuple[str, str] | None:
    """Whether an op reads x [rows, sums], w [columns, sums] and maybe a bias [columns] of one type,
    each as a whole, and writes [rows, columns] of type `result`.
    """
    x, w, *bias = op.reads
    if not all(_multiplies(x, w, bias, out) for out in op.writes):
        return (
            "is no product of its operands",
            "x [rows, sums], w [columns, sums], a bias [columns]",
        )
    for access, tensor in zip(accesses(op), (*reads, *writes), strict=True):
        whole = tuple(op.extents[axis] for index in access.dims for axis in index.axes)
        if not is_plain(access) or whole != tensor.shape:
            return f"takes a part of {tensor.name!r} of {list(tensor.shape)}", "all of it"
    inner = {axis for index in w.dims[1:] for axis in index.axes}
    if any((axis.role == "reduce") != (axis.name in inner) for axis in op.axes):
        return "has reduce axes that it does not sum over, or others", "those of w but the first"
    types = [tensor.dtype for tensor in reads], [tensor.dtype for tensor in writes]
    if {*types[0]} != {reads[0].dtype} or {*types[1]} != {result}:
        return f"is {op.kind} of {types[0]} to {types[1]}", f"operands of one type, {result}"
    return None


def _shaped_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    return (
        _count_misfit(op, 2, 3)
        or _formula_misfit(op, 1)
        or _product_misfit(op, reads, writes, reads[0].dtype)
    )


def _split_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """Whether each result is as large a part of the sums."""
    if wrong := _count_misfit(op, 2, 2, results=0) or _product_misfit(op, reads, writes, "f32"):
        return wrong
    num_sums = math.prod(reads[1].shape[1:])
    if num_sums % len(writes):
        found = f"cuts {counted(num_sums, 'term')} into {counted(len(writes), 'part')}"
        return found, "equal parts"
    return None


def _mixed_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    """Whether the weights are two of one shape, or the halves of the rows of one."""
    if wrong := _count_misfit(op, 3, 3) or _formula_misfit(op, 2):
        return wrong
    x, upper, lower = op.reads
    weight, other = reads[1:]
    if not weight.shape or (weight.shape, weight.dtype) != (other.shape, other.dtype):
        found = f"weights {weight.shape} of {weight.dtype} and {other.shape} of {other.dtype}"
        return f"is fused_linear of {found}", "equal shapes [columns, sums] and types"
    num_parts = 2 if weight.name == other.name else 1
    num_rows = weight.shape[0] // num_parts
    below = replace(upper, tensor=other.name)
    if num_parts == 2:
        below = replace(upper, dims=(replace(upper.dims[0], offset=num_rows), *upper.dims[1:]))
    if lower != below or num_rows * num_parts != weight.shape[0]:
        return f"reads {upper} and {lower}", "two weights, or the upper and the lower half of one"
    half = replace(weight, shape=(num_rows, *weight.shape[1:]))
    of_one = replace(op, reads=(x, upper))
    return _product_misfit(of_one, (reads[0], half), writes, reads[0].dtype)


def _restated_groups(op: Op, x: Tensor, upper: Tensor, lower: Tensor, starts: Tensor) -> Built:
    """A product of rows with the matrix of their group, as grouped_linear has it, and another."""
    if (upper.shape, upper.dtype) != (lower.shape, lower.dtype):
        found = f"matrices {upper.shape} of {upper.dtype} and {lower.shape} of {lower.dtype}"
        raise bad_op(op.name, found, "equal shapes and types")
    stated, outs = restated_product(op, x, upper, starts)
    rows, matrix, last = stated.reads
    operands = rows, matrix, replace(matrix, tensor=lower.name), last

    def starting_last(access: Access) -> Access:
        dims = (replace(i, starts=3) if i.is_grouped else i for i in access.dims)
        return replace(access, dims=tuple(dims))

    reads, writes = (tuple(map(starting_last, each)) for each in (operands, stated.writes))
    return replace(stated, kind=op.kind, reads=reads, writes=writes), outs


_is_of_groups = as_stated(_restated_groups)


def _groups_misfit(
    op: Op, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> tuple[str, str] | None:
    return _formula_misfit(op, 2) or _is_of_groups(op, reads, writes)


def _restated_norm(
    op: Op, x: Tensor, row: Tensor, other: Tensor, other_row: Tensor, *vectors: Tensor
) -> Built:
    """A norm of rows, stated of x, and of another tensor that is added to it."""
    if (other.shape, other.dtype) != (x.shape, x.dtype):
        found = f"a sum of {x.shape} of {x.dtype} and {other.shape} of {other.dtype}"
        raise bad_op(op.name, found, "equal shapes and types")
    eps, is_rms = float(str(op.attr("eps"))), op.attr("norm") == "rms_norm"
    most = 1 if is_rms else 2
    if len(vectors) > most or (is_rms and not vectors):
        found = counted(len(vectors), "vector")
        raise bad_op(op.name, found, "a weight, or of layer_norm none, or a weight and a bias")
    if is_rms:
        stated, (out,) = norms.rms_norm(op.name, x, vectors[0], eps)
    else:
        weight, bias = (*vectors, None, None)[:2]
        stated, (out,) = norms.layer_norm(op.name, x, weight, bias, eps)
    element, whole, *rest = stated.reads
    added = (replace(each, tensor=other.name) for each in (element, whole))
    reads, total = (element, whole, *added, *rest), replace(element, tensor=f"{out.name}.sum")
    op = replace(stated, kind=op.kind, reads=reads, writes=(*stated.writes, total))
    return op, (out, replace(x, name=total.tensor))


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
        misfit=as_stated(_restated_norm),
    )
)
define(
    OpKind(
        name="fused_heads",
        origin="internal",
        inplace=True,
        attrs={"parts": PARTS, "eps": POSITIVE_OR_ZERO, "several": FLAG, "own": FLAG.optional()},
        misfit=as_stated(restated_heads),
    )
)
define(
    OpKind(
        name="fused_attention",
        origin="internal",
        inplace=True,
        reads_whole=True,
        reads_positions=True,
        host_reads="positions",
        attrs={
            "parts": PARTS,
            "eps": POSITIVE_OR_ZERO,
            "scale": NUMBER,
            "window": COUNT,
            "softcap": POSITIVE_OR_ZERO.optional(),
        },
        misfit=as_stated(restated_attention),
        flops=attention_flops,
    )
)
define(
    OpKind(
        name="fused_linear",
        origin="internal",
        attrs={"expr": FORMULA},
        misfit=_mixed_misfit,
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
        misfit=_groups_misfit,
        grouped_flops=lambda op, points: 4 * points,
    )
)
define(
    OpKind(
        name="fused_product",
        origin="internal",
        attrs={"expr": FORMULA},
        misfit=_shaped_misfit,
        flops=lambda op, work: 2 * work.points,
    )
)
define(
    OpKind(
        name="split_linear",
        origin="internal",
        misfit=_split_misfit,
        flops=lambda op, work: 2 * work.points,
    )
)
define(
    OpKind(
        name="fused_rows",
        origin="internal",
        attrs={"steps": STEPS, "outs": NUMBERS, "dtypes": TYPES},
        misfit=_rows_misfit,
    )
)
