"""Whole programs as one persistent kernel a rank, with sums and gathers over ranks inside."""

import pytest
import torch

from bench.models import gated_mlp
from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.kernels.machines import H200
from distmega.sharding.planner import plan_program
from tests.gpu.test_whole import error, program_of, random_values, run
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_whole"
MOST_ERROR = 1.25
NUM_CALLS = 2000


def run_whole(comm: Communicator, rows: int) -> None:
    """One launch a rank is as exact as library ops with NCCL, and the same on all ranks and in all
    calls.
    """
    device = str(torch.get_default_device())
    for name in ("silu", "tanh", "ungated", "layer norms", "chain", "post norms"):
        program = program_of(name, "bf16", rows)
        with torch.device("cpu"):
            values = random_values(program)
            exact = run(program_of(name, "f32", rows), values, "cpu")
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
            print(
                f"{name} of {rows} rows: kernel {errors[0]:.2e}, library ops {errors[1]:.2e}",
                flush=True,
            )
        assert errors[0] <= MOST_ERROR * errors[1]
        theirs = comm.all_gather_object(first.float().cpu().tolist())
        assert all(one == theirs[0] for one in theirs)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
@pytest.mark.parametrize("rows", [1, 16])
def test_a_program_is_one_launch_a_rank(run_ranks, device: str, num_ranks: int, rows: int):
    run_ranks(f"{HERE}:run_whole", device, num_ranks, rows)


def run_rows(comm: Communicator, rows: int, layers: int) -> None:
    """Inputs change from call to call; ranks get the same bits, and an input that comes again its
    own.
    """
    device = str(torch.get_default_device())
    model = gated_mlp(rows, layers, hidden=512, inner=1536)
    with torch.device("cpu"):
        values = random_values(model.program)
        exact = run(gated_mlp(rows, layers, 512, 1536, "f32").program, values, "cpu")
    plan = plan_program(model.program, comm.mesh, H200, model.marks)
    whole = CompiledProgram(plan, comm, device, megakernel=True)
    parts = whole.parts({key: x.to(device) for key, x in values.items()})
    library = CompiledProgram(plan, comm, device, megakernel=False)
    (expected,) = library(dict(parts)).values()
    (found,) = whole(parts).values()
    assert (whole.stats.num_megakernels, whole.stats.num_library_ops) == (1, 0)
    first = found.clone()
    inputs = [parts["x"] * (1.0 - 0.25 * number) for number in range(7)]
    for number in range(NUM_CALLS):
        (found,) = whole({"x": inputs[number % 7]}).values()
        if number % 490 == 0:
            assert torch.equal(found, first)
    whole.wait()
    errors = error(first.float().cpu(), exact), error(expected.float().cpu(), exact)
    if comm.rank == 0:
        print(f"{rows} rows, {layers} layers: kernel {errors[0]:.2e}, library ops {errors[1]:.2e}")
    assert errors[0] <= MOST_ERROR * errors[1]
    theirs = comm.all_gather_object((first.float().cpu().tolist(), found.float().cpu().tolist()))
    assert all(one == theirs[0] for one in theirs)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
@pytest.mark.parametrize(("rows", "layers"), [(1, 1), (1, 3), (2, 1), (16, 1), (16, 2), (16, 3)])
def test_rows_over_ranks(run_ranks, device: str, num_ranks: int, rows: int, layers: int):
    """Of one sum, of an even and of an odd number."""
    run_ranks(f"{HERE}:run_rows", device, num_ranks, rows, layers)
