"""Attention of rows over rows, and of rows over one cache, whose heads ranks divide: one launch a
rank.
"""

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.kernels.machines import H200
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program_in
from tests.kernels.row_programs import attending_rows, crossing, prompt, random_values, sequences
from tests.multigpu.ranks import ON_GPUS

HERE = "tests.multigpu.test_row_attention"
MOST_ERROR = 1.25
"""Times the error of torch in bf16."""
NUM_CALLS = 200


def run_attention(comm: Communicator) -> None:
    """As exact as torch on one rank, the same bits on all ranks and in all calls."""
    device = str(torch.get_default_device())
    programs = (
        attending_rows(5, turned="norm", sees="position", dim=32),
        crossing(3, 5),
        sequences(2, 5),
        prompt(4),
    )
    for program in programs:
        with torch.device("cpu"):
            values = random_values(program)
            exact, half = (
                run_program_in(dtype, program, values) for dtype in (torch.float64, torch.bfloat16)
            )
        plan = plan_program(program, comm.mesh, H200)
        whole = CompiledProgram(plan, comm, device, megakernel=True)
        assert (whole.stats.num_megakernels, whole.stats.num_library_ops) == (1, 0)
        parts = whole.parts({name: x.to(device) for name, x in values.items()})
        first = {name: x.clone() for name, x in whole(parts).items()}
        for _ in range(NUM_CALLS):
            found = whole(parts)
        whole.wait()
        assert all(torch.equal(x, found[name]) for name, x in first.items())
        for name, x in first.items():
            if not x.is_floating_point():
                continue
            far, in_half = (
                float((one.double() - exact[name]).norm() / exact[name].norm())
                for one in (x.cpu(), half[name])
            )
            if comm.rank == 0:
                print(f"{program.name} {name}: kernel {far:.2e}, torch {in_half:.2e}", flush=True)
            assert far <= MOST_ERROR * in_half
            theirs = comm.all_gather_object(x.float().cpu().tolist())
            assert all(one == theirs[0] for one in theirs)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_heads_that_ranks_divide(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_attention", device, num_ranks)
