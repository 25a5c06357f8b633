"""Programs with norms, softmax and sums that follow no contraction, as one kernel: as exact as
torch's own bf16.
"""

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program_in
from tests.kernels.hopper.batch_plan.test_batch_pointwise import heads_normed, two_lookups
from tests.kernels.row_programs import (
    CONTEXT,
    FIRST,
    HEADS,
    PROGRAMS,
    PROMPTS,
    SELF_ATTENTION,
    attending,
    attending_columns,
    attending_rows,
    crossing,
    prompt,
    random_values,
    sequences,
)

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)
NUM_SETS = 6
"""Sets of values of a program: one row of one set rounds 0.5 to 1.5 times as badly as torch's."""

MOST_ERROR = 1.25
"""Times the error of torch in bf16, of all sets."""

MOST_ERROR_OF_A_SET = 2.5
"""Times that of torch over all sets."""


def check(program: Program, unseen: tuple[range, ...] = (), first: int = FIRST) -> None:
    """One launch, no library op; floats as exact as torch's, a token that is as good as its.
    unseen: positions of caches that hold no numbers; first: position of the first row.
    """
    plan = plan_program(program, MESH, H200)
    step = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", warm=True, megakernel=True)
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(NUM_SETS):
        values = {name: x.cuda() for name, x in random_values(program, seed, first).items()}
        for tensor in program.with_role("state"):
            for positions in unseen:
                values[tensor.name][:, positions.start : positions.stop] = torch.nan
        for name, error in errors_of(step, program, values).items():
            errors.setdefault(name, []).append(error)
    for name, of_sets in errors.items():
        far, in_half = (
            (sum(x * x for x in one) / NUM_SETS) ** 0.5 for one in zip(*of_sets, strict=True)
        )
        print(f"{program.name} {name}: kernel {far:.2e}, torch {in_half:.2e}")
        assert far <= MOST_ERROR * in_half, (name, of_sets)
        assert max(far for far, _ in of_sets) <= MOST_ERROR_OF_A_SET * in_half, (name, of_sets)


def errors_of(
    step: CompiledProgram, program: Program, values: dict[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Relative error of each float that a launch leaves, and of torch's in bf16."""
    for name, tensor in step.tensors.items():
        tensor.copy_(values[name])
    inputs = {tensor.name: values[tensor.name] for tensor in program.with_role("input")}
    found = {name: x.clone() for name, x in step(inputs).items()}
    again = step(inputs)
    assert all(torch.equal(x, again[name]) for name, x in found.items())
    assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    exact, half = (
        run_program_in(dtype, program, values) for dtype in (torch.float64, torch.bfloat16)
    )
    states = {tensor.name: step.tensors[tensor.name] for tensor in program.with_role("state")}
    errors = {}
    for name, x in (found | states).items():
        if not x.is_floating_point():
            continue
        wanted = exact[name].nan_to_num()
        assert torch.equal(x.isnan(), exact[name].isnan())
        far, in_half = (
            float((one.double().nan_to_num() - wanted).norm() / wanted.norm())
            for one in (x, half[name])
        )
        errors[name] = far, in_half
    if "next" in found:
        for logits, token in zip(exact["logits"], found["next"], strict=True):
            assert logits.max() - logits[token] <= 0.05 * logits.abs().max()
    return errors


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_launch_is_as_exact_as_torch(name, rows):
    check(PROGRAMS[name](rows))


@pytest.mark.parametrize("program", [two_lookups, heads_normed])
def test_rows_of_tables_and_norms_of_heads(program):
    check(program(7))


@pytest.mark.parametrize("name", HEADS)
def test_rows_of_decoders_with_other_heads(name):
    check(attending(rows=5, **HEADS[name]))


@pytest.mark.parametrize(("rows", "turned"), [(3, ""), (2, "rope"), (16, "norm")])
def test_attention_over_columns_of_one_product(rows, turned):
    check(attending_columns(rows, turned=turned))


@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_rows_that_see_each_other(name):
    check(attending_rows(5, **SELF_ATTENTION[name]))


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (2, 128), (16, 256), (33, 64), (64, 128)])
def test_any_rows_that_see_those_before(rows, dim):
    check(attending_rows(rows, sees="position", dim=dim))


@pytest.mark.parametrize(
    ("rows", "memory", "given"),
    [(3, 5, ""), (40, 2, ""), (3, 70, "input"), (3, 20, "weight"), (4, 200, "state")],
)
def test_rows_that_see_other_rows(rows, memory, given):
    check(crossing(rows, memory, given=given))


@pytest.mark.parametrize(
    ("num", "rows", "mask"), [(2, 8, ()), (3, 7, (1, 4, 7, 7)), (5, 3, (5, 1, 1, 3))]
)
def test_sequences_that_see_nothing_of_each_other(num, rows, mask):
    check(sequences(num, rows, mask=mask))


@pytest.mark.parametrize("name", PROMPTS)
def test_rows_of_one_cache(name):
    unseen = range(FIRST - 8 if name == "window" else 0), range(FIRST + 4, CONTEXT)
    check(prompt(4, **PROMPTS[name]), unseen)


@pytest.mark.parametrize("rows", [2, 16, 40, 64])
def test_any_rows_of_one_cache(rows):
    check(prompt(rows, dim=128 if rows == 16 else 64, group=4))


@pytest.mark.parametrize(("name", "rows"), [(name, 4) for name in PROMPTS] + [("rope", 40)])
def test_sms_share_the_keys_of_a_head(name, rows):
    """Of few heads every SM has a part of the keys."""
    first = 2100
    unseen = range(first - 8 if name == "window" else 0), range(first + rows, 2304)
    check(prompt(rows, context=2304, **PROMPTS[name]), unseen, first)


@pytest.mark.parametrize("rows", [3, 16])
def test_rows_of_decoders_with_norms_of_all_heads_together(rows):
    check(attending(rows=rows))


@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_a_decoder_with_norms_of_all_heads_together(softcap):
    check(attending(softcap=softcap))


@pytest.mark.parametrize(
    ("dim", "heads", "group"), [(136, 2, 1), (192, 1, 2), (200, 1, 7), (256, 1, 8), (256, 2, 2)]
)
def test_a_decoder_with_wide_heads(dim, heads, group):
    check(attending(dim=dim, heads=heads, group=group, window=40, softcap=0.5 * (group == 2)))


@pytest.mark.parametrize(("dim", "heads", "group"), [(64, 2, 3), (256, 1, 8)])
def test_a_decoder_with_biases_of_scores(dim, heads, group):
    check(attending(dim=dim, heads=heads, group=group, biased=True))
