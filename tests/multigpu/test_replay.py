"""Compiled programs of several GPUs, replayed: the bits of single nodes, and faults that end."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.models import Model, encoder, gated_mlp, gpt2_step
from distmega.compiled import CompiledProgram
from distmega.errors import HangError, ProgramError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.nccl_native import NativeNccl
from distmega.hostir.ir.text import parse_host
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.run import deadline
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import H200
from distmega.kernels.runtime.report import REPORT_LIMIT
from distmega.kernels.runtime.streams.signals import open_signals
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.placements import shard, stream
from distmega.sharding.planner import plan_program
from tests.hostir.programs import inputs_of
from tests.multigpu.ranks import ON_GPUS, TIMEOUT_S, RanksFailed
from tests.multigpu.test_faults import open_small, start

HERE = "tests.multigpu.test_replay"
LIMIT_S = 2.0


def chunked(num: int) -> Model:
    """Rows summed over ranks, chunk by chunk on streams."""
    p = ProgramBuilder("chunked")
    x, w = p.input("x", (256, 512), "bf16"), p.weight("w", (512, 512), "bf16")
    y = p.linear(x, w, name="y")
    marks = {"x": shard(1, "tp"), "w": shard(1, "tp"), "y": stream(0, 4)}
    return Model(program=p.build(y), marks=marks, in_torch=lambda own, total: own["x"])


def sums(num: int) -> Model:
    """y = x w' summed over ranks, and what all calls gave."""
    p = ProgramBuilder("sums")
    x, total = p.input("x", (4, 256)), p.state("total", (4, 256))
    y = p.linear(x, p.weight("w", (256, 256)), name="y")
    p.set(p.pointwise("a0 + a1", total, y), into=total)
    marks = {"x": shard(1, "tp"), "w": shard(1, "tp")}
    return Model(program=p.build(y), marks=marks, in_torch=lambda own, total: own["x"])


MODELS: dict[str, Callable[[int], Model]] = {
    "sums": sums,
    "one row": lambda num: gated_mlp(1, 3, 1024, 2048),
    "few rows": lambda num: gated_mlp(64, 3, 1024, 2048),
    "many rows": lambda num: gated_mlp(1024, 3, 2048, 8192),
    "states": lambda num: gpt2_step(0, 2, 256, 8, 64),
    "attention": lambda num: encoder(64, 2, 256, 8),
    "chunks": chunked,
}


def opened(model: Model, comm: Communicator, **options: bool) -> CompiledProgram:
    device = torch.get_default_device()
    with torch.device("cpu"):
        plan = plan_program(model.program, comm.mesh, H200, model.marks)
    return CompiledProgram(plan, comm, str(device), **options)


def values_of(step: CompiledProgram, seed: int) -> dict[str, Tensor]:
    """This rank's parts of random whole tensors."""
    wholes: dict[str, Tensor] = {}
    for tensor in step.plan.program.tensors:
        if tensor.role == "temp":
            continue
        torch.manual_seed(seed + len(wholes))
        x = torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5
        whole = torch.tensor([seed % 16]) if tensor.dtype == "i64" else x
        wholes[tensor.name] = whole.to(torch_dtype(tensor.dtype))
    return step.parts(wholes)


def run_models(comm: Communicator) -> None:
    mine = NativeNccl(comm.mesh, comm.rank, TIMEOUT_S)
    for name, make in MODELS.items():
        model = make(comm.mesh.num_ranks)
        graph, nodes = (opened(model, mine, replay=replay) for replay in (True, False))
        first = values_of(graph, 0)
        own = {each: x.clone() for each, x in first.items()}
        for number in range(5):
            given = inputs_of(graph, values_of(graph, number))
            found = graph(given if number else {**first, **given})
            expected = nodes(given if number else {**own, **given})
            for each, x in found.items():
                assert torch.equal(x, expected[each]), (name, number, each)
        graph.wait()
        assert graph.stats.replayed, (name, graph.stats.reason)
        for buffer in graph.host.buffers:
            if buffer.role == "state":
                assert torch.equal(first[buffer.name], own[buffer.name]), (name, buffer.name)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_replays_give_the_bits_of_single_nodes(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:run_models", device, num_ranks)


def run_often(comm: Communicator) -> None:
    """10,000 replays, and another program and an engine in between."""
    mine = NativeNccl(comm.mesh, comm.rank, TIMEOUT_S)
    engine = open_small(comm, timeout_s=20.0)
    tokens = start(engine, 4).tolist()
    step = opened(sums(comm.mesh.num_ranks), mine)
    other = opened(MODELS["many rows"](comm.mesh.num_ranks), mine)
    weights = values_of(other, 1)
    expected = other(weights)
    given = step.parts({"x": torch.ones(4, 256), "w": torch.eye(256), "total": torch.zeros(4, 256)})
    wrong = torch.zeros((), dtype=torch.int64)
    for number in range(10_000):
        x = given["x"].fill_(number % 97)
        (y,) = step(given if not number else {"x": x}).values()
        wrong += (y != number % 97).sum()
        if number % 1000 == 500:
            again = other(inputs_of(other, weights))
            assert all(torch.equal(x, expected[name]) for name, x in again.items())
            assert start(engine, 4).tolist() == tokens
    step.wait()
    assert step.stats.replayed
    assert int(wrong) == 0
    assert int(given["total"].flatten()[0]) == sum(number % 97 for number in range(10_000))


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_ten_thousand_replays_beside_others(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:run_often", device, num_ranks)


def small_step(comm: Communicator, name: str, *, replay: bool) -> tuple[CompiledProgram, dict]:
    """A program that has run a few times, with a short limit, and its values."""
    mine = NativeNccl(comm.mesh, comm.rank, TIMEOUT_S)
    step = opened(MODELS[name](comm.mesh.num_ranks), mine, replay=replay)
    values = values_of(step, 0)
    for _ in range(3):
        step(values)
    step.wait()
    assert step.stats.replayed == replay
    step._deadline.limit_s = LIMIT_S
    comm.barrier()
    return step, values


def come_late(comm: Communicator, replay: bool) -> None:
    """Within the limit a rank is waited for. Behind it the others give up, and go on once their
    states are bound again.
    """
    step, values = small_step(comm, "sums", replay=replay)
    is_late = comm.rank == 0
    if is_late:
        time.sleep(LIMIT_S / 2)
    step({**inputs_of(step, values)})
    step.wait()
    comm.barrier()
    if is_late:
        time.sleep(LIMIT_S + 1)
    step(inputs_of(step, values))
    if is_late:
        step.wait()
    else:
        with pytest.raises(HangError, match=f"rank {comm.rank}: still under way after 2 s"):
            step.wait()
        with pytest.raises(ProgramError, match="void since HangError"):
            step(inputs_of(step, values))
    torch.cuda.synchronize()
    comm.barrier()
    step.bind({n: x for n, x in values.items() if n not in inputs_of(step, values)})
    found = step(inputs_of(step, values))
    step.wait()
    assert all(torch.isfinite(x).all() for x in found.values())


def die(comm: Communicator, name: str, replay: bool, waits: bool) -> None:
    """The last rank is killed while all run; the others wait for what they queued, or just for
    their GPU.
    """
    step, values = small_step(comm, name, replay=replay)
    deadline.GRACE_S = 0.5
    for number in range(10):
        step(inputs_of(step, values))
        if number == 4 and comm.rank == comm.mesh.num_ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if waits:
        step.wait()
    torch.cuda.synchronize()


SIGNALLED = """
host signalled on mesh(tp={num})
  streams 1, events 0
  input x: f32[4]
  temp y: f32[4]
  body
    allocate y
    signal go to tp[+1]
    wait signal go from tp[-1]
    y = pointwise[i:4] x(i) -> y(i) | expr='a0 + 1.0'
  return y
"""


def lose_a_signal(comm: NcclCommunicator, replay: bool) -> None:
    """One rank stays away from one run, so that the next one waits in vain."""
    mine = NcclCommunicator(comm.mesh, comm.rank, TIMEOUT_S)
    open_signals(mine, "tp", ("go",), LIMIT_S, peer_memory=True)
    num = comm.mesh.num_ranks
    evaluator = Evaluator(parse_host(SIGNALLED.format(num=num)), mine, {}, "cuda")
    given = {"x": torch.arange(4.0)}
    run: Callable[[], object] = lambda: evaluator.run(given)  # noqa: E731
    if replay:
        captured = CapturedHost(evaluator, given)
        run = lambda: captured.run({})  # noqa: E731
    for _ in range(100):
        run()
    torch.cuda.synchronize()
    mine.check_signals()
    comm.barrier()
    if comm.rank != num - 1:
        run()
    since = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - since < LIMIT_S + 3
    if comm.rank == 0:
        with pytest.raises(
            HangError, match=f"rank 0 waited 2 s for signal 'go' from rank {num - 1}"
        ):
            mine.check_signals()
    comm.barrier()


def miss_a_replay(comm: Communicator) -> None:
    """The last rank stays away from one replay of a program that is one kernel; those of the others
    give up waiting for it.
    """
    step, values = small_step(comm, "one row", replay=True)
    assert step.stats.num_megakernels == 1
    assert step._kernel is not None
    step._deadline.limit_s = TIMEOUT_S
    alarm = step._kernel.runner._alarm
    alarm.limit_s = LIMIT_S
    alarm._report[REPORT_LIMIT] = round(LIMIT_S * 1e9)
    torch.cuda.synchronize()
    comm.barrier()
    if comm.rank != comm.mesh.num_ranks - 1:
        step(inputs_of(step, values))
        with pytest.raises(HangError, match=r"rank \d, SM \d+ .* waited 2 s for word"):
            step.wait()
    comm.barrier()  # whose memory peers write into may not end before they do


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_rank_that_misses_a_replay_of_one_kernel_is_missed(
    device: str, num_ranks: int, run_ranks
):
    run_ranks(f"{HERE}:miss_a_replay", device, num_ranks)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("body", ["come_late", "lose_a_signal"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_fault_ends_in_time(device: str, num_ranks: int, body: str, replay: bool, run_ranks):
    run_ranks(f"{HERE}:{body}", device, num_ranks, replay)


@pytest.mark.parametrize(
    ("name", "replay"), [("one row", True), ("many rows", True), ("one row", False)]
)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_killed_rank_ends_the_others(
    device: str, num_ranks: int, name: str, replay: bool, run_ranks
):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(f"{HERE}:die", device, num_ranks, name, replay, True)
    found = str(caught.value)
    assert f"rank {num_ranks - 1}: died, exit code -9" in found
    assert "rank 0: still under way after 2 s" in found


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_host_that_only_waits_for_its_gpu_is_ended(device: str, num_ranks: int, run_ranks):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(f"{HERE}:die", device, num_ranks, "one row", True, False)
    assert f"rank 0: died, exit code {deadline.HUNG}" in str(caught.value)
