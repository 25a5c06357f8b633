"""Where programs are cut into stages, and what then goes from one to another."""

import random
from itertools import pairwise

import pytest

from distmega.errors import PlanError
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program, accesses, verify_program
from distmega.sharding.search.cost import op_bytes
from distmega.sharding.stages import Stage, cut_positions, split_stages
from tests.sharding.programs import decoder


def stages_of(program: Program, num: int) -> tuple[Stage, ...]:
    return split_stages(program, cut_positions(program, num))


def bytes_of(stage: Stage) -> int:
    tensors = stage.program.tensor_map()
    return sum(op_bytes(op, tensors) for op in stage.program.ops)


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_a_70b_model_is_cut_between_blocks_into_equal_stages(num: int) -> None:
    program = build_decoder(PRESETS["llama-3-70b"], 1, 512, dtype="bf16")
    stages = stages_of(program, num)
    sizes = [bytes_of(stage) for stage in stages]
    assert max(sizes) < 1.08 * sum(sizes) / num
    for stage in stages[1:]:
        received = [t.tensor for t in stage.transfers if t.target == stage.index and not t.final]
        assert [tensor.shape for tensor in received] == [(1, 8192)]


def test_a_head_larger_than_the_layers_stands_alone() -> None:
    program = decoder(layers=2, hidden=4, ffn=4, vocab=4000)
    cuts = cut_positions(program, 2)
    assert cuts == ("logits",) or cuts == ("final",)


def random_program(seed: int) -> Program:
    """Ops that read any earlier tensors, states and views among them."""
    choices = random.Random(seed)
    p = ProgramBuilder("random")
    made = [p.input("x", (4, 6)), p.state("s", (4, 6))]
    for i in range(choices.randint(4, 12)):
        one, other = choices.choices(made, k=2)
        kind = choices.randrange(4)
        if kind == 0:
            made.append(p.linear(one, p.weight(f"w{i}", (6, 6)), name=f"t{i}"))
        elif kind == 1:
            made.append(p.pointwise("a0 + a1", one, other, name=f"t{i}"))
        elif kind == 2:
            made.append(p.slice(one, 0, 0, 4, view=True, name=f"t{i}"))
        else:
            made.append(p.set(one, name=f"t{i}"))
    temps = made[2:]
    return p.build(temps[-1], choices.choice(temps))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_stages_are_programs_that_give_each_other_what_they_need(num: int) -> None:
    num_cut = 0
    for seed in range(200):
        program = random_program(seed)
        try:
            stages = stages_of(program, num)
        except PlanError:
            continue
        num_cut += 1
        assert tuple(op for stage in stages for op in stage.program.ops) == program.ops
        tensors = program.tensor_map()
        held: list[set[str]] = [set() for _ in stages]
        for stage in stages:
            verify_program(stage.program)
            held[stage.index] |= {a.tensor for op in stage.program.ops for a in op.writes}
            sent = {t.tensor.name for t in stage.transfers if t.source == stage.index}
            assert sent <= held[stage.index]
            for t in stage.transfers:
                if t.target == stage.index:
                    held[stage.index].add(t.tensor.name)
                    assert t.final or t.source < stage.index
            used = {a.tensor for op in stage.program.ops for a in accesses(op)}
            assert {n for n in used if tensors[n].role == "temp"} <= held[stage.index]
            assert {n for n in program.outputs if tensors[n].role == "temp"} <= held[stage.index]
        for one, other in pairwise(stages):
            states = ({t.name for t in s.program.with_role("state")} for s in (one, other))
            assert not set.intersection(*states)
    assert num_cut > 40


def test_a_user_fixes_the_stage_of_an_op() -> None:
    program = decoder(layers=4)
    free, fixed = cut_positions(program, 2), cut_positions(program, 2, {"layers.0.a": 1})
    assert fixed != free
    first = split_stages(program, fixed)[0].program
    assert not any(op.name.startswith("layers.0") for op in first.ops)
    last = split_stages(program, cut_positions(program, 2, {"layers.3.a": 0}))[1].program
    assert not any(op.name == "layers.3.a" for op in last.ops)


def test_stages_that_cannot_be_are_refused() -> None:
    program = decoder(layers=1)
    with pytest.raises(PlanError, match="99 stages of program 'decoder'; expected as many places"):
        cut_positions(program, 99)
    with pytest.raises(PlanError, match="op 'nothing' in stage 0; expected an op of 'decoder'"):
        cut_positions(program, 2, {"nothing": 0})
    with pytest.raises(PlanError, match="op 'logits' in stage 2"):
        cut_positions(program, 2, {"logits": 2})
    with pytest.raises(PlanError, match="with 2 ops fixed"):
        cut_positions(program, 2, {"x": 1, "logits": 0})
    with pytest.raises(PlanError, match=r"stages that begin with ops \['nothing'\]"):
        split_stages(program, ("nothing",))
