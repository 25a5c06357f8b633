"""Columns that ranks gather inside the kernel of one row: they give what torch does in any order,
whoever takes them.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from distmega.errors import CheckError, UnsupportedError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowLinear
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard
from tests.gpu.test_whole import Maker, program_of, random_values
from tests.kernels import row_programs
from tests.kernels.hopper.emulator.emulating import Case, case_of, error, expected, with_queues

MOST_ERROR = 0.02
"""Of what is rounded to bf16 between ops."""


def leaving(m: Maker) -> Handle:
    """Taken by nobody else."""
    return m.linear(m.rms(m.input(128), "n"), "w", 192, bias=True)


def gates(m: Maker) -> Handle:
    """Two streams that meet, then a product of what is gathered."""
    h = m.rms(m.input(128), "n")
    mixed = m.p.pointwise("silu(a0) * a1", m.linear(h, "g", 256), m.linear(h, "u", 256))
    return m.linear(mixed, "d", 128)


def added(m: Maker) -> Handle:
    """Gathered twice, polled and added to."""
    x = m.linear(m.input(128), "a", 128)
    y = m.linear(x, "b", 256).map("tanh(a0)")
    return m.p.pointwise("a0 + a1", m.linear(y, "c", 128), x)


def normed(m: Maker) -> Handle:
    """Rows of what is gathered are normalised, by whom no product asks."""
    return m.rms(m.linear(m.input(128), "a", 256).map("gelu(a0)"), "n")


def two_forms(m: Maker) -> Handle:
    """Of two products of one size others poll the first in pairs, and the second by numbers."""
    return m.linear(m.rms(m.linear(m.input(128), "a", 128), "n"), "b", 128)


PROGRAMS: dict[str, Callable[[Maker], Handle]] = {
    "leaving": leaving, "gates": gates, "added": added, "normed": normed, "two_forms": two_forms,
}  # fmt: skip


def build(name: str, rows: int = 1) -> Program:
    if name not in PROGRAMS:
        return program_of(name, "bf16", rows)
    m = Maker("bf16", rows)
    return m.p.build(PROGRAMS[name](m))


def columns_of(program: Program) -> dict[str, Layout]:
    """Every rank has columns of each product."""
    return {t.name: shard(0, "tp") for t in program.with_role("weight") if len(t.shape) == 2}


def gathering(name: str, tp: int, num_sms: int) -> Case:
    program = build(name)
    marks = columns_of(program) if name in (*PROGRAMS, "chain") else {}
    case = case_of(program, tp, num_sms, marks)
    kinds = {op.kind for op in case.local.program.ops}
    assert "all_gather" in kinds
    return case


def require_right(case: Case, seed: int) -> None:
    """Two equal calls and another one, on all ranks."""
    values = random_values(case.program)
    x = values.pop("x")
    inputs = [{"x": one} for one in (x, x, -0.5 * x)]
    exact = expected(case.program, values, inputs)
    found = case.emulate(values, inputs, seed)
    (out,) = case.program.outputs
    for each, wanted in zip(found, exact, strict=True):
        for one in each:
            assert error(one.outputs[out], wanted[out]) < MOST_ERROR
            assert torch.equal(one.outputs[out], each[0].outputs[out])
    assert torch.equal(found[0][0].outputs[out], found[1][0].outputs[out])


@pytest.mark.parametrize(
    ("name", "tp", "num_sms"),
    [
        ("leaving", 2, 3),
        ("gates", 4, 4),
        ("added", 2, 4),
        ("normed", 2, 3),
        ("two_forms", 2, 3),
        ("chain", 2, 5),
    ],
)
def test_columns_of_all_ranks(name: str, tp: int, num_sms: int):
    require_right(gathering(name, tp, num_sms), seed=tp)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [*PROGRAMS, "chain", "post norms", "post layer norms"])
def test_columns_in_many_orders(name: str, tp: int):
    for seed in range(8):
        require_right(gathering(name, tp, 3 + seed % 6), seed)


def test_rows_of_some_ranks_tell_nothing_of_the_others():
    """An SM's rows are of some ranks: it waits for all, unless another op tells it."""
    found = {
        (name, tp): [formula.norm for formula in gathering(name, tp, 3).queues[0].formulas]
        for name in ("leaving", "gates")
        for tp in (2, 4)
    }
    assert found["leaving", 2] == found["leaving", 4] == ["heard"]
    assert found["gates", 2] == found["gates", 4] == ["copy"]


def test_an_input_of_fewer_units_than_ranks_tells_these_nothing():
    """One of two ranks hands out all of it: the other one's launches are news to nobody."""
    m = Maker("bf16", 1)
    program = m.p.build(m.linear(m.input(8), "w", 8).map("tanh(a0)"))
    with pytest.raises(UnsupportedError, match=r"overwrites word .* has read it"):
        case_of(program, 2, 2, columns_of(program))


def test_programs_that_are_planned_alone_gather_too():
    """Without marks the planner divides weights of the first and the last product by columns."""
    case = case_of(build("post norms"), 2, 6)
    assert sum(op.kind == "all_gather" for op in case.local.program.ops) == 2
    assert find_hazard(case.queues[0]) == ""


def unguarded(queues: RowQueues) -> RowQueues:
    """All products in one buffer, as if nobody read them any more."""
    firsts = [one.dst for one in queues.queues[0] if isinstance(one, RowLinear)]

    def other(one: object) -> object:
        return replace(one, dst=firsts[0]) if isinstance(one, RowLinear) else one

    return replace(queues, queues=tuple(tuple(map(other, queue)) for queue in queues.queues))


def test_parts_over_words_that_peers_still_read_are_noticed():
    case = gathering("added", 2, 4)
    bad = with_queues(case, [unguarded(queues) for queues in case.queues])
    assert find_hazard(bad.queues[0]) != ""
    values = random_values(case.program)
    with pytest.raises(CheckError):
        bad.emulate(values, [{"x": values["x"]}] * 2, 0)


def test_the_given_row_is_kept_where_others_than_sums_take_it():
    """Embedded by whichever rank has the token, and added to a norm."""
    program = row_programs.post_norms(1)
    values = row_programs.random_values(program)
    inputs = [{"ids": values["ids"]}, {"ids": values["ids"] // 2}]
    _, out = program.outputs
    exact = expected(program, values, inputs)
    for each, wanted in zip(case_of(program, 2, 4).emulate(values, inputs, 0), exact, strict=True):
        for one in each:
            assert error(one.outputs[out], wanted[out]) < MOST_ERROR
            assert one.ids == each[0].ids


def test_a_row_of_which_ranks_have_parts_is_refused():
    """No rank could hand it out."""
    with pytest.raises(UnsupportedError, match="of which ranks have parts"):
        case_of(row_programs.two_tables(1), 2, 4)
    p = ProgramBuilder("parts")
    x = p.input("x", (1, 256), "bf16")
    program = p.build(p.linear(x, p.weight("w", (256, 256), "bf16")))
    with pytest.raises(UnsupportedError, match="of which ranks have parts"):
        case_of(program, 2, 4, {"x": shard(1, "tp"), "w": shard(1, "tp")})
