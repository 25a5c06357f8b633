"""Operators that combine a dim: sums, means, extremes, softmax, sums so far.

In: as table.py says. Out: rules of its table. Next: norms.py.
"""

import math
from collections.abc import Sequence
from typing import Any

from distmega.program.dtypes import HALVES
from distmega.program.kinds import OpKind, kinds
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import RULES, Rule, rule
from distmega.torch_import.operators.values import TensorValue, Value, value_dtype


def _along_rows(kind: OpKind) -> Rule:
    """The rule of a kind that computes along the last dim what torch computes along any."""
    build = kind.build
    assert build is not None, f"kind {kind.name!r} is of no function"

    def along(b: Build, self: TensorValue, dim: int, **other: Value) -> Value:
        row = b.handle(b.to_last(b.cast(self, b.dtype), dim))
        return b.from_last(b.p.op(build, row, name=b.name()), dim)

    return along


RULES.update(
    {f"aten.{kind.torch_row_op}": _along_rows(kind) for kind in kinds() if kind.torch_row_op}
)


@rule("softmax", "_softmax", "_safe_softmax")
def softmax(b: Build, self: TensorValue, dim: int, **other: Value) -> Value:
    row = b.handle(b.to_last(b.cast(self, b.dtype), dim))
    return b.from_last(b.p.softmax(row, name=b.name()), dim)


@rule("log_softmax", "_log_softmax")
def log_softmax(b: Build, self: TensorValue, dim: int, **other: Value) -> Value:
    wide = b.cast(self, "f32" if b.dtype in HALVES else b.dtype)
    dtype = value_dtype(wide)
    largest = reduced(b, wide, [dim], True, "max")
    text = "exp({0} - {1})"
    total = reduced(
        b, b.pointwise(text, wide, largest, dtype=dtype, shape=self.shape), [dim], True, "sum"
    )
    return b.pointwise("{0} - {1} - log({2})", wide, largest, total)


@rule("logsumexp")
def logsumexp(b: Build, self: TensorValue, dim: Sequence[int], keepdim: bool = False) -> Value:
    largest = reduced(b, self, dim, True, "max")
    risen = b.pointwise("exp({0} - {1})", self, largest, shape=self.shape)
    total = reduced(b, risen, dim, True, "sum")
    found = b.pointwise("log({0}) + {1}", total, largest, shape=total.shape)
    return b.reshape(found, b.shape)


def reduced(
    b: Build, x: TensorValue, dims: Sequence[int] | None, keep: bool, combine: str
) -> TensorValue:
    """x with dims combined away, all of them for None or none listed."""
    rank = len(x.shape)
    gone = sorted({dim % rank for dim in dims} if dims else range(rank), reverse=True)
    out = b.handle(x)
    for dim in gone:
        out = b.p.reduce(out, dim, combine, name=b.name())
    shape = [1 if n in gone else extent for n, extent in enumerate(x.shape)]
    return b.reshape(out, shape) if keep else out


def _as_dims(dim: int | Sequence[int] | None) -> Sequence[int] | None:
    return [dim] if isinstance(dim, int) else dim


@rule("sum")
def sum_(
    b: Build, self: TensorValue, dim: Sequence[int] | None = None, keepdim: bool = False,
    dtype: object = None,
) -> Value:  # fmt: skip
    return b.reshape(reduced(b, b.cast(self, b.dtype), _as_dims(dim), False, "sum"), b.shape)


@rule("mean")
def mean(
    b: Build, self: TensorValue, dim: Sequence[int] | None = None, keepdim: bool = False,
    dtype: object = None,
) -> Value:  # fmt: skip
    return averaged(b, self, _as_dims(dim), 0)


def averaged(b: Build, x: TensorValue, dims: Sequence[int] | None, fewer: float) -> TensorValue:
    """The sum along dims over their extent less `fewer`, in the shape of the node's result."""
    wide = b.cast(x, "f32" if b.dtype in HALVES else b.dtype)
    total = b.reshape(reduced(b, wide, dims, False, "sum"), b.shape)
    count = math.prod(x.shape[dim] for dim in dims) if dims else math.prod(x.shape)
    return b.pointwise("{0} / {1}", total, max(count - fewer, 0.0))


@rule("var")
def var(
    b: Build, self: TensorValue, dim: Sequence[int] | None = None, correction: Value = 1,
    keepdim: bool = False, unbiased: bool = True,
) -> Value:  # fmt: skip
    wide = b.cast(self, "f32" if b.dtype in HALVES else b.dtype)
    dims, dtype = _as_dims(dim), value_dtype(wide)
    total = reduced(b, wide, dims, True, "sum")
    count = math.prod(self.shape[n] for n in dims) if dims else math.prod(self.shape)
    off = b.pointwise("{0} - {1} / {2}", wide, total, count, dtype=dtype, shape=self.shape)
    square = b.pointwise("{0} * {0}", off, dtype=dtype, shape=self.shape)
    less = correction if isinstance(correction, int | float) else 1
    return averaged(b, square, dims, less if unbiased else 0)


@rule("var_mean")
def var_mean(b: Build, self: TensorValue, **options: Any) -> Value:
    spread = var(b, self, **options)
    b.results = b.results[1:]
    return [spread, averaged(b, self, _as_dims(options.get("dim")), 0)]


def _extreme(combine: str) -> Rule:
    def reduce(
        b: Build, self: TensorValue, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> Value:
        found = reduced(b, b.cast(self, b.dtype), _as_dims(dim), False, combine)
        return b.reshape(found, b.shape)

    return reduce


RULES.update(
    {
        "aten.amax": _extreme("max"),
        "aten.amin": _extreme("min"),
        "aten.any": _extreme("max"),
        "aten.all": _extreme("min"),
        "aten.max.default": _extreme("max"),
        "aten.min.default": _extreme("min"),
    }
)


@rule("argmax")
def argmax(b: Build, self: TensorValue, dim: int | None = None, keepdim: bool = False) -> Value:
    x = b.reshape(self, (math.prod(self.shape),)) if dim is None else b.to_last(self, dim)
    return b.reshape(b.p.argmax(b.handle(x), name=b.name()), b.shape)


@rule("max.dim")
def max_dim(b: Build, self: TensorValue, dim: int, keepdim: bool = False) -> Value:
    """The largest and the first place where it is, a NaN if there is one, as torch has it."""
    if b.dtype == "bool":
        return NotImplemented
    chosen = b.p.argmax(b.handle(b.to_last(self, dim)), name=b.name())
    return [b.reshape(found, b.shape) for found in (b.p.value_of(chosen), chosen)]


@rule("linalg_vector_norm")
def vector_norm(
    b: Build, self: TensorValue, ord: float = 2, dim: Sequence[int] | None = None,
    keepdim: bool = False, dtype: object = None,
) -> Value:  # fmt: skip
    if ord != 2:
        return NotImplemented
    wide = b.cast(self, "f32" if b.dtype in HALVES else b.dtype)
    square = b.pointwise("{0} * {0}", wide, dtype=value_dtype(wide), shape=self.shape)
    return b.pointwise("sqrt({0})", b.reshape(reduced(b, square, dim, False, "sum"), b.shape))
