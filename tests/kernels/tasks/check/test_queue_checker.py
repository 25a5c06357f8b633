"""The explicit checker: named cases, and every interleaving of small random queues as an oracle."""

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import CheckError
from distmega.kernels.tasks.check.queues import CheckedTask, MemoryRegion, check_queues


def memory(start: int, stop: int, rank: int = 0) -> MemoryRegion:
    return MemoryRegion(rank=rank, tensor="x", region=((range(start, stop),),))


def test_t22_queues_that_wait_in_a_circle():
    c1, p2 = CheckedTask(name="C1", waits=((1, 1),)), CheckedTask(name="P2", signals=((0, 2),))
    c2, p1 = CheckedTask(name="C2", waits=((2, 1),)), CheckedTask(name="P1", signals=((0, 1),))
    with pytest.raises(CheckError) as error:
        check_queues([[[[c1, p2], [c2, p1]]]])
    text = str(error.value)
    assert "deadlock" in text
    assert "'C1' (rank 0, queue 0) waits for event 1 of 'P1'" in text
    assert "'C2' (rank 0, queue 1) waits for event 2 of 'P2'" in text
    check_queues([[[[p2, c1], [p1, c2]]]])


def test_t22_ranks_that_wait_for_each_other():
    one = CheckedTask(name="one", waits=((1, 1),), signals=((1, 0),))
    other = CheckedTask(name="other", waits=((0, 1),), signals=((0, 1),))
    with pytest.raises(CheckError, match=r"deadlock.*'one' \(rank 0.*'other' \(rank 1"):
        check_queues([[[[one]], [[other]]]])


def producers_and_consumer(launches: int) -> list[list[list[list[CheckedTask]]]]:
    """Four producers and one consumer, thrice; counters are never reset."""
    made = []
    for i in range(launches):
        queues = [[CheckedTask(name=f"P{q}.{i}", signals=((0, 7),))] for q in range(4)]
        made.append([[*queues, [CheckedTask(name=f"C.{i}", waits=((7, 4 * (i + 1)),))]]])
    return made


def test_t20_thresholds_grow_with_the_launches():
    launches = producers_and_consumer(3)
    assert [launch[0][4][0].waits[0][1] for launch in launches] == [4, 8, 12]
    check_queues(launches)


def test_t20_a_task_of_the_second_launch_blocks_at_the_first_count():
    launches = producers_and_consumer(2)
    launches[1][0][:4] = [[], [], [], []]
    with pytest.raises(CheckError, match=r"'C.1' .* waits for 8 signals.*at most 4"):
        check_queues(launches)


def test_a_threshold_that_does_not_grow_races():
    launches = producers_and_consumer(2)
    early = CheckedTask(name="C.1", waits=((7, 4),), reads=(memory(0, 1),))
    late = CheckedTask(name="C.2", waits=((7, 8),))
    write = CheckedTask(name="P0.1", signals=((0, 7),), writes=(memory(0, 1),))
    launches[1][0][0], launches[1][0][4] = [write], [early, late]
    with pytest.raises(CheckError, match=r"race on 'x' of rank 0: 'P0.1'"):
        check_queues(launches)


def test_waits_for_more_than_there_is():
    wait = CheckedTask(name="C", waits=((0, 2),))
    with pytest.raises(CheckError, match=r"'C' .* waits for 2 signals of event 0; expected"):
        check_queues([[[[CheckedTask(name="P", signals=((0, 0),))], [wait]]]])


def test_signals_beyond_what_is_waited_for():
    wait = CheckedTask(name="C", waits=((0, 1),))
    twice = [CheckedTask(name=f"P{i}", signals=((0, 0),)) for i in range(2)]
    with pytest.raises(CheckError, match=r"event 0 of rank 0 gets 2 signals.*expected 1"):
        check_queues([[[twice, [wait]]]])


def test_unordered_writes_race_and_distant_ones_do_not():
    queues = [[CheckedTask(name=f"W{i}", writes=(memory(4 * i, 4 * i + 5),))] for i in range(2)]
    with pytest.raises(CheckError, match=r"race on 'x' of rank 0: 'W0' .*'W1'"):
        check_queues([[queues]])
    check_queues(
        [[[[CheckedTask(name=f"W{i}", writes=(memory(4 * i, 4 * i + 4),))] for i in range(2)]]]
    )
    reads = [[CheckedTask(name=f"R{i}", reads=(memory(0, 4),))] for i in range(2)]
    check_queues([[reads]])


def test_memories_of_two_ranks_are_two():
    writers = [[[CheckedTask(name=f"W{rank}", writes=(memory(0, 4, rank),))]] for rank in range(2)]
    check_queues([writers])
    both = [[[CheckedTask(name=f"W{rank}", writes=(memory(0, 4, 0),))]] for rank in range(2)]
    with pytest.raises(CheckError, match=r"'W0' \(rank 0.*'W1' \(rank 1"):
        check_queues([both])


def test_a_launch_knows_its_own_rank_and_no_other():
    def launch(i: int, owner: int) -> list[list[list[CheckedTask]]]:
        return [
            [[CheckedTask(name=f"R.{i}", reads=(memory(0, 4),))] if rank == 0 else []]
            if i == 0
            else [[CheckedTask(name=f"W.{i}", writes=(memory(0, 4),))] if rank == owner else []]
            for rank in range(2)
        ]

    check_queues([launch(0, 0), launch(1, 0)])
    with pytest.raises(CheckError, match="race"):
        check_queues([launch(0, 1), launch(1, 1)])


def symmetric(shared_counter: bool) -> list[list[list[list[CheckedTask]]]]:
    """Three ranks push to each other and wait for all, twice; one counter, or one a source."""
    launches = []
    for i in range(2):
        ranks = []
        for rank in range(3):
            signals = tuple((to, 0 if shared_counter else rank) for to in range(3))
            push = CheckedTask(name=f"push{rank}.{i}", signals=signals)
            waits = ((0, 3 * (i + 1)),)
            if not shared_counter:
                waits = tuple((source, i + 1) for source in range(3))
            ranks.append([[push], [CheckedTask(name=f"sum{rank}.{i}", waits=waits)]])
        launches.append(ranks)
    return launches


def test_one_counter_a_source_keeps_launches_apart():
    check_queues(symmetric(shared_counter=False))


def test_a_rank_ahead_must_not_count_for_a_slow_one():
    launches = symmetric(shared_counter=True)
    check_queues(launches)
    # Rank 0 now goes on to its second launch without waiting for rank 2.
    launches[0][0][1] = []
    with pytest.raises(CheckError, match=r"'push0.1' .* can let 'sum1.0' .* pass before the 3"):
        check_queues(launches)


@st.composite
def small_queues(draw: st.DrawFn) -> list[list[CheckedTask]]:
    """Up to six tasks in up to three queues, each with one event that others may wait for."""
    num = draw(st.integers(2, 6))
    waits: list[set[int]] = []
    for i in range(num):
        others = [j for j in range(num) if j != i]
        likely = [j for j in others if j < i] if draw(st.integers(0, 3)) else others
        waits.append(draw(st.sets(st.sampled_from(likely), max_size=2)) if likely else set())
    awaited = set().union(*waits)
    tasks = []
    for i in range(num):
        cell = memory(*(lambda at: (at, at + 1))(draw(st.integers(0, 1))))
        write = draw(st.booleans())
        tasks.append(
            CheckedTask(
                name=f"t{i}",
                waits=tuple((j, 1) for j in sorted(waits[i])),
                signals=((0, i),) if i in awaited else (),
                reads=() if write else (cell,),
                writes=(cell,) if write else (),
            )
        )
    queues: list[list[CheckedTask]] = [[] for _ in range(3)]
    for task in tasks:
        queues[draw(st.integers(0, 2))].append(task)
    return queues


def explore(queues: list[list[CheckedTask]]) -> tuple[bool, set[tuple[str, str]]]:
    """Over all interleavings: whether one gets stuck, and which pairs came in either order."""
    stuck, before = False, set()
    seen: set[tuple[int, ...]] = set()

    def visit(heads: tuple[int, ...]) -> None:
        nonlocal stuck
        if heads in seen:
            return
        seen.add(heads)
        done = [task for queue, head in zip(queues, heads, strict=True) for task in queue[:head]]
        events = {event for task in done for _, event in task.signals}
        moved = False
        for at, (queue, head) in enumerate(zip(queues, heads, strict=True)):
            if head < len(queue) and all(e in events for e, _ in queue[head].waits):
                moved = True
                before.update((task.name, queue[head].name) for task in done)
                visit((*heads[:at], head + 1, *heads[at + 1 :]))
        stuck = stuck or (not moved and any(h < len(q) for q, h in zip(queues, heads, strict=True)))

    visit((0,) * len(queues))
    return stuck, {pair for pair in before if pair[::-1] in before}


def conflict(a: CheckedTask, b: CheckedTask) -> bool:
    same = {m.region for m in (*a.reads, *a.writes)} & {m.region for m in (*b.reads, *b.writes)}
    return bool(same and (a.writes or b.writes))


@given(small_queues())
def test_verdicts_are_those_of_all_interleavings(queues: list[list[CheckedTask]]):
    stuck, unordered = explore(queues)
    tasks = [task for queue in queues for task in queue]
    races = {
        frozenset((a.name, b.name))
        for a, b in combinations(tasks, 2)
        if conflict(a, b) and (a.name, b.name) in unordered
    }
    if stuck or races:
        with pytest.raises(CheckError) as error:
            check_queues([[queues]])
        text = str(error.value)
        assert text.startswith("deadlock" if stuck else "race")
        assert stuck or frozenset(re.findall(r"'(t\d)'", text)) in races
    else:
        check_queues([[queues]])
