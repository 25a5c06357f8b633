"""What a program computes, op by op, over any arithmetic: one side of every comparison.

Comes in: a Program, planes for its inputs and weights. Goes out: planes of its outputs. It knows
nothing of the search, of its axes' names or of graphs. Next: equivalence.py, which compares.
"""

from collections.abc import Mapping

from distmega.program import expr
from distmega.program.types import Access, Op, Program
from distmega.superopt.graph.arithmetic import Arithmetic, Planes
from distmega.superopt.graph.axes import unsupported
from distmega.superopt.graph.named import Named, contract, fold, ordered, reduce, unfold, union


def run_program(
    program: Program,
    inputs: Mapping[str, Planes],
    arithmetic: Arithmetic,
    whole: Program | None = None,
) -> dict[str, Planes]:
    """Outputs by name, of shape [samples, *tensor shape].

    whole: the program that this one is a smaller version of; a mean divides by its extents.
    """
    values = dict(inputs)
    dtypes = {tensor.name: tensor.dtype for tensor in program.tensors}
    originals = {op.name: op for op in (whole or program).ops}
    for op in program.ops:
        reads = [_read(op, access, values[access.tensor]) for access in op.reads]
        found = _compute(op, originals[op.name], reads, arithmetic)
        write = op.writes[0]
        planes = fold(found, tuple(index.axes for index in write.dims), op.extents)
        values[write.tensor] = arithmetic.store(planes, dtypes[write.tensor])
    return {name: values[name] for name in program.outputs}


def _read(op: Op, access: Access, planes: Planes) -> Named:
    return unfold(planes, tuple(index.axes for index in access.dims), op.extents)


def _compute(op: Op, whole: Op, reads: list[Named], arithmetic: Arithmetic) -> Named:
    match op.kind:
        case "linear":
            reduced = [axis.name for axis in op.axes if axis.role == "reduce"]
            return _linear(op, reads, reduced, arithmetic)
        case "pointwise":
            return _pointwise(expr.parse(str(op.attr("expr"))), reads, arithmetic)
        case "reduce":
            reduced = [axis.name for axis in op.axes if axis.role == "reduce"]
            return reduce(arithmetic, reads[0], reduced, str(op.attr("combine")))
        case "rms_norm" | "layer_norm":
            return _norm(op, whole, reads, arithmetic)
        case "softmax":
            x, row = _shifted(reads[0], reads[1], "r", arithmetic)
            total = reduce(arithmetic, _apply("exp(a0)", [row], arithmetic), ["r"], "sum")
            return _apply("exp(a0) / a1", [x, total], arithmetic)
        case "attend":
            return _attend(op, reads, arithmetic)
        case "reshape" | "transpose" | "view" | "set" | "expand":
            return reads[0]
    raise unsupported(op, f"kind {op.kind!r}")


def _pointwise(tree: expr.Expr, args: list[Named], arithmetic: Arithmetic) -> Named:
    axes = union(*(arg.axes for arg in args))
    return Named(axes, arithmetic.evaluate(tree, [ordered(arg, axes).planes for arg in args]))


def _apply(text: str, args: list[Named], arithmetic: Arithmetic) -> Named:
    return _pointwise(expr.parse(text), args, arithmetic)


def _linear(op: Op, reads: list[Named], reduced: list[str], arithmetic: Arithmetic) -> Named:
    found = contract(arithmetic, reads[0], reads[1], reduced)
    return _apply("a0 + a1", [found, reads[2]], arithmetic) if len(reads) == 3 else found


def _norm(op: Op, whole: Op, reads: list[Named], arithmetic: Arithmetic) -> Named:
    x, row, *vectors = reads
    share = 1.0 / whole.axis("r").extent
    eps = op.attr("eps")
    if op.kind == "layer_norm":
        mean = _apply(f"a0 * {share!r}", [reduce(arithmetic, row, ["r"], "sum")], arithmetic)
        x, row = (_apply("a0 - a1", [part, mean], arithmetic) for part in (x, row))
    total = reduce(arithmetic, _apply("a0 * a0", [row], arithmetic), ["r"], "sum")
    found = _apply(f"a0 * rsqrt(a1 * {share!r} + {eps!r})", [x, total], arithmetic)
    for text, vector in zip(("a0 * a1", "a0 + a1"), vectors, strict=False):
        found = _apply(text, [found, vector], arithmetic)
    return found


def _shifted(x: Named, row: Named, axis: str, arithmetic: Arithmetic) -> tuple[Named, Named]:
    """Both less the row's largest element, which leaves a softmax as it is and in range; exact
    arithmetic needs none.
    """
    if not arithmetic.overflows:
        return x, row
    top = reduce(arithmetic, row, [axis], "max")
    return _apply("a0 - a1", [x, top], arithmetic), _apply("a0 - a1", [row, top], arithmetic)


def _attend(op: Op, reads: list[Named], arithmetic: Arithmetic) -> Named:
    q, k, v, *mask = reads
    scores = contract(arithmetic, q, k, ["d"])
    scores = _apply(f"a0 * {op.attr('scale')!r}", [scores], arithmetic)
    scores = _apply("a0 + a1", [scores, *mask], arithmetic) if mask else scores
    scores, _ = _shifted(scores, scores, "t", arithmetic)
    weights = _apply("exp(a0)", [scores], arithmetic)
    total = reduce(arithmetic, weights, ["t"], "sum")
    return _apply("a0 / a1", [contract(arithmetic, weights, v, ["t"]), total], arithmetic)
