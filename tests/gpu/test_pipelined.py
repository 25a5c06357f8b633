"""The pipelined kernels agree with float64 on a GPU: random shapes, types, strides and tails; every
element of poisoned outputs is written; what TMA can't take runs in plain Triton.
"""

import random

import pytest
import torch
from torch import Tensor

from distmega import expr
from distmega.hostir import library
from distmega.kernels.pipelined import api

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")

norms = pytest.importorskip("distmega.kernels.pipelined.norms")
launches = pytest.importorskip("distmega.kernels.pipelined.pointwise")

TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Relative; absolute is 1e-5, as torch.testing has it for these types (fp32 is wider: fast exp)."""
HALF = torch.bfloat16


def make(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=TOLERANCE[found.dtype], atol=1e-5
    )


def expected_pointwise(text: str, tensors: list[Tensor], shape: torch.Size) -> Tensor:
    def lift(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device="cuda")

    wide = [x.double() for x in tensors]
    return expr.evaluate(expr.parse(text), wide, library.FUNCTIONS, lift).expand(shape)


def check_pointwise(texts: list[str], tensors: list[Tensor], dtypes: list[torch.dtype]) -> None:
    """Into poisoned results, and through the API."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    results = [torch.full(shape, float("nan"), dtype=d, device="cuda") for d in dtypes]
    trees = tuple(map(expr.parse, texts))
    launches.launch_pointwise(trees, tensors, results)
    for found, again, text in zip(
        results, api.pointwise(texts, *tensors, dtypes=dtypes), texts, strict=True
    ):
        assert_close(found, expected_pointwise(text, tensors, shape))
        assert torch.equal(found, again)


def uses_tma(tensors: list[Tensor], results: list[Tensor]) -> bool:
    return bool(launches.pointwise_choices(tensors, results))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(64, 4096), (1,), (37,), (3, 5, 7), (1000, 1001), (128, 64, 40)])
def test_tensors_of_one_shape(shape, dtype):
    tensors = [make(*shape, dtype=dtype, seed=n) for n in range(2)]
    assert uses_tma(tensors, tensors[:1])
    check_pointwise(["silu(a0) * a1"], tensors, [dtype])


def test_all_functions():
    x, y = (make(8, 512, dtype=torch.float32, seed=n).abs() + 0.1 for n in range(2))
    for n in range(0, len(expr.FUNCTIONS), 4):
        names = list(expr.FUNCTIONS)[n : n + 4]
        texts = [f"{f}(a0)" if expr.FUNCTIONS[f] == 1 else f"{f}(a0, a1)" for f in names]
        check_pointwise(texts, [x, y], [torch.float32] * len(texts))


@pytest.mark.parametrize("num_inputs", [1, 3, 4, 8])
def test_up_to_eight_inputs_and_four_outputs(num_inputs):
    types = [HALF, torch.float32, torch.float16]
    tensors = [make(96, 384, dtype=types[n % 3], seed=n) for n in range(num_inputs)]
    total = " + ".join(f"a{n}" for n in range(num_inputs))
    texts = [total, "a0 * 2 + 1", f"relu(a{num_inputs - 1})", "0.5"]
    dtypes = [torch.float32, HALF, torch.float16, HALF]
    check_pointwise(texts, tensors, dtypes)


def test_rows_columns_and_scalars_are_broadcast():
    x, row, column = make(300, 520), make(520, seed=1), make(300, 1, seed=2)
    scalar = make(1, dtype=torch.float32, seed=3)
    assert uses_tma([x, row, column, scalar], [x])
    check_pointwise(["a0 * a1 + a2 * a3", "a1 + a2"], [x, row, column, scalar], [HALF, HALF])
    check_pointwise(["a0 + a1"], [row, column], [torch.float32])
    check_pointwise(["a0 * a1"], [make(7, 40, 8), make(1, 40, 8, seed=1)], [HALF])


def test_row_strided_inputs_stream_by_tma():
    x, y = make(100, 1024)[:, 64:576], make(512, 512, seed=1)[::3][:100]
    assert uses_tma([x, y], [make(100, 512)])
    check_pointwise(["a0 - a1"], [x, y], [HALF])


def test_other_strides_and_alignments_take_the_fallback():
    unaligned, plain = make(4097)[1:], make(4096, seed=1)
    assert not uses_tma([unaligned, plain], [plain])
    check_pointwise(["a0 * a1"], [unaligned, plain], [HALF])
    check_pointwise(["a0 * a1"], [make(96, 64).t(), make(64, 96, seed=1)], [HALF])
    check_pointwise(["a0 * a1"], [make(33, 35), make(35, seed=1)], [HALF])
    check_pointwise(["a0 + a1"], [make(4, 6, 8).permute(2, 0, 1), make(8, 4, 6)], [HALF])
    check_pointwise(["a0 + a1"], [make(5, 1, 7, 1), make(6, 1, 8, seed=1)], [HALF])


def test_random_pointwise_shapes():
    rng = random.Random(6)
    for n in range(12):
        rows, columns = rng.randint(1, 700), rng.randint(1, 300) * rng.choice([1, 8])
        padded = rng.choice([columns, columns + 8, -(-columns // 8) * 8])
        tensors = [make(rows, padded, seed=n)[:, :columns], make(rows, columns, seed=n + 50)]
        check_pointwise(["a0 * a1 + a0"], tensors, [HALF])


def check_norm(op: str, x: Tensor, residual: Tensor | None, tma: bool) -> None:
    """With weight, and bias for layer norm; results poisoned."""
    columns = x.shape[-1]
    weight = make(columns, dtype=x.dtype, seed=7) if op != "softmax" else None
    bias = make(columns, dtype=x.dtype, seed=8) if op == "layer" else None
    rows = norms.make_rows(op, x, residual, weight, bias, 1e-5)
    for result in (rows.y, rows.total):
        if result is not None:
            result.fill_(float("nan"))
    assert bool(norms.norm_choices(rows)) == tma
    norms.launch_norm(rows)
    total = x.reshape(rows.y.shape).double()
    if residual is not None:
        assert_close(rows.total, total + residual.reshape(rows.y.shape).double())
        total = rows.total.double()
    if op == "rms":
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    elif op == "layer":
        expected = torch.nn.functional.layer_norm(total, [columns], eps=1e-5)
    else:
        expected = torch.softmax(total, -1)
    expected = expected * weight.double() if weight is not None else expected
    expected = expected + bias.double() if bias is not None else expected
    assert_close(rows.y, expected)


@pytest.mark.parametrize("op", ["rms", "layer", "softmax"])
@pytest.mark.parametrize("columns", [128, 1024, 4096, 5120, 16384, 65536])
def test_norms_of_row_lengths(op, columns):
    x, residual = make(211, columns) + 1, make(211, columns, seed=1)
    check_norm(op, x, None, tma=True)
    check_norm(op, x, None if op == "softmax" else residual, tma=True)


@pytest.mark.parametrize("op", ["rms", "layer", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_of_types(op, dtype):
    for columns in (256, 1544, 16384):
        check_norm(op, make(3, 50, columns, dtype=dtype), None, tma=True)


@pytest.mark.parametrize("op", ["rms", "layer", "softmax"])
def test_norms_of_strided_and_unaligned_rows(op):
    check_norm(op, make(70, 2048)[:, 128:1152], make(70, 1032, seed=1)[:, :1024], tma=True)
    check_norm(op, make(70, 1001), make(70, 1001, seed=1), tma=False)
    check_norm(op, make(70, 1025)[:, 1:], None, tma=False)
    check_norm(op, make(1024, 70).t(), None, tma=False)
    check_norm(op, make(1, 128), None, tma=True)


def test_norms_through_the_api():
    x, residual, weight = make(2, 30, 512), make(2, 30, 512, seed=1), make(512, seed=2)
    y, total = api.rms_norm(x, weight, residual=residual)
    assert y.shape == total.shape == x.shape
    assert_close(total, x.double() + residual.double())
    assert torch.equal(y, api.rms_norm(total, weight))
    assert_close(api.softmax(x).sum(-1).to(HALF), torch.ones(2, 30, device="cuda"))


@pytest.mark.parametrize("columns", [4096, 65536])
def test_large_offsets_keep_their_variance(columns):
    x = make(40, columns, dtype=torch.float32) + 1000
    expected = torch.nn.functional.layer_norm(x.double(), [columns])
    found = api.layer_norm(x)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


def test_runs_repeat_bit_by_bit():
    x, residual, weight = make(999, 4096), make(999, 4096, seed=1), make(4096, seed=2)
    first = api.rms_norm(x, weight, residual=residual)
    for _ in range(50):
        again = api.rms_norm(x, weight, residual=residual)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
