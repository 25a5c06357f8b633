"""Kernels of rows longer than a tile: machine code for sm_90a."""

import re
from dataclasses import replace

import pytest

from distmega.kernels.pipelined.norms.long_rows import (
    LongRowSpec,
    long_rows_gather,
    long_rows_whole,
    long_rows_write,
)
from tests.kernels.sm90 import Machine, compile_kernel

STRIDES = ("x_row", "x_step", "residual_row", "residual_step")
PAIR = ("num_parts", "part_chunks")
SOFTMAX = LongRowSpec(
    op="softmax", threads=512, loads=4, vector=8, even=False, x_wide=True, residual_wide=True,
    sums_wide=True, early=True, parts=8,
)  # fmt: skip
KERNELS = [long_rows_whole, long_rows_gather, long_rows_write]


def code_of(kernel: object, dtype: str, spec: LongRowSpec, tensors: tuple[str, ...]) -> Machine:
    """With what the kernel takes of the tensors; rows of any length, elements that are neighbours
    where they are wide.
    """
    known = set(kernel.arg_names)
    types: dict[str, object] = dict.fromkeys((*tensors, "x", "y"), f"*{dtype}")
    types |= dict.fromkeys((*STRIDES, *PAIR, "num_columns"), "i32")
    types |= {"statistics": "*fp32", "eps": "fp32"}
    fixed: dict[str, object] = {"spec": spec}
    if spec.x_wide:
        fixed |= {"x_step": 1, "residual_step": 1}
    types = {name: kind for name, kind in types.items() if name in known and name not in fixed}
    multiples = ("num_columns", "x_row", "residual_row") if spec.even else ()
    return compile_kernel(kernel, types, fixed, spec.threads // 32, None, multiples)


def accesses(code: str) -> list[str]:
    """Loads and stores of global memory by their bits, several registers a thread counted."""
    found = re.findall(r"\b(ld|st)\.global(?:\.cg)?\.(v4\.)?b(\d+)", code)
    return [f"{kind} {int(bits) * (4 if many else 1)}" for kind, many, bits in found]


@pytest.mark.parametrize("warps", [pytest.param(8, marks=pytest.mark.nightly), 16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_begin_anywhere_move_by_16_bytes(kernel, warps):
    """But for what is outside of chunks, one element a thread."""
    code = code_of(kernel, "bf16", replace(SOFTMAX, threads=32 * warps), ())
    assert code.stack_bytes == 0
    found = accesses(code.ptx)
    writes = kernel is not long_rows_gather
    reads = 1 if kernel is long_rows_gather else 2
    assert found.count("ld 128") == reads * SOFTMAX.loads
    assert found.count("ld 16") == 1
    assert (found.count("st 128") > 0, found.count("st 16")) == (writes, int(writes))
    assert found.count("st 32") == (3 if kernel is long_rows_gather else 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_loads_start_before_any_is_waited_for(kernel):
    lines = code_of(kernel, "bf16", SOFTMAX, ()).ptx.splitlines()
    loads = [at for at, line in enumerate(lines) if "ld.global" in line and ".v4" in line]
    first, last = loads[0], loads[SOFTMAX.loads - 1]
    assert not any("cvt." in line or "ex2" in line for line in lines[first:last])


def test_a_second_pass_loads_before_it_waits_for_the_first():
    text = code_of(long_rows_write, "bf16", SOFTMAX, ()).ptx
    before, behind = text.split("griddepcontrol.wait")
    assert before.count("ld.global.cg.v4") == SOFTMAX.loads
    assert "ld.global.cg.b32" in behind
    assert "st.global" not in before
    narrow = code_of(long_rows_write, "bf16", replace(SOFTMAX, loads=1, x_wide=False), ()).ptx
    assert "ld.global" not in narrow.split("griddepcontrol.wait")[0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("op", "dtype", "even"),
    [
        pytest.param("layer_norm", "bf16", False, marks=pytest.mark.nightly),
        ("layer_norm", "fp32", False),
        ("rms_norm", "fp16", True),
    ],
)
def test_nothing_spills(kernel, op, dtype, even):
    loads, vector = (8, 4) if dtype == "fp32" else (4, 8)
    spec = replace(SOFTMAX, op=op, loads=loads, vector=vector, even=even)
    names = ("residual", "sums", "weight", *(("bias",) if op == "layer_norm" else ()))
    code = code_of(kernel, dtype, spec, names)
    assert code.stack_bytes == 0
    assert not even or {text.split()[1] for text in accesses(code.ptx)} <= {"128", "32"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides(kernel):
    spec = replace(SOFTMAX, loads=1, x_wide=False, residual_wide=False, sums_wide=False)
    assert code_of(kernel, "bf16", spec, ("residual", "sums")).stack_bytes == 0
