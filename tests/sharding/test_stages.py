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
    for num in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match=rf"num_stages {num}; expected"):
            cut_positions(program, num)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="1000000000 stages of program 'decoder'"):
        cut_positions(program, 10**9)
    p = ProgramBuilder("nothing")
    with pytest.raises(PlanError, match="2 stages of program 'nothing'; expected as many places"):
        cut_positions(p.build(p.input("x", (2,))), 2)


def shared_program() -> Program:
    """A state that two ops use, then a temporary that two write."""
    p = ProgramBuilder("shared")
    x, s = p.input("x", (2, 4)), p.state("s", (2, 4))
    a = p.pointwise("a0 + a1", x, s, name="a")
    p.set(a, into=s, name="keep")
    b = a.map("a0 * 2", name="b")
    c = b.map("a0 * 3", name="c")
    p.set(c, into=p.slice(b, 0, 0, 2, view=True, name="shown"), name="again")
    return p.build(b.map("a0 + 1", name="y"))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (("a",), r"ops \['a'\]; expected different ops behind the first"),
        (("c", "b"), "in the order of the program"),
        (("b", "b"), "expected different ops"),
        (("keep",), "begins with op 'keep', where 's' is used on both sides"),
        (("b", "c"), "begins with op 'c', where 'b' is used on both sides"),
        (("again",), "begins with op 'again', where 'b' is used on both sides"),
    ],
)
def test_cuts_by_hand_that_cannot_be_are_refused(cuts: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_stages(shared_program(), cuts)


def test_no_cut_parts_what_is_written_again() -> None:
    program = shared_program()
    assert cut_positions(program, 3) == ("b", "y")
    with pytest.raises(PlanError, match="4 stages of program 'shared'"):
        cut_positions(program, 4)


def test_results_that_no_op_makes_reach_the_stages_that_lack_them() -> None:
    p = ProgramBuilder("given")
    x, s = p.input("x", (2, 4)), p.state("s", (2, 4))
    w, unused = p.weight("w", (4, 4)), p.weight("unused", (2,))
    y = p.linear(p.pointwise("a0 + a1", x, s, name="a"), w, name="b").map("a0 * 2", name="y")
    stages = split_stages(p.build(y, x, s, w, unused), ("b", "y"))
    sent = {(t.tensor.name, t.source, t.target) for t in stages[0].transfers if t.final}
    assert sent == {
        *(("s", 0, 1), ("s", 0, 2), ("w", 1, 0), ("w", 1, 2)),
        *(("unused", 0, 1), ("unused", 0, 2), ("y", 2, 0), ("y", 2, 1)),
    }
    assert [stage.program.outputs for stage in stages] == [("a", "s", "unused"), ("b", "w"), ("y",)]
