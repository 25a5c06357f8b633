"""Programs that the kernels of rows refuse, as one launch of the kernel of records."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.kernels.records.programs import (
    KINDS,
    NAMES,
    expected_of,
    program_of,
    tolerance,
    values_of,
)

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)


def found_wrong(name: tuple[str, str]) -> str:
    """What differs from the library's values, or from one call to the next; "" if nothing does."""
    torch.set_num_threads(1)
    program = program_of(*name)
    values = values_of(program)
    step = CompiledProgram(
        plan_program(program, MESH, H200), SingleCommunicator(MESH), "cuda:0", megakernel=True
    )
    if (step.stats.num_megakernels, step.stats.num_library_ops) != (1, 0):
        return f"{name}: {step.stats}"
    given = {key: x.cuda() for key, x in values.items()}
    found = {key: x.cpu() for key, x in step(given).items()}
    expected = expected_of(program, values)
    for out in program.outputs:
        most = tolerance(program, out)
        try:
            torch.testing.assert_close(found[out], expected[out], rtol=most, atol=most)
        except AssertionError as error:
            return f"{name} {out}: {error}"
    if not step.stats.replayed:
        return f"{name}: {step.stats.reason}"
    if not program.with_role("state"):
        again = step(given)
        if not all(torch.equal(again[key].cpu(), x) for key, x in found.items()):
            return f"{name}: a second call gives other bits"
    return ""


@pytest.mark.parametrize(
    "names",
    [
        [(kind, dtypes[0]) for kind, (_, dtypes) in KINDS.items()],
        pytest.param(list(NAMES), marks=pytest.mark.nightly),
    ],
    ids=len,
)
def test_one_launch_gives_what_library_ops_give(names):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        wrong = [text for text in pool.map(found_wrong, names) if text]
    assert not wrong


def test_auto_leaves_them_to_library_ops():
    program = program_of("batched", "bf16")
    step = CompiledProgram(plan_program(program, MESH, H200), SingleCommunicator(MESH), "cuda:0")
    assert step.stats.num_megakernels == 0
