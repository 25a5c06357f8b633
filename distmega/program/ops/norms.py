"""Ops over whole rows, the last dim: norms, softmax, cumsum; each element needs all of its row.

As compute.py: a function takes the op's name and operand tensors, and returns the Op with the
tensors it writes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from distmega.program.kinds import (
    POSITIVE_OR_ZERO,
    Coordinate,
    OpKind,
    Reference,
    define,
    flops_a_result,
    has_positive_eps,
    in_fp32,
)
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    finite_number,
    make_op,
    require_floats,
)
from distmega.program.types import Attr, Axis, Op, Tensor

NORMS = ("rms_norm", "layer_norm", "softmax")
"""Kinds of ops that normalise a row by the mean of its squares; by its mean and variance; by its
largest element and the sum of exponentials.
"""


def rms_norm(name: str, x: Tensor, weight: Tensor, eps: float) -> Built:
    """x / sqrt(mean(x^2 over the last dim) + eps) * weight, in fp32; weight has the extent of the
    last dim.
    """
    require_floats(name, x)
    return _row_op(name, "rms_norm", x, [weight], eps=_checked_eps(name, eps))


def layer_norm(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Built:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim, in fp32; weight and bias
    have its extent. Either may be missing, a bias only with a weight.
    """
    if weight is None and bias is not None:
        raise bad_op(name, "a bias without a weight", "both, a weight, or none", "add the bias")
    require_floats(name, x)
    vectors = [vector for vector in (weight, bias) if vector is not None]
    return _row_op(name, "layer_norm", x, vectors, eps=_checked_eps(name, eps))


def softmax(name: str, x: Tensor) -> Built:
    """exp(x) over its sum along the last dim, in fp32."""
    require_floats(name, x)
    return _row_op(name, "softmax", x, [])


def cumsum(name: str, x: Tensor) -> Built:
    """Sums of the elements up to each one along the last dim; half types in fp32."""
    return _row_op(name, "cumsum", x, [])


def cumprod(name: str, x: Tensor) -> Built:
    """Products of the elements up to each one along the last dim; half types in fp32."""
    return _row_op(name, "cumprod", x, [])


SCAN_VALUES: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
}
"""Kinds that combine the elements of a row up to each one -> how."""


def _checked_eps(name: str, eps: float) -> float:
    if finite_number(name, "eps", eps) < 0:
        raise bad_op(name, f"eps {eps}", "a finite number of at least 0", "change eps")
    return float(eps)


def _row_op(name: str, kind: str, x: Tensor, vectors: Sequence[Tensor], **attrs: Attr) -> Built:
    """Reads x twice: the element, and along `r` all of its row."""
    for vector in vectors:
        if not x.shape or vector.shape != x.shape[-1:]:
            found = f"{vector.name!r} of shape {vector.shape} for x of shape {x.shape}"
            raise bad_op(name, found, "x [..., d] and weight or bias [d]")
    if not x.shape:
        raise bad_op(name, "x of shape ()", "x [..., d]")
    rows = axis_names("m", len(x.shape) - 1)
    axes = [Axis(name=n, extent=e) for n, e in zip([*rows, "d"], x.shape, strict=True)]
    axes.append(Axis(name="r", extent=x.shape[-1], role="reduce"))
    out = Tensor(name=name, shape=x.shape, dtype=x.dtype)
    reads = [access(x, *rows, "d"), access(x, *rows, "r"), *(access(v, "d") for v in vectors)]
    return make_op(name, kind, axes, reads, [access(out, *rows, "d")], **attrs), (out,)


def eps_of(op: Op) -> float:
    """As a float: a text may say 1 or 0."""
    return float(str(op.attr("eps")))


def _norm_reference(normalise: Callable[[Any, float], Any]) -> Reference:
    """Of a norm that then multiplies by a weight and adds a bias, where the op has them."""

    def bind(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
        eps = eps_of(op)

        def run(x: Any, row: Any, *vectors: Any) -> Any:
            out = normalise(x, eps)
            out = out * vectors[0] if vectors else out
            return out + vectors[1] if len(vectors) > 1 else out

        return in_fp32(run)(op, coordinate)

    return bind


def _centre(x: Any, eps: float) -> Any:
    around = x - x.mean(-1, keepdim=True)
    return around * (around.square().mean(-1, keepdim=True) + eps).rsqrt()


define(
    OpKind(
        name="rms_norm",
        in_megakernel=True,
        reads_whole=True,
        is_norm=True,
        scales_elements=True,
        attrs={"eps": POSITIVE_OR_ZERO},
        misfit=as_stated(lambda op, x, row, weight: rms_norm(op.name, x, weight, eps_of(op))),
        zero_where=lambda op, holders, zero: 0 in zero and has_positive_eps(op),
        finite_where=lambda op, zero: has_positive_eps(op),
        flops=flops_a_result(4),
        reference=_norm_reference(
            lambda x, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ),
    )
)
define(
    OpKind(
        name="layer_norm",
        in_megakernel=True,
        reads_whole=True,
        is_norm=True,
        scales_elements=True,
        attrs={"eps": POSITIVE_OR_ZERO},
        misfit=as_stated(
            lambda op, x, row, weight=None, bias=None: layer_norm(
                op.name, x, weight, bias, eps_of(op)
            )
        ),
        finite_where=lambda op, zero: has_positive_eps(op),
        flops=flops_a_result(4),
        reference=_norm_reference(_centre),
    )
)
define(
    OpKind(
        name="softmax",
        in_megakernel=True,
        reads_whole=True,
        is_norm=True,
        misfit=as_stated(lambda op, x, row: softmax(op.name, x)),
        flops=flops_a_result(4),
        reference=in_fp32(lambda x, row: x.softmax(-1)),
    )
)
define(
    OpKind(
        name="cumsum",
        in_megakernel=True,
        reads_whole=True,
        misfit=as_stated(lambda op, x, row: cumsum(op.name, x)),
        flops=flops_a_result(4),
        reference=in_fp32(lambda x, row: SCAN_VALUES["cumsum"](x)),
        torch_row_op="cumsum",
        build=cumsum,
    )
)
define(
    OpKind(
        name="cumprod",
        in_megakernel=True,
        reads_whole=True,
        misfit=as_stated(lambda op, x, row: cumprod(op.name, x)),
        flops=flops_a_result(1),
        reference=in_fp32(lambda x, row: SCAN_VALUES["cumprod"](x)),
        torch_row_op="cumprod",
        build=cumprod,
    )
)
