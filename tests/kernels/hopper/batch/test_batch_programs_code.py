"""Machine code for sm_90a of the kernel of several rows, for programs that are no decoders."""

from functools import cache

import pytest
import torch
import triton

from bench.models import gated_mlp
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.batch_plan.words import MAX_ROWS
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.kernels.hopper.batch_plan.test_batch_programs import program_of
from tests.kernels.hopper.emulator.one_row.test_gathers import build, columns_of
from tests.kernels.hopper.one_row.test_decode_code import LoneTeam
from tests.kernels.offline import NUM_SMS, offline
from tests.kernels.ptx import bare_signals, plain_spins, unfenced_loads
from tests.kernels.row_programs import (
    HEADS,
    PROGRAMS,
    PROMPTS,
    SELF_ATTENTION,
    attending,
    attending_rows,
    prompt,
)
from tests.kernels.sass import instructions, parted_at_barriers, spills_in_products
from tests.kernels.sm90 import SHARED_BYTES, Machine

MOST_INSTRUCTIONS = {"gated": 2000, "attention": 5000, "odd sizes": 2900}
"""A kernel without attention holds nothing of it: a decoder's has over 4000."""
MOST_INSTRUCTIONS_LATER = {**MOST_INSTRUCTIONS, "gated": 2050}
"""Under releases of Triton after PINNED, the newest of which makes 2040 of a gated MLP."""
PINNED = (3, 6)
"""The release of Triton that MOST_INSTRUCTIONS is of."""
SPILLED_BYTES = {"96 of each": 8}
"""Scalars that an instruction reads back once."""


def compiled(name: str) -> Machine:
    return compiled_program(program_of(name))


@cache
def compiled_program(program: Program, num_ranks: int = 1) -> Machine:
    """num_ranks: that share the program, which is of one of them."""
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    given = {*(tensor.name for tensor in program.with_role("input")), *program.outputs}
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        runner = BatchRunner(
            program,
            build_batch_queues(program, weights, states, NUM_SMS, most_rows=MAX_ROWS),
            weights=weights,
            weights_arena=torch.empty(weights.num_bytes, dtype=torch.uint8),
            state_arena=torch.empty(max(states.num_bytes, 16), dtype=torch.uint8),
            team=LoneTeam(num_ranks) if num_ranks > 1 else None,
        )
        runner.launch(
            {
                tensor.name: torch.zeros(
                    tensor.shape, dtype=torch.bfloat16 if tensor.dtype == "bf16" else torch.int64
                )
                for tensor in program.tensors
                if tensor.name in given
            }
        )
    (machine,) = launched
    return machine


@pytest.mark.parametrize("name", MOST_INSTRUCTIONS)
def test_nothing_spills_and_nothing_unused_is_there(name: str):
    code = compiled(name)
    assert code.stack_bytes == 0
    assert spills_in_products(code.cubin) == []
    assert parted_at_barriers(code.cubin) == []
    assert code.shared_bytes <= SHARED_BYTES
    release = tuple(int(number) for number in triton.__version__.split(".")[:2])
    most = MOST_INSTRUCTIONS if release <= PINNED else MOST_INSTRUCTIONS_LATER
    assert len(instructions(code.cubin)) <= most[name]
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("attending", marks=pytest.mark.nightly),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in HEADS if name != "80 capped"),
        "80 capped",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in PROGRAMS),
    ],
)
def test_pointwise_work_fits_an_sm(name: str):
    if name in HEADS:
        program = attending(rows=8, **HEADS[name])
    else:
        program = attending(rows=8) if name == "attending" else PROGRAMS[name](8)
    code = compiled_program(program)
    assert code.stack_bytes <= SPILLED_BYTES.get(name, 0)
    assert spills_in_products(code.cubin) == []
    assert parted_at_barriers(code.cubin) == []
    assert code.shared_bytes <= SHARED_BYTES
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []


@pytest.mark.nightly
@pytest.mark.parametrize("num_layers", [1, 2])
def test_sums_of_an_input_over_ranks_fit_an_sm(num_layers: int):
    """Of one sum alone, ranks add up the rows that come in, too."""
    model = gated_mlp(16, num_layers)
    plan = plan_program(model.program, DeviceMesh(tp=2), H200, model.marks)
    code = compiled_program(localize(plan).program, 2)
    assert code.stack_bytes == 0
    assert spills_in_products(code.cubin) == []
    assert parted_at_barriers(code.cubin) == []
    assert code.shared_bytes <= SHARED_BYTES
    assert plain_spins(code.ptx) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gates", "added"])
def test_gathers_over_ranks_fit_an_sm(name: str):
    program = build(name, 16)
    plan = plan_program(program, DeviceMesh(tp=2), H200, columns_of(program))
    code = compiled_program(localize(plan).program, 2)
    assert code.stack_bytes == 0
    assert spills_in_products(code.cubin) == []
    assert parted_at_barriers(code.cubin) == []
    assert code.shared_bytes <= SHARED_BYTES
    assert plain_spins(code.ptx) == []


@pytest.mark.parametrize(
    ("rows", "attends", "most_bytes"),
    [
        (64, False, 0),
        pytest.param(32, True, 8, marks=pytest.mark.nightly),
        pytest.param(64, True, 152, marks=pytest.mark.nightly),
    ],
)
def test_many_rows_are_products_of_warp_groups(rows: int, attends: bool, most_bytes: int):
    """x comes by loads of 16 bytes, four slots ahead, a slot of weights is four products of a warp
    group, and what spills, scalars, does so outside of them.
    """
    program = attending(rows=rows) if attends else gated_mlp(rows, 2, 1024, 2816).program
    code = compiled_program(program)
    assert code.stack_bytes <= most_bytes
    assert code.shared_bytes <= SHARED_BYTES
    lines = [line for _, line in instructions(code.cubin)]
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    assert len(products) == 16
    loop = lines[products[0] : products[-1] + 20]
    assert sum("LDG.E.128" in line for line in loop) == 16
    assert not [line for line in loop if "LDL" in line or "STL" in line]
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []


@pytest.mark.parametrize(
    ("rows", "name", "most_bytes"),
    [
        (4, "norm", 0),
        *(
            pytest.param(rows, name, 0, marks=pytest.mark.nightly)
            for rows, names in (
                (5, ("joined", "window", "mask of heads", "rotated")),
                (4, ("rope", "plain", "biased", "window")),
            )
            for name in names
        ),
        pytest.param(64, "norm", 88, marks=pytest.mark.nightly),
    ],
)
def test_attention_of_rows_over_each_other_fits_an_sm(rows: int, name: str, most_bytes: int):
    """What spills where there are many rows is not of attention, but of their products."""
    made = prompt(rows, **PROMPTS[name]) if name in PROMPTS and rows != 5 else None
    code = compiled_program(made or attending_rows(rows, **SELF_ATTENTION[name]))
    assert code.stack_bytes <= most_bytes
    assert code.registers <= 168
    assert parted_at_barriers(code.cubin) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []
