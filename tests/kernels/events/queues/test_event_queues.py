"""Static queues and drained regions: the same results under any interleaving and any routing, the
proof for all of them, and what finds a wait that is missing.
"""

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.errors import CheckError, HangError, ProgramError
from distmega.kernels.events import (
    EventGraph,
    RunTime,
    analyse_events,
    check_queues,
    make_queues,
    parse_events,
    print_events,
    run_queues,
    run_ranks,
)
from distmega.kernels.events.analyse import Tilings
from distmega.kernels.events.queues.assign import (
    Drain,
    Dynamic,
    Entry,
    Queues,
    assign_tasks,
    drains_faster,
)
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.text import parse_program, print_program
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import replicate, shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.calls import num_calls
from tests.hostir.programs import run_program, shard_tensors
from tests.kernels.events.queues.broken import without_wait
from tests.kernels.events.test_events import GATHERED, rows_and_heads
from tests.program.experts import moe_block

Ids = list[list[int]]

TILES = {"rows": {"e": 1, "r": 2}, "up": {"e": 1, "r": 2, "n": 4}, "act": {"e": 1, "r": 2},
         "down": {"e": 1, "r": 2, "n": 4}, "y": {"m": 2, "n": 4}}  # fmt: skip


def experts(num_rows: int, num: int, num_experts: int = 4, hidden: int = 8) -> Program:
    """Experts whose routing is given: ids [rows, num]."""
    p = ProgramBuilder("experts")
    x, ids = p.input("x", (num_rows, hidden)), p.input("ids", (num_rows, num), "i32")
    weights = p.input("weights", (num_rows, num))
    routing = p.route(ids, num_experts, name="routing")
    rows = p.gather_rows(x, routing, name="rows")
    up = p.grouped_linear(rows, p.weight("wu", (num_experts, 8, hidden)), routing, name="up")
    act = p.grouped_pointwise("silu(a0)", up, routing=routing, name="act")
    down = p.grouped_linear(act, p.weight("wd", (num_experts, hidden, 8)), routing, name="down")
    return p.build(p.scatter_add(down, weights, routing, name="y"))


@cache
def queues_of(num_rows: int, num: int, num_sms: int, dynamic: Dynamic) -> Queues:
    graph = analyse_events(experts(num_rows, num), TILES)
    return make_queues(graph, num_sms, dynamic)


def given(program: Program, ids: Ids) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        t.name: torch.randn(t.shape, generator=generator)
        for t in program.tensors
        if t.role != "temp"
    }
    return tensors | ({"ids": torch.tensor(ids, dtype=torch.int32)} if ids else {})


def run_all_seeds(queues: Queues, ids: Ids, seeds: range) -> None:
    """Values as by library ops, and of guarded tasks exactly those that have rows."""
    program = queues.graph.program
    tensors = given(program, ids)
    expected = run_program(program, tensors)
    offsets = expected["routing.offsets"].tolist()
    running = set(queues.graph.running(RunTime(starts={"routing.offsets": offsets})))
    for seed in seeds:
        launch = run_queues(queues, tensors, seed=seed)
        torch.testing.assert_close(launch.tensors["y"], expected["y"])
        assert {task for task, _ in launch.ran} == running


E1 = [[[0, 1], [0, 2], [0, 1], [3, 0]], [[1, 2], [1, 2], [1, 2], [1, 2]]]
"""The two routings of the case, of top-2 of 4."""

ADVERSARIAL = [[[2]] * 4, [[0], [1], [2], [3]], [[3], [3], [0], [3]], [[0]] * 4]
"""All to one expert, all different, most without a row."""


@pytest.mark.parametrize("dynamic", ["never", "always"])
@pytest.mark.parametrize("ids", E1)
def test_e1_through_the_same_queues(ids: Ids, dynamic: Dynamic):
    queues = queues_of(4, 2, 3, dynamic)
    assert len(queues.regions) == (1 if dynamic == "always" else 0)
    run_all_seeds(queues, ids, range(20))
    launch = run_queues(queues, given(queues.graph.program, ids))
    ran = {queues.graph.coordinates["rows"][n][0] for _, n in launch.tasks("rows")}
    assert ran == {expert for row in ids for expert in row}
    for (name, place), num in launch.triggers.items():
        offsets = launch.tensors["routing.offsets"].tolist()
        known = RunTime(starts={"routing.offsets": offsets})
        assert queues.graph.count((name, place), known) == num


@pytest.mark.parametrize("dynamic", ["never", "always"])
@pytest.mark.parametrize("ids", ADVERSARIAL)
def test_adversarial_routings(ids: Ids, dynamic: Dynamic):
    run_all_seeds(queues_of(4, 1, 3, dynamic), ids, range(20))


@pytest.mark.parametrize("dynamic", ["never", "always"])
@pytest.mark.parametrize("num_sms", [1, 2, 5, 40])
def test_the_proof_holds_on_any_number_of_sms(num_sms: int, dynamic: Dynamic):
    queues = queues_of(4, 2, num_sms, dynamic)
    check_queues(queues)
    everything = assign_tasks(queues.graph, num_sms, dynamic)
    check_queues(everything)
    assert queues.num_waits() <= everything.num_waits()
    if num_sms == 1 and dynamic == "never":
        assert queues.num_waits() == 0
    run_all_seeds(queues, E1[0], range(2))


@pytest.mark.parametrize("dynamic", ["never", "always"])
@pytest.mark.parametrize("num_sms", [2, 5])
def test_every_deleted_wait_is_caught_without_running(num_sms: int, dynamic: Dynamic):
    queues = queues_of(4, 2, num_sms, dynamic)
    for number in range(queues.num_waits()):
        with pytest.raises(CheckError, match=r"race|need not have written"):
            check_queues(without_wait(queues, number))


@pytest.mark.parametrize("dynamic", ["never", "always"])
def test_deleted_waits_are_caught_by_running(dynamic: Dynamic):
    """Under some interleaving of some routing; drained tasks start in order, so that with few SMs
    most find ended what they should have awaited.
    """
    queues = queues_of(4, 2, 12, dynamic)
    caught = 0
    for number in range(queues.num_waits()):
        broken = without_wait(queues, number)
        try:
            for ids in (*E1, [[0, 3], [3, 0], [0, 3], [3, 0]]):
                for seed in range(2):
                    run_queues(broken, given(queues.graph.program, ids), seed=seed)
        except CheckError:
            caught += 1
    assert caught > queues.num_waits() * (0.5 if dynamic == "never" else 0.2)


@pytest.mark.parametrize("symbols", [{}, {"N": ("x", 0)}])
def test_a_task_that_may_be_passed_over_teaches_nothing(symbols: dict[str, tuple[str, int]]):
    """B waits for A, and C for both: B's wait tells C of A, unless B may not run."""
    p = ProgramBuilder("taught")
    x, z = p.input("x", (4, 8)), p.input("z", (6, 8))
    a = z.map("exp(a0)", name="A")
    b = p.linear(x, a, spec="m k, n k -> m n", name="B")
    program = p.build(p.linear(b, a, spec="m n, n k -> m k", name="C"))
    graph = analyse_events(program, {"B": {"m": 1}}, symbols=symbols)
    queues = make_queues(graph, 9)
    check_queues(queues)
    (entry,) = (e for queue in queues.sms for e in queue if e.task == ("C", 0))
    producers = {graph.producers[event][0][0] for event in entry.waits}
    assert producers == ({"A", "B"} if symbols else {"B"})


def test_symbols_run_what_is_in_use():
    graph = analyse_events(
        rows_and_heads(), {"P": {"i0": 1}, "C": {"m": 1, "h": 2}}, symbols={"B": ("x", 0)}
    )
    queues = make_queues(graph, 3)
    check_queues(queues)
    tensors = given(graph.program, [])
    expected = run_program(graph.program, tensors)["C"]
    for batch in (0, 1, 3, 16):
        for seed in range(3):
            launch = run_queues(queues, tensors, symbols={"B": batch}, seed=seed)
            found = launch.tensors["C"]
            torch.testing.assert_close(found[:batch], expected[:batch], rtol=1e-5, atol=1e-4)
            assert found[batch:].isnan().all()
            assert len(launch.ran) == batch + 2 * batch
    for number in range(queues.num_waits()):
        with pytest.raises(CheckError):
            check_queues(without_wait(queues, number))


@pytest.mark.parametrize("dynamic", ["never", "always"])
def test_rows_in_use_are_routed_and_no_others(dynamic: Dynamic):
    """A program for 6 rows with 0, 1, 3 and 6 of them: one compile, one set of queues."""
    p = ProgramBuilder("some")
    x, used = p.input("x", (6, 8)), p.input("used", (1,), "i32")
    scores = p.linear(x, p.weight("router", (4, 8)), spec="m k, e k -> m e", name="scores")
    weights, ids = p.top_k(scores, 2, name="chosen")
    routing = p.route(ids, 4, used, name="routing")
    rows = p.gather_rows(x, routing, name="rows")
    down = p.grouped_linear(rows, p.weight("w", (4, 8, 8)), routing, name="down")
    program = p.build(p.scatter_add(down, weights, routing, name="y"))
    tilings = {"scores": {"m": 1}, "chosen": {"m": 1}, "rows": {"e": 1, "r": 2},
               "down": {"e": 1, "r": 2}, "y": {"m": 1}}  # fmt: skip
    graph = analyse_events(program, tilings, symbols={"B": ("x", 0)})
    queues = make_queues(graph, 3, dynamic)
    check_queues(queues)
    tensors = given(program, []) | {"used": torch.tensor([6], dtype=torch.int32)}
    expected = run_program(program, tensors)["y"]
    for batch in (0, 1, 3, 6):
        tensors["used"] = torch.tensor([batch], dtype=torch.int32)
        for seed in range(5):
            launch = run_queues(queues, tensors, symbols={"B": batch}, seed=seed)
            torch.testing.assert_close(launch.tensors["y"][:batch], expected[:batch])
            assert [len(launch.tasks(op)) for op in ("chosen", "y")] == [batch, batch]
            counts = launch.tensors["routing.counts"]
            assert counts.sum() == 2 * batch
            assert len(launch.tasks("down")) == sum(-(-n // 2) for n in counts.tolist())


@pytest.mark.parametrize("dynamic", ["never", "always"])
def test_rows_that_no_group_has_are_zero(dynamic: Dynamic):
    """Nobody computes their parts, so the buffers of groups hold no numbers there; the sum is that
    of library ops all the same.
    """
    p = ProgramBuilder("some")
    x, used = p.input("x", (5, 8)), p.input("used", (1,), "i32")
    weights, ids = p.top_k(p.input("scores", (5, 4)), 2, name="chosen")
    routing = p.route(ids, 4, used, name="routing")
    rows = p.gather_rows(x, routing, name="rows")
    down = p.grouped_linear(rows, p.weight("w", (4, 8, 8)), routing, name="down")
    shifted = p.grouped_pointwise("a0 + 1.0", down, routing=routing, name="shifted")
    program = p.build(p.scatter_add(shifted, weights, routing, name="y"))
    tiles = {"e": 1, "r": 2}
    graph = analyse_events(program, {"rows": tiles, "down": tiles, "shifted": tiles, "y": {"m": 1}})
    queues = make_queues(graph, 3, dynamic)
    for num_used in (0, 2, 5):
        tensors = given(program, []) | {"used": torch.tensor([num_used], dtype=torch.int32)}
        launch = run_queues(queues, tensors)
        torch.testing.assert_close(launch.tensors["y"], run_program(program, tensors)["y"])
        assert not launch.tensors["y"][num_used:].any()


@pytest.mark.parametrize("dynamic", ["never", "always"])
@pytest.mark.parametrize(
    "tiles",
    [
        {},
        {"scores": {"m": 1}, "chosen": {"m": 4}, "rows": {"e": 2, "r": 3}, "y": {"m": 4}},
        {"scores": {"m": 5}, "down": {"e": 1, "r": 2}, "y": {"n": 3}},
    ],
)
def test_a_symbol_ends_inside_of_tiles_and_sums(tiles: Tilings, dynamic: Dynamic):
    """Rows that are not in use hold no numbers; they reach no score, no routing and no sum."""
    p = ProgramBuilder("ends")
    x = p.input("x", (6, 8))
    scores = p.linear(x, p.weight("router", (5, 8)), spec="m k, e k -> m e", name="scores")
    weights, ids = p.top_k(scores, 2, name="chosen")
    routing = p.route(ids, 5, name="routing")
    rows = p.gather_rows(x, routing, name="rows")
    down = p.grouped_linear(rows, p.weight("w", (5, 8, 8)), routing, name="down")
    y = p.scatter_add(down, weights, routing, name="y")
    program = p.build(y, p.reduce(y, 0, name="sum"), p.reduce(y, 0, combine="max", name="most"))
    graph = analyse_events(program, tiles, symbols={"B": ("x", 0)})
    assert parse_events(print_events(graph), program) == graph
    queues = make_queues(graph, 3, dynamic)
    check_queues(queues)
    tensors = given(program, [])
    expected = run_program(program, tensors)["y"]
    for batch in (1, 3, 6):
        tensors["x"][batch:] = float("nan")
        launch = run_queues(queues, tensors, symbols={"B": batch}, seed=batch)
        torch.testing.assert_close(launch.tensors["y"][:batch], expected[:batch])
        assert launch.tensors["y"][batch:].isnan().all()
        torch.testing.assert_close(launch.tensors["sum"], expected[:batch].sum(0))
        torch.testing.assert_close(launch.tensors["most"], expected[:batch].amax(0))
        assert launch.tensors["routing.counts"].sum() == 2 * batch
        tensors = given(program, [])
    with pytest.raises(ProgramError, match=r"the max along axis .* of which nothing is in use"):
        run_queues(queues, tensors, symbols={"B": 0})


def test_a_symbol_ends_rows_that_are_normalised():
    """Along the dim that the symbol ends: the statistics are of what is in use."""
    p = ProgramBuilder("ends")
    turned = p.transpose(p.input("x", (6, 4)), (1, 0), name="turned")
    weight = p.weight("w", (6,))
    parts = (
        p.softmax(turned),
        p.rms_norm(turned, weight, 1e-5),
        p.layer_norm(turned, weight, None, 0),
    )
    outs = [*parts, p.cumsum(turned), p.linear(parts[0], turned, name="product")]
    program = p.build(*outs)
    tiles = {op.name: {"m0": 2} for op in program.ops} | {
        "turned": {"i0": 3},
        outs[0].name: {"d": 4},
    }
    graph = analyse_events(program, tiles, symbols={"B": ("x", 0)})
    queues = make_queues(graph, 3)
    check_queues(queues)
    for batch in (1, 3, 6):
        tensors = given(program, [])
        x, w = tensors["x"][:batch].T, tensors["w"][:batch]
        shares, scaled = x.softmax(-1), F.rms_norm(x, (batch,), w, 1e-5)
        centred = F.layer_norm(x, (batch,), w, eps=0) if batch > 1 else None
        tensors["x"][batch:] = float("nan")
        launch = run_queues(queues, tensors, symbols={"B": batch}, seed=batch)
        for out, wanted in zip(
            outs, (shares, scaled, centred, x.cumsum(-1), shares @ x.T), strict=True
        ):
            if wanted is not None:
                found = launch.tensors[out.name]
                torch.testing.assert_close(found[:, : wanted.shape[1]], wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_a_symbol_of_nothing_ends_sums_of_products(bias: bool):
    """Sums over what is in use are zero where nothing is, and then the bias alone."""
    p = ProgramBuilder("nothing")
    x, w, b = p.input("x", (2, 6)), p.weight("w", (3, 6)), p.weight("b", (3,))
    y = p.linear(x.map("a0 + 1"), w, b if bias else None, name="y")
    program = p.build(y, p.linear(x, w, spec="m k, n k -> n m", name="turned"))
    graph = analyse_events(program, {"y": {"n": 2}}, symbols={"K": ("x", 1)})
    queues = make_queues(graph, 2)
    check_queues(queues)
    tensors = given(program, [])
    for used in (0, 1, 6):
        launch = run_queues(queues, tensors, symbols={"K": used}, seed=used)
        x, w = tensors["x"][:, :used], tensors["w"][:, :used]
        expected = (x + 1) @ w.T + (tensors["b"] if bias else 0)
        torch.testing.assert_close(launch.tensors["y"], expected)
        torch.testing.assert_close(launch.tensors["turned"], w @ x.T)


@pytest.mark.parametrize("dtype", ["bool", "i32", "i64", "bf16", "f16", "f64"])
def test_tasks_make_tensors_of_all_types(dtype: str):
    p = ProgramBuilder("types")
    x = p.input("x", (4, 6))
    less = p.pointwise("lt(a0, 0)", x, dtype=dtype, name="less")
    shown = p.reshape(p.set(less, name="copy"), (24,), view=True, name="shown")
    program = p.build(p.slice(shown, 0, 1, 24, 2, name="y"), p.reduce(less, 0, "max", name="any"))
    graph = analyse_events(program, {"less": {"i0": 1}, "copy": {"i1": 4}, "y": {"i0": 5}})
    queues = make_queues(graph, 3)
    check_queues(queues)
    tensors = given(program, [])
    expected = run_program(program, tensors)
    for seed in range(3):
        found = run_queues(queues, tensors, seed=seed).tensors
        assert all(torch.equal(found[name], expected[name]) for name in program.outputs)


@pytest.mark.parametrize("symbols", [{}, {"B": ("x", 0)}])
def test_views_show_what_their_source_holds(symbols: dict[str, tuple[str, int]]):
    p = ProgramBuilder("views")
    made = p.input("x", (6, 4)).map("exp(a0)", name="P")
    turned = p.transpose(made, (1, 0), view=True)
    program = p.build(turned.map("-a0", name="C"))
    graph = analyse_events(program, {"P": {"i0": 2}, "C": {"i0": 3, "i1": 4}}, symbols=symbols)
    queues = make_queues(graph, 3)
    check_queues(queues)
    tensors = {"x": torch.randn(6, 4)}
    for batch in (3, 6) if symbols else (6,):
        launch = run_queues(queues, tensors, symbols=dict.fromkeys(symbols, batch))
        expected = -tensors["x"].exp().T
        assert torch.equal(launch.tensors["C"][:, :batch], expected[:, :batch])
        assert bool(launch.tensors["C"][:, batch:].isnan().all())


def test_a_sum_that_a_symbol_ends_in_is_refused():
    """Rows in use of 6, 4 elements each, seen as 24 elements: their sum is of no axis alone."""
    p = ProgramBuilder("flat")
    made = p.input("x", (6, 4)).map("exp(a0)", name="P")
    flat = p.reshape(made, (24,), name="F").map("-a0", name="G")
    program = p.build(flat, p.reduce(flat, 0, name="S"))
    with pytest.raises(ProgramError, match=r"op 'S' of all of axis .* in which symbol 'B' ends"):
        analyse_events(program, {}, symbols={"B": ("x", 0)})
    analyse_events(program, {})


@pytest.mark.parametrize(
    "part",
    [
        lambda p, x: p.slice(x, 0, 0, 4),
        lambda p, x: p.slice(x, 0, 0, 4, view=True),
        lambda p, x: p.concat([x, x], 0),
        lambda p, x: p.concat([p.slice(x, 0, 0, 3), p.slice(x, 0, 3, 6)], 0),
        lambda p, x: p.reshape(x, (3, 2, 4)),
    ],
    ids=["slice", "view", "twice", "again", "apart"],
)
def test_a_sum_over_a_part_of_what_a_symbol_counts_is_refused(part):
    """Which of its elements are in use nobody says: they would be read, whatever they hold."""
    for sums in (False, True):
        p = ProgramBuilder("parts")
        made = part(p, p.input("x", (6, 4)).map("exp(a0)", name="P"))
        results = [p.reduce(made, 0, name="S")] if sums else []
        program = p.build(made.map("-a0"), *results)
        refused = pytest.raises(
            ProgramError, match=r"op 'S' of all of axis .* in which symbol 'B' ends"
        )
        with refused if sums else nullcontext():
            analyse_events(program, {}, symbols={"B": ("x", 0)})


@pytest.mark.parametrize(
    ("choose", "least"),
    [(lambda p, x: p.topk(x, 3)[1], 3), (lambda p, x: p.top_k(x, 2)[1], 2),
     (lambda p, x: p.argmax(x), 1)],
    ids=["topk", "top_k", "argmax"],
)  # fmt: skip
def test_what_is_chosen_among_fewer_is_refused(choose, least: int):
    p = ProgramBuilder("choice")
    program = p.build(choose(p, p.input("x", (4, 6))))
    queues = make_queues(analyse_events(program, {}, symbols={"E": ("x", 1)}), 2)
    given = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    launch = run_queues(queues, given, symbols={"E": least})
    (found,) = (launch.tensors[name] for name in program.outputs)
    assert found.max() < least
    with pytest.raises(ProgramError, match=f"in use; expected a symbol of at least {least}"):
        run_queues(queues, given, symbols={"E": least - 1})


def test_an_op_of_torch_along_a_symbol_is_no_choice():
    p = ProgramBuilder("padded")
    x = p.input("x", (6, 4))
    program = p.build(
        *p.opaque(
            "aten.constant_pad_nd.default",
            '[[{"tensor": 0}, [0, 3], 0.0], {}, [0]]',
            [x],
            [((6, 7), "f32")],
            name="padded",
        )
    )
    queues = make_queues(analyse_events(program, {}, symbols={"B": ("x", 0)}), 2)
    given = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}
    launch = run_queues(queues, given, symbols={"B": 6})
    assert torch.equal(launch.tensors["padded"][:, :4], given["x"])


def test_a_program_of_views_has_ended_before_it_starts():
    p = ProgramBuilder("views")
    program = p.build(p.transpose(p.input("x", (4, 3)), (1, 0), view=True, name="y"))
    x = torch.arange(12.0).view(4, 3)
    launch = run_queues(make_queues(analyse_events(program, {}), 2), {"x": x})
    assert torch.equal(launch.tensors["y"], x.T)


def test_states_that_are_given_stay():
    """A launch leaves what it was given alone, however an op is cut."""
    p = ProgramBuilder("states")
    cache = p.state("cache", (2, 8, 4))
    rows, positions = p.input("rows", (3, 2, 4)), p.input("at", (3,), "i64")
    p.kv_append(cache, rows, positions, name="put")
    program = p.build(rows.map("2.0 * a0", name="out"))
    put = next(op for op in program.ops if op.name == "put")
    heads = next(a.name for a in put.axes if a.role == "parallel" and a.extent == 2)
    for tiles in ({}, {"put": {heads: 1}}):
        queues = make_queues(analyse_events(program, tiles), 2)
        tensors = {"cache": torch.zeros(2, 8, 4), "rows": torch.ones(3, 2, 4),
                   "at": torch.tensor([1, 5, 2])}  # fmt: skip
        launch = run_queues(queues, tensors)
        assert not tensors["cache"].any()
        assert launch.tensors["cache"].sum() == 24


@pytest.mark.parametrize("dtype", ["f32", "i64"])
def test_states_that_are_left_out_are_zero_at_first(dtype: str):
    p = ProgramBuilder("counting")
    state = p.state("state", (4,), dtype)
    total = p.pointwise("a0 + a1", p.input("x", (4,), dtype), state, name="total")
    program = p.build(p.set(total, into=p.slice(state, 0, 0, 4, view=True)), state)
    queues = make_queues(analyse_events(program, {"total": {"i0": 2}}), 3)
    x = torch.arange(4).to(torch.int64 if dtype == "i64" else torch.float32)
    found = run_queues(queues, {"x": x}).tensors
    assert torch.equal(found["state"], x)
    again = run_queues(queues, {"x": x, "state": found["state"]}).tensors
    assert torch.equal(again["state"], 2 * x)


def test_lists_never_overflow():
    """The capacity bounds any routing, and some routing comes near it."""
    for num_rows, num, num_experts in ((4, 2, 4), (7, 3, 5), (1, 2, 9), (12, 1, 3)):
        graph = analyse_events(experts(num_rows, num, num_experts), TILES)
        (region,) = make_queues(graph, 2, "always").regions
        generator = random.Random(0)
        most = 0
        for _ in range(200):
            counts = [0] * num_experts
            for _ in range(num_rows):
                for expert in generator.sample(range(num_experts), num):
                    counts[expert] += 1
            starts = [sum(counts[:n]) for n in range(num_experts + 1)]
            known = RunTime(starts={"routing.offsets": starts})
            records = sum(graph.runs(entry.task, known) for entry in region.entries)
            most = max(most, records)
            assert records <= region.capacity
        assert most >= 0.6 * region.capacity
        assert region.capacity <= len(region.entries)


def test_costs_decide_between_static_and_dynamic():
    """Few heavy tasks that are unevenly spread are drained; small ones aren't worth a list."""

    def graph_of(hidden: int, num_experts: int) -> EventGraph:
        program = experts(16, 2, num_experts, hidden)
        tiles = {"rows": {"e": 1, "r": 16}, "up": {"e": 1, "r": 16}, "act": {"e": 1, "r": 16},
                 "down": {"e": 1, "r": 16}}  # fmt: skip
        return analyse_events(program, tiles)

    small, heavy = graph_of(8, 8), graph_of(1 << 16, 64)
    assert not make_queues(small, 8, "auto").regions
    assert len(make_queues(heavy, 8, "auto").regions) == 1
    for graph in (small, heavy):
        grids = [grid for grid in graph.grids if grid.rows is not None and grid.op != "y"]
        assert drains_faster(graph, grids, 8) == bool(make_queues(graph, 8, "auto").regions)


GATHERED_STATE = """
program gathered
  state s: f32[2, 4]
  input x: f32[2, 4]
  temp whole: f32[4, 4]
  temp y: f32[4, 4]
  whole = all_gather[r:2 i0:2 i1:4] s(i0, i1) -> whole(r.i0, i1)\
 | dim=0 extent=4 mesh_axis='tp' num_ranks=2
  put = set[i0:2 i1:4] x(i0, i1) -> s(i0, i1)
  y = pointwise[i0:4 i1:4] whole(i0, i1) -> y(i0, i1) | expr='-a0'
  return y, s
"""


def test_what_ranks_read_is_overwritten_once_all_have_read_it():
    program = parse_program(GATHERED_STATE)
    graph = analyse_events(program, {"whole": {}, "put": {"i0": 1}}, num_ranks=2)
    assert "all*2 from whole() count 1 to put()" in print_events(graph)
    queues = make_queues(graph, 2)
    check_queues(queues)
    for seed in range(20):
        given = [
            {"s": torch.full((2, 4), float(rank)), "x": torch.full((2, 4), 9.0)} for rank in (0, 1)
        ]
        for launch in run_ranks(queues, given, DeviceMesh(tp=2), seed=seed):
            assert launch.tensors["y"][:, 0].tolist() == [0, 0, -1, -1]
            assert (launch.tensors["s"] == 9).all()


SUMMED = """
program summed
  input x: f32[4, 4]
  temp p: f32[4, 4]
  temp y: f32[4, 4]
  p = pointwise[i0:4 i1:4] x(i0, i1) -> p(i0, i1) | expr='-a0'
  y = all_reduce[i0:4 i1:4] p(i0, i1) -> y(i0, i1) | combine='sum' mesh_axis='tp' num_ranks=2
  return y
"""


@pytest.mark.parametrize("num_sms", [1, 3])
def test_what_others_make_is_awaited_whole(num_sms: int):
    """The order of an SM tells of its own rank alone."""
    program = parse_program(SUMMED)
    text = print_events(analyse_events(program, {"p": {"i0": 2}, "y": {"i0": 2}}, num_ranks=2))
    event = "  event p.0[2] all*2 from p(d0) count 1 to y(d0)\n"
    assert text.endswith(event)
    check_queues(make_queues(parse_events(text, program), num_sms))
    for other in (text.replace(event, ""), text.replace("y(i0:4/2)", "y(i0:4/4)")):
        with pytest.raises(
            CheckError, match=r"race: p\[.\] need not have ended when y\[0\] starts"
        ):
            check_queues(make_queues(parse_events(other, program), num_sms))


def test_nothing_is_drained_across_ranks():
    text = (
        GATHERED.replace(
            "bring =",
            "x2 = pointwise[i0:256 i1:64] x(i0, i1) -> x2(i0, i1) | expr='exp(a0)'\n  bring =",
        )
        .replace("temp whole", "temp x2: f32[256, 64]\n  temp whole")
        .replace("i1:64] x(i0, i1) -> whole", "i1:64] x2(i0, i1) -> whole")
    )
    graph = analyse_events(parse_program(text), {"bring": {"r": 1}}, num_ranks=4)
    assert any(event.sources == "axis" for event in graph.events)
    with pytest.raises(ProgramError, match="wait for other ranks"):
        make_queues(graph, 2, "always")
    assert not make_queues(graph, 2, "auto").regions


def reordered(queues: Queues) -> Queues:
    return replace(queues, sms=tuple(queue[::-1] for queue in queues.sms))


def without_a_task(queues: Queues) -> Queues:
    return replace(queues, sms=(queues.sms[0][:-1], *queues.sms[1:]))


def with_a_task_twice(queues: Queues) -> Queues:
    entry = next(e for e in queues.sms[1] if isinstance(e, Entry))
    return replace(queues, sms=(*queues.sms, (entry,)))


def without_drains(queues: Queues) -> Queues:
    sms = tuple(tuple(e for e in queue if not isinstance(e, Drain)) for queue in queues.sms)
    return replace(queues, sms=sms)


@pytest.mark.parametrize(
    ("mutate", "dynamic", "message"),
    [
        (reordered, "never", "not in program order"),
        (reordered, "always", "not in program order"),
        (without_a_task, "never", "stands in 0 queues and lists"),
        (with_a_task_twice, "always", "stands in 2 queues and lists"),
        (without_drains, "always", "nobody drains"),
    ],
)
def test_queues_that_can_not_be(mutate, dynamic: Dynamic, message: str):
    with pytest.raises(CheckError, match=message):
        check_queues(mutate(queues_of(4, 2, 3, dynamic)))


def test_a_hang_names_who_waits_and_who_owes():
    queues = reordered(assign_tasks(analyse_events(rows_and_heads(), {}), 1, "never"))
    tensors = given(queues.graph.program, [])
    with pytest.raises(HangError, match=r"SM 0: C\[0\] waits for .*owed by \['P\[0\]'\]"):
        run_queues(queues, tensors)


def test_a_queue_for_nobody():
    with pytest.raises(ProgramError, match="num_sms 0; expected a whole number of at least 1"):
        make_queues(queues_of(4, 2, 3, "never").graph, 0)


@pytest.mark.parametrize("dynamic", ["sometimes", "Never", None, True])
def test_another_word_than_the_schedules_there_are(dynamic: object):
    graph = analyse_events(rows_and_heads(), {})
    with pytest.raises(ProgramError, match="expected one of auto, never, always"):
        make_queues(graph, 2, dynamic)  # type: ignore[arg-type]


def test_many_sms_that_drain_a_region_cost_little_more_than_few():
    """What a region's tasks read before their guards is asked once, not by each SM."""
    graph = analyse_events(experts(8, 2, 8), {op: TILES[op] | {"r": 1} for op in ("rows", "act")})

    def planned(num_sms: int) -> int:
        make_queues(graph, num_sms, "always")  # so that the graph's tables are there
        return num_calls(lambda: check_queues(make_queues(graph, num_sms, "always")))

    assert planned(64) < 3 * planned(4)


def test_tensors_that_are_given_fit_the_program():
    queues = make_queues(analyse_events(rows_and_heads(), {}), 2)
    x, w = torch.ones(16, 64), torch.ones(4, 8, 64)
    with pytest.raises(ProgramError, match="weight 'w' is missing"):
        run_queues(queues, {"x": x})
    with pytest.raises(ProgramError, match=r"input 'x' of shape \(5, 64\); expected \(16, 64\)"):
        run_queues(queues, {"x": x[:5], "w": w})
    with pytest.raises(ProgramError, match=r"weight 'w' given as f64\[4, 8, 64\]; expected f32"):
        run_queues(queues, {"x": x, "w": w.double()})
    with pytest.raises(ProgramError, match="input 'x' given as list, no tensor"):
        run_queues(queues, {"x": x.tolist(), "w": w})
    with pytest.raises(ProgramError, match="a tensor for 'v'; expected one of x, w;"):
        run_queues(queues, {"x": x, "w": w, "v": w})


@pytest.mark.parametrize("num_experts", [4, 5])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_wait_for_the_experts_that_others_have(num_ranks: int, num_experts: int):
    """A sum over ranks right behind experts that these share out: each has other tiles with rows,
    or none.
    """
    program = experts(3, 1, num_experts)
    layouts = {"wu": shard(0, "tp"), "wd": shard(0, "tp"), "down": replicate()}
    local = localize(plan_program(program, DeviceMesh(tp=num_ranks), CPU, annotations=layouts))
    (total,) = (op for op in local.program.ops if op.kind == "all_reduce")
    assert total.reads[0].tensor.startswith("down")
    tiles = {name: TILES[name] for name in ("rows", "up", "act", "down")}
    graph = analyse_events(local.program, tiles, num_ranks=num_ranks)
    queues = make_queues(graph, 2)
    check_queues(queues)
    for ids in ([[0], [0], [0]], [[3], [3], [3]], [[0], [1], [3]], [[2], [3], [2]]):
        tensors = given(program, ids)
        expected = run_program(program, tensors)
        for seed in range(3):
            parts = [shard_tensors(tensors, local, rank) for rank in local.mesh.ranks]
            for launch in run_ranks(queues, parts, local.mesh, seed=seed):
                torch.testing.assert_close(launch.tensors["y"], expected["y"])


def test_what_a_dropped_wait_told_is_still_told():
    """A wait was left out for another that taught the same, and that one then, too."""
    p = ProgramBuilder("s")
    x = p.input("x", (4, 2))
    first, other = x.map("exp(a0)", name="A"), x.map("-a0", name="U")
    program = p.build(first.map("a0 + a1", other, name="C"))
    tiles = {"A": {"i0": 1}, "U": {"i0": 2}, "C": {"i0": 3, "i1": 1}}
    graph = analyse_events(program, tiles, symbols={"B": ("x", 0)})
    for num_sms in (1, 2, 3, 4):
        check_queues(make_queues(graph, num_sms))


def test_tasks_of_guards_of_experts_keep_the_waits_that_they_need():
    tiles = {"gate": {"r": 3}, "up": {"r": 2}, "mixed": {"r": 3, "i0": 1}}
    graph = analyse_events(moe_block(4, 2, 3, 2, 2), tiles)
    for num_sms in range(1, 6):
        check_queues(make_queues(graph, num_sms, "never"))


@pytest.mark.parametrize("num_sms", [1, 3, 8, 20])
def test_who_counts_by_starts_awaits_what_writes_them(num_sms: int):
    """An op that reads grouped rows alone: how many tasks made them, the starts say."""
    p = ProgramBuilder("w")
    x, ids = p.input("x", (4, 8)), p.input("ids", (4, 2), "i32")
    rows = p.gather_rows(x, p.route(ids, 4, name="routing"), name="rows")
    program = p.build(p.reduce(rows, 0, name="sum"))
    queues = make_queues(analyse_events(program, {"rows": {"e": 1, "r": 2}}), num_sms, "never")
    check_queues(queues)
    given = {"x": torch.rand(4, 8), "ids": torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0]]).int()}
    found = run_queues(queues, given).tensors["sum"]
    torch.testing.assert_close(found, 2 * given["x"].sum(0))


def test_tiles_of_an_op_that_disturb_each_other_are_refused():
    p = ProgramBuilder("turned")
    state = p.state("s", (4, 4))
    p.set(p.transpose(state, (1, 0), view=True, name="v"), into=state, name="put")
    program = p.build(state.map("a0", name="out"))
    with pytest.raises(ProgramError, match="tiles of 'put', which read 'v' where others write it"):
        analyse_events(program, {"put": {"i0": 1}})
    queues = make_queues(analyse_events(program, {}), 3)
    given = torch.rand(4, 4)
    torch.testing.assert_close(run_queues(queues, {"s": given}).tensors["out"], given.T)


def test_states_written_through_a_view_stay_too():
    p = ProgramBuilder("shown")
    x, state = p.input("x", (8,)), p.state("s", (9,))
    p.set(x, into=p.slice(state, 0, 1, 9, view=True, name="hi"), name="put")
    queues = make_queues(analyse_events(p.build(state.map("a0", name="out")), {}), 2)
    given = {"s": torch.zeros(9), "x": torch.ones(8)}
    assert run_queues(queues, given).tensors["out"].sum() == 8
    assert not given["s"].any()


def rewritten(place: str, through: str) -> Program:
    """Starts that an op writes anew: before they are read, between two ops or behind all."""
    p = ProgramBuilder("anew")
    x, ids = p.input("x", (4, 8)), p.input("ids", (4, 2), "i32")
    routing = p.route(ids, 4, name="routing")
    offsets = routing.offsets
    shown = {
        "itself": lambda: offsets,
        "view": lambda: p.reshape(offsets, (5, 1), view=True, name="v"),
        "part": lambda: p.slice(offsets, 0, 1, 5, view=True, name="v"),
    }[through]()

    def put(here: str) -> None:
        if here == place:
            p.set(p.input("z", shown.shape, "i32"), into=shown, name="put")

    put("before")
    rows = p.gather_rows(x, routing, name="rows")
    put("between")
    act = p.grouped_pointwise("silu(a0)", rows, routing=routing, name="act")
    put("behind")
    return p.build(p.reduce(act, 0, name="sum"))


@pytest.mark.parametrize("through", ["itself", "view", "part"])
@pytest.mark.parametrize("dynamic", ["never", "always"])
def test_starts_that_are_written_anew_through_a_view(through: str, dynamic: Dynamic):
    tiles = {"rows": {"e": 1, "r": 2}, "act": {"e": 1, "r": 2}}
    program = rewritten("before", through)
    queues = make_queues(analyse_events(program, tiles), 3, dynamic)
    check_queues(queues)
    starts = torch.tensor([0, 4, 4, 8, 8]).int()
    z = starts[-program.tensor_map()["z"].num_elements :].view(program.tensor_map()["z"].shape)
    given = {"x": torch.rand(4, 8), "ids": torch.tensor([[0, 2]] * 3 + [[0, 3]]).int(), "z": z}
    for seed in range(5):
        found = run_queues(queues, given, seed=seed).tensors["sum"]
        torch.testing.assert_close(found, run_program(program, given)["sum"])
    for place in ("between", "behind"):
        queues = make_queues(analyse_events(rewritten(place, through), tiles), 3, dynamic)
        with pytest.raises(
            CheckError, match=r"^rows\[\d\] reads 'routing.offsets', which 'put' ov"
        ):
            check_queues(queues)


@pytest.mark.parametrize("dynamic", ["never", "always"])
def test_starts_that_are_a_view(dynamic: Dynamic):
    program = experts(4, 2)
    text = print_program(program).replace("  temp rows:", "  temp seen: i32[5]\n  temp rows:")
    ops = text.index("  rows =")
    text = (
        text[:ops]
        + "  seen = view[i0:5] routing.offsets(i0) -> seen(i0)\n"
        + text[ops:].replace("routing.offsets(o)", "seen(o)")
    )
    shown = parse_program(text)
    queues = make_queues(analyse_events(shown, TILES), 3, dynamic)
    check_queues(queues)
    tensors = given(shown, E1[0])
    found = run_queues(queues, tensors).tensors["y"]
    torch.testing.assert_close(found, run_program(program, given(program, E1[0]))["y"])
