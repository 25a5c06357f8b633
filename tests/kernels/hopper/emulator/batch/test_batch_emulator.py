"""Queues of the kernel of several rows, emulated: they compute what torch does in any order."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bench.models import gated_mlp
from distmega.errors import CheckError, UnsupportedError
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BATCH, BatchLinear
from distmega.kernels.hopper.emulator import BatchArenas, BatchFound, BatchLaunch, emulate_batch
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.kernels.whole import divided_tensors
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.kernels.hopper.batch_plan.test_batch_programs import PROGRAMS, program_of
from tests.kernels.hopper.batch_plan.test_batch_reference import Random
from tests.kernels.hopper.emulator.emulating import Case, Values, error, expected

MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops."""


def batch_case(
    program: Program, tp: int = 1, num_sms: int = 5, marks: object = None, most_rows: int = BATCH
) -> Case:
    local = localize(plan_program(program, DeviceMesh(tp=tp), H200, marks or {}))
    weights = layout_arena(Space.WEIGHT, order_weights(local.program))
    states = layout_arena(Space.STATE, local.program.with_role("state"))
    queues = tuple(
        build_batch_queues(
            local.program, weights, states, num_sms, rank, divided_tensors(local), most_rows
        )
        for rank in range(tp)
    )
    return Case(program, local, queues, weights, states)


def random_values(program: Program) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        tensor.name: (torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5).bfloat16()
        for tensor in program.with_role("weight")
    }


def arenas_of(case: Case, values: Values) -> list[BatchArenas]:
    found = []
    for rank, queues in enumerate(case.queues):
        arenas = [allocate_arena(layout) for layout in (case.weights, case.states)]
        for layout, arena in zip((case.weights, case.states), arenas, strict=True):
            for name, view in arena_views(layout, arena).items():
                view.copy_(case.part(name, values[name], rank))
        found.append(
            BatchArenas(
                queues=queues,
                weights=case.weights,
                weights_arena=arenas[0],
                state_arena=arenas[1],
                states=arena_views(case.states, arenas[1]),
            )
        )
    return found


def emulate(
    case: Case, values: Values, inputs: Sequence[Values], seed: int
) -> list[list[BatchFound]]:
    arenas = arenas_of(case, values)
    launches = [[BatchLaunch(inputs=each)] * len(arenas) for each in inputs]
    return emulate_batch(arenas, launches, seed)


def require_right(case: Case, seed: int) -> None:
    """Two equal calls and another one; ranks and equal calls give equal bits."""
    program, values = case.program, random_values(case.program)
    (given,) = program.with_role("input")
    x = torch.randn(given.shape).bfloat16()
    inputs = [{given.name: one} for one in (x, x, -0.5 * x)]
    exact = expected(program, values, inputs)
    found = emulate(case, values, inputs, seed)
    for each, wanted in zip(found, exact, strict=True):
        for one in each:
            for name, out in one.outputs.items():
                assert error(out, wanted[name]) < MOST_ERROR
                assert torch.equal(out, each[0].outputs[name])
    for name, out in found[0][0].outputs.items():
        assert torch.equal(out, found[1][0].outputs[name])


NAMES = [name for name in PROGRAMS if name != "attention"]


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_any_order_of_sms_give_what_torch_does(name: str):
    require_right(batch_case(program_of(name, 3)), seed=NAMES.index(name))


@pytest.mark.parametrize(("tp", "layers", "rows"), [(1, 3, 4), (2, 3, 4), (2, 1, 2), (4, 1, 16)])
def test_a_gated_mlp_on_ranks(tp: int, layers: int, rows: int):
    """Of one sum, too, with which ranks add up the rows that come in."""
    model = gated_mlp(rows, layers, hidden=128, inner=256)
    require_right(batch_case(model.program, tp, 3, model.marks if tp > 1 else None), seed=tp)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_sums_over_ranks_in_many_orders(tp: int, layers: int):
    model = gated_mlp(16, layers, hidden=128, inner=256)
    for seed in range(12):
        require_right(batch_case(model.program, tp, 2 + seed % 4, model.marks), seed)


def test_tokens_choose_the_next_ones():
    """Three steps of a launch, and as many launches of one: a table, a gate, a head."""
    p = ProgramBuilder("next")
    table = p.weight("table", (200, 128), "bf16")
    x = p.embedding(p.input("tokens", (3,), "i64"), table)
    h = p.linear(
        p.rms_norm(x, p.weight("n", (128,), "bf16"), 1e-5), p.weight("w", (128, 128), "bf16")
    )
    x = p.pointwise("a0 + tanh(a1)", x, h)
    program = p.build(p.argmax(p.linear(x, p.weight("head", (200, 128), "bf16"))))
    case, values = batch_case(program), random_values(program)
    given = {"tokens": torch.tensor([5, 190, 17])}
    wanted = []
    for _ in range(3):
        (env,) = expected(program, values, [given if not wanted else {"tokens": wanted[-1]}])
        wanted.append(env[program.outputs[0]])
    for together in (True, False):
        (arenas,) = arenas_of(case, values)
        launches = [BatchLaunch(inputs=given, num_steps=3 if together else 1)]
        launches += [BatchLaunch()] * (0 if together else 2)
        found = emulate_batch([arenas], [[one] for one in launches], seed=7 + together)
        tokens = [row for each in found for row in each[0].ids]
        assert tokens == [tuple(one.tolist()) for one in wanted]


def require_random(seeds: range) -> int:
    found = 0
    for seed in seeds:
        try:
            case = batch_case(Random(seed, "bf16").build(), num_sms=3 + seed % 5)
        except UnsupportedError:
            continue
        require_right(case, seed)
        found += 1
    return found


def test_random_programs():
    assert require_random(range(3)) >= 2


@pytest.mark.nightly
def test_many_random_programs():
    assert require_random(range(3, 150)) >= 100


def change(queues: BatchQueues, name: str, **fields: int) -> BatchQueues:
    """The queues with fields of one op's instructions set."""
    return replace(
        queues,
        queues=tuple(
            tuple(
                replace(one, **fields) if isinstance(one, BatchLinear) and one.name == name else one
                for one in queue
            )
            for queue in queues.queues
        ),
    )


def test_a_result_that_lies_where_others_read_is_noticed():
    """The first product over its own x, which other SMs may not have read."""
    case = batch_case(program_of("chain" if "chain" in PROGRAMS else NAMES[0], 3))
    first = next(one for one in case.queues[0].queues[0] if isinstance(one, BatchLinear))
    bad = replace(case, queues=(change(case.queues[0], first.name, dst=first.src * 16 * 1024),))
    values = random_values(case.program)
    (given,) = case.program.with_role("input")
    for seed in range(3):
        with pytest.raises(CheckError, match="activation"):
            emulate(bad, values, [{given.name: torch.ones(given.shape)}], seed)
