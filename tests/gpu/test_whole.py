"""Whole programs as one persistent kernel on a GPU, as exact as torch's own bf16."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU, H200
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
EPS = 1e-5
MOST_ERROR = 1.25
"""Times the error of library ops in bf16."""


class Maker:
    """A program in one dtype, with weights by name as they are asked for."""

    def __init__(self, dtype: str, rows: int) -> None:
        self.p, self.dtype, self.rows = ProgramBuilder("whole"), dtype, rows

    def input(self, num: int) -> Handle:
        return self.p.input("x", (self.rows, num), self.dtype)

    def weight(self, name: str, *shape: int) -> Handle:
        return self.p.weight(name, shape, self.dtype)

    def linear(self, x: Handle, name: str, rows: int, *, bias: bool = False) -> Handle:
        w = self.weight(name, rows, x.shape[-1])
        return self.p.linear(
            x, w, self.weight(f"{name}.b", rows) if bias else None, name=f"{name}.y"
        )

    def rms(self, x: Handle, name: str) -> Handle:
        return self.p.rms_norm(x, self.weight(name, x.shape[-1]), EPS, name=f"{name}.y")

    def layer_norm(self, x: Handle, name: str) -> Handle:
        size = x.shape[-1]
        vectors = self.weight(name, size), self.weight(f"{name}.b", size)
        return self.p.layer_norm(x, *vectors, EPS, name=f"{name}.y")


def gated(gate: str) -> Callable[[Maker], Handle]:
    def build(m: Maker) -> Handle:
        x = m.input(512)
        for i in range(3):
            h = m.rms(x, f"n{i}")
            mixed = m.p.pointwise(gate, m.linear(h, f"g{i}", 1536), m.linear(h, f"u{i}", 1536))
            x = m.p.pointwise("a0 + a1", x, m.linear(mixed, f"d{i}", 512))
        return x

    return build


def ungated(m: Maker) -> Handle:
    x = m.input(320)
    for i in range(2):
        h = m.linear(m.rms(x, f"n{i}"), f"u{i}", 768, bias=True).map("gelu(a0)")
        x = m.p.pointwise("a0 * 0.5 + a1", m.linear(h, f"d{i}", 320, bias=True), x)
    return x


def layer_normed(m: Maker) -> Handle:
    x = m.input(768)
    for i in range(2):
        h = m.linear(m.layer_norm(x, f"n{i}"), f"u{i}", 3072, bias=True).map("gelu(a0)")
        x = m.p.pointwise("a0 + a1", x, m.linear(h, f"d{i}", 768, bias=True))
    return x


def chain(m: Maker) -> Handle:
    x = m.input(128)
    for i, rows in enumerate((192, 1088, 64)):
        x = m.linear(x, f"w{i}", rows)
    return x


def gates_with_biases(m: Maker) -> Handle:
    x = m.input(256)
    h = m.layer_norm(x, "n")
    pair = (m.linear(h, name, 640, bias=True) for name in ("g", "u"))
    mixed = m.p.pointwise("tanh(a0) * a1", *pair)
    return m.p.pointwise("a1 - a0", m.linear(mixed, "d", 256), x)


def odd(m: Maker) -> Handle:
    """Rows that are no multiple of 64 elements."""
    x = m.input(160)
    for i, inner in enumerate((200, 1096)):
        h = m.rms(x, f"n{i}")
        mixed = m.p.pointwise(
            "silu(a0) * a1", m.linear(h, f"g{i}", inner), m.linear(h, f"u{i}", inner)
        )
        x = m.p.pointwise("a0 + a1", x, m.linear(mixed, f"d{i}", 160, bias=True))
    return m.linear(m.layer_norm(x, "last"), "head", 72)


def parallel(m: Maker) -> Handle:
    """Two sums of one norm, taken at once."""
    x = m.input(256)
    for i in range(2):
        h = m.rms(x, f"n{i}")
        parts = (
            m.linear(m.linear(h, f"{name}u{i}", 512).map(f"{fn}(a0)"), f"{name}d{i}", 256)
            for name, fn in (("a", "gelu"), ("b", "tanh"))
        )
        x = m.p.pointwise("a0 + a1 + a2", x, *parts)
    return x


def post_norms(kind: str) -> Callable[[Maker], Handle]:
    """norm(x + f(x)), whose last leaves too."""

    def build(m: Maker) -> Handle:
        x = m.linear(m.input(128), "first", 384)
        for i in range(3):
            h = m.linear(m.linear(x, f"u{i}", 768).map("relu(a0)"), f"d{i}", 384)
            x = (m.rms if kind == "rms" else m.layer_norm)(m.p.pointwise("a0 + a1", x, h), f"n{i}")
        return m.linear(x, "last", 64)

    return build


PROGRAMS = {
    "odd sizes": odd,
    "parallel": parallel,
    "post norms": post_norms("rms"),
    "post layer norms": post_norms("layer"),
    "silu": gated("silu(a0) * a1"),
    "turned": gated("a1 * silu(a0)"),
    "tanh": gated("tanh(a0) + a1"),
    "ungated": ungated,
    "layer norms": layer_normed,
    "chain": chain,
    "biases of gates": gates_with_biases,
}


def program_of(name: str, dtype: str, rows: int = 1) -> Program:
    m = Maker(dtype, rows)
    return m.p.build(PROGRAMS[name](m))


def random_values(program: Program) -> dict[str, Tensor]:
    """Weights of variance 1 / row length, vectors about 1, in bf16's numbers."""
    torch.manual_seed(1)
    values = {}
    for tensor in (*program.with_role("input"), *program.with_role("weight")):
        x = torch.randn(tensor.shape, device="cpu")
        if tensor.role == "weight" and len(tensor.shape) == 2:
            x *= tensor.shape[1] ** -0.5
        elif tensor.role == "weight":
            x = 0.1 * x + (0.0 if tensor.name.endswith(".b") else 1.0)
        values[tensor.name] = x.bfloat16()
    return values


def run(program: Program, values: Mapping[str, Tensor], device: str, **options: object) -> Tensor:
    machine = CPU if device == "cpu" else H200
    with torch.device("cpu"):
        step = CompiledProgram(
            plan_program(program, MESH, machine), SingleCommunicator(MESH), device, **options
        )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    parts = step.parts({name: x.to(dtype).to(device) for name, x in values.items()})
    outs = [next(iter(step(parts).values())).clone() for _ in range(3)]
    assert all(torch.equal(outs[0], out) for out in outs), f"calls differ: {device}, {options}"
    if options.get("megakernel") is True:
        assert step.stats.num_megakernels == 1
        assert step.stats.num_library_ops == 0
        assert step.stats.replayed
        step.wait()
    return outs[0].float().cpu()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_one_launch_as_exact_as_library_ops(name, rows):
    program = program_of(name, "bf16", rows)
    values = random_values(program)
    exact = run(program_of(name, "f32", rows), values, "cpu")
    library = error(run(program, values, "cuda:0", megakernel=False), exact)
    whole = error(run(program, values, "cuda:0", megakernel=True), exact)
    print(f"{name}: kernel {whole:.2e}, library ops {library:.2e}")
    assert whole <= MOST_ERROR * library


@pytest.mark.parametrize("rows", [1, 7])
def test_inputs_change_between_replays(rows):
    program = program_of("silu", "bf16", rows)
    values = random_values(program)
    plan = plan_program(program, MESH, H200)
    step = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", megakernel=True)
    slow = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", megakernel=False)
    parts = step.parts({name: x.cuda() for name, x in values.items()})
    (out,) = program.outputs
    step(parts)
    for number in range(1000):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        found = step({"x": x})[out]
        if number % 250 == 0:
            expected = slow(parts | {"x": x})[out]
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_what_no_kernel_does_is_named():
    m = Maker("bf16", 1)
    x = m.linear(m.input(64), "w", 64)
    program = m.p.build(m.p.cutoff(x, m.p.input("settings", (1, 3)), name="least"))
    plan = plan_program(program, MESH, H200)
    with pytest.raises(UnsupportedError, match="cutoff"):
        CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", megakernel=True)
    step = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0")
    assert step.stats.num_megakernels == 0
    assert "no megakernel" in step.explain()


HEADS, HEAD_DIM, CACHED = 2, 64, 384


def attending(m: Maker) -> Handle:
    """Two layers of attention without rotation, each row with caches of its own."""
    x, at = m.input(256), m.p.input("positions", (m.rows,), "i64")
    for i in range(2):
        h = m.layer_norm(x, f"n{i}")
        q = m.linear(h, f"q{i}", 3 * HEADS * HEAD_DIM, bias=True)
        q = m.p.reshape(q, (m.rows, HEADS, 3, HEAD_DIM), view=True)
        shape = m.rows, HEADS, CACHED, HEAD_DIM
        caches = [m.p.state(f"{name}{i}", shape, m.dtype) for name in "kv"]
        for cache in caches:
            new = m.linear(h, f"w{cache.name}", HEADS * HEAD_DIM, bias=True)
            m.p.kv_append(cache, m.p.reshape(new, (m.rows, HEADS, HEAD_DIM), view=True), at)
        mixed = m.p.attention(q, *caches, at, HEAD_DIM**-0.5)
        mixed = m.p.reshape(mixed, (m.rows, 3 * HEADS * HEAD_DIM), view=True)
        x = m.p.pointwise("a0 + a1", x, m.linear(mixed, f"o{i}", 256, bias=True))
    return x


def test_rows_attend_to_caches_of_their_own():
    """At positions at both sides of a block's end; what is appended is seen by the next step."""
    m = Maker("bf16", 5)
    program = m.p.build(attending(m))
    given = {t.name: t for t in (*program.with_role("weight"), *program.with_role("state"))}
    torch.manual_seed(3)
    values = {
        name: (
            torch.randn(t.shape) * (t.shape[-1] ** -0.5 if len(t.shape) == 2 else 1.0)
        ).bfloat16()
        for name, t in given.items()
    }
    plan, outs = plan_program(program, MESH, H200), {}
    for megakernel in (True, False):
        step = CompiledProgram(
            plan, SingleCommunicator(MESH), "cuda:0", megakernel=megakernel, warm=True
        )
        assert step.stats.num_megakernels == int(megakernel)
        step.load(values)
        torch.manual_seed(4)
        for number in range(4):
            x = torch.randn(5, 256, device="cuda").bfloat16()
            at = torch.tensor([0, 126, 127, 255, 300], device="cuda") + number
            (out,) = step({"x": x, "positions": at}).values()
            outs.setdefault(number, []).append(out.clone())
        outs.setdefault("caches", []).append(step.tensors["v1"].clone())
    for name, (found, expected) in outs.items():
        print(name, error(found.float(), expected.float()))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
