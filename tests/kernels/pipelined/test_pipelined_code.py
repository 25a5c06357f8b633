"""The pipelined kernels' machine code, compiled for sm_90a without a GPU: loads and stores by TMA,
one mbarrier a stage and input, nothing spilled, registers and shared memory as the choices assume.
"""

import re

import pytest

from distmega.kernels.pipelined.blocks import common_width
from distmega.kernels.pipelined.choices import (
    REGISTERS,
    GpuModel,
    KernelChoice,
    Traffic,
    flat_choices,
    matrix_choices,
    plain_row_choices,
    row_choices,
    shared_bytes,
)
from distmega.kernels.pipelined.norms.norm_kernel import NormSpec, norm_kernel
from distmega.kernels.pipelined.pointwise.exprs import formula_of
from distmega.kernels.pipelined.pointwise.pointwise_kernel import PointwiseSpec, pointwise_kernel
from distmega.kernels.pipelined.triton_path import norm_plain, pointwise_plain
from distmega.program import expr
from tests.kernels.ptx import WAIT, loads, stores, unfenced_loads, vector_accesses
from tests.kernels.sm90 import Machine, compile_kernel, descriptor

H200 = GpuModel(num_sms=132, bandwidth_bytes_per_us=4.3e6)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def with_tma(choices: tuple[KernelChoice, ...]) -> KernelChoice:
    """The best choice of a Gluon kernel."""
    return next(choice for choice in choices if choice.stages)


def check_resources(code: Machine, choice: KernelChoice, traffic: Traffic) -> None:
    """Nothing spills, and the programs that the choice puts on an SM find room there."""
    assert code.stack_bytes == 0
    assert code.shared_bytes <= shared_bytes(choice, traffic)
    assert code.registers * 32 * choice.num_warps * choice.programs_per_sm <= REGISTERS


def pointwise_code(
    texts: list[str], kinds: str, ins: list[str], outs: list[str], choice: KernelChoice
) -> Machine:
    """kinds: a letter an input, of tile, row, column, scalar."""
    words = {"t": "tile", "r": "row", "c": "column", "s": "scalar"}
    types: dict[str, object] = {
        f"x{n}": descriptor(dtype, choice.tile) if kind == "t" else f"*{dtype}"
        for n, (kind, dtype) in enumerate(zip(kinds, ins, strict=True))
    }
    types |= {f"y{n}": descriptor(dtype, choice.tile) for n, dtype in enumerate(outs)}
    types |= dict.fromkeys(("num_rows", "num_columns", "num_tiles", "run", "column_tiles"), "i32")
    spec = PointwiseSpec(
        exprs=tuple(map(expr.parse, texts)),
        kinds=tuple(words[kind] for kind in kinds),
        tile=choice.tile,
        stages=choice.stages,
        buffers=choice.buffers,
    )
    return compile_kernel(
        pointwise_kernel, types, {"spec": spec}, choice.num_warps, choice.max_registers
    )


@pytest.mark.parametrize(
    ("texts", "ins", "outs"),
    [
        (["silu(a0) * a1"], ["bf16"] * 2, ["bf16"]),
        (["a0 * a1 + a2 * sigmoid(a3)"], ["bf16"] * 4, ["bf16"]),
        (["gelu(a0)"], ["fp32"], ["fp32"]),
        (["+".join(f"a{n}" for n in range(8)), "a0", "a1", "a2"], ["fp16"] * 8, ["fp32"] * 4),
    ],
)
@pytest.mark.parametrize("num_elements", [2**19, 2**27])
def test_pointwise(texts, ins, outs, num_elements):
    traffic = Traffic(
        in_bytes=sum(map(BYTES.get, ins)),
        out_bytes=sum(map(BYTES.get, outs)),
        num_elements=num_elements,
    )
    choice = with_tma(flat_choices(traffic, H200, 128 // max(map(BYTES.get, ins + outs))))
    code = pointwise_code(texts, "t" * len(ins), ins, outs, choice)
    check_resources(code, choice, traffic)
    assert choice.stages > 1
    assert code.ptx.count("mbarrier.init") == choice.stages * len(ins)
    assert loads(code.ptx) == (choice.stages + 1) * len(ins)
    assert code.ptx.count(WAIT) == len(ins)
    assert stores(code.ptx) == len(outs)
    assert unfenced_loads(code.ptx) == []
    assert "ld.global" not in code.ptx
    assert "st.global" not in code.ptx


def test_inputs_are_consumed_as_they_land():
    choice = KernelChoice(tile=(64, 64), num_warps=4, stages=3, buffers=1, programs_per_sm=2, run=0)
    code = pointwise_code(["exp(a0) * a1"], "tt", ["bf16"] * 2, ["bf16"], choice)
    parts = code.ptx.split(WAIT)
    assert "ld.shared" in parts[1], "a0 is read before a1 is waited for"
    assert loads(parts[-1]) == 2, "the loads of a later tile start when this one is read"


def test_broadcast_vectors_are_plain_loads():
    traffic = Traffic(in_bytes=2, out_bytes=6, num_elements=2**26)
    choice = with_tma(matrix_choices(2**14, 2**12, traffic, H200))
    types = ["bf16", "fp32", "fp16", "fp32"]
    texts = ["a0 * a1 + a2 * a3", "a1"]
    code = pointwise_code(texts, "trcs", types, ["bf16", "fp32"], choice)
    check_resources(code, choice, traffic)
    assert code.ptx.count(WAIT) == 1
    assert "ld.global" in code.ptx
    assert "st.global" not in code.ptx


def test_tails_that_no_run_divides():
    traffic = Traffic(in_bytes=4, out_bytes=2, num_elements=10**6 + 1)
    choice = with_tma(flat_choices(traffic, H200, 0))
    assert len(choice.tile) == 1
    code = pointwise_code(["a0 * a1"], "tt", ["bf16"] * 2, ["bf16"], choice)
    assert code.stack_bytes == 0
    assert ".tensor.1d." in code.ptx


def norm_code(op: str, dtype: str, columns: int, residual: bool) -> None:
    """Compiles the first choice of a norm over 4096 rows and checks it."""
    size = BYTES[dtype] * (2 if residual else 1)
    traffic = Traffic(in_bytes=size, out_bytes=size, num_elements=4096 * columns)
    choice = with_tma(row_choices(4096, columns, traffic, H200))
    width = common_width([BYTES[dtype]], columns)
    block = (choice.tile[0], choice.tile[1] // width, width)
    names = ["x", "y", "residual", "total"] if residual else ["x", "y"]
    types: dict[str, object] = dict.fromkeys(names, descriptor(dtype, block))
    types |= {"num_columns": "i32", "eps": "fp32"}
    types |= {} if op == "softmax" else {"weight": f"*{dtype}"}
    types |= {"bias": f"*{dtype}"} if op == "layer_norm" else {}
    types |= {"num_tiles": "i32", "run": "i32"}
    spec = NormSpec(
        op=op, has_residual=residual, has_weight=op != "softmax", has_bias=op == "layer_norm",
        rows=block[0], groups=block[1], width=width, exact=choice.tile[1] == columns,
        stages=choice.stages, buffers=choice.buffers,
    )  # fmt: skip
    code = compile_kernel(
        norm_kernel, types, {"spec": spec}, choice.num_warps, choice.max_registers
    )
    check_resources(code, choice, traffic)
    count = 1 + residual
    assert code.ptx.count("mbarrier.init") == choice.stages * count
    assert loads(code.ptx) >= (choice.stages + 1) * count
    assert code.ptx.count(WAIT) == count
    assert stores(code.ptx) >= count
    assert unfenced_loads(code.ptx) == []
    assert "st.global" not in code.ptx


@pytest.mark.parametrize(
    "columns",
    [128, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1024, 16384)), 4096, 5000],
)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
def test_norms(op, columns):
    norm_code(op, "bf16", columns, op == "rms_norm")


@pytest.mark.parametrize("columns", [1024, 8192])
def test_norms_in_fp32(columns):
    norm_code("layer_norm", "fp32", columns, True)


NORM_TENSORS = ("x", "residual", "weight", "y", "total")


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
@pytest.mark.parametrize("columns", [4096, 16384])
@pytest.mark.parametrize(
    ("vectors", "exact"), [("after", True), ("before", True), ("beside", False)]
)
def test_plain_norms(op, columns, vectors, exact):
    traffic = Traffic(in_bytes=4, out_bytes=4, num_elements=128 * columns)
    choices = plain_row_choices(128, columns, traffic, H200)
    choice = next(choice for choice in choices if choice.vectors == vectors)
    types: dict[str, object] = dict.fromkeys(NORM_TENSORS, "*bf16") | {"eps": "fp32"}
    multiples = ("x_row", "residual_row", "num_columns")
    types |= dict.fromkeys((*multiples, "num_rows"), "i32")
    fixed = {"x_step": 1, "residual_step": 1, "op": op, "rows": choice.tile[0],
             "padded": choice.tile[1],
             "vectors": vectors, "exact": exact}  # fmt: skip
    code = compile_kernel(norm_plain, types, fixed, choice.num_warps, 255, multiples)
    assert code.stack_bytes == 0
    assert code.registers * 32 * choice.num_warps <= REGISTERS
    assert vector_accesses(code.ptx)
    assert not (exact and re.search(r"@\S+ ld\.global", code.ptx)), "no masks"


@pytest.mark.parametrize("exact", [False, True])
def test_plain_pointwise(exact):
    types: dict[str, object] = {"x0": "*bf16", "x1": "*bf16", "y0": "*bf16"}
    multiples = ("num_columns", "num_elements")
    types |= dict.fromkeys(multiples, "i32")
    fixed = {"row_strides": (0, 0), "column_strides": (1, 1), "num_inputs": 2, "block": 1024,
             "formula": formula_of(("a0 * a1",)), "flat": True, "wide": False,
             "exact": exact, "once": exact}  # fmt: skip
    code = compile_kernel(pointwise_plain, types, fixed, 4, 255, multiples)
    assert code.stack_bytes == 0
    assert vector_accesses(code.ptx)


def test_any_operands():
    types: dict[str, object] = {"x0": "*bf16", "x1": "*fp32", "y0": "*bf16", "num_columns": "i64"}
    types |= {"row_strides": ("i64", "i64"), "column_strides": ("i64", "i64")}
    types |= {"num_elements": "i64"}
    fixed = {"formula": formula_of(("a0 * a1",)), "num_inputs": 2, "flat": False, "wide": True,
             "block": 1024, "exact": False, "once": False}  # fmt: skip
    assert compile_kernel(pointwise_plain, types, fixed, 4, 255).stack_bytes == 0
