"""Queues of the kernel of one row, emulated: they compute what torch does in any order of SMs and
ranks, launch after launch and step after step; queues that lack a wait are noticed.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.llama import VARIANTS, llama_1b
from distmega.errors import CheckError, UnsupportedError
from distmega.kernels.hopper.emulator import RowLaunch, emulate_rows
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowCombine, RowLinear
from distmega.kernels.hopper.row_plan import deferred
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.program.types import Program
from tests.gpu.test_whole import PROGRAMS, program_of, random_values
from tests.kernels.hopper.emulator.emulating import (
    Case,
    case_of,
    error,
    expected,
    with_queues,
)
from tests.kernels.hopper.row_plan.test_row_proof import few_rows
from tests.kernels.random_rows import random_rows, whole_numbers

MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops."""


SMALL = "chain", "parallel", "post layer norms", "biases of gates"
LARGE = [pytest.param(name, marks=pytest.mark.nightly) for name in PROGRAMS if name not in SMALL]


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_calls_in_any_order_of_sms_give_what_torch_does(name: str):
    """Two equal calls give equal bits, a third one with another input its own."""
    program = program_of(name, "bf16")
    values = random_values(program)
    case = case_of(program, num_sms=5)
    x = values["x"]
    inputs = [{"x": x}, {"x": x}, {"x": -0.5 * x}]
    exact = expected(program, values, inputs)
    (out,) = program.outputs
    first = None
    for seed in range(2):
        found = [each[0].outputs[out] for each in case.emulate(values, inputs, seed)]
        first = found[0] if first is None else first
        assert torch.equal(found[0], first)
        assert torch.equal(found[0], found[1])
        for one, wanted in zip(found, exact, strict=True):
            assert error(one, wanted[out]) < MOST_ERROR


def decoder(variant: str, position: int, tp: int = 1, num_sms: int = 6) -> Case:
    """Two small layers of a decoder."""
    model = llama_1b(variant, 2, 128, (8, 4, 32), 192, 200, position, with_state=True)
    return case_of(model.program, tp, num_sms, model.marks)


def decoder_values(program: Program) -> dict[str, Tensor]:
    torch.manual_seed(0)
    values = {}
    for tensor in (*program.with_role("weight"), *program.with_role("state")):
        x = torch.randn(tensor.shape)
        if tensor.role == "weight":
            x = x * tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 1 + 0.1 * x
        values[tensor.name] = x if tensor.dtype == "f32" else x.bfloat16()
    return values


def step_inputs(position: int, num: int) -> list[Mapping[str, Tensor]]:
    return [
        {"token": torch.tensor([7 + i]), "position": torch.tensor([position + i])}
        for i in range(num)
    ]


def require_decodes(case: Case, position: int, seed: int) -> None:
    """Steps on end, a launch each, from `position` on, give every rank torch's tokens and state."""
    values, inputs = decoder_values(case.program), step_inputs(position, 3)
    token, state = case.program.outputs
    exact = expected(case.program, values, inputs)
    found = case.emulate(values, inputs, seed)
    for each, wanted in zip(found, exact, strict=True):
        for one in each:
            assert one.ids == (int(wanted[token][0]),)
            assert error(one.outputs[state], wanted[state]) < MOST_ERROR
            assert torch.equal(one.outputs[state], each[0].outputs[state])


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoders_of_many_kinds(variant: str):
    """Over the end of a block of cached positions."""
    require_decodes(decoder(variant, 130), 126, seed=len(variant))


@pytest.mark.parametrize(("variant", "seed"), [("plain", 0), ("parallel", 1)])
def test_decoders_on_two_ranks(variant: str, seed: int):
    require_decodes(decoder(variant, 130, tp=2), 126, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoders_in_many_orders(variant: str, tp: int):
    taken = 0
    for num_sms in (3, 8, 20):
        try:
            case = decoder(variant, 530, tp, num_sms)
        except UnsupportedError:  # biases of a head a rank, or rows that an SM has no part of
            continue
        taken += 1
        for seed in range(6):
            require_decodes(case, 510 if seed % 2 else 1, seed)
    assert taken or (variant, tp) == ("layernorm", 4)


@pytest.mark.parametrize("tp", [1, 2])
def test_steps_of_one_launch_give_what_launches_of_a_step_do(tp: int):
    case = decoder("plain", 140, tp)
    values = decoder_values(case.program)
    ranks = [case.memory(rank, values) for rank in range(tp)]
    once = [[RowLaunch(num_steps=4, first=(7, 125))] * tp, [RowLaunch(num_steps=2)] * tp]
    first, second = emulate_rows(ranks, once, seed=4)
    ranks = [case.memory(rank, values) for rank in range(tp)]
    apart = [[RowLaunch(first=(7, 125))] * tp] + [[RowLaunch()] * tp] * 5
    each = [found[0] for found in emulate_rows(ranks, apart, seed=5)]
    tokens = [one.ids[0] for one in each]
    assert list(first[0].ids + second[0].ids) == tokens
    _, state = case.program.outputs
    assert torch.equal(second[0].outputs[state], each[-1].outputs[state])
    assert first[-1].ids == first[0].ids


def test_steps_of_one_launch_with_fewer_rows_than_logits():
    case = few_rows(1)
    values = random_values(case.program)
    launch = [RowLaunch(num_steps=4, first=(7, 0))]
    found = [emulate_rows([case.memory(0, values)], [launch], seed)[0][0].ids for seed in range(6)]
    assert len({*found}) == 1


def require_exact(seed: int, num_sms: int) -> bool:
    """A random program in small whole numbers; False if the kernel can't do it."""
    program = random_rows(seed)
    try:
        case = case_of(program, num_sms=num_sms)
    except UnsupportedError:
        return False
    values = whole_numbers(program, seed)
    given = {tensor.name: values.pop(tensor.name) for tensor in program.with_role("input")}
    exact = expected(program, values, [given, given])
    for each, wanted in zip(case.emulate(values, [given, given], seed), exact, strict=True):
        for name, found in each[0].outputs.items():
            assert torch.equal(found, wanted[name].flatten())
        if case.queues[0].chosen:
            assert each[0].ids == (int(wanted[case.queues[0].chosen][0]),)
    return True


def test_random_programs_give_exact_numbers():
    assert sum(require_exact(seed, 5) for seed in range(8)) >= 6


@pytest.mark.nightly
@pytest.mark.parametrize("num_sms", [1, 4, 23])
def test_many_random_programs_give_exact_numbers(num_sms: int):
    assert sum(require_exact(seed, num_sms) for seed in range(200)) >= 150


# queues that lack something

NUM_ORDERS = 3


def change(queues: RowQueues, kind: type, name: str, **fields: int) -> RowQueues:
    """The queues with fields of one op's instructions set."""
    return replace(
        queues,
        queues=tuple(
            tuple(
                replace(one, **fields) if isinstance(one, kind) and one.name == name else one
                for one in queue
            )
            for queue in queues.queues
        ),
    )


def noticed(case: Case, queues: list[RowQueues]) -> list[str]:
    """What the emulator says of queues in several orders, where it says something."""
    values, found = decoder_values(case.program), []
    for seed in range(NUM_ORDERS):
        try:
            with_queues(case, queues).emulate(values, step_inputs(126, 3), seed)
        except CheckError as fault:
            found.append(str(fault))
    return found


def names_of(case: Case, kind: type) -> list[str]:
    queues = case.queues[0].queues
    return list(dict.fromkeys(o.name for queue in queues for o in queue if isinstance(o, kind)))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_generation_that_nobody_writes_is_a_hang(tp: int):
    case = decoder("plain", 130, tp)
    name = names_of(case, RowLinear)[-2]
    changed = [change(queues, RowLinear, name, flag_delta=7) for queues in case.queues]
    assert len(noticed(case, changed)) == NUM_ORDERS
    assert all(find_hazard(queues) for queues in changed)


def test_two_sums_over_ranks_in_one_buffer_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """A rank pushes the next part before a peer has read the last one."""
    monkeypatch.setattr(deferred, "MAX_PART_ROWS", 0)
    case = decoder("plain", 130, tp=2)
    sums = [
        one
        for one in case.queues[0].queues[0]
        if isinstance(one, RowLinear) and case.queues[0].epilogues[one.opcode].summed
    ]
    first, second = sums[:2]
    changed = [
        change(change(q, RowLinear, second.name, dst=first.dst), RowLinear, sums[3].name,
               dst=first.dst)
        for q in case.queues
    ]  # fmt: skip
    assert all(find_hazard(queues) for queues in changed)
    assert len(noticed(case, changed)) == NUM_ORDERS


def test_a_sum_of_splits_that_lies_in_the_next_ones_buffer_is_noticed():
    case = decoder("plain", 130)
    combine = next(
        one for queue in case.queues[0].queues for one in queue if isinstance(one, RowCombine)
    )
    changed = change(case.queues[0], RowCombine, combine.name, dst=combine.dst + 16)
    assert find_hazard(changed)
    assert len(noticed(case, [changed])) == NUM_ORDERS
