"""Host programs on a GPU: pointwise ops, norms and softmax between matmuls run as pipelined
kernels, agree with the same program run by torch op by op and with float64, also as a graph.
"""

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import HostProgram, LibraryOp
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library import row_steps
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.sum_parts import choose_sum_parts
from distmega.kernels.machines import H200
from distmega.kernels.pipelined import api
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.hostir.programs import local, run_program

pytestmark = pytest.mark.gpu

TOLERANCE = {"bf16": 2e-2, "f16": 3e-3, "f32": 1e-5}
"""Of the root of mean squares: a few roundings, of matmuls' results too."""


def block(rows: int, hidden: int, ffn: int, dtype: str) -> Program:
    """What stands between the matmuls of two layers, by every kernel; weights scaled to keep values
    around 1.
    """
    p = ProgramBuilder("block")
    x, a = p.input("x", (rows, hidden), dtype), p.input("a", (rows, hidden), dtype)
    g, b = (p.weight(name, (hidden,), dtype) for name in "gb")
    n = p.rms_norm(p.pointwise("a0 + a1", x, a, name="h"), g, 1e-5, name="n")
    gate, up = (p.linear(n, p.weight(w, (ffn, hidden), dtype), name=f"{w}_n") for w in ("w1", "w2"))
    scaled = up.map("a0 * 0.1", name="scaled")
    act = p.pointwise("silu(a0 * 0.1) * a1", gate, scaled, name="act")
    down = p.linear(act, p.weight("w3", (hidden, ffn), dtype), name="down")
    mixed = down.map("a0 * 0.1", name="mixed")
    m = p.layer_norm(p.pointwise("a0 + a1", mixed, a, name="s"), g, b, 1e-5, name="m")
    logits = p.linear(m, p.weight("w4", (ffn, hidden), dtype), name="l").map("a0 * 0.02")
    probabilities = p.softmax(logits, name="q")
    return p.build(m.map("a0 * 0.5 + a1", x, name="y"), act, probabilities)


def lowered(program: Program) -> HostProgram:
    raw = lower_program(
        local(program),
        megakernel=False,
        peer_memory=False,
        fuse=True,
        sum_parts=partial(choose_sum_parts, num_sms=H200.num_sms),
    )
    return run_passes(raw)


def given(host: HostProgram) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    types = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    return {
        b.name: torch.randn(b.shape, generator=generator, device="cuda").to(types[b.dtype])
        for b in host.buffers
        if b.role != "temp"
    }


def in_float64(program: Program, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = tuple(dataclasses.replace(t, dtype="f64") for t in program.tensors)
    exact = dataclasses.replace(program, tensors=wide)
    return run_program(exact, {name: x.double() for name, x in tensors.items()})


def distance(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square of the difference, relative to that of `expected`."""
    apart = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(apart)


def evaluator(host: HostProgram) -> Evaluator:
    return Evaluator(host, SingleCommunicator(host.mesh), {}, "cuda", ops=KernelOps())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("extents", [(512, 1024, 2048), (37, 200, 120), (1, 64, 96)])
def test_a_block_agrees_with_torch_and_float64(dtype, extents, monkeypatch):
    program = block(*extents, dtype)
    host = lowered(program)
    tensors = given(host)
    plain = run_program(program, tensors)
    exact = in_float64(program, tensors)
    monkeypatch.setattr(api, "normalise", None)
    monkeypatch.setattr(api, "evaluate_all", None)
    found = evaluator(host).run(tensors)
    for name in program.outputs:
        error = distance(found[name], exact[name])
        assert found[name].dtype == plain[name].dtype
        assert distance(found[name], plain[name]) < TOLERANCE[dtype]
        assert error < TOLERANCE[dtype]
        own = torch.finfo(found[name].dtype).eps
        assert error < 1.5 * distance(plain[name], exact[name]) + own


def test_what_is_fused_in_a_block():
    ops = [
        node.op for node in lowered(block(8, 64, 96, "bf16")).body if isinstance(node, LibraryOp)
    ]
    kinds = [op.kind for op in ops if op.kind != "linear"]
    assert kinds == ["fused_norm", "fused_linear", "fused_rows", "fused_product", "softmax",
                     "pointwise"]  # fmt: skip


def row_chain(rows: int, columns: int, dtype: str) -> Program:
    """Norms of rows of two sequences, modulated by vectors of these, with formulas around them."""
    p = ProgramBuilder("rows")
    x, both = p.input("x", (2, rows, columns), dtype), p.input("c", (2, 1, 2 * columns), dtype)
    g, b = (p.weight(name, (columns,), dtype) for name in "gb")
    halves = ((n * columns, (n + 1) * columns) for n in range(2))
    scale, shift = (p.slice(both, 2, *half, view=True) for half in halves)
    n = p.layer_norm(x.map("silu(a0)"), g, b, 1e-5)
    m = p.pointwise("a0 * (1.0 + a1) + a2", n, scale, shift, name="m")
    y = p.pointwise("a0 + a1", x, p.rms_norm(m, g, 1e-5), name="y")
    return p.build(p.softmax(y, name="q"), y)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("extents", [(256, 1024), (37, 200), (1, 64), (900, 96), (3, 8192)])
def test_norms_and_formulas_of_rows_are_one_kernel(dtype, extents, monkeypatch):
    program = row_chain(*extents, dtype)
    host = lowered(program)
    ops = [node.op for node in host.body if isinstance(node, LibraryOp)]
    assert [op.kind for op in ops if not op.is_view] == ["fused_rows"]
    tensors = given(host)
    exact = in_float64(program, tensors)
    monkeypatch.setattr(row_steps, "run_by_torch", None)
    found = evaluator(host).run(tensors)
    for name in program.outputs:
        assert distance(found[name], exact[name]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("extents", [(17, 1024, 4096), (64, 2048, 2048), (33, 4096, 14336)])
def test_a_norm_adds_up_parts_of_sums(extents, dtype, monkeypatch):
    rows, columns, terms = extents
    p = ProgramBuilder("parts")
    x, h = p.input("x", (rows, columns), dtype), p.input("h", (rows, terms), dtype)
    b, g = (p.weight(name, (columns,), dtype) for name in "bg")
    y = p.linear(h.map("a0 * 0.02"), p.weight("w", (columns, terms), dtype), b)
    program = p.build(p.rms_norm(p.pointwise("a0 + a1", x, y, name="t"), g, 1e-5, name="n"))
    host = lowered(program)
    kinds = [node.op.kind for node in host.body if isinstance(node, LibraryOp)]
    assert kinds == ["pointwise", "split_linear", "fused_rows"]
    tensors = given(host)
    exact, plain = in_float64(program, tensors)["n"], run_program(program, tensors)["n"]
    monkeypatch.setattr(row_steps, "run_by_torch", None)
    run = evaluator(host)
    found = run.run(tensors)["n"].clone()
    assert distance(found, exact) <= 1.25 * distance(plain, exact)
    assert torch.equal(CapturedHost(run, tensors, copy_states=False).run({})["n"], found)


def test_a_captured_block_replays_with_new_inputs():
    host = lowered(block(64, 512, 256, "bf16"))
    tensors = given(host)
    run = evaluator(host)
    captured = CapturedHost(run, {name: x.clone() for name, x in tensors.items()})
    tensors["x"] = tensors["x"].flip(0).contiguous()
    expected = run.run(tensors)
    found = captured.run({"x": tensors["x"]})
    for name in host.outputs:
        assert torch.equal(found[name], expected[name])
