"""Peer memory between processes: many launches with changing data, at any speed, and nothing left
behind.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from distmega.errors import HangError, LaunchError
from distmega.kernels.cpu import peer
from distmega.kernels.cpu.interpreter import interpret_ranks
from distmega.kernels.cpu.peer import PeerSizes, local_peers, share_peers
from distmega.kernels.cpu.runner import CpuMegakernel, gather_along, open_peers
from distmega.kernels.megakernel import Megakernel, compile_megakernel
from distmega.kernels.runtime.memory import allocate_arena
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.forked import forking
from tests.kernels.programs import with_collectives
from tests.kernels.running import make_ranks
from tests.leftovers import shared_names

NUM_LAUNCHES = 100
SIZES = PeerSizes(arena_bytes=1000, num_events=5, num_lanes=2)


def reduce_program(num_reductions: int, tp: int) -> Program:
    """y = x + 1 summed over ranks, some times over."""
    p = ProgramBuilder("reduce")
    x = p.input("x", (64,))
    for i in range(num_reductions):
        x = p.set(x + 1.0, name=f"all_reduce{i}")
    return with_collectives(p.build(p.set(x, name="y")), tp)


def input_of(rank: int, launch: int) -> torch.Tensor:
    return torch.arange(64.0) + 10 * rank + launch


def expected_of(num_reductions: int, tp: int, launch: int) -> torch.Tensor:
    values = [input_of(rank, launch) for rank in range(tp)]
    for _ in range(num_reductions):
        values = [sum(value + 1 for value in values)] * tp
    return values[0]


def compiled(num_reductions: int, tp: int) -> Megakernel:
    return compile_megakernel(reduce_program(num_reductions, tp), DeviceMesh(tp=tp), num_sms=2)


@pytest.mark.parametrize("num_reductions", [1, 3])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_run_ahead_of_each_other(num_reductions, tp):
    """All ranks in one thread, each as many launches ahead as events let it."""
    kernel = compiled(num_reductions, tp)
    for seed in range(10):
        ranks = make_ranks(kernel, seed)
        launches = [0] * tp
        furthest = 0

        def before(place: int, launch: int, ranks=ranks, launches=launches) -> None:
            nonlocal furthest
            launches[place] = launch
            furthest = max(furthest, launch - min(launches))
            ranks[place].tensors["x"].copy_(input_of(place, launch))
            ranks[place].runner.load(ranks[place].tensors)

        def after(place: int, launch: int, ranks=ranks) -> None:
            ranks[place].runner.store(ranks[place].tensors)
            found = ranks[place].tensors["y"]
            assert torch.equal(found, expected_of(num_reductions, tp, launch)), (place, launch)

        interpreters = [rank.runner.interpreter for rank in ranks]
        interpret_ranks(interpreters, num_launches=8, seed=seed, before=before, after=after)
        assert furthest == 1


def exchange_over(pipes: Sequence[Connection], rank: int) -> Callable[[object], list[object]]:
    """All-gather of objects: everyone sends to rank 0, which sends the list back."""

    def exchange(value: object) -> list[object]:
        if rank:
            pipes[0].send(value)
            return pipes[0].recv()
        values = [value, *(pipe.recv() for pipe in pipes)]
        for pipe in pipes:
            pipe.send(values)
        return values

    return exchange


Pipes = Sequence[Connection]


def bind(kernel: Megakernel, rank: int, pipes: Pipes, timeout_s: float) -> CpuMegakernel:
    arenas = [allocate_arena(layout) for layout in kernel.layout.arenas[:2]]
    peers = open_peers(kernel, rank, exchange_over(pipes, rank))
    return CpuMegakernel(
        kernel,
        rank=rank,
        weights_arena=arenas[0],
        state_arena=arenas[1],
        peers=peers,
        seed=rank,
        timeout_s=timeout_s,
        poison=True,
    )


def work(rank: int, pipes: Pipes, result: Connection) -> None:
    """One rank in a process of its own. The ranks take turns in being slow; at times none is."""
    torch.set_num_threads(1)
    runner = bind(compiled(2, 2), rank, pipes, 30)
    tensors = {"x": torch.empty(64), "y": torch.empty(64)}
    for launch in range(NUM_LAUNCHES):
        tensors["x"].copy_(input_of(rank, launch))
        if launch % 5 == 0 and launch // 10 % 3 == rank:
            time.sleep(0.005)
        runner.launch(tensors)
        if not torch.equal(tensors["y"], expected_of(2, 2, launch)):
            result.send(f"rank {rank} launch {launch}: {tensors['y'][:4]}")
            return
    result.send("")


def die(rank: int, pipes: Pipes, result: Connection) -> None:
    """Rank 1 ends without a launch, rank 0 waits for it in vain."""
    torch.set_num_threads(1)
    runner = bind(compiled(1, 2), rank, pipes, 0.3)
    if rank == 1:
        result.send("")
        os._exit(9)
    try:
        runner.launch({"x": torch.zeros(64), "y": torch.empty(64)})
    except HangError as error:
        result.send(str(error))


def spawn(target: Callable[..., None]) -> list[str]:
    """Runs two ranks; what each of them reports."""
    context, _ = forking()
    ends = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in range(2)]
    args = [(rank, [ends[rank]], results[rank][1]) for rank in range(2)]
    ranks = [context.Process(target=target, args=own, daemon=True) for own in args]
    for process in ranks:
        process.start()
    found = [receiver.recv() if receiver.poll(60) else "no answer" for receiver, _ in results]
    for process in ranks:
        process.join(10)
    return found


def test_two_processes_agree_over_many_launches():
    before = shared_names()
    assert spawn(work) == ["", ""]
    assert shared_names() <= before


def test_a_dead_rank_is_named():
    before = shared_names()
    waiting, _ = spawn(die)
    assert "from rank 1, owed by rank 1: all_reduce0.push[0]" in waiting
    assert shared_names() <= before


def share(rank: int, answers: Sequence[Sequence[object]], sizes: PeerSizes = SIZES) -> object:
    """share_peers of one rank, with what the exchanges give in place of None for its own offer."""
    rounds = iter(answers)

    def exchange(own: object) -> list[object]:
        return [own if answer is None else answer for answer in next(rounds)]

    return share_peers(rank, (0, 1), sizes, exchange)


def offer(**changes: object) -> peer._Offer:
    values = {"rank": 1, "path": "/proc/self/fd/999", "nonce": b"x" * 16, "sizes": SIZES}
    return peer._Offer(**(values | changes))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (offer(problem="no space"), "rank 1 can't create peer memory: no space"),
        (offer(), "rank 0 can't map peer memory: memory of rank 1 is out of reach"),
        (offer(path=__file__), "out of reach"),
        (
            offer(sizes=PeerSizes(arena_bytes=1, num_events=5, num_lanes=2)),
            "rank 1 wants PeerSizes",
        ),
    ],
)
def test_a_rank_that_can_not_share_is_named(other, message):
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError, match=message):
        share(0, [[None, other.as_plain()], [None, ""]])
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_offer_of_another_form_is_refused():
    for told in (7, (1, "path", b"", (1, 2), ""), offer().as_plain()[:4]):
        with pytest.raises(LaunchError, match="an offer of shared memory of unknown form"):
            share(0, [[None, told], [None, ""]])


def test_memory_of_another_host_is_told_by_its_nonce(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZES.total_bytes))
    with pytest.raises(LaunchError, match="it is on another host"):
        share(0, [[None, offer(path=str(path)).as_plain()], [None, ""]])


def test_other_cpus_are_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(LaunchError, match="aarch64 CPUs reorder stores"):
        share(0, [[None, offer().as_plain()], [None, ""]])


def test_counters_start_at_zero_and_have_one_lane_a_rank():
    peers = local_peers((3, 5), SIZES)
    assert dict(peers.lanes) == {3: 0, 5: 1}
    assert len(peers.counters[3]) >= SIZES.num_events * 2
    assert not any(peers.counters[5])
    assert peers.arenas[3].numel() >= SIZES.arena_bytes
    peers.arenas[3].fill_(255)
    assert not any(peers.counters[3])
    assert not peers.arenas[5].any()


def test_values_along_two_mesh_axes_come_in_mesh_order():
    mesh, told = DeviceMesh(pp=2, dp=2, tp=3), dict[tuple[str, int], object]()
    all_told = Barrier(mesh.num_ranks)

    def run(rank: int) -> list[object]:
        def gather(value: object, axis: str) -> list[object]:
            told[axis, rank] = value
            all_told.wait(timeout=20)
            return [told[axis, one] for one in mesh.team(axis, rank)]

        return [*gather_along(SimpleNamespace(all_gather_object=gather), ("dp", "tp"), rank)]

    with ThreadPoolExecutor(mesh.num_ranks) as pool:
        found = list(pool.map(run, mesh.ranks))
    assert found == [[*range(6)]] * 6 + [[*range(6, 12)]] * 6
