"""Op kinds that one kernel of pointwise ops or norms does, those that fuse.py makes among them.

fused_pointwise: `exprs` over its reads, one a write, in `dtypes`. fused_norm: a `norm` ("rms" or
"layer") of x + residual; reads x and residual, each by element and by row, weight and maybe bias,
writes the result and the sum. Next: fuse.py.
"""

from distmega.program import expr
from distmega.program.types import Op

POINTWISE = frozenset({"pointwise", "fused_pointwise"})
NORMS = frozenset({"rms_norm", "layer_norm", "softmax", "fused_norm"})


def op_exprs(op: Op) -> tuple[expr.Expr, ...]:
    """What an op of a kind of POINTWISE computes, one an output."""
    if op.kind == "pointwise":
        return (expr.parse(str(op.attr("expr"))),)
    texts = op.attr("exprs")
    assert isinstance(texts, tuple), "fuse.py writes a tuple"
    return tuple(expr.parse(str(text)) for text in texts)
