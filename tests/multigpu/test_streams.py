"""Streamed programs on several GPUs: random ones exact, captured ones too, collectives of NCCL."""

import random

import pytest
import torch
from torch import Tensor

from distmega.hostir.comm.communicator import Communicator, GlooCommunicator
from distmega.hostir.comm.nccl_native import NativeNccl
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.gemm.host import PeerMatmuls
from distmega.kernels.machines import CPU, H200
from distmega.kernels.runtime.streams.copy_engines import CopyCommunicator
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, shard, stream
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.overlap.pairs import CHEAPEST, Overlap
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program, shard_tensors
from tests.hostir.streams import planned, small_integers
from tests.multigpu.ranks import ON_EITHER, ON_GPUS, TIMEOUT_S

HERE = "tests.multigpu.test_streams"
NUM_SEEDS = 12
ROWS = shard(0, "tp")
RINGS = {
    "x": ROWS,
    "w1": ROWS,
    "w2": shard(1, "tp"),
    "h": shard(1, "tp"),
    "y": ROWS,
}


def team(comm: Communicator, mesh: DeviceMesh) -> Communicator:
    """The test's communicator, for another mesh of as many ranks and with NCCL's own reductions."""
    if torch.get_default_device().type == "cuda":
        return NativeNccl(mesh, comm.rank, TIMEOUT_S)
    return GlooCommunicator(mesh, comm.rank, TIMEOUT_S)


def own_part(whole: Tensor, local: LocalProgram, name: str, rank: int) -> Tensor:
    return shard_tensors({name: whole}, local, rank)[name]


def on_device(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(torch.get_default_device()) for name, x in tensors.items()}


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], local: LocalProgram, rank: int
) -> None:
    """A rank's outputs are its parts of the whole ones, bit by bit, where they are no padding."""
    at = local.mesh.coordinate(rank)
    for name, x in found.items():
        part = expected[name][local.allocations[name].local_slices(at)]
        assert torch.equal(x.cpu()[tuple(map(slice, part.shape))], part), name


def assert_replays(
    evaluator: Evaluator, given: dict[str, Tensor], expected: dict[str, Tensor], local: LocalProgram
) -> None:
    """A CUDA graph of a program gives what the program gives, from the same states."""
    own = {name: x.clone() for name, x in given.items()}
    states = [t.name for t in evaluator.host.buffers if t.role == "state"]
    captured = CapturedHost(evaluator, own)
    for _ in range(2):
        for name in states:
            own[name].copy_(given[name])
        assert_same(captured.run({}), expected, local, evaluator.comm.rank)
    captured.release()


def run_random(comm: Communicator, first: int) -> None:
    num = comm.mesh.num_ranks
    meshes = [DeviceMesh(tp=num)] + ([DeviceMesh(dp=2, tp=num // 2)] if num > 2 else [])
    device = str(torch.get_default_device())
    for mesh in meshes:
        mine = team(comm, mesh)
        for seed in range(first, first + NUM_SEEDS):
            with torch.device("cpu"):
                plan, local, host = planned(seed, mesh)
                tensors = small_integers(plan.program, seed)
                copies = {name: x.clone() for name, x in tensors.items()}
                expected = run_program(plan.program, copies)
                parts = shard_tensors(tensors, local, comm.rank)
            evaluator = Evaluator(host, mine, {}, device)
            given = on_device(parts)
            for _ in range(2):
                states = {t.name: given[t.name].clone() for t in host.buffers if t.role == "state"}
                assert_same(evaluator.run(given | states), expected, local, comm.rank)
            if device.startswith("cuda"):
                assert_replays(evaluator, given, expected, local)


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_random_streamed_programs_are_exact(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:run_random", device, num_ranks, 0)


def sequence(rows: int, hidden: int, ffn: int, dtype: str) -> Program:
    """An MLP between rows that ranks divide among them."""
    p = ProgramBuilder("sequence")
    x, w1, w2 = (
        p.input("x", (rows, hidden), dtype),
        p.weight("w1", (ffn, hidden), dtype),
        p.weight("w2", (hidden, ffn), dtype),
    )
    h = p.linear(x, w1, name="h").map("relu(a0)", name="act")
    return p.build(p.linear(h, w2, name="y"))


def layers(seed: int, num: int) -> tuple[Program, dict[str, Layout]]:
    """Linears over 0 or 1, each gathering rows or columns in front, or summing behind."""
    rng = random.Random(seed)
    p = ProgramBuilder(f"layers{seed}")
    width = 128 * num * rng.choice((1, 2))
    x = p.input("x", (128 * num * rng.choice((1, 2, 3)), width), "bf16")
    marks: dict[str, Layout] = {}
    rows = rng.random() < 0.6
    if rows:
        marks["x"] = ROWS
    for i in range(2):
        inner = 128 * num * rng.choice((1, 2))
        wide = p.linear(x, p.weight(f"up{i}", (inner, width), "bf16"), name=f"h{i}")
        act = wide.map("minimum(relu(a0), 1.0)", name=f"act{i}")
        down = p.linear(act, p.weight(f"down{i}", (width, inner), "bf16"), name=f"y{i}")
        x = x.map("minimum(a0 + a1, 1.0)", down, name=f"x{i}")
        marks |= {f"up{i}": ROWS, f"h{i}": shard(1, "tp"), f"down{i}": shard(1, "tp")}
        marks |= {f"y{i}": ROWS, f"x{i}": ROWS} if rows else {}
    return p.build(x), marks


def run_layers(comm: Communicator) -> None:
    """By one kernel each where there are GPUs, exact; and what else a user can ask for."""
    on_gpu = torch.get_default_device().type == "cuda"
    mine = CopyCommunicator(comm.mesh, comm.rank, TIMEOUT_S) if on_gpu else comm
    matmuls = PeerMatmuls(mine) if isinstance(mine, CopyCommunicator) else None
    for seed in range(NUM_SEEDS if on_gpu else 2):
        program, marks = layers(seed, comm.mesh.num_ranks)
        ways = ("kernel", "ring") if "x" in marks else ("kernel", "chunks")
        with torch.device("cpu"):
            tensors = small(program, seed)
            expected = run_program(program, tensors)
        for way in ways:
            plan = plan_program(program, comm.mesh, H200, marks, overlap=way)
            local = localize(plan)
            host = run_passes(lower_program(local, megakernel=False, peer_memory=True))
            with torch.device("cpu"):
                given = shard_tensors(tensors, local, comm.rank)
            device = str(torch.get_default_device())
            evaluator = Evaluator(host, mine, {}, device, matmuls=matmuls)
            for _ in range(2):
                found = evaluator.run(on_device(given))
                assert_same(found, expected, local, comm.rank)
            if on_gpu:
                assert_replays(evaluator, on_device(given), expected, local)


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_layers_are_exact_in_every_way(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:run_layers", device, num_ranks)


def overlapped(num: int, how: str) -> tuple[LocalProgram, HostProgram]:
    """The MLP over `num` ranks, whole, in chunks on streams, in rings, or as one kernel each."""
    marks: dict[str, Layout] = dict(RINGS)
    if how == "rings":
        marks["h"] |= stream(0, num, ring="tp")
        marks["y"] |= stream(0, num, ring="tp")
    if how == "chunks":
        marks = {name: at for name, at in marks.items() if name not in ("x", "y")}
        marks["y"] = stream(0, 4)
    program = sequence(512, 256, 512, "bf16")
    ask = Overlap(way="kernel") if how == "kernels" else CHEAPEST
    machine = H200 if how == "kernels" else CPU
    local = localize(plan_program(program, DeviceMesh(tp=num), machine, marks, overlap=ask))
    peers = how == "kernels"
    return local, run_passes(lower_program(local, megakernel=False, peer_memory=peers))


def small(program: Program, seed: int) -> dict[str, Tensor]:
    """Values whose sums are exact in any order, and in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: (torch.rand(t.shape, generator=generator) < 0.02).to(torch.bfloat16)
        for t in program.tensors
        if t.role != "temp"
    }


def run_overlapped(comm: Communicator, how: str) -> None:
    with torch.device("cpu"):
        local, host = overlapped(comm.mesh.num_ranks, how)
        program = sequence(512, 256, 512, "bf16")
        first, second = small(program, 0), small(program, 1)
        wholes = [run_program(program, {**first, "x": x["x"]}) for x in (first, second)]
        parts = [shard_tensors({**first, "x": x["x"]}, local, comm.rank) for x in (first, second)]
    mine = team(comm, comm.mesh)
    device = str(torch.get_default_device())
    matmuls = PeerMatmuls(mine) if host.symmetric_buffers and isinstance(mine, NativeNccl) else None
    evaluator = Evaluator(host, mine, {}, device, matmuls=matmuls)
    captured = CapturedHost(evaluator, on_device(parts[0]))
    for turn in (0, 1, 0, 1):
        found = captured.run({"x": on_device(parts[turn])["x"]})
        assert_same(found, wholes[turn], local, comm.rank)


@pytest.mark.parametrize("how", ["whole", "chunks", "rings", "kernels"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_captured_programs_give_what_they_gave(device: str, num_ranks: int, how: str, run_ranks):
    run_ranks(f"{HERE}:run_overlapped", device, num_ranks, how)
