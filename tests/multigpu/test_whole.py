"""Whole programs as one persistent kernel a rank, with sums over ranks inside."""

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.kernels.machines import H200
from distmega.sharding.planner import plan_program
from tests.gpu.test_whole import error, program_of, random_values, run
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_whole"
MOST_ERROR = 1.25
NUM_CALLS = 2000


def run_whole(comm: Communicator) -> None:
    """One launch a rank is as exact as library ops with NCCL, and the same on all ranks and in all
    calls.
    """
    device = str(torch.get_default_device())
    for name in ("silu", "tanh", "ungated", "layer norms"):
        program = program_of(name, "bf16")
        with torch.device("cpu"):
            values = random_values(program)
            exact = run(program_of(name, "f32"), values, "cpu")
        plan = plan_program(program, comm.mesh, H200)
        whole = CompiledProgram(plan, comm, device, megakernel=True)
        parts = whole.parts({key: x.to(device) for key, x in values.items()})
        library = CompiledProgram(plan, comm, device, megakernel=False)
        (expected,) = library(dict(parts)).values()
        (found,) = whole(parts).values()
        assert whole.stats.replayed, whole.stats.reason
        assert (whole.stats.num_megakernels, whole.stats.num_library_ops) == (1, 0)
        first = found.clone()
        for number in range(NUM_CALLS):
            (found,) = whole(parts).values()
            if number % 500 == 0:
                assert torch.equal(found, first)
        whole.wait()
        errors = error(first.float().cpu(), exact), error(expected.float().cpu(), exact)
        if comm.rank == 0:
            print(f"{name}: kernel {errors[0]:.2e}, library ops {errors[1]:.2e}", flush=True)
        assert errors[0] <= MOST_ERROR * errors[1]
        theirs = comm.all_gather_object(first.float().cpu().tolist())
        assert all(one == theirs[0] for one in theirs)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_program_is_one_launch_a_rank(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_whole", device, num_ranks)
