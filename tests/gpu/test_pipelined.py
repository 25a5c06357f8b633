"""The pipelined kernels agree with float64 on a GPU: random shapes, types, strides and tails; every
element of poisoned outputs is written; what TMA can't take runs in plain Triton.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distmega.hostir.library import pointwise
from distmega.kernels.pipelined import api
from distmega.kernels.pipelined.choices import MAX_ROW, KernelChoice
from distmega.kernels.pipelined.families import LaunchFamily
from distmega.kernels.pipelined.norms import norms
from distmega.kernels.pipelined.pointwise import pointwise as launches
from distmega.kernels.pipelined.pointwise.exprs import formula_of
from distmega.program import expr

pytestmark = pytest.mark.gpu

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
    return expr.evaluate(expr.parse(text), wide, pointwise.FUNCTIONS, lift).expand(shape)


def check_pointwise(texts: list[str], tensors: list[Tensor], dtypes: list[torch.dtype]) -> None:
    """Into poisoned results by a few choices, and through the API."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    expected = [expected_pointwise(text, tensors, shape) for text in texts]
    formula = formula_of(tuple(texts))
    results = [torch.empty(shape, dtype=d, device="cuda") for d in dtypes]
    family = launches.family_of(formula, tensors, results)
    operands = launches.inplace_inputs(tensors, results)
    for choice in tried(family, operands):
        for y in results:
            y.fill_(float("nan"))
        family.launch(choice)(operands)
        for found, value in zip(results, expected, strict=True):
            assert_close(found, value)
    for found, value in zip(api.pointwise(texts, *tensors, dtypes=dtypes), expected, strict=True):
        assert_close(found, value)


def uses_tma(tensors: list[Tensor], results: list[Tensor]) -> bool:
    """Whether TMA can take them; every choice is run."""
    family = launches.family_of(formula_of(("a0",)), tensors, results)
    return family is not None and any(choice.stages for choice in family.choices)


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
        calls = {1: "{}(a0)", 2: "{}(a0, a1)", 3: "{}(lt(a0, a1), a0, a1)"}
        texts = [calls[expr.FUNCTIONS[f]].format(f) for f in names]
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
    bias = make(columns, dtype=x.dtype, seed=8) if op == "layer_norm" else None
    y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    total = torch.empty_like(y) if residual is not None else None
    operands = (x, residual, weight, bias, y, total)
    summed = x.double()
    family = norms.family_of(op, 1e-5, operands)
    if residual is not None:
        summed = (summed + residual.double()).to(x.dtype).double()
    expected = expected_norm(op, summed, weight, bias)
    assert family is None or tma == any(choice.stages for choice in family.choices)
    norms.run_norm(op, 1e-5, operands)
    assert_close(y, expected)
    for choice in tried(family, operands):
        y.fill_(float("nan"))
        if total is not None:
            total.fill_(float("nan"))
        family.launch(choice)(operands)
        assert_close(y, expected)
        if total is not None:
            assert torch.equal(total.double(), summed)


def tried(family: LaunchFamily | None, operands: Sequence[Tensor | None]) -> list[KernelChoice]:
    """A few choices of each kernel, compiled."""
    if family is None:
        return []
    tma = [choice for choice in family.choices if choice.stages]
    plain = [choice for choice in family.choices if not choice.stages]
    shared = [choice for choice in plain if choice.parts > 1]
    alone = [choice for choice in plain if choice.parts == 1]
    found = [*dict.fromkeys(tma[:2] + tma[-1:] + plain[:1] + shared[:2] + alone[:2])]
    family.prepare(found, operands)
    return found


def expected_norm(op: str, total: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if op == "rms_norm":
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    elif op == "layer_norm":
        expected = torch.nn.functional.layer_norm(total, total.shape[-1:], eps=1e-5)
    else:
        expected = torch.softmax(total, -1)
    expected = expected * weight.double() if weight is not None else expected
    return expected + bias.double() if bias is not None else expected


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize("columns", [128, 1024, 4096, 5120, 16384, 65536])
def test_norms_of_row_lengths(op, columns):
    x, residual = make(211, columns) + 1, make(211, columns, seed=1)
    tma = columns <= MAX_ROW
    check_norm(op, x, None, tma=tma)
    check_norm(op, x, None if op == "softmax" else residual, tma=tma)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_of_types(op, dtype):
    for columns in (256, 1544, 16384):
        check_norm(op, make(3, 50, columns, dtype=dtype), None, tma=True)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
def test_norms_of_strided_and_unaligned_rows(op):
    check_norm(op, make(70, 2048)[:, 128:1152], make(70, 1032, seed=1)[:, :1024], tma=True)
    check_norm(op, make(70, 1001), make(70, 1001, seed=1), tma=False)
    check_norm(op, make(70, 1025)[:, 1:], None, tma=False)
    check_norm(op, make(1024, 70).t(), None, tma=False)
    check_norm(op, make(1, 128), None, tma=True)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
def test_long_rows_of_any_alignment(op):
    residual = None if op == "softmax" else make(5, 50257, seed=1)
    check_norm(op, make(5, 50257), residual, tma=False)
    check_norm(op, make(300, 20001, dtype=torch.float32), None, tma=False)
    check_norm(op, make(9, 50304)[:, :50257], None, tma=False)
    check_norm(op, make(9, 20002)[:, 1:], None, tma=False)
    check_norm(op, make(20001, 9).t(), None, tma=False)


def test_rows_without_numbers():
    x = make(5, 50257)
    x[0], x[1, 100:], x[2, :40000] = [float("-inf")] * 3
    x[3, 7], x[4, 50256] = float("nan"), float("inf")
    expected = torch.softmax(x.double(), -1)
    y = torch.empty_like(x)
    operands = (x, None, None, None, y, None)
    family = norms.family_of("softmax", 0.0, operands)
    for choice in tried(family, operands):
        family.launch(choice)(operands)
        torch.testing.assert_close(y.double(), expected, rtol=1.6e-2, atol=1e-5, equal_nan=True)


def test_no_pass_reads_what_is_not_written_yet():
    """Launches begin early: both passes wait for the copy before them, the copy for both."""
    first, second = make(64, 50257), make(64, 50257, seed=1)
    x = first.clone()
    y = torch.empty_like(x)
    operands = (x, None, None, None, y, None)
    family = norms.family_of("softmax", 0.0, operands)
    for choice in tried(family, operands):
        launch = family.launch(choice)
        launch(operands)
        expected, results = y.clone(), []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for source in [second, first] * 8:
                x.copy_(source)
                launch(operands)
                results.append(y.clone())
        graph.replay()
        assert all(torch.equal(found, expected) for found in results[1::2])
        assert not torch.equal(results[0], expected)


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
