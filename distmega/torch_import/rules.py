"""Operators of torch in terms of a program's ops, a function each.

In: a Build, and the operator's arguments by the names of torch's schema, tensors as values. Out:
the value of the result, a list of them, or NotImplemented: then the operator stays opaque. Simple
expressions are in pointwise_rules.py. Used by convert.py.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from distmega.hostir.library.pointwise import pointwise
from distmega.hostir.library.torch_types import torch_dtype
from distmega.program.builder import Handle
from distmega.program.expr import parse
from distmega.program.kinds import OpKind, kinds
from distmega.torch_import.build import Build, is_tensor
from distmega.torch_import.values import (
    Constant,
    Spread,
    TensorValue,
    Value,
    is_float,
    uniform_value,
    value_dtype,
)

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""Operator, or operator and overload -> its rule."""

HALF = ("bf16", "f16")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function for operators of torch's own."""

    def enter(function: Rule) -> Rule:
        RULES.update({f"aten.{name}": function for name in names})
        return function

    return enter


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
        part = b.slice(self, dim, start, start + extent)
        parts.append(b.reshape(part, result.shape))
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
    x = self
    for position in range(len(pad) // 2):
        dim, before, after = (
            len(self.shape) - 1 - position,
            pad[2 * position],
            pad[2 * position + 1],
        )
        x = b.slice(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
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


@rule("flip")
def flip(b: Build, self: TensorValue, dims: Sequence[int]) -> Value:
    x = self
    for dim in dims:
        backwards = torch.arange(x.shape[dim] - 1, -1, -1)
        x = index_select(b, x, dim, Constant(backwards))
    return x


@rule("index_select")
def index_select(b: Build, self: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    """Rows along one dim; of a dim in the middle it comes to the front for the lookup."""
    rank, dim = len(self.shape), dim % max(len(self.shape), 1)
    first = b.transpose(self, [dim, *(n for n in range(rank) if n != dim)])
    found = b.rows(first, index)
    order = list(range(len(index.shape), len(found.shape)))
    order[dim:dim] = range(len(index.shape))
    return b.transpose(found, order)


@rule("index")
def index(b: Build, self: TensorValue, indices: Sequence[TensorValue | None]) -> Value:
    """Lookups by tensors of whole numbers in dims that stand beside each other."""
    at = [dim for dim, each in enumerate(indices) if each is not None]
    given = [each for each in indices if each is not None]
    if not at or at != list(range(at[0], at[-1] + 1)):
        return NotImplemented
    if any(value_dtype(each) not in ("i32", "i64") for each in given):
        return NotImplemented
    extents = self.shape[at[0] : at[-1] + 1]
    shape = b.shape[at[0] : at[0] + max(len(each.shape) for each in given)]
    position: Value = 0
    for each, extent in zip(given, extents, strict=True):
        inside = each
        if not isinstance(each, Constant) or bool((each.tensor < 0).any()):
            text = "where(lt({0}, 0), {0} + {1}, {0})"
            inside = known(b, text, each, extent, shape=each.shape)
        position = known(b, "{0} * {1} + {2}", position, extent, inside, shape=shape)
    joined = b.reshape(self, (*self.shape[: at[0]], math.prod(extents), *self.shape[at[-1] + 1 :]))
    assert isinstance(position, Constant | Handle | Spread)
    return index_select(b, joined, at[0], position)


def known(b: Build, text: str, *operands: Value, shape: tuple[int, ...]) -> TensorValue:
    """An expression on whole numbers, known at once where all operands are."""
    if any(is_tensor(each) and not isinstance(each, Constant) for each in operands):
        return b.pointwise(text, *operands, dtype="i64", shape=shape)
    known = [each.tensor if isinstance(each, Constant) else torch.tensor(each) for each in operands]
    words = [f"a{position}" for position in range(len(known))]
    found = pointwise(parse(text.format(*words)), known, torch.int64)
    return Constant(found.expand(shape))


@rule("embedding")
def embedding(b: Build, weight: TensorValue, indices: TensorValue, **other: Value) -> Value:
    return b.rows(weight, indices)


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    b: Build,
    weight: TensorValue,
    indices: TensorValue,
    offsets: TensorValue,
    mode: int = 0,
    per_sample_weights: TensorValue | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    **other: Value,
) -> Value:
    """Sums, means or maxima of rows, where all bags are known to be equally long."""
    if not isinstance(offsets, Constant) or padding_idx != -1 or len(indices.shape) != 1:
        return NotImplemented
    starts = offsets.tensor.tolist()
    starts = starts if include_last_offset else [*starts, indices.shape[0]]
    lengths = {stop - start for start, stop in pairwise(starts)}
    if len(lengths) != 1 or 0 in lengths or starts[0]:
        return NotImplemented
    length = lengths.pop()
    rows = b.rows(weight, b.reshape(indices, (len(starts) - 1, length)))
    if per_sample_weights is not None:
        scale = b.reshape(per_sample_weights, (len(starts) - 1, length, 1))
        rows = b.pointwise("{0} * {1}", rows, scale, shape=rows.shape)
    bags = b.p.reduce(b.handle(rows), 1, "max" if mode == 2 else "sum", name=b.name())
    if mode == 1:
        return [b.pointwise("{0} / {1}", bags, length), None, None, None]
    return [bags, None, None, None]


@rule("gather")
def gather(b: Build, self: TensorValue, dim: int, index: TensorValue, **other: Value) -> Value:
    if not self.shape:
        return NotImplemented
    dim %= len(self.shape)
    x = self
    for position, extent in enumerate(index.shape):
        if position != dim:
            x = b.slice(x, position, 0, extent)
    return b.p.gather(b.handle(x), b.handle(index), dim, name=b.name())


@rule("topk")
def topk(
    b: Build, self: TensorValue, k: int, dim: int = -1, largest: bool = True, **other: Value
) -> Value:
    if not largest or not self.shape:
        return NotImplemented
    values, chosen = b.p.topk(b.handle(b.to_last(self, dim)), k, name=b.name())
    return [b.from_last(values, dim), b.from_last(chosen, dim)]


def _along_rows(kind: OpKind) -> Rule:
    """The rule of a kind that computes along the last dim what torch computes along any."""
    build = kind.build
    assert build is not None, f"kind {kind.name!r} is of no function"

    def along(b: Build, self: TensorValue, dim: int, **other: Value) -> Value:
        if not self.shape:
            return NotImplemented
        row = b.handle(b.to_last(b.cast(self, b.dtype), dim))
        return b.from_last(b.p.op(build, row, name=b.name()), dim)

    return along


RULES |= {f"aten.{kind.torch_row_op}": _along_rows(kind) for kind in kinds() if kind.torch_row_op}


def _added(sign: str) -> Rule:
    def added(b: Build, self: Value, other: Value, alpha: float = 1) -> Value:
        text = f"{{0}} {sign} {{1}}" + (" * {2}" if alpha != 1 else "")
        return b.pointwise(text, *([self, other, alpha] if alpha != 1 else [self, other]))

    return added


def _subtracted_from(b: Build, self: Value, other: Value, alpha: float = 1) -> Value:
    text = "{1} - {0}" + (" * {2}" if alpha != 1 else "")
    return b.pointwise(text, *([self, other, alpha] if alpha != 1 else [self, other]))


RULES |= {"aten.add": _added("+"), "aten.sub": _added("-"), "aten.rsub": _subtracted_from}


@rule("div.Tensor_mode", "div.Scalar_mode")
def div_mode(b: Build, self: TensorValue, other: Value, rounding_mode: str | None) -> Value:
    """Exact for floats; whole numbers stay with torch, which does not go through floats."""
    if not is_float(b.dtype) or rounding_mode not in (None, "floor"):
        return NotImplemented
    return b.pointwise("floor({0} / {1})" if rounding_mode else "{0} / {1}", self, other)


@rule("clamp")
def clamp(b: Build, self: TensorValue, min: Value = None, max: Value = None) -> Value:
    operands, text = [self], "{0}"
    for bound, name in ((min, "maximum"), (max, "minimum")):
        if bound is not None:
            text = f"{name}({text}, {{{len(operands)}}})"
            operands.append(bound)  # type: ignore[arg-type]
    return b.pointwise(text, *operands)


@rule("clamp_min")
def clamp_min(b: Build, self: TensorValue, min: Value) -> Value:
    return clamp(b, self, min=min)


@rule("clamp_max")
def clamp_max(b: Build, self: TensorValue, max: Value) -> Value:
    return clamp(b, self, max=max)


@rule("hardtanh")
def hardtanh(b: Build, self: TensorValue, min_val: float = -1, max_val: float = 1) -> Value:
    return clamp(b, self, min_val, max_val)


@rule("gelu")
def gelu(b: Build, self: TensorValue, approximate: str = "none") -> Value:
    if approximate == "none":
        return b.pointwise("gelu({0})", self)
    inner = f"{math.sqrt(2 / math.pi)!r} * ({{0}} + 0.044715 * {{0}} * {{0}} * {{0}})"
    return b.pointwise(f"0.5 * {{0}} * (1 + tanh({inner}))", self)


@rule("elu")
def elu(
    b: Build, self: TensorValue, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Value:
    grown = "{1} * (exp(minimum({0} * {3}, 0)) - 1)"
    return b.pointwise(f"where(lt(0, {{0}}), {{0}}, {grown}) * {{2}}", self, alpha, scale,
                       input_scale)  # fmt: skip


def _of_bools(text: str) -> Rule:
    """A rule for bools; bits of whole numbers stay with torch."""

    def on_bools(b: Build, self: Value, other: Value = None) -> Value:
        if b.dtype != "bool":
            return NotImplemented
        return b.pointwise(text, *([self] if other is None else [self, other]))

    return on_bools


RULES |= {
    "aten.bitwise_and": _of_bools("{0} * {1}"),
    "aten.bitwise_or": _of_bools("maximum({0}, {1})"),
    "aten.bitwise_xor": _of_bools("1 - eq({0}, {1})"),
    "aten.bitwise_not": _of_bools("1 - {0}"),
}


@rule("mm", "bmm", "matmul")
def matmul(
    b: Build,
    self: TensorValue,
    other: TensorValue | None = None,
    mat2: TensorValue | None = None,
) -> Value:
    """Products of the last two dims, the dims before them side by side. A sum of one product is
    the product, as where angles are frequencies times positions.
    """
    second = mat2 if other is None else other
    assert second is not None
    if min(len(self.shape), len(second.shape)) > 1 and self.shape[-1] == 1:
        return b.pointwise("{0} * {1}", self, second)
    return b.reshape(_product(b, self, second), b.shape)


def _product(b: Build, x: TensorValue, y: TensorValue) -> Handle:
    """x y, without dims of extent 1 where the other operand has more."""
    x_axes = _axis_names(x.shape, ("m", "k"), ("k",))
    y_axes = _axis_names(y.shape, ("k", "n"), ("k",))
    extents = dict(zip(x_axes, x.shape, strict=True))
    sizes = dict(zip(y_axes, y.shape, strict=True))
    x = _without(b, x, x_axes, sizes)
    y = _without(b, y, y_axes, extents)
    x_axes = [name for name in x_axes if not _dropped(name, extents, sizes)]
    y_axes = [name for name in y_axes if not _dropped(name, sizes, extents)]
    batch = sorted({name for name in (*x_axes, *y_axes) if name[0] == "b"}, reverse=True)
    out = [
        *batch,
        *(name for name in ("m",) if name in x_axes),
        *(n for n in ("n",) if n in y_axes),
    ]
    return b.linear(x, y, spec=f"{' '.join(x_axes)}, {' '.join(y_axes)} -> {' '.join(out)}")


def _axis_names(shape: tuple[int, ...], last: tuple[str, str], only: tuple[str]) -> list[str]:
    if len(shape) == 1:
        return list(only)
    return [*(f"b{n}" for n in range(len(shape) - 3, -1, -1)), *last]


def _dropped(name: str, mine: dict[str, int], other: dict[str, int]) -> bool:
    return name[0] == "b" and mine[name] == 1 and other.get(name, 1) > 1


def _without(b: Build, x: TensorValue, names: list[str], other: dict[str, int]) -> TensorValue:
    """x without the dims that the other operand has more of."""
    mine = dict(zip(names, x.shape, strict=True))
    return b.reshape(x, [mine[name] for name in names if not _dropped(name, mine, other)])


@rule("linear")
def linear(b: Build, input: TensorValue, weight: TensorValue, bias: Value = None) -> Value:
    if len(weight.shape) != 2:
        return b.reshape(_product(b, input, weight), b.shape)
    assert bias is None or isinstance(bias, Handle | Constant | Spread)
    return b.linear(input, weight, bias)


@rule("addmm", "baddbmm", "addbmm", "addmv")
def addmm(
    b: Build, self: TensorValue, beta: float = 1, alpha: float = 1, **operands: Value
) -> Value:
    x, y = (operands[name] for name in operands)
    if not isinstance(x, Handle | Constant | Spread) or not isinstance(
        y, Handle | Constant | Spread
    ):
        return NotImplemented
    if len(x.shape) == 3 and len(b.shape) == 2:
        return NotImplemented
    product = _product(b, x, y)
    plain = beta == 1 and alpha == 1
    text = "{0} + {1}" if plain else "{0} * {2} + {1} * {3}"
    return b.pointwise(text, self, product, *([] if plain else [beta, alpha]))


@rule("dot", "mv")
def dot(b: Build, self: TensorValue, tensor: Value = None, vec: Value = None) -> Value:
    other = tensor if tensor is not None else vec
    assert isinstance(other, Handle | Constant | Spread)
    return _product(b, self, other)


@rule("convolution")
def convolution(
    b: Build,
    input: TensorValue,
    weight: TensorValue,
    bias: TensorValue | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    """A product, where the windows neither overlap nor leave gaps; otherwise it stays opaque."""
    window, sizes = weight.shape[2:], input.shape[2:]
    steps = tuple(stride) * (len(window) if len(stride) == 1 else 1)
    apart = steps == window and all(
        size % step == 0 for size, step in zip(sizes, steps, strict=True)
    )
    if transposed or groups != 1 or any(padding) or not apart:
        return NotImplemented
    positions, inner = [f"y{n}" for n in range(len(window))], [f"z{n}" for n in range(len(window))]
    split = [n for size, step in zip(sizes, steps, strict=True) for n in (size // step, step)]
    x = b.reshape(input, (*input.shape[:2], *split))
    axes = [name for pair in zip(positions, inner, strict=True) for name in pair]
    spec = f"b c {' '.join(axes)}, n c {' '.join(inner)}"
    spec += f"{', n' if bias is not None else ''} -> b n {' '.join(positions)}"
    return b.linear(x, weight, bias, spec)


@rule("softmax", "_softmax", "_safe_softmax")
def softmax(b: Build, self: TensorValue, dim: int, **other: Value) -> Value:
    if not self.shape:
        return NotImplemented
    row = b.handle(b.to_last(b.cast(self, b.dtype), dim))
    return b.from_last(b.p.softmax(row, name=b.name()), dim)


@rule("log_softmax", "_log_softmax")
def log_softmax(b: Build, self: TensorValue, dim: int, **other: Value) -> Value:
    if not self.shape:
        return NotImplemented
    wide = b.cast(self, "f32" if b.dtype in HALF else b.dtype)
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
    wide = b.cast(x, "f32" if b.dtype in HALF else b.dtype)
    total = b.reshape(reduced(b, wide, dims, False, "sum"), b.shape)
    count = math.prod(x.shape[dim] for dim in dims) if dims else math.prod(x.shape)
    return b.pointwise("{0} / {1}", total, max(count - fewer, 0.0))


@rule("var")
def var(
    b: Build, self: TensorValue, dim: Sequence[int] | None = None, correction: Value = 1,
    keepdim: bool = False, unbiased: bool = True,
) -> Value:  # fmt: skip
    wide = b.cast(self, "f32" if b.dtype in HALF else b.dtype)
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


RULES |= {
    "aten.amax": _extreme("max"),
    "aten.amin": _extreme("min"),
    "aten.any": _extreme("max"),
    "aten.all": _extreme("min"),
    "aten.max.default": _extreme("max"),
    "aten.min.default": _extreme("min"),
}


@rule("argmax")
def argmax(b: Build, self: TensorValue, dim: int | None = None, keepdim: bool = False) -> Value:
    x = b.reshape(self, (math.prod(self.shape),)) if dim is None else b.to_last(self, dim)
    return b.reshape(b.p.argmax(b.handle(x), name=b.name()), b.shape)


@rule("max.dim")
def max_dim(b: Build, self: TensorValue, dim: int, keepdim: bool = False) -> Value:
    if not self.shape:
        return NotImplemented
    values, chosen = b.p.topk(b.handle(b.to_last(self, dim)), 1, name=b.name())
    return [b.reshape(values, b.shape), b.reshape(chosen, b.shape)]


@rule("linalg_vector_norm")
def vector_norm(
    b: Build, self: TensorValue, ord: float = 2, dim: Sequence[int] | None = None,
    keepdim: bool = False, dtype: object = None,
) -> Value:  # fmt: skip
    if ord != 2:
        return NotImplemented
    wide = b.cast(self, "f32" if b.dtype in HALF else b.dtype)
    square = b.pointwise("{0} * {0}", wide, dtype=value_dtype(wide), shape=self.shape)
    return b.pointwise("sqrt({0})", b.reshape(reduced(b, square, dim, False, "sum"), b.shape))


@rule("layer_norm")
def layer_norm(
    b: Build,
    input: TensorValue,
    normalized_shape: Sequence[int],
    weight: TensorValue | None = None,
    bias: TensorValue | None = None,
    eps: float = 1e-5,
    **other: Value,
) -> Value:
    return b.reshape(_layer_norm(b, input, len(normalized_shape), weight, bias, eps), b.shape)


def _layer_norm(
    b: Build,
    x: TensorValue,
    num_dims: int,
    weight: TensorValue | None,
    bias: TensorValue | None,
    eps: float,
) -> Handle:
    """Over the last dims, which become one."""
    rows = x.shape[: len(x.shape) - num_dims]
    width = math.prod(x.shape[len(rows) :])
    if weight is None and bias is not None:
        weight = Constant(torch.ones(width, dtype=torch_dtype(b.dtype)))

    def vector(value: TensorValue | None) -> Handle | None:
        return None if value is None else b.handle(b.reshape(value, (width,)))

    row = b.handle(b.reshape(x, (*rows, width)))
    return b.p.layer_norm(row, vector(weight), vector(bias), eps, name=b.name())


@rule("native_layer_norm")
def native_layer_norm(
    b: Build, input: TensorValue, normalized_shape: Sequence[int], weight: TensorValue | None,
    bias: TensorValue | None, eps: float,
) -> Value:  # fmt: skip
    return [layer_norm(b, input, normalized_shape, weight, bias, eps), None, None]


@rule("rms_norm", "_fused_rms_norm")
def rms_norm(
    b: Build, input: TensorValue, normalized_shape: Sequence[int],
    weight: TensorValue | None = None, eps: float | None = None,
) -> Value:  # fmt: skip
    if len(normalized_shape) != 1:
        return NotImplemented
    if weight is None:
        weight = Constant(torch.ones(tuple(normalized_shape), dtype=torch_dtype(b.dtype)))
    if eps is None:
        eps = torch.finfo(torch_dtype(b.dtype)).eps
    found = b.p.rms_norm(b.handle(input), b.handle(weight), float(eps), name=b.name())
    return found if len(b.results) == 1 else [found, None]


@rule("native_group_norm")
def group_norm(
    b: Build, input: TensorValue, weight: TensorValue | None, bias: TensorValue | None, N: int,  # noqa: N803
    C: int, HxW: int, group: int, eps: float,  # noqa: N803
) -> Value:  # fmt: skip
    rows = b.reshape(input, (N, group, C // group * HxW))
    normed = b.reshape(b.p.layer_norm(b.handle(rows), None, None, eps, name=b.name()), b.shape)
    return [_scaled_by_channel(b, normed, weight, bias), None, None]


def _scaled_by_channel(
    b: Build, x: TensorValue, weight: TensorValue | None, bias: TensorValue | None
) -> TensorValue:
    shape = (1, x.shape[1]) + (1,) * (len(x.shape) - 2)
    for vector, text in ((weight, "{0} * {1}"), (bias, "{0} + {1}")):
        if vector is not None:
            x = b.pointwise(text, x, b.reshape(vector, shape))
    return x


@rule("_native_batch_norm_legit_no_training")
def batch_norm(
    b: Build, input: TensorValue, weight: TensorValue | None, bias: TensorValue | None,
    running_mean: TensorValue, running_var: TensorValue, momentum: float, eps: float,
) -> Value:  # fmt: skip
    shape = (1, input.shape[1]) + (1,) * (len(input.shape) - 2)
    mean, spread = (b.reshape(vector, shape) for vector in (running_mean, running_var))
    normed = b.pointwise("({0} - {1}) * rsqrt({2} + {3})", input, mean, spread, eps)
    return [_scaled_by_channel(b, normed, weight, bias), None, None]


@rule("_native_batch_norm_legit.no_stats")
def instance_norm(
    b: Build, input: TensorValue, weight: TensorValue | None, bias: TensorValue | None,
    training: bool, momentum: float, eps: float,
) -> Value:  # fmt: skip
    """Every channel over all samples and places."""
    order = [1, 0, *range(2, len(input.shape))]
    turned = b.transpose(input, order)
    rows = b.reshape(turned, (turned.shape[0], math.prod(turned.shape[1:])))
    normed = b.p.layer_norm(b.handle(rows), None, None, eps, name=b.name())
    back = b.transpose(b.reshape(normed, turned.shape), order)
    return [_scaled_by_channel(b, back, weight, bias), None, None]


@rule("scaled_dot_product_attention")
def attention(
    b: Build,
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    attn_mask: TensorValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    if dropout_p or len(query.shape) < 2:
        return NotImplemented
    if is_causal:
        rows = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        attn_mask = Constant(rows)
    return attend(b, query, key, value, attn_mask, scale, 0.0)


def attend(
    b: Build,
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    mask: TensorValue | None,
    scale: float | None,
    softcap: float,
) -> Value:
    """Attention of any number of dims as the op's four: the ones before the heads are one."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (_in_four_dims(b, x) for x in (query, key, value))
    if q.shape[0] != k.shape[0] or v.shape[:3] != k.shape[:3]:
        return NotImplemented
    seen = None
    if mask is not None:
        front = (1,) * max(4 - len(mask.shape), 0)
        if len(mask.shape) > 4 and any(extent > 1 for extent in mask.shape[:-4]):
            return NotImplemented
        if uniform_value(mask) not in (True, 0.0) or value_dtype(mask) == "bool":
            seen = b.reshape(mask, (*front, *mask.shape[-4:]))
    if isinstance(seen, Spread):
        source = seen.source
        seen = b.reshape(source, (1,) * (4 - len(source.shape)) + source.shape)
    operand = None if seen is None else b.handle(seen)
    handles = b.handle(q), b.handle(k), b.handle(v)
    out = b.p.attend(*handles, operand, float(scale), softcap, name=b.name())
    return b.reshape(out, b.shape)


def _in_four_dims(b: Build, x: TensorValue) -> TensorValue:
    rank = len(x.shape)
    if rank <= 4:
        return b.reshape(x, (1,) * (4 - rank) + x.shape)
    return b.reshape(x, (math.prod(x.shape[: rank - 3]), *x.shape[rank - 3 :]))


def _filled(number: float | None) -> Rule:
    def fill(b: Build, fill_value: float | None = None, **other: Value) -> Value:
        value = fill_value if number is None else number
        one = torch.full((1,) * len(b.shape), value, dtype=torch_dtype(b.dtype))  # type: ignore[arg-type]
        return Constant(one.expand(b.shape))

    return fill


RULES |= {
    "aten.full_like": _filled(None),
    "aten.new_full": _filled(None),
    "aten.fill": lambda b, self, value: (
        b.expand(value, b.shape) if is_tensor(value) else _filled(None)(b, value)
    ),
    **{f"aten.{name}": _filled(0) for name in ("zeros_like", "new_zeros", "empty_like")},
    **{f"aten.{name}": _filled(1) for name in ("ones_like", "new_ones")},
}
