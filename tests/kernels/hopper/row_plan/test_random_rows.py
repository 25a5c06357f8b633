"""Random programs of rows: the interpreter gives torch's numbers, the queues of the kernel of one
row are built and proven for most of them, and queues emulated give the interpreter's bits.
"""

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.batch import runner as batch_runner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.plan.encoded import encode_queues
from distmega.kernels.hopper.plan.extents import count_rows
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import CPU
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.gpu.test_random_rows import compare
from tests.hostir.programs import run_program_in
from tests.kernels.hopper.emulator.batch.test_batch_emulator import batch_case
from tests.kernels.hopper.emulator.emulated_bits import emulated, hash_of, hash_of_words
from tests.kernels.hopper.emulator.emulating import case_of
from tests.kernels.random_bodies import random_body
from tests.kernels.random_rows import random_rows, whole_numbers

MESH = DeviceMesh(tp=1)
SEEDS = range(40)


@pytest.mark.parametrize("seed", range(12))
def test_the_interpreter_gives_exact_numbers(seed):
    program, values = random_rows(seed), whole_numbers(random_rows(seed), seed)
    step = CompiledProgram(
        plan_program(program, MESH, CPU), SingleCommunicator(MESH), megakernel=True
    )
    expected = run_program_in(torch.float32, program, values)
    for name, found in step(step.parts(values)).items():
        assert torch.equal(found.double(), expected[name].double())


def test_most_are_one_kernel_of_one_row():
    refused = {}
    for seed in SEEDS:
        program = random_rows(seed)
        weights = layout_arena(Space.WEIGHT, order_weights(program))
        states = layout_arena(Space.STATE, program.with_role("state"))
        try:
            queues = build_queues(program, weights, states, 20)
        except UnsupportedError as error:
            refused[seed] = str(error)
        else:
            assert len(queues.outputs) + bool(queues.chosen) == len(program.outputs)
    assert len(refused) <= 0.2 * len(SEEDS), refused


@pytest.mark.parametrize(("seed", "rows"), [(1, 1), (4, 1), (1, 5), (7, 16)])
def test_emulated_queues_give_the_interpreters_bits(seed: int, rows: int):
    program = random_rows(seed, rows)
    values = whole_numbers(program, seed)
    step = CompiledProgram(
        plan_program(program, MESH, CPU), SingleCommunicator(MESH), megakernel=True
    )
    _, found = emulated(program, values, 7, seed)
    for one, other in zip(found, step(step.parts(values)).values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", [0, 3])
def test_what_the_sweep_on_gpus_compares(seed: int):
    """On a CPU the interpreter is compared with itself."""
    assert compare(seed, "cpu") == (seed, "")


def test_queues_have_one_hash():
    """As they are planned, and as a GPU has them."""
    (row,) = case_of(random_rows(1), num_sms=20).queues
    (batch,) = batch_case(random_rows(1, 3), num_sms=20).queues
    (other,) = batch_case(random_rows(2, 3), num_sms=20).queues
    encoded = encode_queues(row)
    words, lengths = map(torch.from_numpy, (encoded.words, encoded.lengths))
    assert hash_of(row) == hash_of_words(words, lengths)
    assert hash_of(batch) == hash_of_words(batch_runner._encode(batch))
    assert len({hash_of(row), hash_of(batch), hash_of(other)}) == 3


def test_most_random_bodies_are_one_kernel():
    """What the sweep over extents runs on GPUs."""
    refused = {}
    for seed in range(18):
        program = random_body(seed)
        weights = layout_arena(Space.WEIGHT, order_weights(program))
        states = layout_arena(Space.STATE, program.with_role("state"))
        build = build_queues if count_rows(program) == 1 else build_batch_queues
        try:
            queues = build(program, weights, states, 20)
        except UnsupportedError as error:
            refused[seed] = str(error)
        else:
            assert len(queues.outputs) + bool(queues.chosen) == len(program.outputs)
    assert len(refused) <= 0.3 * 18, refused
