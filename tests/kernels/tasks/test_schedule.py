"""Schedules: proven by the checker, minimal in waits, balanced, and fast to make."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import CheckError, VerifyError
from distmega.kernels.tasks.check.schedule import check_schedule
from distmega.kernels.tasks.expand import expand_collectives
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.schedule import HOP_BYTES, schedule_graph
from distmega.kernels.tasks.tile import task_bytes, tile_segment
from distmega.kernels.tasks.types import Schedule, ScheduledTask
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from tests.calls import num_calls
from tests.kernels.programs import decoder, edges, graph_of, random_programs, with_collectives


def all_tasks(schedule: Schedule) -> list[tuple[int, int, ScheduledTask]]:
    return [
        (sm, place, task)
        for sm, queue in enumerate(schedule.queues)
        for place, task in enumerate(queue)
    ]


def without_wait(schedule: Schedule, sm: int, place: int, number: int) -> Schedule:
    """The schedule less one wait; signals that nobody waits for any more go too."""
    task = schedule.queues[sm][place]
    waits = task.waits[:number] + task.waits[number + 1 :]
    queues = [list(queue) for queue in schedule.queues]
    queues[sm][place] = replace(task, waits=waits)
    awaited = {wait.event for queue in queues for one in queue for wait in one.waits}
    kept = tuple(
        tuple(
            replace(one, signals=tuple(s for s in one.signals if s.event in awaited))
            for one in queue
        )
        for queue in queues
    )
    return replace(schedule, queues=kept)


def assert_every_wait_is_needed(schedule: Schedule) -> int:
    num_waits = 0
    for sm, place, task in all_tasks(schedule):
        for number in range(len(task.waits)):
            num_waits += 1
            with pytest.raises(CheckError, match="race on"):
                check_schedule(without_wait(schedule, sm, place, number))
    return num_waits


@pytest.mark.parametrize("tp", [1, 2])
def test_removing_any_wait_of_a_transformer_block_is_caught(tp: int):
    schedule = schedule_graph(graph_of(decoder(1, tp), 4, tp), 4, hop_bytes=0)
    check_schedule(schedule)
    assert assert_every_wait_is_needed(schedule) > 20


@pytest.mark.parametrize("num_sms", [1, 2])
def test_who_overwrites_what_a_push_read_waits_for_no_peer(num_sms: int):
    p = ProgramBuilder("overwrite")
    x = p.state("x", (12,))
    total = p.set(x, name="all_reduce_0")
    p.set(p.state("y", (12,)), into=x)
    program = with_collectives(p.build(p.pointwise("a0 + a1", x, total)), 2)
    expanded = expand_collectives(program, DeviceMesh(tp=2))
    graph = graph_of(expanded, num_sms, 2)
    schedule = schedule_graph(graph, num_sms, hop_bytes=0)
    check_schedule(schedule)
    assert_every_wait_is_needed(schedule)
    (overwrite,) = (
        task
        for _, _, task in all_tasks(schedule)
        if [w.tensor for w in graph.groups[task.group].op.writes] == ["x"]
    )
    local = {s.event for _, _, t in all_tasks(schedule) for s in t.signals if not s.all_ranks}
    assert {wait.event for wait in overwrite.waits} <= local


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_sms", [1, 3, 8])
def test_decoders_pass(tp: int, num_sms: int):
    graph = graph_of(decoder(3, tp), num_sms, tp)
    schedule = schedule_graph(graph, num_sms)
    check_schedule(schedule)
    check_schedule(schedule_graph(replace_mode(graph), num_sms))
    assert len(schedule.queues) == num_sms
    placed = [(task.group, task.task) for _, _, task in all_tasks(schedule)]
    assert len(placed) == len(set(placed)) == graph.num_tasks


def replace_mode(graph):
    return build_task_graph(graph.segment, graph.groups, graph.team_size, mode="op")


def test_one_sm_needs_no_waits():
    schedule = schedule_graph(graph_of(decoder(2), 4), 1)
    assert schedule.num_events == 0
    assert not any(task.waits or task.signals for _, _, task in all_tasks(schedule))


def test_one_sm_still_waits_for_other_ranks():
    schedule = schedule_graph(graph_of(decoder(1, 2), 4, 2), 1)
    waiting = {
        schedule.graph.groups[task.group].op.kind
        for _, _, task in all_tasks(schedule)
        if task.waits
    }
    assert waiting == {"sum_ranks"}
    assert all(signal.all_ranks for _, _, task in all_tasks(schedule) for signal in task.signals)


def test_queues_follow_program_order():
    schedule = schedule_graph(graph_of(decoder(2, 2), 4, 2), 4)
    for queue in schedule.queues:
        assert [(t.group, t.task) for t in queue] == sorted((t.group, t.task) for t in queue)


def test_events_are_dense_and_counted():
    tp = 2
    schedule = schedule_graph(graph_of(decoder(2, tp), 4, tp), 4)
    signals = [s for _, _, task in all_tasks(schedule) for s in task.signals]
    waits = {wait for _, _, task in all_tasks(schedule) for wait in task.waits}
    assert {s.event for s in signals} == {w.event for w in waits} == set(range(schedule.num_events))
    for wait in waits:
        triggers = [s for s in signals if s.event == wait.event]
        assert wait.count == len(triggers) * (tp if triggers[0].all_ranks else 1)


def test_large_linears_spread_over_all_sms():
    """Those that take longer than one SM waits for another; smaller ones may leave out an SM that
    waits for all others meanwhile.
    """
    program = decoder(1, k=1024, f=4096)
    graph = build_task_graph(program, tile_segment(program, 8))
    schedule = schedule_graph(graph, 8)
    tensors, num_large = program.tensor_map(), 0
    for place, group in enumerate(graph.groups):
        if group.op.kind == "linear" and task_bytes(group, tensors).min() > HOP_BYTES:
            assert all(sum(t.group == place for t in queue) == 1 for queue in schedule.queues)
            num_large += 1
    assert num_large >= 4


def sms_of(schedule: Schedule, kind: str) -> list[list[int]]:
    """Of each group of a kind, the SM of each task."""
    where = {
        (task.group, task.task): sm for sm, queue in enumerate(schedule.queues) for task in queue
    }
    groups = enumerate(schedule.graph.groups)
    return [
        [where[place, n] for n in range(group.num_tasks)]
        for place, group in groups
        if group.op.kind == kind
    ]


def test_formulas_stay_where_their_tiles_were_made():
    p = ProgramBuilder("follow")
    x = p.input("x", (128, 256), "bf16")
    h = p.linear(x, p.weight("up", (512, 256), "bf16")).map("gelu(a0)")
    turned = p.transpose(h, (1, 0), view=True)
    y = p.linear(turned, p.weight("down", (192, 128), "bf16"))
    program = p.build(
        p.transpose(y, (1, 0), view=True).map("a0 * 2.0 + a1", p.input("z", (192, 512), "bf16"))
    )
    schedule = schedule_graph(build_task_graph(program, tile_segment(program, 132)), 132)
    check_schedule(schedule)
    products, formulas = sms_of(schedule, "linear"), sms_of(schedule, "pointwise")
    assert [sorted(sms) for sms in products] == [sorted(sms) for sms in formulas]
    for place, group in enumerate(schedule.graph.groups):
        if group.op.kind == "pointwise":
            assert not any(t.waits for queue in schedule.queues for t in queue if t.group == place)


def test_tasks_behind_several_sms_spread_over_free_ones():
    """All wait for another SM wherever they are, so that none queues behind another to spare it."""
    p = ProgramBuilder("spread")
    x = p.input("x", (64, 512), "bf16")
    for n in range(2):
        x = p.linear(x, p.weight(f"w{n}", (512, 512), "bf16"))
    program = p.build(x)
    schedule = schedule_graph(build_task_graph(program, tile_segment(program, 132)), 132)
    for sms in sms_of(schedule, "linear"):
        assert len(set(sms)) == len(sms) > 4


def test_waits_for_later_groups_are_refused():
    graph = graph_of(decoder(1), 4)
    event = graph.events[-1]
    swapped = replace(event, producer=event.consumers[0][0], consumers=event.consumers)
    with pytest.raises(VerifyError, match="waits for earlier groups only"):
        schedule_graph(replace(graph, events=(*graph.events[:-1], swapped)), 4)


@pytest.mark.parametrize("tp", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=40)
def test_random_programs_pass_and_need_every_wait(tp: int, data: st.DataObject):
    program, groups = data.draw(random_programs(tp))
    num_sms = data.draw(st.integers(1, 4))
    graph = build_task_graph(program, groups, tp)
    schedule = schedule_graph(graph, num_sms, hop_bytes=data.draw(st.sampled_from((0, 65536))))
    check_schedule(schedule)
    assert_every_wait_is_needed(schedule)


def interleave(schedule: Schedule, choices: random.Random) -> list[tuple[int, int]]:
    """(Group, task) in the order of one random run of one rank; ends early if it gets stuck."""
    heads, counts = [0] * len(schedule.queues), [0] * schedule.num_events
    order = []
    while True:
        able = [
            sm
            for sm, queue in enumerate(schedule.queues)
            if heads[sm] < len(queue)
            and all(counts[wait.event] >= wait.count for wait in queue[heads[sm]].waits)
        ]
        if not able:
            return order
        sm = choices.choice(able)
        task = schedule.queues[sm][heads[sm]]
        heads[sm] += 1
        order.append((task.group, task.task))
        for signal in task.signals:
            counts[signal.event] += 1


@given(data=st.data(), seed=st.integers(0, 1000))
def test_swapped_tasks_pass_only_if_every_run_keeps_the_order(data: st.DataObject, seed: int):
    program, groups = data.draw(random_programs())
    graph = build_task_graph(program, groups)
    schedule = schedule_graph(graph, 2, hop_bytes=0)
    names = [group.op.name for group in groups]
    needed = {(names.index(p), i, names.index(c), j) for p, i, c, j in edges(graph)}
    long = [sm for sm, queue in enumerate(schedule.queues) if len(queue) > 1]
    sm = data.draw(st.sampled_from(long or [0]))
    queue = list(schedule.queues[sm])
    at = data.draw(st.integers(0, max(0, len(queue) - 2)))
    queue[at : at + 2] = reversed(queue[at : at + 2])
    swapped = replace(
        schedule,
        queues=tuple(tuple(queue) if i == sm else q for i, q in enumerate(schedule.queues)),
    )
    try:
        check_schedule(swapped)
    except CheckError:
        assert swapped != schedule
        return
    for i in range(5):
        order = interleave(swapped, random.Random(seed + i))
        assert len(order) == graph.num_tasks
        place = {task: when for when, task in enumerate(order)}
        assert all(place[p, i] < place[c, j] for p, i, c, j in needed)


def test_swapping_a_producer_behind_its_consumer_is_rejected():
    schedule = schedule_graph(graph_of(decoder(1), 1), 1)
    (queue,) = schedule.queues
    for at in range(len(queue) - 1):
        one, other = queue[at : at + 2]
        swapped = (*queue[:at], other, one, *queue[at + 2 :])
        names = [schedule.graph.groups[task.group].op.name for task in (one, other)]
        if any((p, c) == tuple(names) for p, _, c, _ in edges(schedule.graph)):
            with pytest.raises(CheckError, match=f"race on .*{re.escape(names[0])}"):
                check_schedule(replace(schedule, queues=(swapped,)))
        else:
            check_schedule(replace(schedule, queues=(swapped,)))


def build(num_layers: int) -> None:
    """The task graph of so many layers of a 70B model."""
    program = decoder(num_layers, tp=1, k=8192, h=8, f=28672)
    graph = build_task_graph(program, tile_segment(program, 132))
    assert graph.num_tasks > 600 * num_layers


def test_building_a_graph_grows_with_its_layers_alone():
    build(1)
    assert num_calls(lambda: build(40)) < 4.4 * num_calls(lambda: build(10))
