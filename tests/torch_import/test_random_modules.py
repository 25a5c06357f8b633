"""Random modules: layers drawn by hypothesis, captured, and run on one rank and on two."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.torch_import.running import check_module

ROWS, WIDTH = 6, 8


class Linear(nn.Module):
    """To another width and back, with or without biases."""

    def __init__(self, inner: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias), nn.Linear(inner, WIDTH, not bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Gated(nn.Module):
    """Two halves of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 12), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.out(F.gelu(gate, approximate="tanh") * up)


class Attention(nn.Module):
    """Heads, causal or not, keys and values for a part of them."""

    def __init__(self, heads: int, kv_heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        self.qkv = nn.Linear(WIDTH, (heads + 2 * kv_heads) * 4)
        self.out = nn.Linear(heads * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        parts = self.qkv(x).split([4 * size for size in sizes], -1)
        q, k, v = (
            part.unflatten(-1, (size, 4)).transpose(-2, -3)
            for part, size in zip(parts, sizes, strict=True)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x[..., 0, :].reshape(-1, WIDTH)).reshape(x[..., :1, :].shape)


class Moved(nn.Module):
    """Elements in other places."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case 0:
                return torch.cat([x[..., 4:], -x[..., :4]], -1)
            case 1:
                return x.flip(-2)
            case 2:
                return F.pad(x, (1, 1))[..., 2:]
            case 3:
                return x.reshape(*x.shape[:-2], WIDTH, ROWS).transpose(-1, -2) * 0.5
            case _:
                return torch.where(x > x.mean(-1, keepdim=True), x, x.cumsum(-2))


class Normed(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.scale = make(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


NORMS = [
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    lambda: nn.RMSNorm(WIDTH),
    lambda: nn.Softmax(-1),
    lambda: nn.Tanh(),
]

layers = st.one_of(
    st.builds(Linear, st.sampled_from([3, 8, 16]), st.booleans()),
    st.builds(Gated),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]).flatmap(
        lambda heads: st.builds(Attention, st.just(heads[0]), st.just(heads[1]), st.booleans())
    ),
    st.builds(Recurrent),
    st.builds(Moved, st.integers(0, 4)),
    st.builds(Normed, st.sampled_from(NORMS)),
)


class Stack(nn.Module):
    """Layers one after the other, some of them beside a residual, one weight used twice."""

    def __init__(self, parts: list[nn.Module], residual: list[bool]) -> None:
        super().__init__()
        self.parts, self.residual = nn.ModuleList(parts), residual
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        for part, residual in zip(self.parts, self.residual, strict=False):
            x = x + part(x) if residual else part(x)
        return x, (x @ self.table.weight.T).argmax(-1)


@pytest.mark.parametrize("num", [6, pytest.param(30, marks=pytest.mark.nightly)])
def test_random_modules(num: int):
    @settings(
        max_examples=num, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(
        st.lists(layers, min_size=1, max_size=4),
        st.lists(st.booleans(), min_size=4, max_size=4),
        st.sampled_from([(ROWS,), (1, ROWS), (3, ROWS)]),
    )
    def check(parts: list[nn.Module], residual: list[bool], shape: tuple[int, ...]) -> None:
        module = Stack(parts, residual).eval()
        captured = check_module(module, (torch.randint(0, 11, shape),))
        assert not captured.opaque

    check()
