"""The interpreter: any order of tasks gives the library's results, and hangs are explained."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import HangError, RankFailure
from distmega.kernels.megakernel import Megakernel
from distmega.kernels.runtime.arena import Space, tensor_space
from distmega.kernels.tasks.check.schedule import check_schedule
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.types import (
    Schedule,
    ScheduledTask,
    TaskGraph,
    TaskGroup,
    TaskSignal,
    TaskWait,
)
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.programs import decoder, even, graph_of, random_programs, tile_ops
from tests.kernels.running import (
    Rank,
    evaluate,
    kernel_of,
    launch_all,
    make_ranks,
    random_values,
    tiled_kernel,
)


def kernel(program: Program, *, tp: int = 1, num_sms: int = 4) -> Megakernel:
    schedule = schedule_graph(graph_of(program, num_sms, tp), num_sms)
    return kernel_of(schedule, DeviceMesh(tp=tp))


def decoder_values(program: Program, tp: int) -> list[dict[str, torch.Tensor]]:
    """Ranks differ in their shards, and agree in what is replicated."""
    ranks = [random_values(program, seed) for seed in range(tp)]
    for values in ranks:
        for name in values:
            if not any(part in name for part in ("wq", "wk", "wv", "wo", "w_", "cache")):
                values[name] = ranks[0][name]
        values["tokens"], values["positions"] = torch.tensor([7]), torch.tensor([5])
    return ranks


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_twenty_seeds_give_the_results_of_the_library(tp):
    """Bitwise equal among seeds and ranks; a tiled sum may differ from a whole one in the last
    bits.
    """
    program = decoder(2, tp)
    compiled = kernel(program, tp=tp)
    values = decoder_values(program, tp)
    expected = evaluate(program, values)
    outputs = []
    for seed in (None, *range(20)):
        ranks = make_ranks(compiled, seed)
        for rank, own in zip(ranks, values, strict=True):
            rank.fill(own)
        launch_all(ranks, seed)
        for rank, full in zip(ranks, expected, strict=True):
            for tensor in program.with_role("state"):
                if tensor_space(tensor) is Space.STATE:
                    torch.testing.assert_close(rank.tensors[tensor.name], full[tensor.name])
        outputs.append([rank.tensors["next"].item() for rank in ranks])
    assert outputs[0] == [full["next"].item() for full in expected]
    assert all(found == outputs[0] and len(set(found)) == 1 for found in outputs)


@pytest.mark.parametrize("tp", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_programs_give_the_results_of_the_library(tp, data):
    """Overwrites, views, odd strides, all-reduces; several launches, ranks as far apart as they can
    be.
    """
    program, groups = data.draw(random_programs(tp))
    compiled = tiled_kernel(program, groups, tp=tp, num_sms=data.draw(st.integers(1, 4)))
    check_schedule(compiled.schedule)
    seed = data.draw(st.integers(0, 1000))
    ranks = make_ranks(compiled, seed)
    values = [random_values(program, place, integers=True) for place in range(tp)]
    for rank, own in zip(ranks, values, strict=True):
        rank.fill(own)
    for _ in range(3):
        launch_all(ranks, seed)
        results = evaluate(program, values)
        for rank, full, own in zip(ranks, results, values, strict=True):
            own.update({name: full[name] for name in own})
            for name in (*own, *program.outputs):
                assert torch.equal(rank.tensors[name], full[name]), name


def mlp() -> tuple[Program, tuple[TaskGroup, ...]]:
    """32 tasks, then 8 that each need 4 of them."""
    p = ProgramBuilder("mlp")
    h = p.linear(p.input("x", (1, 16)), p.weight("w1", (128, 16)), name="up")
    y = h.map("silu(a0)", name="act")
    program = p.build(p.linear(y, p.weight("w2", (16, 128)), name="down"))
    return program, tile_ops(program, up=(even("n", 128, 32),), act=(even("i1", 128, 8),))


def test_events_keep_counting_over_launches():
    """Four triggers a launch and no reset: thresholds 4, 8, 12."""
    compiled = tiled_kernel(*mlp(), num_sms=5)
    assert 4 in {wait.count for q in compiled.schedule.queues for t in q for wait in t.waits}
    (rank,) = make_ranks(compiled, seed=3)
    counters = rank.runner.interpreter._counters
    for launch in range(1, 4):
        rank.fill(random_values(compiled.segment, launch))
        launch_all([rank])
        expected = evaluate(compiled.segment, [random_values(compiled.segment, launch)])[0]
        torch.testing.assert_close(rank.tensors["down"], expected["down"])
        for queue in compiled.schedule.queues:
            for wait in (wait for task in queue for wait in task.waits):
                assert counters[wait.event] == launch * wait.count


def by_hand(
    queues: list[list[tuple[int, int, list[TaskWait], list[int]]]], num_events: int
) -> Schedule:
    """A schedule of mlp's groups, unchecked."""
    program, groups = mlp()
    graph = TaskGraph(segment=program, groups=groups, events=())

    def task(group: int, number: int, waits: list[TaskWait], events: list[int]) -> ScheduledTask:
        signals = tuple(TaskSignal(event=event) for event in events)
        return ScheduledTask(group=group, task=number, waits=tuple(waits), signals=signals)

    made = tuple(tuple(task(*each) for each in queue) for queue in queues)
    return Schedule(graph=graph, queues=made, num_events=num_events)


def test_a_task_of_the_second_launch_blocks_at_the_count_of_the_first():
    queues = [[(0, i, [], [0]) for i in range(4)], [(1, 0, [TaskWait(event=0, count=4)], [])]]
    (rank,) = make_ranks(kernel_of(by_hand(queues, 1), DeviceMesh(tp=1)))
    interpreter = rank.runner.interpreter
    interpreter.start()
    interpreter.run(1)
    assert interpreter._counters[0] == 4
    interpreter.start()
    interpreter._next[0] = 4  # SM 0 is not allowed to run
    assert not interpreter.step()
    interpreter._next[0] = 0
    interpreter.run(1)
    assert interpreter._counters[0] == 8


def hang_of(schedule: Schedule, timeout_s: float = 0.05) -> HangError:
    (rank,) = make_ranks(kernel_of(schedule, DeviceMesh(tp=1)))
    rank.runner.interpreter.start()
    with pytest.raises(HangError) as caught:
        rank.runner.interpreter.run(timeout_s)
    return caught.value


def test_a_missing_trigger_is_reported_with_who_owes_it():
    queues = [
        [(0, 0, [], [0]), (0, 1, [TaskWait(event=1, count=1)], [0])],
        [(1, 0, [TaskWait(event=0, count=2)], [1])],
    ]
    found = hang_of(by_hand(queues, 2)).found
    assert found == (
        "rank 0 SM 0: up[1] waits for event 1, at 0 of 1 from rank 0, "
        "owed by rank 0: act[0] on SM 1; "
        "rank 0 SM 1: act[0] waits for event 0, at 1 of 2 from rank 0, "
        "owed by rank 0: up[1] on SM 0"
    )


def test_a_count_nobody_reaches_is_reported():
    queues = [[(0, 0, [], [0])], [(1, 0, [TaskWait(event=0, count=3)], [])]]
    assert (
        "at 1 of 3 from rank 0, owed by rank 0: no task that is left"
        in hang_of(by_hand(queues, 1)).found
    )


def without_signals(schedule: Schedule, name: str) -> Schedule:
    """The schedule in which tasks of one op forget to signal."""
    group = next(i for i, g in enumerate(schedule.graph.groups) if g.op.name == name)
    queues = tuple(
        tuple(replace(task, signals=()) if task.group == group else task for task in queue)
        for queue in schedule.queues
    )
    return replace(schedule, queues=queues)


def test_a_rank_that_owes_is_named():
    """Rank 1 of two pushes nothing: rank 0 says so, and names the push."""
    program = decoder(1, tp=2)
    schedule = schedule_graph(graph_of(program, 2, 2), 2)
    good, bad = (
        kernel_of(s, DeviceMesh(tp=2))
        for s in (schedule, without_signals(schedule, "all_reduce.attn.0.push"))
    )
    peers = make_ranks(good)[0].runner.interpreter._peers
    ranks = [Rank(good, 0, peers, None), Rank(bad, 1, peers, None)]
    with pytest.raises(HangError) as caught:
        launch_all(ranks)
    assert "rank 0 SM" in caught.value.found
    assert "all_reduce.attn.0" in caught.value.found
    assert "at 0 of 1 from rank 1, owed by rank 1: all_reduce.attn.0.push[0]" in caught.value.found


def test_no_launch_follows_one_that_failed_among_ranks():
    rank, _ = make_ranks(kernel(decoder(1, 2), tp=2))
    rank.runner.interpreter.start()
    with pytest.raises(RankFailure, match="a launch on rank 0 after one that failed"):
        rank.runner.interpreter.start()


def test_poison_shows_reads_of_what_was_never_written():
    queues = [[(1, 0, [], [])], [(2, 0, [], [])]]
    (rank,) = make_ranks(kernel_of(by_hand(queues, 1), DeviceMesh(tp=1)))
    rank.fill(random_values(rank.runner.kernel.segment, 0))
    rank.runner.launch(rank.tensors)
    assert rank.tensors["down"].isnan().all()
