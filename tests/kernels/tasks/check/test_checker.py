"""The proof of a schedule: as strict as running every task of every rank, and fast at any size."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.errors import CheckError
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import PEER_BUFFERS
from distmega.kernels.tasks.check.queues import CheckedTask, MemoryRegion, check_queues
from distmega.kernels.tasks.check.schedule import check_schedule, lay_out
from distmega.kernels.tasks.expand import SOURCE, expand_collectives, team_size
from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.regions import access_boxes, task_tiles
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.tile import tile_segment
from distmega.kernels.tasks.types import (
    RangeSplit,
    Schedule,
    ScheduledTask,
    TaskGroup,
    TaskSignal,
    TaskWait,
)
from distmega.models.presets import PRESETS
from distmega.program.types import Access, Index, Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.calls import num_calls
from tests.kernels.programs import decoder, graph_of, random_programs, random_splits, sized
from tests.kernels.tasks.test_collectives import gather_program
from tests.kernels.tasks.test_schedule import without_wait

NUM_LAUNCHES = 4


def explicit_launch(schedule: Schedule, launch: int, copies: int) -> list[list[list[CheckedTask]]]:
    """The queues of all ranks with the memory that each task touches, as the explicit checker takes
    them.
    """
    groups = schedule.graph.groups
    footprints = Footprints(schedule.graph.segment)
    shapes = schedule.graph.segment.tensor_map()
    num_ranks = schedule.graph.team_size
    received = {a.tensor for group in groups if group.all_ranks for a in group.op.writes}

    def memories(task: ScheduledTask, access: Access, owner: int, rank: int) -> MemoryRegion:
        group, name = groups[task.group], footprints.base(access.tensor)
        region = footprints.region(access, group, task.task)
        if access.tensor in received and group.all_ranks:
            extents = group.op.extents
            tiles = [t | {SOURCE: range(rank, rank + 1)} for t in task_tiles(group, task.task)]
            region = access_boxes(access, tiles, extents, shapes[access.tensor].shape)
        copy = f" copy {launch % copies}" if name in received else ""
        return MemoryRegion(rank=owner, tensor=name + copy, region=region)

    def with_memory(task: ScheduledTask, bare: CheckedTask, rank: int) -> CheckedTask:
        group = groups[task.group]
        owners = range(num_ranks) if group.all_ranks else (rank,)
        return replace(
            bare,
            reads=tuple(memories(task, a, rank, rank) for a in group.op.reads),
            writes=tuple(memories(task, a, to, rank) for a in group.op.writes for to in owners),
        )

    bare = lay_out(schedule, launch, num_ranks)
    return [
        [
            [with_memory(task, each, rank) for task, each in zip(queue, tasks, strict=True)]
            for queue, tasks in zip(schedule.queues, bare[rank], strict=True)
        ]
        for rank in range(num_ranks)
    ]


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except CheckError:
        return False
    return True


def damaged(schedule: Schedule, choices: random.Random) -> Schedule:
    """The schedule with one of its waits gone, or two tasks of a queue swapped, or one moved."""
    queues = [list(queue) for queue in schedule.queues]
    full = [at for at, queue in enumerate(queues) if queue]
    source, kind = choices.choice(full), choices.choice(("wait", "wait", "swap", "move"))
    waits = [
        (sm, place, number)
        for sm, queue in enumerate(queues)
        for place, task in enumerate(queue)
        for number in range(len(task.waits))
    ]
    if kind == "wait" and waits:
        return without_wait(schedule, *choices.choice(waits))
    if kind == "swap" and len(queues[source]) > 1:
        at = choices.randrange(len(queues[source]) - 1)
        queues[source][at : at + 2] = reversed(queues[source][at : at + 2])
    else:
        task = queues[source].pop(choices.randrange(len(queues[source])))
        target = choices.choice(queues)
        target.insert(choices.randint(0, len(target)), task)
    return replace(schedule, queues=tuple(map(tuple, queues)))


@pytest.mark.parametrize("tp", [1, 2, 3])
@given(data=st.data(), seed=st.integers(0, 10**6), copies=st.integers(1, PEER_BUFFERS))
@settings(max_examples=60)
def test_what_passes_also_passes_task_by_task(
    tp: int, data: st.DataObject, seed: int, copies: int
) -> None:
    require_as_strict(data.draw(random_programs(tp)), tp, data, seed, copies)


@pytest.mark.parametrize("tp", [2, 4])
@given(data=st.data(), seed=st.integers(0, 10**6), copies=st.integers(1, PEER_BUFFERS))
@settings(max_examples=30)
def test_what_passes_of_gathers_also_passes_task_by_task(
    tp: int, data: st.DataObject, seed: int, copies: int
) -> None:
    """Tasks that read the slots of some ranks only."""
    program = expand_collectives(gather_program((2, 3), 0, tp), DeviceMesh(tp=tp))
    cuts = [data.draw(random_splits(op)) for op in program.ops]
    require_as_strict((program, grouped(program, cuts)), tp, data, seed, copies)


def grouped(program: Program, cuts: Sequence[tuple[RangeSplit, ...]]) -> tuple[TaskGroup, ...]:
    """One group an op, cut so."""
    return tuple(
        TaskGroup(op=op, splits=cut, all_ranks=op.kind == "push")
        for op, cut in zip(program.ops, cuts, strict=True)
    )


def require_as_strict(
    cut: tuple[Program, tuple[TaskGroup, ...]],
    tp: int,
    data: st.DataObject,
    seed: int,
    copies: int,
) -> None:
    """Damages a schedule; what the proof lets pass the explicit checker does too."""
    program, groups = cut
    graph = build_task_graph(program, groups, tp)
    choices = random.Random(seed)
    schedule = schedule_graph(graph, data.draw(st.integers(1, 4)), hop_bytes=0)
    assume(0 < graph.num_tasks < 40)
    for _ in range(choices.randint(0, 2)):
        schedule = damaged(schedule, choices)
    launches = [explicit_launch(schedule, at, copies) for at in range(NUM_LAUNCHES)]
    if passes(lambda: check_schedule(schedule, copies)):
        check_queues(launches)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_no_wait_of_a_gather_can_go(num_ranks: int) -> None:
    """A task a slot, each on an SM of its own; every slot is a peer's on some rank."""
    program = expand_collectives(gather_program((1, 6), 1, num_ranks), DeviceMesh(tp=num_ranks))
    cuts = ((), (sized("r", num_ranks, 1),))
    graph = build_task_graph(program, grouped(program, cuts), num_ranks)
    schedule = schedule_graph(graph, 2 * num_ranks, hop_bytes=0)
    check_schedule(schedule)
    waits = [
        (sm, place, number)
        for sm, queue in enumerate(schedule.queues)
        for place, task in enumerate(queue)
        for number in range(len(task.waits))
    ]
    assert waits
    for at in waits:
        with pytest.raises(CheckError, match="race on"):
            check_schedule(without_wait(schedule, *at))


def test_peers_that_write_one_place_are_refused() -> None:
    program = expand_collectives(gather_program((1, 6), 1, 2), DeviceMesh(tp=2))
    push, combine = program.ops
    place = replace(push.writes[0], dims=(Index(), *push.writes[0].dims[1:]))
    program = replace(program, ops=(replace(push, writes=(place,)), combine))
    graph = build_task_graph(program, grouped(program, ((), ())), 2)
    with pytest.raises(CheckError, match="on every rank; expected a slot for each rank"):
        check_schedule(schedule_graph(graph, 2))


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_whole_blocks_pass_task_by_task(tp: int) -> None:
    schedule = schedule_graph(graph_of(decoder(1, tp, h=6, f=96), 2, tp), 2, hop_bytes=0)
    check_schedule(schedule)
    check_queues([explicit_launch(schedule, at, PEER_BUFFERS) for at in range(3)])


@pytest.mark.parametrize(
    "layer", [39, 79, *(pytest.param(n, marks=pytest.mark.nightly) for n in (0, 1, 78))]
)
def test_no_wait_of_a_deep_model_can_go(layer: int, deep: Schedule) -> None:
    """Within a layer, and at the seam to the next, where its first norm waits for the last sum."""
    inside, seam = [], []
    groups = deep.graph.groups
    per_layer = [f"layers.{layer}.", f"ffn.{layer}", f"attn.{layer}"]
    first = [f"layers.{layer}.attn_norm", f"layers.{layer + 1}.attn_norm"]
    for sm, queue in enumerate(deep.queues):
        for place, task in enumerate(queue):
            op = groups[task.group].op
            names = [op.name, *(a.tensor for a in op.reads)]
            for number in range(len(task.waits)):
                if any(name in first for name in names):
                    seam.append((sm, place, number))
                elif any(name.startswith(part) for name in names for part in per_layer):
                    inside.append((sm, place, number))
    choices = random.Random(layer)
    assert seam
    assert len(inside) > 10
    for at in (*seam[:2], *choices.sample(inside, 8)):
        with pytest.raises(CheckError, match="race on"):
            check_schedule(without_wait(deep, *at))


@pytest.fixture(scope="module")
def deep() -> Schedule:
    """80 layers on two ranks; passes as it is."""
    schedule = schedule_graph(graph_of(decoder(80, 2), 4, 2), 4, hop_bytes=0)
    check_schedule(schedule)
    return schedule


def deep_schedule(num_layers: int) -> Schedule:
    """So many layers of a 70B model on 8 ranks."""
    mesh, options = DeviceMesh(tp=8), EngineOptions(max_context=512)
    config = replace(PRESETS["llama-3-70b"], num_layers=num_layers)
    plan = plan_decode(config, mesh, H200, options)
    (segment,) = lower_decode(config, plan, options, peer_memory=True).host.segments
    segment = expand_collectives(segment, mesh)
    graph = build_task_graph(segment, tile_segment(segment, 132), team_size(segment, mesh))
    schedule = schedule_graph(graph, 132)
    assert sum(map(len, schedule.queues)) > 600 * num_layers
    return schedule


def test_the_proof_of_a_model_grows_with_its_layers_alone() -> None:
    """A proof of pairs of tasks would do 16 times as much for 4 times as many layers."""
    few, many = deep_schedule(10), deep_schedule(40)
    assert num_calls(lambda: check_schedule(many)) < 4.4 * num_calls(lambda: check_schedule(few))


@pytest.fixture(scope="module")
def block() -> Schedule:
    return schedule_graph(graph_of(decoder(1, 2), 4, 2), 4, hop_bytes=0)


def changed(schedule: Schedule, change: Callable[[ScheduledTask], ScheduledTask]) -> Schedule:
    """The schedule with its first task that waits, or signals, changed."""
    queues = [list(queue) for queue in schedule.queues]
    for queue in queues:
        for at, task in enumerate(queue):
            if (new := change(task)) != task:
                queue[at] = new
                return replace(schedule, queues=tuple(map(tuple, queues)))
    raise AssertionError("nothing to change")


def test_counts_that_do_not_fit_are_refused(block: Schedule) -> None:
    def wait_for(more: int) -> Callable[[ScheduledTask], ScheduledTask]:
        def change(task: ScheduledTask) -> ScheduledTask:
            waits = tuple(TaskWait(event=w.event, count=w.count + more) for w in task.waits[:1])
            return replace(task, waits=(*waits, *task.waits[1:]))

        return change

    for more in (-1, 1):
        with pytest.raises(CheckError, match=r"waits for \d+ signals? of event \d+; expected"):
            check_schedule(changed(block, wait_for(more)))


def test_signals_that_do_not_fit_are_refused(block: Schedule) -> None:
    dropped = changed(block, lambda task: replace(task, signals=task.signals[1:]))
    with pytest.raises(CheckError, match=r"waits for \d+ signals?"):
        check_schedule(dropped)
    extra = TaskSignal(event=block.num_events)
    more = replace(
        changed(block, lambda task: replace(task, signals=(*task.signals, extra))),
        num_events=block.num_events + 1,
    )
    with pytest.raises(CheckError, match="gets 1 signal, and nobody waits"):
        check_schedule(more)

    def turned(task: ScheduledTask) -> ScheduledTask:
        signals = tuple(replace(s, all_ranks=not s.all_ranks) for s in task.signals)
        return replace(task, signals=signals)

    with pytest.raises(CheckError, match=r"one rank by some tasks, on all by|waits for \d+"):
        check_schedule(changed(block, turned))


def test_tasks_that_are_missing_or_twice_are_refused(block: Schedule) -> None:
    at = next(at for at, queue in enumerate(block.queues) if not queue[-1].signals)
    last = block.queues[at][-1]
    name = block.graph.groups[last.group].op.name

    def with_queue(queue: tuple[ScheduledTask, ...]) -> Schedule:
        return replace(block, queues=(*block.queues[:at], queue, *block.queues[at + 1 :]))

    with pytest.raises(CheckError, match=f"of '{name}' stands in no queue|waits for"):
        check_schedule(with_queue(block.queues[at][:-1]))
    with pytest.raises(CheckError, match="tasks in queues; expected the"):
        check_schedule(with_queue((*block.queues[at], last)))


def test_a_deadlock_names_who_waits_for_whom() -> None:
    schedule = schedule_graph(graph_of(decoder(1, 2), 4, 2), 4, hop_bytes=0)
    order = [task for queue in schedule.queues for task in queue]
    waiting = next(task for task in order if task.waits)
    (event, *_) = [wait.event for wait in waiting.waits]
    producer = next(t for t in order if any(s.event == event for s in t.signals))
    queue = [task for task in order if task is not producer]
    queue.insert(queue.index(waiting) + 1, producer)
    with pytest.raises(CheckError, match=r"deadlock: .* waits for event \d+ of .* \(rank 0"):
        check_schedule(replace(schedule, queues=(tuple(queue),)))
