"""Event tensors of programs cut into tiles: extents, maps and counts of the worked cases, symbols,
the printed form, and agreement with the tables of overlap.
"""

from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import ParseError, ProgramError, VerifyError
from distmega.kernels.events import RunTime, analyse_events, parse_events, print_events
from distmega.kernels.events.analyse import Tilings
from distmega.kernels.events.graph import EventGraph
from distmega.kernels.events.values import EventTensor
from distmega.program.builder import ProgramBuilder
from distmega.program.text import parse_program
from distmega.program.types import Program
from tests.program.experts import moe_block


def two_products(extent: int = 256) -> Program:
    """P = silu(A B), C = P D."""
    p = ProgramBuilder("two")
    a = p.input("a", (extent, extent))
    b, d = (p.weight(name, (extent, extent)) for name in "bd")
    made = p.linear(a, b, name="ab").map("silu(a0)", name="P")
    return p.build(p.linear(made, d, name="C"))


def analysed(program: Program, tilings: Tilings, **options) -> EventGraph:
    """The graph, after its printed form was read back."""
    graph = analyse_events(program, tilings, **options)
    assert parse_events(print_events(graph), program) == graph
    return graph


def between(graph: EventGraph, producer: str, consumer: str) -> EventTensor:
    (found,) = (
        event
        for event in graph.events
        if event.producer == producer and consumer in dict(event.waits)
    )
    return found


def shape(event: EventTensor) -> tuple[int, ...]:
    return tuple(extent.most for extent in event.extents)


def waiting(graph: EventGraph, event: EventTensor, consumer: str) -> dict[tuple[int, ...], set]:
    """Event -> coordinates of the consumer's tasks that await it."""
    found: dict[tuple[int, ...], set] = {}
    for number, task in enumerate(graph.coordinates[consumer]):
        for name, place in graph.waits[consumer, number]:
            if name == event.name:
                found.setdefault(place, set()).add(task)
    return found


def triggering(graph: EventGraph, event: EventTensor) -> dict[tuple[int, ...], set]:
    """Event -> coordinates of the tasks that trigger it."""
    return {
        place: {graph.coordinates[op][n] for op, n in tasks}
        for (name, place), tasks in graph.producers.items()
        if name == event.name
    }


def test_m1_row_blocks():
    tiles = {"m0": 64, "n": 64}
    graph = analysed(two_products(), {"ab": tiles, "P": {"i0": 64, "i1": 64}, "C": tiles})
    event = between(graph, "P", "C")
    assert (shape(event), event.count.each) == ((4,), (4,))
    assert triggering(graph, event) == {(i,): {(i, j) for j in range(4)} for i in range(4)}
    assert waiting(graph, event, "C") == {(i,): {(i, j) for j in range(4)} for i in range(4)}
    assert f"event {event.name}[4] own from P(d0) count 4 to C(d0)" in print_events(graph)
    aligned = between(graph, "ab", "P")
    assert (shape(aligned), aligned.count.each) == ((4, 4), (1,))
    assert len(graph.events) == 2


def test_m2_row_blocks_of_other_heights():
    graph = analysed(
        two_products(),
        {
            "ab": {"m0": 32, "n": 64},
            "P": {"i0": 32, "i1": 64},
            "C": {"m0": 96, "n": 64},
        },
    )
    event = between(graph, "P", "C")
    assert (shape(event), event.count.each) == ((3,), (12, 12, 8))
    rows = {place[0]: {i for i, _ in tasks} for place, tasks in triggering(graph, event).items()}
    assert rows == {0: {0, 1, 2}, 1: {3, 4, 5}, 2: {6, 7}}
    assert event.notify.first[0].divisor == 3
    assert not event.notify.listed


@pytest.mark.parametrize(
    ("start", "stop", "step", "tiles", "form"),
    [
        (0, 16, 2, (1, 1), "(d0+1)/2..(d0)/2"), (1, 16, 2, (1, 1), "(d0)/2..(d0-1)/2"),
        (0, 16, 4, (2, 1), "(d0+1)/2..(d0)/2"), (0, 16, 3, (1, 1), "(d0+2)/3..(d0)/3"),
        (0, 16, 2, (2, 1), "d0"),
        (3, 16, 3, (1, 1), "listed"), (0, 15, 3, (1, 1), "listed"), (0, 16, 2, (1, 2), "listed"),
    ],
)  # fmt: skip
def test_who_makes_a_strided_slice_signals_by_a_formula(start, stop, step, tiles, form):
    """Tasks between the steps signal nothing: their first event is behind their last."""
    p = ProgramBuilder("slices")
    x = p.input("x", (16, 4)).map("a0 + 1", name="a")
    program = p.build(p.slice(x, 0, start, stop, step, name="y"))
    graph = analysed(program, {"a": {"i0": tiles[0]}, "y": {"i0": tiles[1]}})
    event = between(graph, "a", "y")
    assert f"from a({form}" in print_events(graph)
    wanted = {row: (row - start) // step // tiles[1] for row in range(start, stop, step)}
    made = {(row // tiles[0],): {(event,)} for row, event in wanted.items()}
    signals = enumerate(graph.coordinates["a"])
    assert {t: {*event.notify.events(n, t)} for n, t in signals} == {
        (n,): made.get((n,), set()) for n in range(16 // tiles[0])
    }


def chain_of(shape: tuple[int, ...], **consumers: str) -> Program:
    """P = exp(x), and consumers by name and expression."""
    p = ProgramBuilder("chain")
    made = p.input("x", shape).map("exp(a0)", name="P")
    return p.build(*(made.map(text, name=name) for name, text in consumers.items()))


def printed(graph: EventGraph) -> list[str]:
    return [line.strip() for line in print_events(graph).splitlines() if " event " in line]


CASES = {
    "T1": (
        chain_of((96,), C="-a0"),
        {"P": {"i0": 3}, "C": {"i0": 12}},
        ["event P.0[8] own from P((d0)/4) count 4 to C(d0)"],
    ),
    "T2": (
        chain_of((64,), C="-a0"),
        {"P": {"i0": 8}, "C": {"i0": 2}},
        ["event P.0[8] own from P(d0) count 1 to C((d0)/4)"],
    ),
    "T5": (
        chain_of((384,), C="-a0"),
        {"P": {"i0": 32}, "C": {"i0": 48}},
        ["event P.0[8] own from P((d0*2)/3..(d0*2+1)/3) count 2 to C(d0)"],
    ),
    "T7": (
        chain_of((130,), C="-a0"),
        {"P": {"i0": 48}, "C": {"i0": 64}},
        ["event P.0[3] own from P((d0)/2..d0) count [2, 2, 1] to C(d0)"],
    ),
    "T8": (
        chain_of((32, 64), C="-a0", rows="2.0 * a0", columns="3.0 * a0"),
        {
            "P": {"i0": 8, "i1": 8},
            "C": {"i0": 16, "i1": 16},
            "rows": {"i0": 8},
            "columns": {"i1": 8},
        },
        [
            "event P.0[2, 4] own from P((d0)/2, (d1)/2) count 4 to C(d0, d1)",
            "event P.1[4] own from P(d0) count 8 to rows(d0)",
            "event P.2[8] own from P(d1) count 4 to columns(d0)",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_worked_cases(case: str):
    program, tilings, expected = CASES[case]
    assert printed(analysed(program, tilings)) == expected


def test_t3_only_one_axis_of_the_grid_maps():
    p = ProgramBuilder("grid")
    made = p.input("x", (96,)).map("exp(a0)", name="P")
    program = p.build(p.pointwise("a0 + a1", p.input("z", (4, 96)), made, name="C"))
    graph = analysed(program, {"P": {"i0": 1}, "C": {"i0": 1, "i1": 12}})
    assert printed(graph) == ["event P.0[8] own from P((d0)/12) count 12 to C(d1)"]


def test_t13_a_wait_that_another_implies_is_still_an_event():
    p = ProgramBuilder("through")
    a = p.input("x", (8, 8)).map("exp(a0)", name="A")
    program = p.build(p.linear(a.map("-a0", name="B"), a, spec="m k, n k -> m n", name="C"))
    graph = analysed(program, {"A": {"i0": 1}, "B": {"i0": 1}, "C": {"m": 1}})
    assert "event A.1[] own from A() count 8 to C()" in printed(graph)


def test_g1_of_tiles_that_two_sources_share():
    """250 rows a source, tiles of 128: every other tile awaits two of them."""
    text = GATHERED.replace("256", "250").replace("1024", "1000")
    graph = analysed(parse_program(text), {"y": {"m": 128}}, num_ranks=4)
    event = between(graph, "bring", "y")
    assert event.count.each == (1, 2, 1, 2, 1, 2, 1)
    order = graph.own_first("y", 1)
    assert [task for (_, task), waits in order if not waits] == [2]
    assert order[0][0] == ("y", 2)


GATHERED = """\
program gathered
  input x: f32[256, 64]
  weight w: f32[32, 64]
  temp whole: f32[1024, 64]
  temp y: f32[1024, 32]
  bring = all_gather[r:4 i0:256 i1:64] x(i0, i1) -> whole(r.i0, i1)\
 | dim=0 extent=1024 mesh_axis='tp' num_ranks=4
  y = linear[m:1024 n:32 k:64:reduce:sum] whole(m, k) w(n, k) -> y(m, n)
  return y
"""


def test_g1_gather_then_product():
    tilings = {"bring": {"r": 1}, "y": {"m": 128}}
    graph = analysed(parse_program(GATHERED), tilings, num_ranks=4)
    event = between(graph, "bring", "y")
    assert (shape(event), event.count.each) == ((4,), (1,))
    assert waiting(graph, event, "y") == {(s,): {(2 * s,), (2 * s + 1,)} for s in range(4)}
    order = graph.own_first("y", 1)
    assert [task for (_, task), _ in order] == [2, 3, 4, 5, 6, 7, 0, 1]
    assert [task for (_, task), waits in order if not waits] == [2, 3]
    assert {waits for (_, task), waits in order if task in (4, 5)} == {((event.name, (2,)),)}


def test_own_part_of_a_gather_waits_for_what_makes_it():
    text = GATHERED.replace("input x", "input z: f32[256, 64]\n  temp x").replace(
        "  bring =",
        "  x = pointwise[i0:256 i1:64] z(i0, i1) -> x(i0, i1) | expr='exp(a0)'\n  bring =",
    )
    program = parse_program(text)
    graph = analysed(
        program, {"x": {"i0": 128}, "bring": {"r": 1, "i0": 128}, "y": {"m": 128}}, num_ranks=4
    )
    brought = between(graph, "x", "bring")
    assert brought.sources == "axis"
    waits = dict(graph.own_first("y", 2))
    assert waits["y", 4] == ((brought.name, (0,)),)
    assert waits["y", 5] == ((brought.name, (1,)),)
    assert waits["y", 0][0][0] == between(graph, "bring", "y").name


@pytest.mark.parametrize("size", [2, 3])
def test_several_sources_a_task_are_awaited_by_all_who_read_one(size: int):
    """A tile of sources is a rank's own part only if no other's is in it."""
    tilings = {"bring": {"r": size}, "y": {"m": 128}}
    graph = analysed(parse_program(GATHERED), tilings, num_ranks=4)
    (name,) = (event.name for event in graph.events)
    for rank in range(4):
        for (_, task), waits in graph.own_first("y", rank):
            alone = size == 3 and rank == task // 2 == 3
            assert waits == (() if alone else ((name, (task // 2 // size,)),))
    tiles = [task for (_, task), _ in graph.own_first("y", 3)]
    assert tiles[:2] == ([6, 7] if size == 3 else [0, 1])


@pytest.mark.parametrize("later", ["into whole", "into part"])
def test_who_overwrites_a_part_or_what_is_brought_awaits_the_gather(later: str):
    """The gather of the own part may come after what makes that part."""
    text = GATHERED.replace("input x", "state x" if later == "into part" else "input x")
    tensor, rows = ("x", 256) if later == "into part" else ("whole", 1024)
    copied = f"  z = copy[i0:{rows} i1:64] v(i0, i1) -> {tensor}(i0, i1)\n"
    text = text.replace("  weight", f"  input v: f32[{rows}, 64]\n  weight")
    text = text.replace("  return", f"{copied}  return")
    tilings = {"bring": {"r": 1}, "y": {"m": 128}, "z": {"i0": 128}}
    graph = analysed(parse_program(text), tilings, num_ranks=4)
    name = between(graph, "bring", "y").name
    held = dict(graph.own_first("y" if later == "into part" else "z", 1))
    tasks = [("y" if later == "into part" else "z", task) for task in (2, 3)]
    assert all((name, (1,)) in held[task] for task in tasks)


SCATTERED = """\
program scattered
  input x: f32[1024, 64]
  weight w: f32[32, 64]
  temp parts: f32[1024, 32]
  temp y: f32[256, 32]
  p = linear[m:1024 n:32 k:64:reduce:sum] x(m, k) w(n, k) -> parts(m, n)
  y = reduce_scatter[i0:256 i1:32 r:4:reduce:sum] parts(r.i0, i1) -> y(i0, i1)\
 | combine='sum' dim=0 extent=1024 mesh_axis='tp' num_ranks=4
  return y
"""


@pytest.mark.parametrize("columns", [32, 16])
def test_r1_product_then_reduce_scatter(columns: int):
    tilings = {"p": {"m": 128, "n": columns}, "y": {"r": 1, "i0": 128}}
    graph = analysed(parse_program(SCATTERED), tilings, num_ranks=4)
    event = between(graph, "p", "y")
    assert (event.sources, event.ranks) == ("all", 4)
    assert shape(event) == (8,)
    for number, (owner, half) in enumerate(product(range(4), range(2))):
        assert waiting(graph, event, "y")[number,] == {(owner, half)}
        assert {task[0] for task in triggering(graph, event)[number,]} == {number}
        assert graph.count((event.name, (number,)), RunTime()) == 4 * 32 // columns


def rows_and_heads() -> Program:
    """P row-wise over 16 rows, C over (row, 4 heads)."""
    p = ProgramBuilder("heads")
    x = p.input("x", (16, 64))
    made = x.map("2.0 * a0", name="P")
    return p.build(p.linear(made, p.weight("w", (4, 8, 64)), spec="m k, h d k -> m h d", name="C"))


def test_e2_symbols():
    graph = analysed(
        rows_and_heads(), {"P": {"i0": 1}, "C": {"m": 1, "h": 1}}, symbols={"B": ("x", 0)}
    )
    event = between(graph, "P", "C")
    assert (event.extents[0].symbol, shape(event)) == ("B", (16,))
    for batch in (0, 1, 2, 3, 5, 16):
        known = RunTime(symbols={"B": batch})
        assert event.extents[0].value(known) == batch
        running = graph.running(known)
        assert {op: sum(o == op for o, _ in running) for op in "PC"} == {"P": batch, "C": 4 * batch}
        awaited = {place for task in running for place in graph.waits.get(task, ())}
        assert awaited == {(event.name, (row,)) for row in range(batch)}
        assert all(graph.count(place, known) == 1 for place in awaited)
    with pytest.raises(ProgramError, match="symbol 'B' is 17; expected 0 to 16"):
        graph.running(RunTime(symbols={"B": 17}))


def test_events_of_a_symbol_and_a_number():
    """E(B, 2): halves of each row, from one analysis for B = 1, 2 and 3."""
    p = ProgramBuilder("halves")
    x = p.input("x", (3, 8)).map("exp(a0)", name="P")
    program = p.build(x.map("-a0", name="C"))
    graph = analysed(
        program, {"P": {"i0": 1, "i1": 4}, "C": {"i0": 1, "i1": 2}}, symbols={"B": ("x", 0)}
    )
    event = between(graph, "P", "C")
    assert shape(event) == (3, 2)
    for batch in (1, 2, 3):
        known = RunTime(symbols={"B": batch})
        assert [extent.value(known) for extent in event.extents] == [batch, 2]
        awaited = {e for task in graph.running(known, "C") for e in graph.waits[task]}
        assert awaited == {(event.name, place) for place in product(range(batch), range(2))}
        assert {graph.count(e, known) for e in awaited} == {1}


def test_symbols_of_tiles_and_sums():
    """Tiles of 4 rows; an op that sums over all rows counts those that are in use."""
    p = ProgramBuilder("sums")
    made = p.input("x", (16, 8)).map("exp(a0)", name="P")
    program = p.build(p.reduce(made, 0, name="S"))
    graph = analysed(program, {"P": {"i0": 4}}, symbols={"B": ("x", 0)})
    event = between(graph, "P", "S")
    assert (event.count.each, event.count.active, event.count.symbol) == ((4,), True, "B")
    for batch, tiles in ((0, 0), (1, 1), (4, 1), (5, 2), (16, 4)):
        assert graph.count((event.name, ()), RunTime(symbols={"B": batch})) == tiles


def test_experts_two_at_a_time_and_tiles_in_another_order():
    program = moe_block(7, 8, 5, 3, 12)
    graph = analysed(
        program,
        {
            "gathered": {"e": 2, "r": 3},
            "gate": {"e": 1, "r": 3, "n": 6},
            "mixed": {"r": 3, "e": 1},
            "down": {"e": 1},
        },
    )
    known = RunTime(starts={"routing.offsets": (0, 7, 7, 10, 17, 21)})
    assert graph.tiles(known, "gathered") == [3, 3, 2]
    assert graph.tiles(known, "gate") == graph.tiles(known, "mixed") == [3, 0, 1, 3, 2]
    assert graph.tiles(known, "down") == [1, 0, 1, 1, 1]
    lines = "\n".join(printed(graph))
    assert "from gathered(d0, d1) count 1 active routing.offsets to gate((d0)/2, d1)" in lines
    assert "from gate(d0, d1) count 2 active routing.offsets to mixed(d1, d0)" in lines
    assert "from mixed(d1) count 3 active routing.offsets to down(d0)" in lines


E1 = {"gathered": {"e": 1, "r": 2}, "gate": {"e": 1, "r": 2, "n": 6}, "up": {"e": 1, "r": 2},
      "mixed": {"e": 1, "r": 2}, "down": {"e": 1, "r": 2, "n": 4}, "added": {"n": 4}}  # fmt: skip


def test_e1_experts():
    graph = analysed(moe_block(rows=4, num_experts=4), E1)
    first = RunTime(starts={"routing.offsets": (0, 4, 6, 7, 8)})
    second = RunTime(starts={"routing.offsets": (0, 0, 4, 8, 8)})
    for op in ("gathered", "gate", "mixed", "down"):
        assert graph.tiles(first, op) == [2, 1, 1, 1]
        assert graph.tiles(second, op) == [0, 2, 2, 0]
    rows = between(graph, "gathered", "gate")
    assert (shape(rows), rows.extents[1].starts) == ((4, 2), "routing.offsets")
    assert waiting(graph, rows, "gate")[2, 1] == {(2, 1, 0), (2, 1, 1)}
    added = between(graph, "down", "added")
    assert (added.count.active, added.count.starts) == (True, "routing.offsets")
    for known, tiles in ((first, 5), (second, 4)):
        assert {graph.count((added.name, (n,)), known) for n in range(2)} == {tiles}
        for task in graph.running(known):
            for event in graph.waits.get(task, ()):
                assert graph.count(event, known) > 0
    assert {op for op, _ in graph.running(second)} == {grid.op for grid in graph.grids}


def test_rows_that_somebody_reads_whole_are_awaited_whole():
    """An op that knows nothing of groups reads the packed rows: all of them come before it."""
    p = ProgramBuilder("whole")
    x, ids = p.input("x", (4, 8)), p.input("ids", (4, 2), "i32")
    routing = p.route(ids, 4, name="routing")
    rows = p.gather_rows(x, routing, name="rows")
    graph = analysed(p.build(p.reduce(rows, 0, name="sum")), {"rows": {"e": 1, "r": 2}})
    event = between(graph, "rows", "sum")
    known = RunTime(starts={"routing.offsets": (0, 4, 6, 7, 8)})
    assert graph.count((event.name, ()), known) == 5


def pointwise_chain(extent: int) -> Program:
    p = ProgramBuilder("chain")
    made = p.input("x", (extent,)).map("exp(a0)", name="P")
    return p.build(made.map("-a0", name="C"))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_maps_say_what_ranges_do(extent: int, ours: int, theirs: int):
    """Task i of P covers [i * ours, ...), task j of C [j * theirs, ...)."""
    graph = analysed(pointwise_chain(extent), {"P": {"i0": ours}, "C": {"i0": theirs}})
    for number in range(-(-extent // theirs)):
        (event,) = graph.waits["C", number]
        producers = {task for _, task in graph.producers[event]}
        wanted = {
            place // ours for place in range(number * theirs, min(extent, (number + 1) * theirs))
        }
        assert producers == wanted
        assert graph.count(event, RunTime()) == len(wanted)


def test_formulas_of_uneven_tiles():
    graph = analysed(pointwise_chain(384), {"P": {"i0": 32}, "C": {"i0": 48}})
    (event,) = graph.events
    assert shape(event) == (8,)
    text = print_events(graph)
    assert "from P((d0*2)/3..(d0*2+1)/3) count 2 to C(d0)" in text


@pytest.mark.parametrize(
    ("tilings", "options", "message"),
    [
        ({"Q": {"i0": 4}}, {}, "tiles of 'Q'"),
        ({"P": {"j": 4}}, {}, "tiles of 4 along axis 'j' of op 'P'"),
        ({"P": {"i0": 0}}, {}, "tiles of 0 along axis 'i0'"),
        ({"C": {"k": 4}}, {}, "tiles of 4 along axis 'k' of op 'C'"),
        ({"P": {"i0": 1.5}}, {}, "tiles of 1.5 along axis 'i0'"),
        ({"P": {"i0": "2"}}, {}, "tiles of '2' along axis 'i0'"),
        ({}, {"num_ranks": 0}, "num_ranks 0; expected"),
        ({}, {"symbols": {"B": ("x", 7)}}, "symbol 'B' for dim 7 of 'x'"),
        ({}, {"symbols": {"B": ("x", 0.0)}}, "symbol 'B' for dim 0.0 of 'x'"),
        ({}, {"symbols": {"rows of x": ("x", 0)}}, "symbol 'rows of x'; expected letters"),
        ({}, {"symbols": {"B": ("x", 0), "N": ("P", 0)}}, "symbols '[BN]' and '[BN]' meet in"),
    ],
)
def test_misuse(tilings: Tilings, options: dict, message: str):
    with pytest.raises(ProgramError, match=message):
        analyse_events(rows_and_heads(), tilings, **options)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("count 1", "count 2", VerifyError, "1 trigger of"),
        ("from P(d0)", "from P(d0+1)", VerifyError, r"signals \(16,\)"),
        ("to C(d0)", "to C(d0*2)", VerifyError, "waits for"),
        (" active B", "", VerifyError, "a fixed count of tasks that may not run"),
        ("to C(d0)", "to P(d0)", VerifyError, "consumers after the producer"),
        ("of x.0", "of y.0", VerifyError, "symbol 'B' for dim 0 of 'y'"),
        ("of x.0", "of x.5", VerifyError, "symbol 'B' for dim 5 of 'x'"),
        ("of x.0", "of x.0\n  symbol B: 16 of P.0", ParseError, "cannot read 'symbol B: 16 of P"),
        ("count 1", "count [1, one]", ParseError, "cannot read"),
        ("from P(d0)", "from P(listed 7)", ParseError, "cannot read"),
        ("from P(d0)", "from P(listed [[0], [1)])", ParseError, "cannot read"),
        ("from P(d0)", "from P(listed [[(0.5,)]])", ParseError, "cannot read"),
        (
            "  event P",
            "  event P.0[16] own from P(d0) count 1 active B to C(d0)\n  event P",
            VerifyError,
            "one event tensor of each name",
        ),
        ("tasks P(", "tasks P[", ParseError, "cannot read"),
        ("(d0)", "(d0?)", ParseError, "cannot read"),
    ],
)
def test_verifier_and_parser(old: str, new: str, error: type[Exception], message: str):
    program = rows_and_heads()
    graph = analyse_events(
        program, {"P": {"i0": 1}, "C": {"m": 1, "h": 1}}, symbols={"B": ("x", 0)}
    )
    text = print_events(graph)
    assert old in text
    with pytest.raises(error, match=message):
        parse_events(text.replace(old, new), program)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (RunTime(), "symbol 'B' is None"),
        (RunTime(symbols={"B": "5"}), "symbol 'B' is '5'"),
        (RunTime(symbols={"B": 17}), "symbol 'B' is 17; expected 0 to 16"),
        (RunTime(symbols={"B": 5, "C": 1}), "symbol 'C' is 1; expected symbols among B"),
    ],
)
def test_what_is_known_at_run_time_fits(known: RunTime, message: str):
    graph = analyse_events(rows_and_heads(), {"P": {"i0": 1}}, symbols={"B": ("x", 0)})
    with pytest.raises(ProgramError, match=message):
        graph.running(known)
    with pytest.raises(ProgramError, match="tasks of 'Q'"):
        graph.running(RunTime(symbols={"B": 5}), "Q")
    with pytest.raises(ProgramError, match=message if known.symbols else "'B' without a value"):
        graph.count(graph.triggers["P", 0][0], known)


@pytest.mark.parametrize("value", [-1, 2.0, "5", True, None])
def test_an_extent_of_a_symbol_that_is_no_extent(value: object):
    tilings = {"P": {"i0": 1}, "C": {"m": 1}}
    graph = analyse_events(rows_and_heads(), tilings, symbols={"B": ("x", 0)})
    (extent,) = graph.events[0].extents
    with pytest.raises(ProgramError, match=f"symbol 'B' is {value!r}; expected a whole number"):
        extent.value(RunTime(symbols={"B": value}))  # type: ignore[dict-item]


def test_starts_that_do_not_fit_are_named():
    graph = analyse_events(moe_block(rows=4, num_experts=4), {"gate": {"e": 1, "r": 2}})
    with pytest.raises(ProgramError, match=r"starts 'routing\.offsets' without a value"):
        graph.running(RunTime())
    event = graph.waits["gate", 0][0]
    for starts in ([0, 1], [0, 4, 2, 6, 8], [0, 5, 6, 7, 8], [0, 4, 6, 7, 9], [-1, 3, 6, 7, 8]):
        for ask in (graph.running, partial(graph.count, event)):
            with pytest.raises(ProgramError, match="expected 5 numbers from 0 to 8"):
                ask(RunTime(starts={"routing.offsets": starts}))
    for unread in (None, ["a"] * 5, [0, 4, 6, 7, 8.0]):
        with pytest.raises(ProgramError, match="expected whole numbers in a sequence"):
            graph.running(RunTime(starts={"routing.offsets": unread}))  # type: ignore[dict-item]
    with pytest.raises(ProgramError, match="tasks of 'nothing'"):
        graph.tiles(RunTime(starts={"routing.offsets": [0, 4, 6, 7, 8]}), "nothing")
