"""Dependencies and events: the T cases of the project's case list, more of their kind, and a
brute-force oracle over random programs."""

import pytest
from hypothesis import given

from distmega.errors import VerifyError
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.regions import regions_meet
from distmega.kernels.tasks.types import RangeSplit, TaskGraph, TaskGroup
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.kernels.programs import (
    decoder,
    edges,
    even,
    graph_of,
    random_programs,
    sized,
    tile_ops,
    triggers_of,
    waits_of,
)


def two_ops(
    shape: tuple[int, ...], p_splits: tuple[RangeSplit, ...], c_splits: tuple[RangeSplit, ...]
):
    """Graph of P: x -> P and C: P -> C, elementwise."""
    p = ProgramBuilder("pair")
    y = p.input("x", shape).map("a0", name="P")
    program = p.build(y.map("a0", name="C"))
    return build_task_graph(program, tile_ops(program, P=p_splits, C=c_splits))


def summary(graph: TaskGraph, producer: str = "P", consumer: str = "C"):
    """Events of a producer: (how many, triggers of each, consumer tasks of each)."""
    triggers = triggers_of(graph, producer)
    groups = [group.op.name for group in graph.groups]
    (event,) = (e for e in graph.events if groups[e.producer] == producer)
    waits = next(waits for g, waits in event.consumers if groups[g] == consumer)
    users = [sum(e in one for one in waits) for e in range(len(triggers))]
    return len(triggers), [len(t) for t in triggers], users


def test_t1_many_small_producers():
    graph = two_ops((128,), (even("i0", 128, 32),), (even("i0", 128, 8),))
    assert len(edges(graph)) == 32
    assert triggers_of(graph, "P") == [tuple(range(4 * e, 4 * e + 4)) for e in range(8)]
    assert waits_of(graph, "P", "C") == [set(range(4 * e, 4 * e + 4)) for e in range(8)]
    assert graph.num_events == 8


def test_t2_many_small_consumers():
    graph = two_ops((128,), (even("i0", 128, 8),), (even("i0", 128, 32),))
    assert summary(graph) == (8, [1] * 8, [4] * 8)


def test_t3_only_the_second_grid_axis_maps():
    p = ProgramBuilder("grid")
    y = p.input("x", (96,)).map("a0", name="P")
    program = p.build(p.pointwise("a0 + a1", p.input("b", (4, 96)), y, name="C"))
    groups = tile_ops(program, P=(even("i0", 96, 96),), C=(even("i0", 4, 4), even("i1", 96, 8)))
    assert summary(build_task_graph(program, groups)) == (8, [12] * 8, [4] * 8)


def test_t5_uneven_ratio():
    graph = two_ops((384,), (even("i0", 384, 12),), (even("i0", 384, 8),))
    expected = [{0, 1}, {1, 2}, {3, 4}, {4, 5}, {6, 7}, {7, 8}, {9, 10}, {10, 11}]
    assert waits_of(graph, "P", "C") == expected
    assert graph.num_events == 8


def test_t7_tiles_that_do_not_divide():
    graph = two_ops((130,), (sized("i0", 130, 64),), (sized("i0", 130, 48),))
    assert waits_of(graph, "P", "C") == [{0}, {0, 1}, {1, 2}]


@pytest.mark.parametrize(
    ("consumer", "num_events", "num_triggers"),
    [
        ((even("i0", 8, 2), even("i1", 16, 4)), 8, 4),
        ((even("i0", 8, 4),), 4, 8),
        ((even("i1", 16, 8),), 8, 4),
    ],
    ids=["2x4", "rows", "columns"],
)
def test_t8_grids(consumer: tuple[RangeSplit, ...], num_events: int, num_triggers: int):
    graph = two_ops((8, 16), (even("i0", 8, 4), even("i1", 16, 8)), consumer)
    assert summary(graph) == (num_events, [num_triggers] * num_events, [1] * num_events)


def test_t13_a_pair_counts_though_another_op_stands_between():
    p = ProgramBuilder("skip")
    a = p.input("x", (64,)).map("a0", name="A")
    b = a.map("a0", name="B")
    program = p.build(p.linear(a, p.weight("w", (64, 64)), b, spec="k, n k, n -> n", name="C"))
    tiles = {name: (even("i0", 64, 8),) for name in "AB"}
    graph = build_task_graph(program, tile_ops(program, C=(even("n", 64, 8),), **tiles))
    assert waits_of(graph, "A", "B") == [{i} for i in range(8)]
    assert waits_of(graph, "A", "C") == [set(range(8))] * 8
    assert waits_of(graph, "B", "C") == [{i} for i in range(8)]


def test_t16_overwriting_waits_for_readers_and_writers():
    p = ProgramBuilder("overwrite")
    x = p.state("X", (64,))
    p.set(p.input("a", (64,)), into=x, name="A")
    b = x.map("a0", name="B")
    p.set(p.input("d", (64,)), into=x, name="D")
    program = p.build(b)
    graph = build_task_graph(
        program, tile_ops(program, **{name: (even("i0", 64, 8),) for name in "ABD"})
    )
    assert waits_of(graph, "B", "D") == [{i} for i in range(8)]
    assert waits_of(graph, "A", "D") == [{i} for i in range(8)]
    assert waits_of(graph, "A", "B") == [{i} for i in range(8)]


def test_equal_trigger_sets_are_shared_by_consumer_groups():
    p = ProgramBuilder("shared")
    y = p.input("x", (64,)).map("a0", name="P")
    program = p.build(y.map("a0", name="C"), y.map("a0", name="D"), y.map("a0", name="E"))
    eight, two = (even("i0", 64, 8),), (even("i0", 64, 2),)
    graph = build_task_graph(program, tile_ops(program, P=eight, C=eight, D=eight, E=two))
    assert graph.num_events == 10


def test_strided_slices_need_only_their_tiles():
    p = ProgramBuilder("strided")
    y = p.input("x", (64,)).map("a0", name="P")
    odd = p.slice(y, 0, 1, 64, 8, name="C")
    program = p.build(odd)
    graph = build_task_graph(program, tile_ops(program, P=(sized("i0", 64, 4),), C=()))
    assert waits_of(graph, "P", "C") == [set(range(0, 16, 2))]


def test_interleaved_writers_do_not_touch_each_other():
    p = ProgramBuilder("interleaved")
    x = p.state("X", (32,))
    even_part, odd_part = (p.slice(x, 0, i, 32, 2, view=True) for i in (0, 1))
    p.set(p.input("a", (16,)), into=even_part, name="A")
    p.set(p.input("b", (16,)), into=odd_part, name="B")
    program = p.build(p.slice(x, 0, 1, 32, 4, name="C"))
    four = (even("i0", 16, 4),)
    graph = build_task_graph(program, tile_ops(program, A=four, B=four, C=(even("i0", 8, 4),)))
    assert edges(graph) == {("B", i, "C", i) for i in range(4)}


def test_transposed_consumers():
    p = ProgramBuilder("transposed")
    y = p.input("x", (8, 12)).map("a0", name="P")
    program = p.build(p.transpose(y, (1, 0), view=True).map("a0", name="C"))
    rows = (even("i0", 8, 4),)
    graph = build_task_graph(program, tile_ops(program, P=rows, C=(even("i0", 12, 3),)))
    assert waits_of(graph, "P", "C") == [{0, 1, 2, 3}] * 3
    graph = build_task_graph(program, tile_ops(program, P=rows, C=(even("i1", 8, 2),)))
    assert waits_of(graph, "P", "C") == [{0, 1}, {2, 3}]


def test_merged_dims_follow_rows():
    p = ProgramBuilder("merged")
    y = p.input("x", (4, 6)).map("a0", name="P")
    program = p.build(p.reshape(y, (24,), view=True).map("a0", name="C"))
    groups = tile_ops(program, P=(even("i0", 4, 4),), C=(sized("i0", 24, 9),))
    assert waits_of(build_task_graph(program, groups), "P", "C") == [{0, 1}, {1, 2}, {3}]


def halo(p: ProgramBuilder, y: Handle, num: int) -> Program:
    left, middle, right = (p.slice(y, 0, i, num - 2 + i, view=True) for i in range(3))
    return p.build(p.pointwise("a0 + a1 + a2", left, middle, right, name="C"))


def test_halos_reach_into_the_neighbours():
    p = ProgramBuilder("halo")
    program = halo(p, p.input("x", (34,)).map("a0", name="P"), 34)
    tiles = RangeSplit(axes=("i0",), bounds=(0, 9, 17, 25, 34))
    graph = build_task_graph(program, tile_ops(program, P=(tiles,), C=(even("i0", 32, 4),)))
    assert waits_of(graph, "P", "C") == [{0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3}]


def test_three_dimensional_grids():
    shape = (4, 6, 8)
    coarse = (even("i0", 4, 2), even("i1", 6, 3), even("i2", 8, 2))
    fine = (even("i0", 4, 4), even("i1", 6, 3), even("i2", 8, 4))
    assert summary(two_ops(shape, fine, coarse)) == (12, [4] * 12, [1] * 12)
    assert summary(two_ops(shape, coarse, fine)) == (12, [1] * 12, [4] * 12)
    rows = (even("i0 i1 i2", 192, 4),)
    assert summary(two_ops(shape, rows, (even("i1", 6, 3),)), "P") == (1, [4], [3])


def test_flat_ranges_over_composed_axes():
    # 3 heads of 2 groups of 4: a cut at 10 of 24 lies inside the second head's first group.
    p = ProgramBuilder("heads")
    q = p.linear(
        p.input("x", (1, 8)), p.weight("w", (3, 2, 4, 8)), spec="m k, h g d k -> m h g d", name="P"
    )
    program = p.build(q.map("a0", name="C"))
    flat = RangeSplit(axes=("h", "g", "d"), bounds=(0, 10, 17, 24))
    graph = build_task_graph(program, tile_ops(program, P=(flat,), C=(even("i1", 3, 3),)))
    assert waits_of(graph, "P", "C") == [{0}, {0, 1}, {1, 2}]


def test_reductions_wait_for_all_they_sum():
    p = ProgramBuilder("reduce")
    y = p.input("x", (8, 8)).map("a0", name="P")
    program = p.build(p.reduce(y, 1, name="C"))
    groups = tile_ops(program, P=(even("i0", 8, 4), even("i1", 8, 2)), C=(even("i0", 8, 8),))
    assert waits_of(build_task_graph(program, groups), "P", "C") == [
        {2 * (i // 2), 2 * (i // 2) + 1} for i in range(8)
    ]


def test_cache_updates_come_before_attention_and_after_the_readers_before_them():
    graph = graph_of(decoder(1), 4)
    names = [group.op.name for group in graph.groups]
    caches = [name for name in names if name.startswith("kv_append")]
    attention = next(name for name in names if name.startswith("attention"))
    for cache in caches:
        assert all(waits_of(graph, cache, attention))


def test_one_event_an_op():
    p = ProgramBuilder("op")
    y = p.input("x", (128,)).map("a0", name="P")
    program = p.build(y.map("a0", name="C"))
    groups = tile_ops(program, P=(even("i0", 128, 32),), C=(even("i0", 128, 8),))
    graph = build_task_graph(program, groups, mode="op")
    assert triggers_of(graph, "P") == [tuple(range(32))]
    assert waits_of(graph, "P", "C") == [set(range(32))] * 8


def brute_force(program: Program, groups: tuple[TaskGroup, ...]) -> set[tuple[str, int, str, int]]:
    footprints = Footprints(program)
    uses = [
        (place, group.op.name, task, footprints.base(access.tensor), write, region)
        for place, group in enumerate(groups)
        for reads, write in ((group.op.reads, False), (group.op.writes, True))
        for access in reads
        for task in range(group.num_tasks)
        for region in [footprints.region(access, group, task)]
    ]
    return {
        (name, task, other, number)
        for place, name, task, tensor, write, region in uses
        for later, other, number, base, wrote, touched in uses
        if place < later and tensor == base and (write or wrote) and regions_meet(region, touched)
    }


@given(random_programs())
def test_events_say_what_the_elements_say(made: tuple):
    program, groups = made
    expected = brute_force(program, groups)
    assert edges(build_task_graph(program, groups)) == expected
    by_op = edges(build_task_graph(program, groups, mode="op"))
    assert by_op >= expected
    assert {(p, c) for p, _, c, _ in by_op} == {(p, c) for p, _, c, _ in expected}


@given(random_programs())
def test_consumers_share_an_event_exactly_when_they_need_the_same_tasks(made: tuple):
    graph = build_task_graph(*made)
    for event in graph.events:
        triggers = triggers_of(graph, graph.groups[event.producer].op.name)
        assert len(set(triggers)) == len(triggers)
        assert all(len(waits) <= 1 for _, tasks in event.consumers for waits in tasks)


def test_a_receive_buffer_can_not_be_filled_twice_in_a_launch():
    program = decoder(1, tp=2)
    groups = graph_of(program, 4, tp=2).groups
    push = next(place for place, group in enumerate(groups) if group.op.kind == "push")
    with pytest.raises(VerifyError, match="on every rank after"):
        build_task_graph(program, (*groups, groups[push]), 2)


def test_remote_producers_keep_counts_of_one_rank():
    graph = graph_of(decoder(1, tp=2), 4, tp=2)
    assert graph.team_size == 2
    for event in graph.events:
        if event.all_ranks:
            assert max(event.counts) <= graph.groups[event.producer].num_tasks


def test_equal_layers_share_their_patterns():
    graph = graph_of(decoder(6), 8)
    queries = [
        event for event in graph.events if graph.groups[event.producer].op.kind == "attention"
    ]
    assert len(queries) == 6
    assert len({id(event.notify) for event in queries}) == 1
