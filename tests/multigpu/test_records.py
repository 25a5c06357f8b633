"""Programs that the kernels of rows refuse, as one launch of the kernel of records a rank."""

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard
from distmega.sharding.planner import plan_program
from tests.kernels.records.programs import expected_of, values_of
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_records"
NUM_CALLS = 500


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


def run_records(comm: Communicator) -> None:
    """Values of the library's ops on one rank, the same bits on all ranks and in all calls."""
    device = str(torch.get_default_device())
    for program, layouts in (summed(), shared_out()):
        with torch.device("cpu"):
            values = values_of(program)
            expected = expected_of(program, values)
        plan = plan_program(program, comm.mesh, H200, layouts)
        step = CompiledProgram(plan, comm, device, megakernel=True)
        assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
        parts = step.parts({name: x.to(device) for name, x in values.items()})
        first = {name: x.clone() for name, x in step(parts).items()}
        wholes = step.parts({name: expected[name].to(device) for name in program.outputs})
        for name, x in first.items():
            torch.testing.assert_close(x, wholes[name], rtol=1e-4, atol=1e-4)
        for _ in range(NUM_CALLS):
            found = step(parts)
        assert all(torch.equal(found[name], x) for name, x in first.items())
        assert step.stats.replayed, step.stats.reason
        step.wait()


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_sums_and_parts_over_ranks(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_records", device, num_ranks)
