"""A step begins with the last flag of the one before, whatever the head reads."""

from dataclasses import replace

import torch

from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowLinear
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.kernels.hopper.emulator.emulating import case_of, expected


def layers_and_head(layers: int, *, neck: bool) -> Program:
    """Equal layers, perhaps a linear of other sizes, and the choice of a token from its result."""
    p = ProgramBuilder("chosen")
    x = p.input("x", (1, 64), "bf16")
    for i in range(layers):
        h = p.linear(x, p.weight(f"u{i}", (96, 64), "bf16")).map("tanh(a0)")
        x = p.pointwise("a0 + a1", x, p.linear(h, p.weight(f"d{i}", (64, 96), "bf16")))
    if neck:
        x = p.linear(x, p.weight("neck", (80, 64), "bf16")).map("relu(a0)")
    return p.build(p.argmax(p.linear(x, p.weight("head", (200, x.shape[-1]), "bf16"))))


def heads(queues: RowQueues) -> set[int]:
    """Generations of what a token is chosen by."""
    return {
        one.generation
        for queue in queues.queues
        for one in queue
        if isinstance(one, RowLinear) and queues.epilogues[one.opcode].ranked
    }


def test_tokens_of_a_head_behind_another_linear():
    """Its x is of the first generation; layers have seven, or so many that some are left out."""
    for layers in (2, 7):
        for neck in (False, True):
            program = layers_and_head(layers, neck=neck)
            case = case_of(program, num_sms=5)
            (queues,) = case.queues
            assert heads(queues) == {queues.num_generations - 1}
            torch.manual_seed(layers)
            values = {
                tensor.name: (torch.randn(tensor.shape) * tensor.shape[1] ** -0.5).bfloat16()
                for tensor in program.with_role("weight")
            }
            inputs = [{"x": torch.randn(1, 64).bfloat16()}] * 2
            found = case.emulate(values, inputs, layers)
            (wanted,) = expected(program, values, inputs[:1])
            token = int(wanted[program.outputs[0]][0])
            assert [each[0].ids for each in found] == [(token,)] * 2


def test_a_head_with_another_flag_is_waited_for_in_vain():
    (queues,) = case_of(layers_and_head(3, neck=True), num_sms=5).queues
    late = replace(
        queues,
        queues=tuple(
            tuple(
                replace(one, generation=0, flag_delta=0)
                if isinstance(one, RowLinear) and queues.epilogues[one.opcode].ranked
                else one
                for one in queue
            )
            for queue in queues.queues
        ),
    )
    assert find_hazard(queues) == ""
    assert "for ever" in find_hazard(late)
