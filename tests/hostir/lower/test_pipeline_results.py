"""Pipelines whose stages all make results, some of which later stages read, with chunks inside."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from distmega.errors import CheckError, PlanError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import (
    EndCoalescing,
    HostProgram,
    Node,
    Recv,
    Send,
    StartCoalescing,
    Wait,
)
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.lower.pipeline import StagePart, link_stage
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from distmega.sharding.stages import cut_positions, split_stages
from tests.hostir.programs import renamed, run_program
from tests.hostir.streams import small_integers
from tests.hostir.threads import ThreadCommunicator, Wires
from tests.sharding.random_programs import random_program

ROWS, NUM_BATCHES = 2, 3


def rows_program(rows: int) -> Program:
    """a on the first stage; b, read by the last as well, and c on the second; d on the last."""
    p = ProgramBuilder("rows")
    x = p.input("x", (rows, 4))
    a = p.linear(x, p.weight("w", (6, 4)), name="a")
    b = a.map("a0 * 2", name="b")
    c = p.pointwise("relu(a0) + a1", a, b, name="c")
    return p.build(b.map("a0 - 1", name="d"), b, c)


def stages(
    marks: Mapping[str, Layout],
    build: Callable[[int], Program] = rows_program,
    cuts: Sequence[str] = ("b", "d"),
    sizes: Mapping[int, int] = MappingProxyType({ROWS: NUM_BATCHES}),
    dim: int = 0,
) -> list[HostProgram]:
    """sizes: number of micro-batches by their rows, or by their extent of another dim."""
    hosts = []
    mesh = DeviceMesh(pp=1 + len(cuts))
    for index in range(1 + len(cuts)):
        parts = []
        for rows, count in sizes.items():
            stage = split_stages(build(rows), cuts)[index]
            mine = {name: layout for name, layout in marks.items() if name in stage.program.outputs}
            local = localize(plan_program(stage.program, mesh.part("pp", index), CPU, mine))
            host = lower_program(replace(local, mesh=mesh), megakernel=False, peer_memory=False)
            parts.append(StagePart(stage=stage, host=host, count=count))
        by_rows = [t.name for t in build(rows).with_role("input")]
        by_rows += [t.name for t in stage.results]
        hosts.append(run_passes(link_stage(parts, dict.fromkeys(by_rows, dim))))
    return hosts


def assert_whole(hosts: Sequence[HostProgram], whole: Program) -> None:
    """All stages have what the whole program gives."""
    check_host(hosts)
    assert all(parse_host(print_host(host)) == host for host in hosts)
    tensors = small_integers(whole)
    expected = run_program(whole, {name: x.clone() for name, x in tensors.items()})
    mesh = hosts[0].mesh
    wires = Wires(mesh)

    def run(rank: int) -> Mapping[str, torch.Tensor]:
        comm = ThreadCommunicator(mesh, rank, wires)
        return Evaluator(hosts[rank], comm, {}).run(tensors)

    with ThreadPoolExecutor(mesh.num_ranks) as pool:
        for found in pool.map(run, mesh.ranks):
            assert list(found) == list(whole.outputs)
            assert all(torch.equal(found[name], expected[name]) for name in whole.outputs)


@pytest.mark.parametrize("marks", [{}, {"b": stream(1, 2), "c": stream(1, 3), "d": stream(1, 2)}])
def test_results_of_all_stages_reach_all_stages(marks: Mapping[str, Layout]):
    assert_whole(stages(marks), rows_program(ROWS * NUM_BATCHES))


def shown_program(rows: int) -> Program:
    """a and v, a view of it, on the first stage; c on the last."""
    p = ProgramBuilder(f"shown {rows}")
    a = p.linear(p.input("x", (rows, 4)), p.weight("w", (6, 4)), name="a")
    v = p.slice(a, 1, 1, 4, view=True, name="v")
    return p.build(p.linear(a, p.weight("u", (3, 6)), name="c"), v)


SIZES = [{2: 1}, {2: 3}, {2: 2, 1: 1}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cuts", [("c",), ()])
def test_a_result_may_be_a_view(cuts: Sequence[str], sizes: Mapping[int, int]):
    rows = sum(rows * count for rows, count in sizes.items())
    assert_whole(stages({}, shown_program, cuts, sizes), shown_program(rows))


@pytest.mark.parametrize("clash", ["x#0", "a#1", "v#1", "v#0.view"])
@pytest.mark.parametrize("other", ["w", "u", "c"])
def test_micro_batches_have_names_that_no_tensor_of_the_program_has(clash: str, other: str):
    def build(rows: int) -> Program:
        return renamed(shown_program(rows), {other: clash})

    hosts = stages({}, build, (clash if other == "c" else "c",), {2: 2, 1: 1})
    assert_whole(hosts, build(5))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_random_programs_with_what_is_overwritten(num_stages: int):
    """States, tensors that are written again, results that no op makes."""
    num_cut = 0
    for seed in range(40):
        program = random_program(seed, num_ops=8)
        try:
            cuts = cut_positions(program, num_stages)
        except PlanError:
            continue
        num_cut += 1
        assert_whole(stages({}, {1: program}.__getitem__, cuts, {1: 1}), program)
    assert num_cut > 25


def one_by_one(host: HostProgram) -> HostProgram:
    """The program with each member of its groups by itself, waited for before the next."""
    body: list[Node] = []
    groups: list[str] = []
    for at, node in enumerate(host.body):
        match node:
            case Send(handle="") | Recv(handle=""):
                body += [replace(node, handle=f"alone{at}"), Wait(handle=f"alone{at}")]
            case EndCoalescing(handle=handle):
                groups.append(handle)
            case Wait(handle=handle) if handle in groups:
                continue
            case StartCoalescing():
                continue
            case _:
                body.append(node)
    assert groups
    return replace(host, body=tuple(body))


def test_stages_that_give_each_other_results_do_so_at_once():
    """The second stage has c for the last one and wants its d."""
    first, second, last = stages({})
    with pytest.raises(CheckError, match="these wait for each other"):
        check_host([first, one_by_one(second), one_by_one(last)])


def test_programs_of_two_sizes_have_names_of_their_own():
    (stage,) = split_stages(rows_program(ROWS), ())
    local = localize(plan_program(stage.program, DeviceMesh(tp=1), CPU))
    host = lower_program(local, megakernel=False, peer_memory=False)
    with pytest.raises(PlanError, match=r"parts of a stage named \['rows', 'rows'\]"):
        link_stage([StagePart(stage=stage, host=host)] * 2, {"x": 0})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cuts", [("b",), ()])
def test_a_result_may_be_an_input(cuts: Sequence[str], sizes: Mapping[int, int]):
    def build(rows: int) -> Program:
        p = ProgramBuilder(f"given {rows}")
        x = p.input("x", (rows, 4))
        return p.build(x.map("a0 * 2", name="a").map("a0 + 1", name="b"), x)

    rows = sum(rows * count for rows, count in sizes.items())
    assert_whole(stages({}, build, cuts, sizes), build(rows))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_view_of_what_came_is_sent_on_after_a_loop_on_streams(sizes: Mapping[int, int]):
    """What came stays until the view of it has gone."""

    def build(rows: int) -> Program:
        p = ProgramBuilder(f"sent on {rows}")
        a = p.input("x", (rows, 4)).map("a0 * 2", name="a")
        b = a.map("a0 + 1", name="b")
        v = p.slice(a, 1, 0, 2, view=True, name="v")
        return p.build(b, v.map("a0 - 1", name="c"))

    rows = sum(rows * count for rows, count in sizes.items())
    assert_whole(stages({"b": stream(1, 2)}, build, ("b", "c"), sizes), build(rows))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cuts", [("c",), ()])
def test_what_is_cut_along_any_dim_may_be_viewed(cuts: Sequence[str], sizes: Mapping[int, int]):
    """Elements of a micro-batch's columns have gaps between them."""

    def build(columns: int) -> Program:
        p = ProgramBuilder(f"columns {columns}")
        x = p.input("x", (3, columns))
        flat = p.reshape(x, (3 * columns,), view=True, name="flat")
        a = p.reshape(flat.map("a0 * 2", name="b"), (3, columns), name="a")
        c = a.map("a0 + 1", name="c")
        d = p.reshape(c, (3 * columns,), view=True, name="shown").map("a0 - 1", name="d")
        return p.build(c, a, p.reshape(d, (3, columns), name="e"))

    columns = sum(columns * count for columns, count in sizes.items())
    assert_whole(stages({}, build, cuts, sizes, dim=1), build(columns))


def first_of_rows_program() -> StagePart:
    stage, *_ = split_stages(rows_program(ROWS), ("b", "d"))
    local = localize(plan_program(stage.program, DeviceMesh(pp=1), CPU))
    return StagePart(stage=stage, host=lower_program(local, megakernel=False, peer_memory=False))


@pytest.mark.parametrize(
    ("chunk_dims", "message"),
    [
        ({"x": 2}, r"along dim 2 of 'x', which is \(2, 4\); expected a dim that it has"),
        ({"d": -1}, "along dim -1 of 'd'"),
        ({"x": "rows"}, "along dim 'rows' of 'x'"),
        ({"x": True}, "along dim True of 'x'"),
        ({"w": 0}, "micro-batches of 'w'; expected inputs and results of the whole program"),
        ({"a": 0}, "micro-batches of 'a'; expected inputs and results"),
    ],
)
def test_what_can_not_be_cut_is_refused(chunk_dims: Mapping[str, int], message: str):
    part = first_of_rows_program()
    with pytest.raises(PlanError, match=message):
        link_stage([replace(part, count=2)], chunk_dims)


@pytest.mark.parametrize("sizes", [{2: 1, 3: 1}, {2: 2, 1: 2}, {3: 1, 1: 1, 2: 1}])
def test_a_micro_batch_of_another_size_stands_last_and_is_smaller(sizes: Mapping[int, int]):
    with pytest.raises(PlanError, match="expected equal ones, but for the last"):
        stages({}, shown_program, ("c",), sizes)


@pytest.mark.parametrize("count", [0, -1, True, 2.5])
def test_micro_batches_are_counted(count: int):
    part = first_of_rows_program()
    with pytest.raises(PlanError, match=f"count {count}; expected"):
        replace(part, count=count)
