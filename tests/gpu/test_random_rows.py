"""Random programs of one row in small whole numbers: the kernel of one row on a GPU gives the bits
of the interpreter on a CPU. Workers compile and run beside each other.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU, H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.kernels.random_rows import random_rows, whole_numbers

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
WORKERS = 8
LEAST_TAKEN = 0.8
"""Of random programs, those that the kernel takes at least."""


def outputs(seed: int, device: str) -> list[list[torch.Tensor]]:
    """Of the program in one launch, three times; UnsupportedError if no kernel takes it."""
    program = random_rows(seed)
    values = whole_numbers(program, seed)
    plan = plan_program(program, MESH, CPU if device == "cpu" else H200)
    step = CompiledProgram(plan, SingleCommunicator(MESH), device, megakernel=True)
    parts = step.parts({name: x.to(device) for name, x in values.items()})
    found = [[out.clone().cpu() for out in step(parts).values()] for _ in range(3)]
    assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    return found


def compare(seed: int) -> tuple[int, str]:
    """What is wrong with a program; "" if nothing is, "refused" if no kernel takes it."""
    torch.set_num_threads(1)
    try:
        found = outputs(seed, "cuda:0")
    except UnsupportedError:
        return seed, "refused"
    expected, *_ = outputs(seed, "cpu")
    far = [
        (call, number)
        for call, of_call in enumerate(found)
        for number, pair in enumerate(zip(of_call, expected, strict=True))
        if not torch.equal(*pair)
    ]
    return seed, f"calls and outputs {far} differ" if far else ""


def compare_all(seeds: range) -> Iterator[tuple[int, str]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        yield from pool.map(compare, seeds)


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 330), marks=pytest.mark.nightly)], ids=len
)
def test_random_programs_give_the_bits_of_the_interpreter(seeds):
    results = dict(compare_all(seeds))
    refused = [seed for seed, result in results.items() if result == "refused"]
    wrong = {seed: text for seed, text in results.items() if text not in ("", "refused")}
    assert not wrong
    assert len(refused) <= (1 - LEAST_TAKEN) * len(seeds), refused
