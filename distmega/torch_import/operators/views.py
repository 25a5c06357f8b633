"""Operators that move data or fill it: views, slices, joins, casts, tensors of one number.

In: as table.py says. Out: rules of its table. Next: lookups.py.
"""

from collections.abc import Sequence

import torch

from distmega.hostir.library.torch_types import torch_dtype
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import RULES, Rule, rule
from distmega.torch_import.operators.values import (
    Constant,
    TensorValue,
    Value,
    is_tensor,
    value_dtype,
)


@rule("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "dropout", "_conj")
def keep(b: Build, self: Value = None, input: Value = None, **other: Value) -> Value:
    """The tensor itself, which nothing changes later."""
    if other.get("train") is True:
        return NotImplemented
    return self if self is not None else input


@rule("_to_copy")
def to_copy(b: Build, self: TensorValue, **other: Value) -> Value:
    return b.cast(self, b.dtype)


@rule("copy")
def copy(b: Build, self: TensorValue, src: TensorValue, **other: Value) -> Value:
    return b.expand(b.cast(src, b.dtype), b.shape)


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")
def reshape(b: Build, self: TensorValue, **other: Value) -> Value:
    return b.reshape(self, b.shape)


@rule("view.dtype")
def reinterpret(b: Build, self: TensorValue, dtype: object) -> Value:
    """The bits as another type, which no op reads."""
    return self if value_dtype(self) == b.dtype else NotImplemented


@rule("permute")
def permute(b: Build, self: TensorValue, dims: Sequence[int]) -> Value:
    return b.transpose(self, [dim % len(self.shape) for dim in dims])


@rule("transpose")
def transpose(b: Build, self: TensorValue, dim0: int, dim1: int) -> Value:
    order = list(range(len(self.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return b.transpose(self, order)


@rule("t")
def t(b: Build, self: TensorValue) -> Value:
    return b.transpose(self, list(range(len(self.shape)))[::-1])


@rule("expand")
def expand(b: Build, self: TensorValue, **other: Value) -> Value:
    return b.expand(self, b.shape)


@rule("slice")
def slice_(
    b: Build,
    self: TensorValue,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    extent = self.shape[dim]
    return b.slice(self, dim, start or 0, extent if end is None else end, step)


@rule("select")
def select(b: Build, self: TensorValue, dim: int, index: int) -> Value:
    index %= self.shape[dim]
    return b.reshape(b.slice(self, dim, index, index + 1), b.shape)


@rule("split_with_sizes", "split", "chunk", "unbind")
def split(b: Build, self: TensorValue, dim: int = 0, **other: Value) -> Value:
    parts, start = [], 0
    for result in b.results:
        extent = result.shape[dim] if len(result.shape) == len(self.shape) else 1
        if extent:
            part = b.slice(self, dim, start, start + extent)
            parts.append(b.reshape(part, result.shape))
        else:
            parts.append(Constant(torch.empty(result.shape, dtype=torch_dtype(result.dtype))))
        start += extent
    return parts


@rule("cat")
def cat(b: Build, tensors: Sequence[TensorValue], dim: int = 0) -> Value:
    full = [x for x in tensors if 0 not in x.shape]
    return b.p.concat([b.handle(b.cast(x, b.dtype)) for x in full], dim, name=b.name())


@rule("stack")
def stack(b: Build, tensors: Sequence[TensorValue], dim: int = 0) -> Value:
    dim %= len(b.shape)
    one = tuple(1 if n == dim else extent for n, extent in enumerate(b.shape))
    return cat(b, [b.reshape(x, one) for x in tensors], dim)


@rule("repeat")
def repeat(b: Build, self: TensorValue, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - len(self.shape)) + self.shape
    apart = [n for extent in shape for n in (1, extent)]
    wide = [n for times, extent in zip(repeats, shape, strict=True) for n in (times, extent)]
    return b.reshape(b.expand(b.reshape(self, apart), wide), b.shape)


@rule("constant_pad_nd")
def constant_pad_nd(b: Build, self: TensorValue, pad: Sequence[int], value: float = 0) -> Value:
    """Negative widths cut; where they leave nothing of a dim, the result is padding alone."""
    rank = len(self.shape)
    widths = {rank - 1 - n: (pad[2 * n], pad[2 * n + 1]) for n in range(len(pad) // 2)}
    left = {
        dim: (max(-before, 0), self.shape[dim] - max(-after, 0))
        for dim, (before, after) in widths.items()
    }
    if any(start >= stop for start, stop in left.values()):
        shape = [extent + sum(widths.get(dim, ())) for dim, extent in enumerate(self.shape)]
        one = torch.full((1,) * rank, value, dtype=torch_dtype(b.dtype))
        return Constant(one.expand(shape))
    x = self
    for dim, (before, after) in widths.items():
        x = b.slice(x, dim, *left[dim])
        shape = list(x.shape)
        parts: list[TensorValue] = []
        for extent in (before, after):
            shape[dim] = max(extent, 0)
            parts.append(Constant(torch.full(shape, value, dtype=torch_dtype(b.dtype))))
        parts = [part for part in (parts[0], x, parts[1]) if part.shape[dim]]
        x = parts[0] if len(parts) == 1 else b.p.concat(list(map(b.handle, parts)), dim)
    return x


@rule("slice_scatter")
def slice_scatter(
    b: Build,
    self: TensorValue,
    src: TensorValue,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    """The tensor with a part of it replaced."""
    extent = self.shape[dim]
    first, last, _ = slice(start, end).indices(extent)
    if step != 1:
        return NotImplemented
    if last - first == extent:
        return b.expand(b.cast(src, b.dtype), b.shape)
    rest = (b.slice(self, dim, 0, first) if first else None, src,
            b.slice(self, dim, last, extent) if last < extent else None)  # fmt: skip
    return cat(b, [part for part in rest if part is not None], dim)


@rule("select_scatter")
def select_scatter(b: Build, self: TensorValue, src: TensorValue, dim: int, index: int) -> Value:
    dim, index = dim % len(self.shape), index % self.shape[dim]
    one = tuple(1 if n == dim else extent for n, extent in enumerate(self.shape))
    return slice_scatter(b, self, b.reshape(src, one), dim, index, index + 1)


def _filled(number: float | None) -> Rule:
    def fill(b: Build, fill_value: float | None = None, **other: Value) -> Value:
        value = fill_value if number is None else number
        one = torch.full((1,) * len(b.shape), value, dtype=torch_dtype(b.dtype))  # type: ignore[arg-type]
        return Constant(one.expand(b.shape))

    return fill


RULES.update(
    {
        "aten.full_like": _filled(None),
        "aten.new_full": _filled(None),
        "aten.fill": lambda b, self, value: (
            b.expand(value, b.shape) if is_tensor(value) else _filled(None)(b, value)
        ),
        **{f"aten.{name}": _filled(0) for name in ("zeros_like", "new_zeros", "empty_like")},
        **{f"aten.{name}": _filled(1) for name in ("ones_like", "new_ones")},
    }
)
