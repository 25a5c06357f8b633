"""Compiled programs replayed as CUDA graphs give the bits of the same programs run node by node."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.models import Model, encoder, gated_mlp, gpt2_step, mixer
from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.gpu.engines import open_engine, random_model
from tests.hostir.programs import inputs_of, run_program, shard_tensors
from tests.hostir.streams import planned, small_integers

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
DEVICE = "cuda:0"
MODELS: dict[str, Callable[[], Model]] = {
    "one row": lambda: gated_mlp(1, 2, 256, 512),
    "many rows": lambda: gated_mlp(512, 2, 1024, 2048),
    "states": lambda: gpt2_step(0, 2, 128, 4, 64),
    "attention": lambda: encoder(48, 2, 128, 4),
    "views": lambda: mixer(0, 2, 128, 48, 64),
}


def compiled(program: Program, **options: bool) -> CompiledProgram:
    plan = plan_program(program, MESH, H200)
    return CompiledProgram(plan, SingleCommunicator(MESH), DEVICE, **options)


def random_values(step: CompiledProgram, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found: dict[str, Tensor] = {}
    for buffer in step.host.buffers:
        if buffer.role != "temp" and buffer.dtype == "i64":
            found[buffer.name] = torch.tensor([seed % 16], device=DEVICE)
        elif buffer.role != "temp":
            x = torch.randn(buffer.shape, generator=generator, device=DEVICE)
            found[buffer.name] = (x * buffer.shape[-1] ** -0.5).to(torch_dtype(buffer.dtype))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_replays_give_the_bits_of_single_nodes(name: str):
    program = MODELS[name]().program
    graph, nodes = compiled(program), compiled(program, replay=False)
    first = random_values(graph, 0)
    own = {name: x.clone() for name, x in first.items()}
    for number in range(6):
        given = inputs_of(graph, random_values(graph, number))
        found = graph(given if number else {**first, **given})
        expected = nodes(given if number else {**own, **given})
        assert found.keys() == expected.keys()
        for each, x in found.items():
            assert torch.isfinite(x).all()
            assert torch.equal(x, expected[each]), (number, each)
        there = graph(given, inplace=True)
        again = nodes(given)
        assert all(torch.equal(x, again[each]) for each, x in there.items())
    assert graph.stats.replayed
    assert not nodes.stats.replayed
    for buffer in graph.host.buffers:
        if buffer.role == "state":
            assert torch.equal(first[buffer.name], own[buffer.name])


def test_random_streamed_programs_replay_exactly():
    comm = SingleCommunicator(MESH)
    for seed in range(24):
        with torch.device("cpu"):
            plan, local, host = planned(seed, MESH)
            tensors = small_integers(plan.program, seed)
            copies = {name: x.clone() for name, x in tensors.items()}
            expected = run_program(plan.program, copies)
            parts = shard_tensors(tensors, local, 0)
        evaluator = Evaluator(host, comm, {}, DEVICE)
        if evaluator.graph_breaks:
            continue
        given = {name: x.to(DEVICE) for name, x in parts.items()}
        states = {b.name: given[b.name].clone() for b in host.buffers if b.role == "state"}
        captured = CapturedHost(evaluator, given)
        for _ in range(2):
            for name, x in states.items():
                given[name].copy_(x)
            found = captured.run({})
            for name, x in found.items():
                assert torch.equal(x.cpu(), expected[name]), (seed, name)


def test_ten_thousand_replays_with_changing_inputs():
    """States count, outputs follow their inputs."""
    p = ProgramBuilder("counter")
    x, total = p.input("x", (3, 64)), p.state("total", (3, 64))
    y = p.linear(x.map("a0 * 2.0"), p.weight("w", (64, 64)), name="y")
    p.set(p.pointwise("a0 + a1", total, x), into=total)
    step = compiled(p.build(y))
    given = {"x": torch.zeros(3, 64), "w": 4 * torch.eye(64), "total": torch.zeros(3, 64)}
    own = {name: value.to(DEVICE) for name, value in given.items()}
    wrong = torch.zeros((), device=DEVICE, dtype=torch.int64)
    for number in range(10_000):
        x = own["x"].fill_(number % 97)
        (y,) = step(own if not number else {"x": x}, inplace=number % 2 == 1).values()
        wrong += (y != 8 * x).sum()
    step.wait()
    assert step.stats.replayed
    assert int(wrong) == 0
    expected = sum(number % 97 for number in range(10_000))
    assert torch.equal(own["total"], torch.full((3, 64), float(expected), device=DEVICE))


@pytest.mark.parametrize("rows", [1, 4])
def test_ids_without_a_row_read_and_write_nothing_else(rows: int):
    """A table and caches that are read and written by one kernel, far outside of which ids lie."""
    p = ProgramBuilder("looks")
    table, at = p.weight("table", (96, 128), "bf16"), p.input("at", (rows,), "i64")
    x = p.rms_norm(p.embedding(p.input("ids", (rows,), "i64"), table), p.weight("n", (128,)), 1e-5)
    shape = (2, 128, 64) if rows == 1 else (rows, 2, 128, 64)
    caches = [p.state(name, shape, "bf16") for name in "kv"]
    qkv = p.linear(x, p.weight("qkv", (384, 128), "bf16"))
    q, k, v = (p.slice(qkv, 1, 128 * n, 128 * (n + 1), view=True) for n in range(3))
    for cache, new in zip(caches, (k, v), strict=True):
        p.kv_append(cache, p.reshape(new, (rows, 2, 64), view=True), at)
    q = p.reshape(q, (rows, 2, 1, 64), view=True)
    mixed = p.reshape(p.attention(q, *caches, at, 0.125), (rows, 128), view=True)
    step = compiled(p.build(p.linear(mixed, p.weight("o", (128, 128), "bf16"))), megakernel=True)
    values = random_values(step, 0)
    found = []
    for ids, places in (([2**40 + 5] * rows, [2**35 + 3] * rows), ([-(10**9)] * rows, [-1] * rows)):
        values |= {
            "ids": torch.tensor(ids, device=DEVICE),
            "at": torch.tensor(places, device=DEVICE),
        }
        (y,) = step(values).values()
        step.wait()
        found.append(bool(torch.isfinite(y).all()))
    for cache in "kv":
        changed = values[cache] != random_values(step, 0)[cache]
        found.append(int(changed.any(-1).sum()) <= 2 * 2 * rows)
    assert all(found), found


def test_two_programs_and_an_engine_take_turns():
    """On streams of their own, with memory that the programs share."""
    programs = [MODELS[name]().program for name in ("states", "many rows")]
    graphs = [compiled(program) for program in programs]
    nodes = [compiled(program, replay=False) for program in programs]
    streams = [torch.cuda.Stream() for _ in programs]
    engine = open_engine(random_model("llama-3.2-1b", num_layers=2), max_context=64)
    tokens = list(engine.generate([1, 2, 3], 6))
    first = [random_values(step, 7) for step in graphs]
    own = [{name: x.clone() for name, x in values.items()} for values in first]
    torch.cuda.synchronize()
    found: list[tuple[int, dict[str, Tensor], dict[str, Tensor]]] = []
    for number in range(4):
        for which, step in enumerate(graphs):
            given = inputs_of(step, random_values(step, number))
            streams[which].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[which]):
                ours = step(given if number else {**first[which], **given})
            torch.cuda.current_stream().wait_stream(streams[which])
            theirs = nodes[which](given if number else {**own[which], **given})
            found.append((which, ours, theirs))
        assert list(engine.generate([1, 2, 3], 6)) == tokens
    for which, ours, theirs in found:
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items()), which
    assert graphs[0]._replay.captured._memory is graphs[1]._replay.captured._memory


def test_what_a_graph_can_not_hold_runs_node_by_node():
    """An operator of torch that asks the device for a number."""
    p = ProgramBuilder("asking")
    x = p.input("x", (4, 4))
    (same,) = p.opaque(
        "aten.masked_select.default", '[[{"tensor": 0}, {"tensor": 1}], {}, [0]]',
        [x, p.input("seen", (4, 4), "bool")], [((16,), "f32")],
    )  # fmt: skip
    held = compiled(MODELS["one row"]().program)  # has memory that others share
    held(random_values(held, 0))
    step = compiled(p.build(same.map("a0 + 1.0")))
    given = {"x": torch.ones(4, 4, device=DEVICE), "seen": torch.ones(4, 4, device=DEVICE).bool()}
    for _ in range(3):
        (y,) = step(given).values()
        assert torch.equal(y, torch.full((16,), 2.0, device=DEVICE))
    assert not step.stats.replayed
    assert step.stats.reason
    other = compiled(MODELS["one row"]().program)
    other(random_values(other, 0))
    assert other.stats.replayed, other.stats.reason
    held.bind({name: x.clone() for name, x in random_values(held, 1).items()})
    held({})
    assert held.stats.replayed, held.stats.reason


def test_a_warm_program_is_captured_before_its_first_call():
    """Of library ops, since a program with states needs `warm` for one kernel."""
    step = compiled(MODELS["states"]().program, warm=True, megakernel=False)
    assert step.stats.replayed
    values = random_values(step, 3)
    for name, x in values.items():
        step.tensors[name].copy_(x)
    own = {name: x.clone() for name, x in values.items()}
    expected = compiled(MODELS["states"]().program, replay=False)(own)
    found = step({})
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
