"""A program as one expression an output: sums, products, exp and opaque functions of its tensors
along named axes.

Comes in: a Program and its Axes. Goes out: Terms, in several forms where an op has several (a
softmax with and without its largest score). Next: egraph.py, which finds what equals them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from distmega.program import expr
from distmega.program.types import Op, Program
from distmega.superopt.graph.arithmetic import without_powers
from distmega.superopt.graph.axes import Axes
from distmega.superopt.graph.named import Dims

Data = str | float | tuple[str, ...] | tuple[str, Dims] | None
"""What an op needs besides its operands: a constant, axes, a tensor's name and dims, a function."""


@dataclass(frozen=True, slots=True)
class Term:
    """An op of OPS and its operands; `alternatives` are other terms of the same value.

    op: input (data: tensor and dims), const (a number), add, mul, inv, exp, call (data: an
    expression of its operands), sum, max, min (data: sorted axes).
    """

    op: str
    args: tuple["Term", ...] = ()
    data: Data = None
    alternatives: tuple["Term", ...] = ()


def input_of(data: Data) -> tuple[str, Dims]:
    """The tensor and dims of an input's data."""
    name, dims = cast(tuple[str, Dims], data)
    return name, dims


def const(value: float) -> Term:
    """A number."""
    return Term("const", data=value)


ONE, MINUS_ONE = const(1.0), const(-1.0)


def add(a: Term, b: Term) -> Term:
    """a + b."""
    return Term("add", (a, b))


def exact_product(a: float, b: float) -> float | None:
    """a * b where no rounding changes it: a proof takes constants for what they are."""
    found = a * b
    return found if math.isfinite(found) and Fraction(a) * Fraction(b) == found else None


def exact_sum(a: float, b: float) -> float | None:
    """a + b, likewise."""
    found = a + b
    return found if math.isfinite(found) and Fraction(a) + Fraction(b) == found else None


def mul(a: Term, b: Term) -> Term:
    """a * b; a factor of 1 is left out, two constants are multiplied where that is exact."""
    if ONE in (a, b):
        return b if a == ONE else a
    if isinstance(a.data, float) and isinstance(b.data, float):
        product = exact_product(a.data, b.data)
        if product is not None:
            return const(product)
    return Term("mul", (a, b))


def neg(a: Term) -> Term:
    """-a."""
    return mul(MINUS_ONE, a)


def inv(a: Term) -> Term:
    """1 / a; of a number that number where it is exact, as of a power of two."""
    if isinstance(a.data, float) and a.data:
        inverse = 1.0 / a.data
        if math.isfinite(inverse) and exact_product(a.data, inverse) == 1:
            return const(inverse)
    return Term("inv", (a,))


def exp(a: Term) -> Term:
    """e to the a."""
    return Term("exp", (a,))


def reduced(op: str, a: Term, axes: Sequence[str]) -> Term:
    """The sum, max or min along axes; a itself along none."""
    return Term(op, (a,), tuple(sorted(axes))) if axes else a


def without_alternatives(term: Term) -> Term:
    """The term in its first form alone."""
    return Term(term.op, tuple(map(without_alternatives, term.args)), term.data)


def output_terms(program: Program, axes: Axes) -> dict[str, Term]:
    """The term of each output."""
    values = tensor_terms(program, axes)
    return {name: values[name] for name in program.outputs}


def tensor_terms(program: Program, axes: Axes) -> dict[str, Term]:
    """The term of each tensor that an op writes."""
    values: dict[str, Term] = {}
    temps = {tensor.name for tensor in program.with_role("temp")}
    for op in program.ops:
        reads = [
            values[access.tensor]
            if access.tensor in temps
            else Term("input", data=(access.tensor, dims))
            for access, dims in zip(op.reads, axes.reads[op.name], strict=True)
        ]
        values[op.writes[0].tensor] = _lower(op, reads, axes.ops[op.name])
    return values


def _lower(op: Op, reads: list[Term], local: Mapping[str, tuple[str, ...]]) -> Term:
    match op.kind:
        case "linear":
            found = reduced("sum", mul(reads[0], reads[1]), _reduced_axes(op, local))
            return add(found, reads[2]) if len(reads) == 3 else found
        case "pointwise":
            return lower_expr(without_powers(expr.parse(str(op.attr("expr")))), reads)
        case "reduce":
            return reduced(str(op.attr("combine")), reads[0], _reduced_axes(op, local))
        case "rms_norm" | "layer_norm":
            return _norm(op, reads, local["r"])
        case "softmax":
            return softmax(reads[0], ONE, local["r"])
        case "attend":
            return _attend(op, reads, local)
    return reads[0]


def _reduced_axes(op: Op, local: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for a in op.axes if a.role == "reduce" for name in local[a.name]]


def softmax(x: Term, values: Term, row: Sequence[str]) -> Term:
    """Softmax of x along `row`, times `values` and summed along it unless they are 1: with and
    without the largest element taken from x, which are one value.
    """
    forms = []
    for shift in (reduced("max", x, row), None):
        weights = exp(x if shift is None else add(x, neg(shift)))
        total = inv(reduced("sum", weights, row))
        if values == ONE:
            forms.append(mul(weights, total))
        else:
            forms.append(mul(reduced("sum", mul(weights, values), row), total))
    first = forms[0]
    return Term(first.op, first.args, first.data, (forms[1],))


def _norm(op: Op, reads: list[Term], row: tuple[str, ...]) -> Term:
    x, _, *vectors = reads
    share, eps = 1.0 / op.axis("r").extent, op.attr("eps")
    if op.kind == "layer_norm":
        x = add(x, neg(mul(const(share), reduced("sum", x, row))))
    total = reduced("sum", mul(x, x), row)
    found = mul(x, Term("call", (total,), f"rsqrt(((a0 * {share!r}) + {eps!r}))"))
    found = mul(found, vectors[0]) if vectors else found
    return add(found, vectors[1]) if len(vectors) == 2 else found


def _attend(op: Op, reads: list[Term], local: Mapping[str, tuple[str, ...]]) -> Term:
    q, k, v, *mask = reads
    scale = op.attr("scale")
    assert isinstance(scale, int | float), "attend's scale is a number"
    scores = mul(const(float(scale)), reduced("sum", mul(q, k), local["d"]))
    return softmax(add(scores, mask[0]) if mask else scores, v, local["t"])


def lower_expr(tree: expr.Expr, args: Sequence[Term]) -> Term:
    """A pointwise expression: + - * / and exp are opened; what else holds one operand alone, such
    as silu(a0) or rsqrt(a0 / 64 + 1e-5), is one opaque function of it.
    """
    match tree:
        case expr.Arg(index):
            return args[index]
        case expr.Const(value):
            return const(float(value))
        case expr.Call(fn="add", args=(a, b)):
            return add(lower_expr(a, args), lower_expr(b, args))
        case expr.Call(fn="sub", args=(a, b)):
            return add(lower_expr(a, args), neg(lower_expr(b, args)))
        case expr.Call(fn="mul", args=(a, b)):
            return mul(lower_expr(a, args), lower_expr(b, args))
        case expr.Call(fn="div", args=(a, b)):
            return mul(lower_expr(a, args), inv(lower_expr(b, args)))
        case expr.Call(fn="neg", args=(a,)):
            return neg(lower_expr(a, args))
        case expr.Call(fn="exp", args=(a,)):
            return exp(lower_expr(a, args))
    return _opaque(tree, args)


def _opaque(tree: expr.Call, args: Sequence[Term]) -> Term:
    used = sorted(_used(tree))
    if len(used) == 1:
        return Term("call", (args[used[0]],), str(_renamed(tree, {used[0]: expr.Arg(0)})))
    inner = [lower_expr(part, args) for part in tree.args]
    call = expr.Call(tree.fn, tuple(expr.Arg(n) for n in range(len(inner))))
    return Term("call", tuple(inner), str(call))


def _used(tree: expr.Expr) -> set[int]:
    match tree:
        case expr.Arg(index):
            return {index}
        case expr.Call(_, parts):
            return {index for part in parts for index in _used(part)}
    return set()


def _renamed(tree: expr.Expr, names: Mapping[int, expr.Expr]) -> expr.Expr:
    match tree:
        case expr.Arg(index):
            return names[index]
        case expr.Call(fn, parts):
            return expr.Call(fn, tuple(_renamed(part, names) for part in parts))
    return tree


def substitute(tree: expr.Expr, args: Sequence[expr.Expr]) -> expr.Expr:
    """The expression with its operands replaced."""
    return _renamed(tree, dict(enumerate(args)))


def split_axis(term: Term, axis: str, parts: tuple[str, str]) -> Term:
    """The term with an axis divided into two, outer first."""
    known: dict[Term, Term] = {}

    def visit(x: Term) -> Term:
        if x not in known:
            others = tuple(map(visit, x.alternatives))
            known[x] = Term(x.op, tuple(map(visit, x.args)), data(x), others)
        return known[x]

    def data(x: Term) -> Data:
        if x.op == "input":
            name, dims = input_of(x.data)
            return name, tuple(tuple(replaced(dim)) for dim in dims)
        if x.op in ("sum", "max", "min"):
            assert isinstance(x.data, tuple)
            return tuple(sorted(replaced(x.data)))  # type: ignore[arg-type]
        return x.data

    def replaced(names: Sequence[str]) -> list[str]:
        return [new for name in names for new in (parts if name == axis else (name,))]

    return visit(term)
