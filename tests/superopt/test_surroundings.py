"""Which ops stand among like ones, and that rules are not tried again where they did not help."""

import pytest

from bench.models import gated_mlp
from distmega.program.types import Program
from distmega.superopt.rewrite import apply_rules
from distmega.superopt.rules import shipped_rules
from distmega.superopt.surroundings import Surroundings


def layers(num: int) -> Program:
    return gated_mlp(1, num, 128, 256).program


def test_layers_are_alike_but_for_the_ends():
    program, known = layers(10), Surroundings()
    found = known.of(program)
    norms = [found[op.name] for op in program.ops if op.kind == "rms_norm"]
    assert norms[4] == norms[5]
    assert norms[0] != norms[4] != norms[-1]
    assert known.of(program) == found
    assert {*known.of(layers(11)).values()} == {*found.values()}


def test_other_shapes_are_others():
    known = Surroundings()
    wide = known.of(gated_mlp(1, 8, 128, 512).program)
    assert {*wide.values()}.isdisjoint(known.of(layers(8)).values())


@pytest.mark.parametrize("helps", [False, True])
def test_cost_is_asked_as_often_for_more_layers(helps: bool):
    """Where nothing helps as for 8 layers; where all does, once a layer more."""

    def asked(num: int) -> tuple[int, int]:
        calls: list[int] = []

        def cost(program: Program) -> float:
            calls.append(len(program.ops))
            num_made = sum("#" in op.name for op in program.ops)
            return float(-num_made) if helps else 1.0

        made = apply_rules(layers(num), shipped_rules(), cost)
        return len(calls), sum("#" in op.name for op in made.ops)

    few, many = asked(8), asked(14)
    assert bool(few[1]) == helps
    assert many[0] - few[0] == (6 if helps else 0)
