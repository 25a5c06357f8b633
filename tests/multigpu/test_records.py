"""Programs that the kernels of rows refuse, as one launch of the kernel of records a rank."""

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram
from distmega.errors import HangError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard
from distmega.sharding.planner import plan_program
from tests.kernels.records.programs import expected_of, values_of
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_records"
NUM_CALLS = 500
LIMIT_S = 2.0


def summed() -> tuple[Program, dict[str, Layout]]:
    """Two sums over ranks, one of them behind the other, of odd extents."""
    p = ProgramBuilder("summed")
    x = p.input("x", (5, 61))
    for n in range(2):
        h = p.linear(x, p.weight(f"up{n}", (96, 61))).map("tanh(a0)")
        x = x + p.linear(h, p.weight(f"down{n}", (61, 96)))
    layouts = {"up0": shard(0, "tp"), "up1": shard(0, "tp")}
    return p.build(x), layouts | {"down0": shard(1, "tp"), "down1": shard(1, "tp")}


def shared_out() -> tuple[Program, dict[str, Layout]]:
    """A sum of which each rank keeps a part, then the other dim of it, then all of it."""
    p = ProgramBuilder("parts")
    x = p.input("x", (10, 24))
    y = p.linear(x, p.weight("w", (14, 24)), name="y")
    z = p.softmax(p.pointwise("a0 * 2.0", y, name="z"))
    best = p.argmax(p.linear(z, p.weight("v", (64, 14))))
    layouts = {"x": shard(1, "tp"), "w": shard(1, "tp"), "y": shard(1, "tp")}
    return p.build(best, z), layouts | {"z": shard(0, "tp"), "v": shard(0, "tp")}


def differs(found: dict[str, Tensor], expected: dict[str, Tensor], most: float) -> str:
    """Which elements of which outputs are further apart, and what they are; "" if none is."""
    lines = []
    for name, x in found.items():
        wanted, x = expected[name].cpu().double(), x.cpu().double()
        wrong = ~torch.isclose(x, wanted, rtol=most, atol=most, equal_nan=True)
        if bool(wrong.any()):
            at = wrong.nonzero()
            some = [
                (tuple(i), x[tuple(i)].item(), wanted[tuple(i)].item()) for i in at[:6].tolist()
            ]
            lines.append(f"{name}: {len(at)} of {x.numel()}, (index, found, expected) {some}")
    return "; ".join(lines)


def run_records(comm: Communicator) -> None:
    """Values of the library's ops on one rank, the same bits in all calls; first node by node, then
    in a graph, so that a failure says where it began.
    """
    device = str(torch.get_default_device())
    for program, layouts in (summed(), shared_out()):
        with torch.device("cpu"):
            values = values_of(program)
            expected = expected_of(program, values)
        plan = plan_program(program, comm.mesh, H200, layouts)
        for replay, num_calls in ((False, 7), (True, NUM_CALLS)):
            step = CompiledProgram(plan, comm, device, megakernel=True, replay=replay)
            where = f"{program.name} on rank {comm.rank}, replay={replay}"
            assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0), where
            parts = step.parts({name: x.to(device) for name, x in values.items()})
            first = {name: x.clone() for name, x in step(parts).items()}
            step.wait()
            own = {name: expected[name][step.slices(name)] for name in program.outputs}
            held = {name: x[tuple(map(slice, own[name].shape))] for name, x in first.items()}
            assert not (text := differs(held, own, 1e-4)), f"{where}, first call: {text}"
            for n in range(num_calls):
                found = step(parts)
                # between calls that are queued one behind the other, some are looked at
                if n in (0, 1, num_calls - 1):
                    text = differs(found, first, 0.0)
                    assert not text, f"{where}, call {n + 2}: {text}"
            assert step.stats.replayed == replay, f"{where}: {step.stats.reason}"
            spans = step.trace(parts)
            assert {span.process for span in spans} == {f"rank {comm.rank}"}, where
            step.wait()


def run_without_one(comm: Communicator) -> None:
    """A rank makes a call that the others leave out: it hears of its hang, and they of nothing."""
    device = str(torch.get_default_device())
    program, layouts = summed()
    with torch.device("cpu"):
        values = values_of(program)
    soon = NcclCommunicator(comm.mesh, comm.rank, LIMIT_S)
    step = CompiledProgram(
        plan_program(program, comm.mesh, H200, layouts), soon, device, megakernel=True, replay=False
    )
    parts = step.parts({name: x.to(device) for name, x in values.items()})
    step(parts)
    step.wait()
    comm.barrier()
    if comm.rank == 0:
        step(parts)
        torch.cuda.synchronize()
        with pytest.raises(HangError, match=r"rank 0, SM \d+ .* waited 2 s for .* rank 1;"):
            step.wait()
    comm.barrier()


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_rank_that_does_not_come_is_named(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_without_one", device, num_ranks)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_sums_and_parts_over_ranks(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_records", device, num_ranks)
