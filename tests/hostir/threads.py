"""Ranks as threads of one process: a host program on a whole mesh, fast enough for random ones."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

from distmega.hostir.comm.collectives import Collectives, CommHandle, copy_into, token
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.run import evaluator
from distmega.hostir.run.evaluator import Evaluator, KernelRunner
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import LocalProgram
from tests.hostir.programs import SegmentRunner, run_program, shard_tensors


class Wires:
    """What ranks have sent to each other, in order: (axis, what, from, to) -> queue."""

    def __init__(self, mesh: DeviceMesh) -> None:
        ranks = mesh.ranks
        self.queues: dict[tuple[str, str, int, int], SimpleQueue[Tensor]] = {
            (axis, what, a, b): SimpleQueue()
            for axis in mesh.names
            for what in ("team", "pair", "signal")
            for a in ranks
            for b in ranks
        }


class ThreadCommunicator(Collectives):
    """One rank of a mesh whose ranks are threads."""

    def __init__(self, mesh: DeviceMesh, rank: int, wires: Wires) -> None:
        super().__init__(mesh, rank)
        self.wires = wires
        self.num_asked: Counter[tuple[str, str, int]] = Counter()
        self.arrived: dict[tuple[str, str, int], list[Tensor]] = {}

    def _put(self, axis: str, what: str, peer: int, x: Tensor) -> None:
        self.wires.queues[axis, what, self.rank, peer].put(x.clone())

    def _ask(self, axis: str, what: str, peer: int) -> Callable[[], Tensor]:
        """The peer's next message; exchanges may end in another order than they start."""
        key = axis, what, peer
        number = self.num_asked[key]
        self.num_asked[key] += 1

        def take() -> Tensor:
            arrived = self.arrived.setdefault(key, [])
            while len(arrived) <= number:
                arrived.append(self.wires.queues[axis, what, peer, self.rank].get(timeout=20))
            return arrived[number]

        return take

    def _gather(self, axis: str, x: Tensor) -> Callable[[], Tensor]:
        return self._swap(axis, [x] * self.mesh.size(axis))

    def _swap(self, axis: str, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        team = self.mesh.team(axis, self.rank)
        for peer, part in zip(team, parts, strict=True):
            self._put(axis, "team", peer, part)
        asked = [self._ask(axis, "team", peer) for peer in team]
        return lambda: torch.stack([take() for take in asked])

    def send(self, axis: str, x: Tensor, peer: int) -> CommHandle:
        self._put(axis, "pair", self.mesh.team(axis, self.rank)[peer], x)
        return CommHandle(lambda: None)

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        source = self.mesh.team(axis, self.rank)[peer]
        take = self._ask(axis, "pair", source)
        return CommHandle(lambda: copy_into(out, take()))

    def signal(self, axis: str, name: str, peer: int) -> None:
        self._put(axis, "signal", self.mesh.team(axis, self.rank)[peer], token())

    def wait_signal(self, axis: str, name: str, peer: int) -> None:
        self._ask(axis, "signal", self.mesh.team(axis, self.rank)[peer])()


Bind = Callable[[HostProgram, int, dict[str, Tensor]], Mapping[str, KernelRunner]]


def op_by_op(host: HostProgram, rank: int, given: dict[str, Tensor]) -> dict[str, KernelRunner]:
    """Runners of a rank's segments that stand in for kernels."""
    at = host.mesh.coordinate(rank)
    return {segment.name: SegmentRunner(segment, at) for segment in host.segments}


def run_mesh(
    host: HostProgram, local: LocalProgram, tensors: Mapping[str, Tensor], bind: Bind = op_by_op
) -> list[dict[str, Tensor]]:
    """Outputs and states of each rank, in mesh order. tensors: those of the whole program. bind:
    makes the runners of a rank, and may put other tensors in the place of those given.
    """
    wires = Wires(local.mesh)

    def run(rank: int) -> dict[str, Tensor]:
        given = shard_tensors(tensors, local, rank)
        runners = bind(host, rank, given)
        comm = ThreadCommunicator(local.mesh, rank, wires)
        return {**given, **Evaluator(host, comm, runners).run(given)}

    if local.mesh.num_ranks == 1:
        return [run(local.mesh.ranks[0])]
    with ThreadPoolExecutor(local.mesh.num_ranks) as pool:
        return list(pool.map(run, local.mesh.ranks))


def join(
    found: Sequence[Mapping[str, Tensor]], local: LocalProgram, names: Sequence[str]
) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks."""
    whole = {}
    for name in names:
        domain = local.allocations[name]
        whole[name] = torch.full(domain.shape, 10**6, dtype=found[0][name].dtype)
        for part, at in zip(found, local.mesh.coordinates(), strict=True):
            here = whole[name][domain.local_slices(at)]
            here.copy_(part[name][tuple(map(slice, here.shape))])
    return whole


class HeldBytes:
    """Counts what the evaluator holds after each node; `peak` is the most, of any rank."""

    def __init__(self, monkeypatch) -> None:
        self.peak = 0
        step = evaluator._Compiler.step

        def counted(compiler, node, index):
            inner = step(compiler, node, index)
            if inner is None:
                return None

            def run(frame) -> None:
                inner(frame)
                kept = {x.untyped_storage().data_ptr(): x for x in frame.tensors.values()}
                held = sum(x.untyped_storage().nbytes() for x in kept.values())
                self.peak = max(self.peak, held)

            return run

        monkeypatch.setattr(evaluator._Compiler, "step", counted)


def assert_bf16_values(program: Program, local: LocalProgram, host: HostProgram) -> None:
    """The host program gives on all ranks what the program gives on one, as near as bf16 is."""
    torch.manual_seed(0)
    given = {
        t.name: torch.randn(t.shape, dtype=torch.bfloat16) * t.shape[-1] ** -0.5
        for t in program.tensors
        if t.role != "temp"
    }
    expected = run_program(program, given)
    found = join(run_mesh(host, local, given), local, program.outputs)
    for name in program.outputs:
        torch.testing.assert_close(found[name], expected[name], rtol=0.02, atol=0.02)
