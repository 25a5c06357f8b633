"""Whole programs as one launch a rank on CPUs: the interpreter against library ops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distmega.compiled import CompiledProgram, compile_plan
from distmega.engine.ranks.agreement import require_equal
from distmega.engine.ranks.context import RankContext
from distmega.errors import LaunchError, ProgramError, RequestError, UnsupportedError
from distmega.hostir.comm.communicator import GlooCommunicator, SingleCommunicator
from distmega.kernels import runners, whole
from distmega.kernels.machines import CPU, H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import flipped
from tests.hostir.threads import ThreadCommunicator, Wires

MESH = DeviceMesh(tp=1)


def gated(formula: str, rows: int = 3) -> Program:
    p = ProgramBuilder("gated")
    x = p.input("x", (rows, 40))
    h = p.rms_norm(x, p.weight("n", (40,)), 1e-5)
    pair = (p.linear(h, p.weight(name, (72, 40))) for name in "gu")
    mixed = p.pointwise(formula, *pair)
    return p.build(p.pointwise("a0 + a1", p.linear(mixed, p.weight("d", (40, 72))), x))


def counting() -> Program:
    """A state that grows by the input."""
    p = ProgramBuilder("counting")
    total, x = p.state("total", (4,)), p.input("x", (4,))
    p.set(p.pointwise("a0 + a1", total, x), total)
    return p.build(total.map("a0 * 2"))


def compiled(program: Program, **options: object) -> CompiledProgram:
    plan = plan_program(program, MESH, CPU)
    return CompiledProgram(plan, SingleCommunicator(MESH), **options)


def random_parts(step: CompiledProgram) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = step.plan.program.tensors
    return step.parts({t.name: torch.randn(t.shape) for t in tensors if t.role != "temp"})


@pytest.mark.parametrize("formula", ["silu(a0) * a1", "tanh(a0) + a1", "a1 * silu(a0)"])
def test_one_launch_gives_what_library_ops_give(formula):
    program = gated(formula)
    slow, fast = compiled(program), compiled(program, megakernel=True)
    parts = random_parts(slow)
    (expected,), (found,) = slow(parts).values(), fast(parts).values()
    torch.testing.assert_close(found, expected)
    assert (fast.stats.num_megakernels, fast.stats.num_library_ops) == (1, 0)
    assert fast.stats.num_tasks > 0
    counts = f"{fast.stats.num_tasks} tasks, {fast.stats.num_events} events"
    assert f"one megakernel a rank of {counts}\n" in fast.explain()
    assert slow.stats.num_megakernels == 0
    assert "no megakernel: a CPU" in slow.explain()


@pytest.mark.parametrize("megakernel", [False, True])
def test_a_cpu_has_no_timeline_and_the_refused_call_leaves_states_as_they_are(megakernel):
    step, total = compiled(counting(), megakernel=megakernel), torch.zeros(4)
    with pytest.raises(UnsupportedError, match=r"a timeline of program .* on cpu; expected a GPU"):
        step.trace({"x": torch.ones(4), "total": total})
    assert total.tolist() == [0.0] * 4
    step({"x": torch.ones(4), "total": total})
    assert total.tolist() == [1.0] * 4


def test_weights_are_copied_when_they_are_bound():
    step = compiled(gated("a0 * a1"), megakernel=True)
    parts = random_parts(step)
    (first,) = step(parts).values()
    parts["d"].zero_()
    (same,) = step(parts).values()
    assert torch.equal(same, first)
    (other,) = step(parts | {"d": torch.zeros_like(parts["d"])}).values()
    assert torch.equal(other, parts["x"])


def test_states_of_the_caller_are_updated_where_they_are():
    step = compiled(counting(), megakernel=True)
    assert (step.stats.num_megakernels, step.stats.num_library_ops) == (1, 0)
    assert "states are copied to it and back" in step.explain()
    total = torch.full((4,), 3.0)
    for number in range(1, 4):
        (out,) = step({"x": torch.ones(4), "total": total}).values()
        assert torch.equal(total, torch.full((4,), 3.0 + number))
        assert torch.equal(out, 2 * total)
    total.zero_()
    other = torch.ones(4)
    step({"x": torch.ones(4)})
    step({"x": torch.ones(4), "total": other})
    assert (total.tolist(), other.tolist()) == ([1.0] * 4, [2.0] * 4)


def test_a_state_that_leaves_is_that_of_the_caller():
    p = ProgramBuilder("leaves")
    total, x = p.state("total", (4,)), p.input("x", (4,))
    p.set(p.pointwise("a0 + a1", total, x), total)
    step = compiled(p.build(total), megakernel=True)
    given = torch.ones(4)
    (out,) = step({"x": torch.ones(4), "total": given}).values()
    assert out is given
    assert torch.equal(given, torch.full((4,), 2.0))


@pytest.mark.parametrize("megakernel", [True, False])
def test_a_state_that_no_op_uses_is_left_alone(megakernel: bool):
    p = ProgramBuilder("unused")
    x = p.input("x", (4, 4))
    p.state("s", (4,))
    program = p.build(x.map("a0 + 1").map("2.0 * a0"))
    plan = plan_program(program, MESH, CPU)
    step = CompiledProgram(plan, SingleCommunicator(MESH), megakernel=megakernel)
    given = step.parts({"x": torch.ones(4, 4), "s": torch.ones(4)})
    (found,) = step(given).values()
    assert (found == 4).all() and (given["s"] == 1).all()  # noqa: PT018


def test_states_are_those_of_the_program():
    step = compiled(counting(), megakernel=True, warm=True)
    step.load({"total": torch.ones(4)})
    for number in range(1, 4):
        (out,) = step({"x": torch.ones(4)}).values()
        assert torch.equal(out, torch.full((4,), 2.0 * (number + 1)))
    assert torch.equal(step.tensors["total"], torch.full((4,), 4.0))
    with pytest.raises(ProgramError, match="state 'total' in memory of the caller"):
        step.bind({"total": torch.zeros(4)})


def test_a_call_with_an_index_out_of_range_leaves_the_program_usable():
    """Of two ops beside each other, only one had run when the index was met."""
    p = ProgramBuilder("looks")
    ids, table = p.input("ids", (3,), "i64"), p.weight("table", (7, 40))
    x = p.embedding(ids.map("a0 - 1"), table)
    beside = p.linear(p.weight("v", (3, 8)), p.weight("u", (72, 8)))
    step = compiled(p.build(p.linear(x, p.weight("w", (72, 40))) * beside), megakernel=True)
    torch.manual_seed(0)
    given = {t.name: torch.randn(t.shape) for t in step.plan.program.with_role("weight")}
    for row in (6, 7, -1, 5):
        call = {**given, "ids": torch.tensor([1, row + 1, 4])}
        if not 0 <= row < 7:
            with pytest.raises(RequestError, match=f"an id of {row} in a table of 7 rows"):
                step(call)
            continue
        (found,) = step(call).values()
        expected = given["table"][call["ids"] - 1] @ given["w"].T * (given["v"] @ given["u"].T)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("megakernel", [True, False])
@pytest.mark.parametrize("looks", ["embedding", "gather", "reshaped"])
def test_ids_that_no_row_has_are_refused_before_anything_runs(megakernel: bool, looks: str):
    """They do not count from the end either."""
    p = ProgramBuilder("looks")
    total, table = p.state("total", (1,)), p.weight("table", (7, 4))
    p.set(total.map("a0 + 1"), total)
    if looks == "gather":
        found = p.gather(table, p.input("ids", (2, 4), "i64"), 0)
    elif looks == "reshaped":
        found = p.embedding(p.reshape(p.input("ids", (2, 2), "i64"), (4,), view=True), table)
    else:
        found = p.embedding(p.input("ids", (4,), "i64"), table)
    step = compiled(p.build(found, total), megakernel=megakernel)
    weights = {"table": torch.randn(7, 4), "total": torch.zeros(1)}
    ids = torch.full(step.plan.program.tensor_map()["ids"].shape, 6)
    step({**weights, "ids": ids})
    for row in (-1, 7):
        ids[-1] = row
        with pytest.raises(RequestError, match=f"an id of {row} in 'ids' .*7 rows; .* from 0 to 6"):
            step.part("ids", ids)
        with pytest.raises(RequestError, match=f"an id of {row} in 'ids' in a table of 7 rows"):
            step({"ids": ids})
    assert weights["total"].item() == 1


@pytest.mark.parametrize("megakernel", [True, False])
@pytest.mark.parametrize("kind", ["gather", "rope"])
@pytest.mark.parametrize("row", [-1, 7])
def test_ids_that_a_program_computes_are_checked_when_they_are_looked_up(
    megakernel: bool, kind: str, row: int
):
    p = ProgramBuilder("computes")
    ids, table = p.input("ids", (3,), "i64").map("a0 + 1"), p.weight("table", (7, 4))
    if kind == "gather":
        found = p.gather(table, p.expand(p.reshape(ids, (3, 1)), (3, 4)), 0)
    else:
        found = p.rope(p.input("x", (3, 2, 4)), ids, table)
    step = compiled(p.build(found), megakernel=megakernel)
    given = {"table": torch.randn(7, 4), "x": torch.ones(3, 2, 4)}
    if kind == "gather":
        del given["x"]
    with pytest.raises(RequestError, match=f"an id of {row} in a table of 7 rows"):
        step({**given, "ids": torch.tensor([0, row - 1, 2])})


@pytest.mark.parametrize("megakernel", [True, False])
@pytest.mark.parametrize(
    "wrong", [{"at": [-1, 2]}, {"at": [4, 2]}, {"of": [0, -1]}, {"of": [3, 0]}]
)
def test_an_append_outside_of_its_cache_is_refused(megakernel: bool, wrong: dict[str, list[int]]):
    """Places do not count from the end."""
    p = ProgramBuilder("appends")
    cache, x = p.state("cache", (3, 2, 4, 5)), p.input("x", (2, 2, 5))
    p.kv_append(cache, x, p.input("at", (2,), "i64"), p.input("of", (2,), "i64"))
    step = compiled(p.build(cache), megakernel=megakernel)
    given = {"cache": torch.zeros(3, 2, 4, 5), "x": torch.ones(2, 2, 5)}
    places = {name: torch.tensor(wrong.get(name, [0, 1])) for name in ("at", "of")}
    number = next(value for found in wrong.values() for value in found if value not in (0, 2))
    with pytest.raises(RequestError, match=f"an id of {number} in '{next(iter(wrong))}'"):
        step(given | places)
    assert not given["cache"].any()


def divided(rows: int, *, looks_up: bool) -> tuple[Program, dict[str, Layout]]:
    """Ranks have some columns of the rows that come in, and add up products of these."""
    p = ProgramBuilder("divided")
    table = p.weight("rows", (50, 64), "bf16") if looks_up else None
    x = (
        p.embedding(p.input("ids", (rows,), "i64"), table)
        if table
        else p.input("rows", (rows, 64), "bf16")
    )
    h = p.linear(x, p.weight("up", (128, 64), "bf16")).map("tanh(a0)")
    program = p.build(p.linear(h, p.weight("down", (64, 128), "bf16")))
    marks = {"up": shard(1, "tp"), "rows": shard(1, "tp")}
    return program, marks | ({"down": replicate()} if rows == 1 else {})


@pytest.mark.parametrize(
    ("rows", "looks_up", "problem"),
    [
        (1, True, "'rows', of which ranks have parts|rows of 'rows' with 32 of 64 columns"),
        (3, True, "rows of 'rows' with 32 of 64 columns on each rank"),
        (3, False, ""),
    ],
)
def test_rows_of_which_ranks_have_parts_are_not_exchanged(rows, looks_up, problem, monkeypatch):
    monkeypatch.setattr(runners, "require_hopper", lambda device: 8)
    monkeypatch.setattr(whole, "_team", lambda comm: SimpleNamespace(team_rank=0, size=2))
    program, marks = divided(rows, looks_up=looks_up)
    mesh = DeviceMesh(tp=2)
    local = localize(plan_program(program, mesh, H200, marks))
    comm = ThreadCommunicator(mesh, 0, Wires(mesh))
    if not problem:
        assert whole.plan_whole(local, comm, torch.device("cuda", 0)).queues.num_ranks == 2
        return
    with pytest.raises(UnsupportedError, match=problem):
        whole.plan_whole(local, comm, torch.device("cuda", 0))


@pytest.mark.parametrize("megakernel", ["yes", None, 1])
def test_another_choice_of_kernel_is_refused(megakernel):
    with pytest.raises(ProgramError, match=f"megakernel={megakernel!r}; expected True, False or"):
        compiled(gated("a0 * a1"), megakernel=megakernel)


def test_a_program_that_is_not_planned_is_refused():
    context = RankContext(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node="", backend="gloo",
        device="cpu",
    )  # fmt: skip
    with pytest.raises(ProgramError, match="Program in place of a plan; expected what plan_prog"):
        compile_plan(gated("a0 * a1"), context)


def test_what_no_kernel_does_is_named():
    program = flipped()
    found = r"op 'turned' of kind opaque: .*\(r0_0 2, r0_1 8, w0_0 2, w0_1 8\).*softmax"
    with pytest.raises(UnsupportedError, match=found):
        compiled(program, megakernel=True)
    step = compiled(program, megakernel=False)
    assert "no megakernel: megakernel=False" in step.explain()
    p = ProgramBuilder("shows")
    program = p.build(p.transpose(p.input("x", (2, 8)), (1, 0), view=True))
    with pytest.raises(UnsupportedError, match="views alone in program 'shows'"):
        compiled(program, megakernel=True)


def sums_in_two_orders() -> tuple[Program, dict[str, Layout]]:
    p = ProgramBuilder("orders")
    x, w = p.input("x", (6, 2, 3, 4, 5)), p.weight("w", (7, 5, 4, 3, 2))
    return p.build(p.linear(x, w, spec="m a b c d, n d c b a -> m n", name="y")), {}


def sums_of_a_view_with_gaps() -> tuple[Program, dict[str, Layout]]:
    p = ProgramBuilder("gaps")
    x = p.input("x", (3,) * 5).map("a0 + 1")
    for dim in range(1, 5):
        x = p.slice(x, dim, 0, 2, view=True)
    w = p.weight("w", (2, 2, 2, 2, 7))
    return p.build(p.linear(x, w, spec="m a b c d, a b c d n -> m n", name="y")), {}


def long_walk() -> tuple[Program, dict[str, Layout]]:
    """A product an element of b, which is walked."""
    p = ProgramBuilder("walk")
    x, w = p.input("x", (20000, 2, 3)), p.weight("w", (20000, 4, 3))
    return p.build(p.linear(x, w, spec="b m k, b n k -> b m n", name="y")), {}


def in_chunks() -> tuple[Program, dict[str, Layout]]:
    return gated("a0 * a1", rows=4), {"x": stream(0, 2)}


def with_a_short_chunk() -> tuple[Program, dict[str, Layout]]:
    return gated("a0 * a1", rows=5), {"x": stream(0, 3)}


def in_fewer_chunks_than_asked_for() -> tuple[Program, dict[str, Layout]]:
    return gated("a0 * a1", rows=4), {"x": stream(0, 3)}


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        (
            sums_in_two_orders,
            r"sums that do not merge into 3 dims \(.*; expected at most 3 dims of",
        ),
        (
            sums_of_a_view_with_gaps,
            "sums that do not merge into 3 dims .*; expected at most 3 dims",
        ),
        (
            long_walk,
            r"'y' of kind linear: 20000 instructions \(.*; expected at most 16384; state it",
        ),
        (in_chunks, "a host loop of 2 chunks in .*; expected a plan without host loops, whose"),
        (with_a_short_chunk, r"a host loop of 3 chunks in .* 5 by 2\)"),
        (in_fewer_chunks_than_asked_for, r"a host loop of 2 chunks in .* 4 by 2\)"),
    ],
)
def test_what_is_in_the_way_of_one_launch_is_what_the_message_expects_otherwise(stated, problem):
    """The kinds that a megakernel does are no help where it does that kind, but not this op."""
    program, marks = stated()
    plan = plan_program(program, MESH, CPU, marks)
    with pytest.raises(UnsupportedError, match=problem):
        CompiledProgram(plan, SingleCommunicator(MESH), megakernel=True)
    assert CompiledProgram(plan, SingleCommunicator(MESH)).stats.num_megakernels == 0


def test_ranks_that_compile_otherwise_are_named_before_a_launch():
    mesh = DeviceMesh(tp=3)

    def told(*theirs: str) -> SimpleNamespace:
        return SimpleNamespace(mesh=mesh, all_gather_object=lambda mine: [[one] for one in theirs])

    require_equal(told("a", "a", "a"), "program 'p'", ["a"])
    with pytest.raises(
        LaunchError, match=r"ranks \[2\] compiled program 'p' otherwise than rank 0"
    ):
        require_equal(told("a", "a", "b"), "program 'p'", ["a"])


class Told(GlooCommunicator):
    """Rank 0 of two, of which the other one tells what is given in turn, then the same."""

    def __init__(self, *theirs: list[str]) -> None:
        self.mesh, self.rank, self.theirs = DeviceMesh(tp=2), 0, [*theirs]

    def all_gather_object(self, value: Any, axis: str = "") -> list[Any]:
        return [value, self.theirs.pop(0) if self.theirs else value]


def test_programs_of_library_ops_are_compared_too():
    plan = plan_program(gated("a0 * a1"), DeviceMesh(tp=2), CPU)
    CompiledProgram(plan, Told())
    asked = ["auto True False cpu"]
    with pytest.raises(LaunchError, match=r"ranks \[1\] compiled program 'gated' otherwise"):
        CompiledProgram(plan, Told(asked, ["another plan", "another program", ""]))


@pytest.mark.parametrize("megakernel", [False, True, "auto"])
def test_ranks_that_ask_for_other_kernels_are_named_at_once(megakernel):
    """What else they tell each other depends on that."""
    plan = plan_program(gated("a0 * a1"), DeviceMesh(tp=2), CPU)
    told = Told([f"{megakernel is False} True False cpu"])
    with pytest.raises(LaunchError, match=r"ranks \[1\] compiled program 'gated' otherwise"):
        CompiledProgram(plan, told, megakernel=megakernel)
    assert not told.theirs


def test_kernels_of_equal_programs_have_equal_fingerprints():
    found = []
    for formula, rows in (("a0 * a1", 3), ("a0 * a1", 3), ("a0 + a1", 3), ("a0 * a1", 4)):
        local = localize(plan_program(gated(formula, rows), MESH, CPU))
        plan = whole.plan_whole(local, SingleCommunicator(MESH), torch.device("cpu"))
        found.append(plan.fingerprint)
    assert found[0] == found[1]
    assert len(set(found)) == 3
