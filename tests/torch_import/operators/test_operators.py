"""Operators of torch by their rules, each against eager, on one rank and on two; several in one
module, since an export costs most of a test.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distmega
from distmega.errors import RequestError
from tests.torch_import.running import assert_close, check_module


class Calls(nn.Module):
    """Several functions of the same inputs."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *args: Tensor) -> list[Any]:
        return [function(*args) for function in self.functions]


def opaque_of(*functions: Callable[..., Any], args: tuple[Tensor, ...]) -> set[str]:
    """Checks functions of inputs; the operators that torch runs."""
    return {*check_module(Calls(*functions), args).opaque}


X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[3, 1, 0, 2], [2, 2, 1, 3]])


def test_expressions():
    functions = [
        torch.abs, torch.ceil, torch.cos, torch.erf, torch.exp, torch.exp2, torch.floor, torch.neg,
        torch.relu, torch.sigmoid, torch.sign, torch.sin, torch.square, torch.tanh, torch.trunc,
        torch.reciprocal, torch.isnan, torch.isinf, torch.logical_not, F.silu, F.gelu, F.mish,
        F.leaky_relu, F.elu, F.hardswish, F.softplus, F.relu6, F.glu, F.logsigmoid, F.selu,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x.abs().sqrt() + x.exp().rsqrt() + x.exp().log() + x.exp().log1p(),
        lambda x: (x**3, 2**x, x.exp() ** x.abs(), x / 3, x / x.exp(), 1 - x, x.sub(x, alpha=2)),
        lambda x: (x > 0) & (x < 1) | ~(x != x) ^ (x >= 2) | (x == 0) | (x <= -1),
        lambda x: (x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=x.mean()), torch.maximum(x, -x)),
        lambda x: (torch.where(x > 0, x, 0.0), x.masked_fill(x > 0, -math.inf), x.nan_to_num()),
        lambda x: x.index_put((x[..., 0] > 0,), torch.tensor(2.0)),
        lambda x: (torch.lerp(x, -x, 0.3), torch.addcmul(x, x, x, value=2), x.minimum(x * x)),
        lambda x: (x.double() + x, x.half().float(), x.bfloat16() * 2, x.long() * 3, x.bool()),
        lambda x: (x.log2(), x.abs().log10(), torch.div(x, 0.3, rounding_mode=None)),
    ]  # fmt: skip
    assert not opaque_of(*functions, args=(X,))


def test_constants_of_both_signs():
    """The second program with an equal constant, of which torch has another one."""
    x = torch.tensor([1.0, -2.0])
    for zero in (0.0, -0.0, 0.0):
        module = Calls(lambda x, zero=zero: x / zero)
        (found,) = distmega.capture(module, (x,)).compile()(x)
        assert torch.equal(found, x / zero)


def test_functions_keep_the_digits_of_small_and_large_arguments():
    """As many as torch keeps, in each type."""
    sizes = torch.tensor([1e-30, 1e-10, 1e-7, 1e-4, 0.1, 1.0, 10.0, 80.0, 1e5], dtype=torch.float64)
    functions: list[Callable[[Tensor], Tensor]] = [
        F.elu, F.selu, F.celu, lambda x: F.elu(x, 0.5), lambda x: F.celu(x, 3.0), F.softplus,
        torch.expm1, lambda x: x.abs().log1p(), torch.tanh, F.logsigmoid, F.gelu, F.silu, F.mish,
    ]  # fmt: skip
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.cat([sizes, -sizes]).to(dtype)
        found = distmega.capture(Calls(*functions), (x,)).compile()(x)
        near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 1e-37}
        for y, function in zip(found, functions, strict=True):
            own, exact = function(x).double(), function(x.double())
            keeps = torch.isclose(own, exact, **near)  # gelu far below zero does not
            assert torch.allclose(y.double()[keeps], exact[keeps], **near), function


def test_movement():
    functions = [
        lambda x, i: (x[1:], x[..., ::2], x[:, -1], x[:, None], x.squeeze(), x[0, 1:3, 2:]),
        lambda x, i: (x.reshape(8, 6), x.permute(2, 0, 1).reshape(3, 16), x.flatten(1), x.mT),
        lambda x, i: (*x.chunk(2, 1), *x.split([1, 5], 2), *x.unbind(0), torch.stack([x, x], 1)),
        lambda x, i: (torch.cat([x, x[:, :1]], 1), x.repeat(2, 1, 3), x.expand(3, 2, 4, 6) + 1),
        lambda x, i: (F.pad(x, (1, 2, 0, 1), value=3.0), F.pad(x, (-1, 1)), x.flip(0, 2)),
        lambda x, i: (x.roll(1, 1), x.tril(), x.triu(1), x.repeat_interleave(2, 1)),
        lambda x, i: x.movedim(0, 2),
        lambda x, i: (x[:, i[0]], x[0][i], x[:, i, i], x[[1, 0]], x.index_select(1, i[1] - 1 + 1)),
        lambda x, i: (x[:, -i[0] - 1], torch.gather(x, 1, i[:, :, None])),
        lambda x, i: (x.scatter(2, i[:, :, None], 7.0), x[..., 0].scatter(1, i, -math.inf)),
        lambda x, i: (x * 0).scatter_(1, x.topk(2, 1)[1], 1) * x,
        lambda x, i: (torch.zeros_like(x), x.new_full((2,), 3.0), torch.full_like(x, 2.0) * x),
        lambda x, i: (F.one_hot(i, 5), torch.arange(4) + i, torch.eye(4) @ x, i.float() / 2),
        lambda x, i: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
    ]  # fmt: skip
    assert not opaque_of(*functions, args=(X, IDS))


def test_padding_that_cuts_all_there_was():
    functions = [
        lambda x: (F.pad(x, (2, -6)), F.pad(x, (-6, 3), value=3.0), F.pad(x, (1, 1, -4, 1))),
        lambda x: (F.pad(x, (0, 0, 0, 0, 1, -2), value=-math.inf), F.pad(x > 0, (-6, 1)) | (x > 0)),
    ]
    assert not opaque_of(*functions, args=(X,))


def test_complex_numbers():
    angles = torch.polar(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3))

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(2, 4, 3, 2))
        return torch.view_as_real(pairs * angles).flatten(2)

    def by_position(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(x[..., 0]), x[..., 1])[:, None].expand(2, 3, 4) * 2.0
        pairs = torch.view_as_complex(x.reshape(2, 4, 3, 2)).transpose(1, 2)
        return torch.view_as_real((pairs * turn).permute(0, 2, 1).unsqueeze(0))

    assert not opaque_of(rotated, by_position, args=(X,))
    assert opaque_of(lambda x: torch.polar(x, x).abs(), args=(X,)), "what has no rule"


def test_ids_that_no_row_has_are_named():
    x = torch.arange(24.0).reshape(2, 3, 4)
    functions: list[tuple[Callable[..., Any], tuple[int, ...], tuple[tuple[int, ...], ...]]] = [
        (lambda x, i, j: x[i, j], (0, 0), ((0, 3), (1, -4), (-3, 2), (2, 0), (1, 5))),
        (lambda x, i, j: x[i, j, i], (1, 1), ((0, 3), (1, -4), (-3, 2), (-2, 7))),
        (lambda x, i, j: x[:1][i, j], (0, 0), ((1, -5), (0, 3), (1, 0), (0, -4))),
        (lambda x, i, j: x[0, :1].scatter(1, (i + j)[None], 5.0), (0, 3), ((4, 0), (-1, 0))),
        (lambda x, i, j: F.one_hot(i + j, 3), (0, 2), ((0, 3), (-1, 0))),
    ]  # fmt: skip
    for function, fit, wrong in functions:
        ids = [torch.tensor([number]) for number in fit]
        module = Calls(function)
        step = distmega.capture(module, (x, *ids)).compile()
        assert_close(step(x, *ids), module(x, *ids))
        for numbers in wrong:
            with pytest.raises(RequestError, match=r"an id of .* in a table of"):
                step(x, *(torch.tensor([number]) for number in numbers))


def test_reductions():
    functions = [
        lambda x: (x.sum(), x.sum((0, 2)), x.mean(1, keepdim=True), x.mean(), x.sum(1).sum(-1)),
        lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min(), *x.max(1), (x > 0).any(1)),
        lambda x: ((x > 0).all(-1, keepdim=True), (x > 0).sum(1), x.var(-1), x.std(0)),
        lambda x: x.norm(dim=1),
        lambda x: (x.argmax(-1), x.argmax(), x.argmax(0, keepdim=True), *x.topk(3), *x.topk(2, 1)),
        lambda x: (x.softmax(0), x.log_softmax(1), x.logsumexp(-1), x.cumsum(1), (x > 0).cumsum(0)),
        lambda x: (x.half().mean(1), F.normalize(x, dim=1), torch.var_mean(x, 1, correction=0)),
    ]  # fmt: skip
    assert not opaque_of(*functions, args=(X,))


def test_products():
    w, y = torch.randn(5, 6), torch.randn(2, 6, 3)
    functions = [
        lambda x, w, y: (F.linear(x, w, w[:, 0]), x @ y, x @ w.T, x[0] @ y[0], x[0, 0] @ w.T),
        lambda x, w, y: (w @ x[0, 0], torch.dot(x[0, 0], x[0, 1]), torch.mv(w, x[1, 1])),
        lambda x, w, y: (torch.bmm(x, y), torch.addmm(w[:, 0], x[0], w.T, beta=2, alpha=0.5)),
        lambda x, w, y: (torch.baddbmm(x @ y, x, y), x[:, None] @ y[:, None].repeat(1, 3, 1, 1)),
        lambda x, w, y: (torch.einsum("bmk,nk->nbm", x, w), torch.einsum("bmk,bkn->bn", x, y)),
        lambda x, w, y: (x[0][None] @ y, torch.outer(w[0], w[1]), torch.kron(w[:2], w[3:])),
        lambda x, w, y: F.cosine_similarity(x, -x, dim=-1),
    ]  # fmt: skip
    assert not opaque_of(*functions, args=(X, w, y))


def test_linear_layers_of_any_weights_and_biases():
    functions = [
        lambda x, w, c: (F.linear(x, w[0], c), F.linear(x[0, 0], w[0], c), F.linear(x, w[0])),
        lambda x, w, c: (F.linear(x, w, c), F.linear(x[0], w, c[None]), F.linear(x[0, 0], w, c)),
        lambda x, w, c: (F.linear(x, w, x[..., :5]), F.linear(x[0], w, x[0, :, :5])),
    ]
    assert not opaque_of(*functions, args=(X, torch.randn(5, 6), torch.tensor(2.0)))


def test_what_is_added_zero_times_is_not_read():
    none, y = torch.full((2, 4, 3), math.nan), torch.randn(2, 6, 3)
    functions = [
        lambda x, y, n: n[0].addmm(x[0], y[0], beta=0),
        lambda x, y, n: n[0, :, 0].addmv(x[1], y[0, :, 0], beta=0),
        lambda x, y, n: (n.baddbmm(x, y, beta=0, alpha=3), n[0, 0].addmm(x[0], y[0], beta=0)),
    ]
    assert not opaque_of(*functions, args=(X, y, none))
    zero_times = [lambda x, y: y[0, 0].addmm(x[0], y[0] * math.nan, alpha=0)]
    assert opaque_of(*zero_times, args=(X, y)) == {"aten.addmm.default"}


def test_norms_and_attention():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    mask = torch.rand(2, 1, 5, 7) < 0.7
    mask[..., 0] = True
    functions = [
        lambda q, k, m: (F.layer_norm(q, (8,)), F.rms_norm(q, (8,)), F.layer_norm(q, (5, 8))),
        lambda q, k, m: F.layer_norm(q, (8,), q[0, 0, 0], q[0, 0, 1], 1e-3),
        lambda q, k, m: (F.layer_norm(q, (8,), bias=q[0, 0, 0]), F.rms_norm(q, (8,), q[0, 0, 0])),
        lambda q, k, m: (F.group_norm(q, 2, q[0, :, 0, 0]), F.instance_norm(q)),
        lambda q, k, m: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda q, k, m: F.scaled_dot_product_attention(q[0], q[0], q[1]),
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m, scale=0.2, enable_gqa=True),
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m.float() * 3, enable_gqa=True),
    ]  # fmt: skip
    assert not opaque_of(*functions, args=(q, k, mask))


def test_attention_of_operands_that_are_repeated():
    q, k = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 7, 8)
    attend = F.scaled_dot_product_attention
    functions = [
        lambda q, k, m: (attend(q, k, k, m), attend(q, k, k, m[0, 0]), attend(q, k, k, m[:1, :1])),
        lambda q, k, m: (attend(q[0], k[0], k[0], m[0]), attend(q[0], k[0, :, :1], k[0, :, :1])),
    ]
    mask = torch.randn(2, 3, 1, 5, 7)
    assert not opaque_of(*functions, args=(q, k, mask))
    apart = [
        lambda q, k, m: (attend(q, k, k, m[:1]), attend(q, k, k, m[0])),
        lambda q, k, m: attend(q[0, :, :1], k[0], k[0]),
        lambda q, k, m: attend(q[:1].transpose(0, 1), k[:1], k[:1]),
    ]
    for each in apart:
        assert opaque_of(each, args=(q, k, mask)), "torch repeats these"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_norm_without_epsilon_has_the_one_of_the_type_it_is_computed_in(dtype: torch.dtype):
    x = (X * 1e-3).to(dtype)
    assert not opaque_of(lambda x: F.rms_norm(x, (6,)), args=(x,))


def test_what_has_no_rule_is_run_by_torch():
    found = opaque_of(
        lambda x, i: x.round(),
        lambda x, i: (x.prod(1), i // 3, i % 3, x.min(1), x.take_along_dim(i[:, :, None], 2)),
        lambda x, i: torch.fft.rfft(x).abs(),
        lambda x, i: (x.sort(1), x.scatter(1, i[:, :, None], 1.0), x.unfold(1, 2, 1)),
        args=(X, IDS),
    )  # fmt: skip
    assert {"aten.round.default", "aten.prod.dim_int", "aten.sort.default"} <= found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 3)])
def test_small_shapes(shape: tuple[int, ...]):
    functions = [lambda x: (x + 1, x.sum(), x.unsqueeze(0), x.mean() * x, x.reshape(-1))]
    assert not opaque_of(*functions, args=(torch.randn(shape),))


def test_convolutions_of_single_channels_are_expressions():
    w, bias = torch.randn(4, 1, 3), torch.randn(4)
    functions = [
        lambda x: F.conv1d(x, w, bias, groups=4),
        lambda x: F.conv1d(x, w, None, padding=2, dilation=2, groups=4),
        lambda x: F.conv1d(x, w, bias, padding="same", groups=4)[..., -1:],
    ]
    assert not opaque_of(*functions, args=(X,))


def test_convolutions_of_windows_with_gaps_stay_with_torch():
    w, one = torch.randn(3, 4, 2), torch.randn(3, 4, 1)
    gaps = opaque_of(lambda x: F.conv1d(x, w, stride=2, dilation=2), args=(X,))
    assert gaps == {"aten.convolution.default"}
    assert not opaque_of(lambda x: F.conv1d(x, one, dilation=3), args=(X,))


def test_bits_that_are_read_as_another_type():
    functions = [
        lambda x: (x.view(torch.int32) + 1, (x + 1).view(torch.float64), x.view(torch.float32)),
        lambda x: ((x * 2).view(torch.uint8), (x + 1).view(torch.complex64)),
    ]
    assert "aten.view.dtype" in opaque_of(*functions, args=(X,))


def test_quotients_that_are_rounded_down_are_those_of_torch():
    """1 over 0.1 is less than 10 in floats, whose quotient is 10."""
    x = torch.tensor([1.0, 2.5, -1.0, 1.0, math.inf, 0.0, -7.0])
    y = torch.tensor([0.1, 0.1, math.inf, -math.inf, 3.0, 0.0, 2.0])
    found = opaque_of(lambda x, y: (x // y, x // 0.1, torch.div(x, 0.5)), args=(x, y))
    assert found == {"aten.div.Tensor_mode"}


def test_powers_of_whole_numbers_are_exact():
    x = torch.tensor([0, 1, -1, 3, -7, 2**31 + 1])
    y = torch.tensor([-2, -3, -3, 39, 21, 2])
    assert opaque_of(lambda x, y: (x**y, 2**y, x.float() ** y), args=(x, y))
    assert not opaque_of(lambda x: (x**2, x**3, x**0, 0.5**x), args=(x,))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_whole_numbers_with_floats_do_not_wrap_around(dtype: torch.dtype):
    x = torch.tensor([1_700_000_000, -(2**31), 3, torch.iinfo(dtype).max], dtype=dtype)
    functions = [
        lambda x: (x**2.0, x**3.0, x * 4e9, 2.5 + x, 1e19 - x, x[:1] * 1e12, x / x.flip(0)),
        lambda x: (
            torch.where(x > 5, x, 0.5) * x,
            torch.add(x, 1.0, alpha=3),
            x.exp(),
            (x > 4) / 2,
        ),
    ]
    assert not opaque_of(*functions, args=(x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_numbers_are_compared_in_the_type_in_which_torch_compares(dtype: torch.dtype):
    """That of the tensors, to which a number is rounded before; of whole numbers a float's."""
    whole = torch.arange(16777214, 16777220)
    known = [torch.full((6,), 0.3, dtype=torch.float64), torch.full((6,), 16777216.0)]
    functions = [
        lambda x, y: (x == 0.3, x != 0.3, x <= 0.3, x > 0.3, x < 0.3, x == 3.0),
        lambda x, y: (x == known[0], x >= known[0][:1], x < known[0][0], x == known[1]),
        lambda x, y: (y == known[1], y == 16777216.0, y > 16777216, y == x.float() * 0 + known[1]),
        lambda x, y: (x == (y[0] * 0 + 0.3), y <= x, (x > 0) == 1.0, (x > 0) != (y > 0)),
        lambda x, y: (F.hardshrink(x.half(), 0.3), F.threshold(x.bfloat16(), 0.3, 7.0)),
    ]
    x = torch.tensor([0.3, -0.3, 0.0, 3.0, 16777216.0, 16777217.0]).to(dtype)
    assert not opaque_of(*functions, args=(x, whole))


def test_known_numbers_of_more_digits_than_what_they_meet():
    """A tensor of equal numbers, which stands as one number in an expression."""
    known = torch.full((6,), 0.1, dtype=torch.float64)
    functions = [
        lambda x: (x * known, known - x, x / known[:1], torch.where(x > 0, x, known)),
        lambda x: (x.half() * known, x.long() * known, (x > 0) * known, x.abs() ** known),
        lambda x: (torch.maximum(x, known), x.clamp(known), x * known[0], x.bfloat16() + known),
    ]
    found = distmega.capture(Calls(*functions), (X,)).compile()(X)
    for mine, function in zip(found, functions, strict=True):
        assert_close(mine, list(function(X)), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_numbers_that_halves_lack_are_rounded_where_they_meet(dtype: torch.dtype):
    whole = torch.tensor([257, 1025, 2049, 4099, -65519, 70000, 3])
    near = torch.tensor([256, 1024, 2048, 4096, 1, 0.5, 3]).to(dtype)
    functions: list[Callable[..., Any]] = [
        lambda i, x: (i - x, x - i, i * x, i / x, torch.where(x > 2, i, x)),
        lambda i, x: (i.int() - x, torch.maximum(i, x), i[:1] - x[:1], x * i[0]),
    ]
    opaque_of(*functions, args=(whole, near))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logarithms_of_powers_are_whole(dtype: torch.dtype):
    powers = torch.cat([2.0 ** torch.arange(-40.0, 41.0), 10.0 ** torch.arange(-30.0, 31.0)])
    x = torch.cat([powers, torch.tensor([0.0, -1.0, math.inf, math.nan])]).to(dtype)
    assert not opaque_of(lambda x: (x.log2().floor(), x.log10().ceil()), args=(x,))


def test_a_root_of_what_is_not_finite():
    roots = [lambda x: (x**0.5, x**-0.5)]
    assert not opaque_of(*roots, args=(torch.tensor([4.0, 0.0, -1.0, math.inf, -math.inf]),))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_complex_numbers_made_of_others():
    functions = [
        lambda x: (x.to(torch.complex64) * 1j, x.to(torch.complex128), torch.fft.fft2(x)),
        lambda x: ((x > 0).to(torch.complex64) * x, x.long().to(torch.complex64) * 2.0),
        lambda x: (x.sum().long().to(torch.complex64), x.sum().to(torch.complex64)),
        lambda x: (x == 1j, x != 2 + 0j, torch.where(x > 0, 1j, x), x - 1j),
        lambda x: (torch.complex(x.half(), x.half()), torch.complex(x.half(), x.half())[1:] * 2),
    ]
    opaque_of(*functions, args=(X,))


def test_dims_of_a_tensor_without_dims():
    functions = [
        lambda x: (x.sum(0), x.mean(0), x.amax(-1), x.amin(0), x.logsumexp(0), x.norm(dim=0)),
        lambda x: (x.argmax(0), x.argmin(0, keepdim=True), x.max(0), x.sort(0), x.cumsum(0)),
        lambda x: (x.softmax(0), x.log_softmax(-1), x.var(0, correction=0), (x > 0).any(0)),
        lambda x: (x.index_select(0, torch.tensor([0])), x.flip(0), x.cumprod(0), x.prod(0)),
        lambda x: (torch.cat([x[None], x[None]]), x.expand(3), x.median(), F.normalize(x, dim=0)),
        lambda x: (torch.var_mean(x, 0, correction=0), (x > 0).all(0), x.unsqueeze(-1), x.topk(1)),
    ]
    opaque_of(*functions, args=(torch.tensor(-1.5),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_maximum_is_the_first_of_equals(dtype: torch.dtype):
    x = torch.tensor([[1, 1, 1, 1, 1, 1], [2, 3, 3, 0, 3, 3], [0, 2, 0, 1, 2, 2]], dtype=dtype)
    if dtype.is_floating_point:
        x[2, 3:5] = math.nan
    assert not opaque_of(lambda x: (*x.max(1), *x.max(0, keepdim=True)), args=(x,))


def test_bools_have_a_maximum():
    opaque_of(lambda x: (*(x > 0).max(1), *(x > 0).min(1), (x > 0).amax(0)), args=(X,))


def test_what_norms_give_besides():
    """Means and roots of variances."""
    gain = torch.arange(4.0)
    functions = [
        lambda x: torch.native_layer_norm(x, (6,), None, None, 1e-5),
        lambda x: torch.native_group_norm(x, gain, gain, 2, 4, 6, 2, 1e-5)[1],
        lambda x: torch.native_batch_norm(x, gain, gain, gain, gain + 1, False, 0.1, 1e-5)[:2],
    ]
    opaque_of(*functions, args=(X,))


def test_operands_and_parts_without_elements():
    nothing = torch.zeros(4, 0)
    functions = [
        lambda x, e: (x.split([2, 2, 0], 1), torch.addmm(x[0], e, e.T[:, :1].expand(0, 6))),
        lambda x, e: (F.linear(e, torch.zeros(6, 0), x[0, 0]), torch.cat([x[0], e], 1)),
        lambda x, e: (e.add_(1), e.sum() + x, x.index_put((e.long()[0],), torch.ones(0, 4, 6))),
        lambda x, e: (*x.topk(0), *x[:0].max(1), x[..., :0].sort(1)[1]),
        lambda x, e: (F.group_norm(x[:0], 2), F.batch_norm(x[:0], x[0, :, 0], x[0, :, 0] + 3)),
    ]
    opaque_of(*functions, args=(X, nothing))
