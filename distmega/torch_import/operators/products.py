"""Products: matmuls of any number of dims, linear layers, convolutions.

In: as table.py says. Out: rules of its table. Next: reductions.py.
"""

from collections.abc import Sequence

from distmega.program.builder import Handle
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import rule
from distmega.torch_import.operators.values import Constant, Spread, TensorValue, Value
from distmega.torch_import.operators.views import constant_pad_nd


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
def linear(
    b: Build, input: TensorValue, weight: TensorValue, bias: TensorValue | None = None
) -> Value:
    """With a bias that isn't a number a row of the weight, that is added to the product."""
    if len(weight.shape) == 2 and (bias is None or bias.shape == weight.shape[:1]):
        return b.linear(input, weight, bias)
    if bias is None:
        return _product(b, input, weight)
    return b.pointwise("{0} + {1}", linear(b, input, weight), bias)


@rule("addmm", "baddbmm", "addbmm", "addmv")
def addmm(
    b: Build, self: TensorValue, beta: float = 1, alpha: float = 1, **operands: Value
) -> Value:
    """beta self + alpha x y; self isn't read where beta is 0. Where alpha is, some kernels of torch
    read x and y and others don't: what these make of a NaN is left to them.
    """
    x, y = (operands[name] for name in operands)
    if not isinstance(x, Handle | Constant | Spread) or not isinstance(
        y, Handle | Constant | Spread
    ):
        return NotImplemented
    if alpha == 0 or (len(x.shape) == 3 and len(b.shape) == 2):
        return NotImplemented
    product = _product(b, x, y)
    if beta == 0:
        return product if alpha == 1 else b.pointwise("{0} * {1}", product, alpha)
    plain = beta == 1 and alpha == 1
    text = "{0} + {1}" if plain else "{0} * {2} + {1} * {3}"
    return b.pointwise(text, self, product, *([] if plain else [beta, alpha]))


@rule("dot", "mv")
def dot(b: Build, self: TensorValue, tensor: Value = None, vec: Value = None) -> Value:
    other = tensor if tensor is not None else vec
    assert isinstance(other, Handle | Constant | Spread)
    return _product(b, self, other)


MAX_TAPS = 8
"""Taps up to which a convolution of single channels is one expression."""


def _by_taps(
    b: Build, x: TensorValue, weight: TensorValue, bias: TensorValue | None, dilation: int
) -> Value:
    """x [b, c, l] shifted by each tap, times its weight [c, 1]."""
    channels, length = x.shape[1], b.shape[2]
    operands: list[TensorValue] = []
    for tap in range(weight.shape[2]):
        operands.append(b.slice(x, 2, tap * dilation, tap * dilation + length))
        operands.append(b.reshape(b.slice(weight, 2, tap, tap + 1), (channels, 1)))
    text = " + ".join(f"{{{2 * tap}}} * {{{2 * tap + 1}}}" for tap in range(weight.shape[2]))
    if bias is not None:
        text += f" + {{{len(operands)}}}"
        operands.append(b.reshape(bias, (channels, 1)))
    return b.pointwise(text, *operands)


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
    """A product, where the windows neither overlap nor leave gaps; a sum of a few, where each
    channel has its own and there is one dim; otherwise it stays opaque.
    """
    window, sizes = weight.shape[2:], input.shape[2:]
    own = groups == input.shape[1] == weight.shape[0]
    if own and len(window) == 1 and window[0] <= MAX_TAPS and set(stride) == {1} and not transposed:
        x = constant_pad_nd(b, input, (padding[0], padding[0]))
        return _by_taps(b, x, weight, bias, dilation[0])
    steps, between = (
        tuple(each) * (len(window) if len(each) == 1 else 1) for each in (stride, dilation)
    )
    dense = all(taps == 1 or step == 1 for taps, step in zip(window, between, strict=True))
    apart = steps == window and all(
        size % step == 0 for size, step in zip(sizes, steps, strict=True)
    )
    if transposed or groups != 1 or any(padding) or not (apart and dense):
        return NotImplemented
    positions, inner = [f"y{n}" for n in range(len(window))], [f"z{n}" for n in range(len(window))]
    split = [n for size, step in zip(sizes, steps, strict=True) for n in (size // step, step)]
    x = b.reshape(input, (*input.shape[:2], *split))
    axes = [name for pair in zip(positions, inner, strict=True) for name in pair]
    spec = f"b c {' '.join(axes)}, n c {' '.join(inner)}"
    spec += f"{', n' if bias is not None else ''} -> b n {' '.join(positions)}"
    return b.linear(x, weight, bias, spec)
