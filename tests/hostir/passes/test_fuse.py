"""Which library ops are joined, and that fused programs give what the same ops one by one give."""

import random
from collections.abc import Mapping

import pytest
import torch

from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import Allocate, HostProgram, LibraryOp, walk_nodes
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.uses import storage_of
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.passes.split_sums import SumParts
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.hostir.programs import local, random_tensors, run_program


def lowered(
    program: Program, *, fuse: bool = True, sum_parts: SumParts | None = None
) -> HostProgram:
    raw = lower_program(
        local(program), megakernel=False, peer_memory=False, fuse=fuse, sum_parts=sum_parts
    )
    return run_passes(raw)


def steps(host: HostProgram) -> list[str]:
    """Each op as kind and results."""
    ops = [node.op for node in walk_nodes(host.body) if isinstance(node, LibraryOp)]
    return [f"{op.kind} {' '.join(access.tensor for access in op.writes)}" for op in ops]


def check(
    program: Program, sum_parts: SumParts | None = None, *, error: float | None = None
) -> list[str]:
    """The fused program gives what its ops one by one give, by torch and by the kernels' fallback,
    and reads back from its text; its steps. error: largest of a result, relative above 1, where
    others are rounded.
    """
    host = lowered(program, sum_parts=sum_parts)
    assert parse_host(print_host(host)) == host
    check_host(host)
    tensors = random_tensors(host)
    expected = run_program(program, {name: x.clone() for name, x in tensors.items()})
    for ops in (None, KernelOps()):
        given = {name: x.clone() for name, x in tensors.items()}
        found = Evaluator(host, SingleCommunicator(host.mesh), {}, ops=ops).run(given)
        for name in program.outputs:
            assert found[name].dtype == expected[name].dtype
            torch.testing.assert_close(found[name], expected[name], rtol=error, atol=error)
    return steps(host)


@pytest.mark.parametrize("num_vectors", [0, 1, 2])
def test_a_sum_and_its_norm_are_one_with_any_vectors(num_vectors: int):
    p = ProgramBuilder("normed")
    total = p.input("x", (5, 8)).map("a0 + a1", p.input("z", (5, 8)), name="total")
    vectors = [p.weight(f"v{n}", (8,)) for n in range(num_vectors)]
    weight, bias = (*vectors, None, None)[:2]
    y = p.layer_norm(total, weight, bias, 1e-5, name="y")
    assert check(p.build(total, y)) == ["fused_norm y total"]


def test_chains_of_pointwise_ops_are_one():
    p = ProgramBuilder("chain")
    x, row, column = p.input("x", (6, 8)), p.weight("row", (8,)), p.weight("column", (6, 1))
    a = p.pointwise("silu(a0) * a1", x, row, name="a")
    b = p.pointwise("a0 - a1 * a0", a, column, name="b")
    program = p.build(p.pointwise("a1 / (2 + a0 ** 2)", b, row, name="y"))
    assert check(program) == ["fused_pointwise y"]
    host = lowered(program)
    assert [n.buffer for n in host.body if isinstance(n, Allocate)] == ["y"]
    assert [buffer.name for buffer in host.buffers] == ["x", "row", "column", "y"]
    (op,) = [node.op for node in host.body if isinstance(node, LibraryOp)]
    assert [access.tensor for access in op.reads] == ["x", "row", "column"]


def test_results_that_others_read_are_kept():
    p = ProgramBuilder("kept")
    x, w = p.input("x", (6, 8)), p.weight("w", (8, 8))
    a = x.map("a0 * 2", name="a")
    b = a.map("exp(a0)", name="b")
    c = b.map("a0 + a1", a, name="c")
    y = p.linear(c, w, name="y").map("a0 + a1", a, name="z")
    assert check(p.build(y, b)) == ["fused_pointwise c b a", "linear y", "pointwise z"]


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_sum_and_its_norm_are_one(norm: str):
    p = ProgramBuilder("norms")
    x, w = p.input("x", (2, 3, 8)), p.weight("w", (8, 8))
    for i in range(2):
        h = p.linear(x, w, name=f"h{i}")
        x = p.pointwise("a0 + a1", x, h, name=f"x{i}")
        g, b = (p.weight(f"{each}{i}", (8,)) for each in "gb")
        vectors = (g, b) if norm == "layer_norm" else (g,)
        n = getattr(p, norm)(x, *vectors, 1e-5, name=f"n{i}")
        x = p.pointwise("a0 + a1", x, p.linear(n, w, name=f"m{i}"), name=f"o{i}")
    assert check(p.build(x)) == [
        "linear h0", "fused_norm n0 x0", "linear m0", "pointwise o0",
        "linear h1", "fused_norm n1 x1", "linear m1", "pointwise o1",
    ]  # fmt: skip


def test_what_does_not_fit_stays_apart():
    p = ProgramBuilder("apart")
    x, r = p.input("x", (6, 8)), p.input("r", (8,))
    doubled = r.map("a0 * 2", name="doubled")
    wide = p.pointwise("a0 + a1", x, doubled, name="wide")
    shifted = p.rms_norm(wide, p.weight("g", (8,)), 1e-5, name="shifted")
    turned = p.transpose(shifted.map("a0 * 3", name="t"), (1, 0), view=True, name="v")
    steps = check(p.build(turned.map("a0 + 1", name="y")))
    assert steps == ["pointwise doubled", "fused_rows t", "view v", "pointwise y"]


def test_nothing_moves_past_a_change_of_what_it_reads():
    p = ProgramBuilder("changed")
    x = p.input("x", (6, 8))
    kept = p.set(x, name="kept")
    a = kept.map("a0 * 2", name="a")
    p.set(x.map("a0 + 1", name="b"), kept, name="again")
    steps = check(p.build(a.map("a0 + a1", kept, name="y")))
    assert steps == ["set kept", "pointwise a", "pointwise b", "set kept", "pointwise y"]


def test_a_kernel_takes_eight_operands():
    p = ProgramBuilder("many")
    inputs = [p.input(f"x{i}", (4, 8)) for i in range(12)]
    total = inputs[0]
    for i, x in enumerate(inputs[1:]):
        total = p.pointwise("a0 + a1", total, x, name=f"s{i}")
    found = check(p.build(total))
    assert found == ["fused_pointwise s6", "fused_pointwise s10"]


def random_program(rng: random.Random) -> Program:
    """Ops on tensors of one shape, most of which can be joined, results kept and overwritten."""
    p = ProgramBuilder("random")
    made: list[Handle] = [p.input("x", (5, 8)), p.input("y", (5, 8))]
    w, g = p.weight("w", (8, 8)), p.weight("g", (8,))
    temps: list[Handle] = []
    for i in range(rng.randint(2, 12)):
        a, b = rng.choice(made), rng.choice(made[-3:])
        match rng.randint(0, 7):
            case 0 | 1:
                new = p.pointwise("tanh(a0) * a1", a, b, name=f"t{i}")
            case 2:
                new = p.pointwise("a0 + a1", a, b, name=f"t{i}")
            case 3:
                new = p.pointwise("a0 - sigmoid(a1)", b, g, name=f"t{i}")
            case 4:
                new = p.rms_norm(b, g, 1e-3, name=f"t{i}")
            case 5:
                new = p.layer_norm(b, g, g, 1e-3, name=f"t{i}")
            case 6:
                new = p.softmax(p.linear(b, w, name=f"l{i}"), name=f"t{i}")
            case _:
                new = p.set(b, rng.choice(temps), name=f"t{i}") if temps else p.set(b, name=f"t{i}")
        made.append(new)
        temps.append(new)
    return p.build(made[-1], *rng.sample(made[2:], k=min(2, len(made) - 2)))


def test_random_programs():
    joined = 0
    for seed in range(60):
        steps = check(random_program(random.Random(seed)))
        joined += sum(step.startswith("fused") for step in steps)
    assert joined > 40


def test_work_of_fusing_grows_with_the_number_of_ops(monkeypatch: pytest.MonkeyPatch):
    """Between an op and the one that it is joined with lie all others of a wide program."""
    asked: list[str] = []

    def counting(name: str, sources: Mapping[str, str]) -> str:
        asked.append(name)
        return storage_of(name, sources)

    monkeypatch.setattr("distmega.hostir.passes.fuse.storage_of", counting)
    counts = []
    for num in (20, 80):
        p = ProgramBuilder("wide")
        x = p.input("x", (2, 2))
        parts = [x.map(f"a0 + {n}") for n in range(num)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        asked.clear()
        lowered(p.build(total, p.concat(parts, 0)))
        counts.append(len(asked))
    assert counts[1] < 6 * counts[0]
