"""Communication between GPUs over NCCL, for programs whose ranks share no memory, and as the oracle
for those that do.

NcclCommunicator moves bytes as GlooCommunicator does, but between GPUs and on CUDA streams: a call
queues behind the current stream, and waiting for a handle makes the current stream wait. Results
are combined in rank order by every rank, so they are bitwise equal. Objects and barriers go over
gloo, signals as nccl_signals.py or kernels/runtime/streams/signals.py have it. Next on the walk:
evaluator.py.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.hostir.comm.collectives import CommHandle, join_handles
from distmega.hostir.comm.communicator import GlooCommunicator, TeamCommunicator, flat_bytes
from distmega.hostir.comm.nccl_signals import Signals
from distmega.hostir.comm.plain import Plain
from distmega.hostir.comm.waits import await_gpu
from distmega.sharding.layout.mesh import STAGE_AXIS, DeviceMesh

P = TypeVar("P", bound=Plain)


class NcclCommunicator(TeamCommunicator):
    """Teams of CUDA processes, each with its device current. Every rank of the mesh makes one, at
    the same point of its program; all connections are open when it returns.

    NCCL pairs sends and receives of two ranks by their order, so what goes both ways at once must
    stand between begin_group and end_group.
    """

    def __init__(self, mesh: DeviceMesh, rank: int, timeout_s: float = 300.0) -> None:
        super().__init__(mesh, rank, "nccl", timeout_s)
        self.signals: Signals | None = None
        """How ranks signal each other, if they do; see open_signals of
        kernels/runtime/streams/signals.py."""
        self.kept: dict[Hashable, object] = {}
        """What is opened for its ranks and used as long as it is, such as workspaces, by a key of
        whoever keeps it there."""
        self._control = GlooCommunicator(mesh, rank, timeout_s)
        self._pending: list[dist.P2POp] | None = None
        for axis in mesh.names:
            self.all_gather(axis, *self._probe(mesh.size(axis)), 0).wait()
            if axis == STAGE_AXIS:
                self._connect(axis)
        torch.cuda.synchronize()

    def _connect(self, axis: str) -> None:
        """Sends something from each of the team to each. NCCL connects two ranks when they first
        send to each other, and wants both to group their sends and receives alike then; stages do
        not.
        """
        size = self.mesh.size(axis)
        x, out = torch.zeros(size, 1, device="cuda"), torch.empty(1, size, device="cuda")
        self.all_to_all(axis, x, out, 1, 0).wait()

    def group(self, axis: str) -> tuple[dist.ProcessGroup, Sequence[int]]:
        """The process group of this rank's team of two or more, and the place of each of the team,
        in rank order, in it.
        """
        group = self._group(axis)
        assert group is not None, f"a team of one along {axis}"
        return group, self._team_ranks[axis]

    def _arrive(self, work: dist.Work) -> Callable[[], object]:
        return work.wait

    def _probe(self, size: int) -> tuple[Tensor, Tensor]:
        """A first communication, which makes NCCL connect."""
        return torch.zeros(1, device="cuda"), torch.empty(size, device="cuda")

    def send(self, axis: str, x: Tensor, peer: int) -> CommHandle:
        if self._group(axis) is None:
            return self._mail.send(axis, x)
        return self._transfer(axis, dist.isend, flat_bytes(x), peer)

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        if self._group(axis) is None:
            return self._mail.recv(axis, out)
        data = torch.empty(out.numel() * out.element_size(), dtype=torch.uint8, device=out.device)
        arrived = self._transfer(axis, dist.irecv, data, peer)

        def finish() -> None:
            arrived.wait()
            out.copy_(data.view(out.dtype).view(out.shape))

        return CommHandle(finish)

    def begin_group(self) -> None:
        self._pending = []

    def end_group(self, members: Sequence[CommHandle]) -> CommHandle:
        pending, self._pending = self._pending, None
        with self._guard("sends and receives", ""):
            works = dist.batch_isend_irecv(pending) if pending else []

        def finish() -> None:
            with self._guard("sends and receives", ""):
                for work in works:
                    work.wait()
            join_handles(members).wait()

        return CommHandle(finish, lambda: [work.wait() for work in works])

    def _transfer(
        self, axis: str, call: Callable[..., dist.Work | None], data: Tensor, peer: int
    ) -> CommHandle:
        """One send or receive, or its place in the open group, whose handle then waits for it."""
        group, other = self._group(axis), self._teams[axis][peer]
        if self._pending is not None:
            self._pending.append(dist.P2POp(call, data, other, group))
            return CommHandle(lambda: None)
        with self._guard("send or receive", axis):
            work = call(data, other, group=group)
        assert work is not None, "this rank is in the team"

        def finish() -> None:
            with self._guard("send or receive", axis):
                work.wait()

        return CommHandle(finish)

    def signal(self, axis: str, name: str, peer: int) -> None:
        with self._guard(f"signal {name!r}", axis):
            self._opened_signals().signal(axis, name, peer)

    def wait_signal(self, axis: str, name: str, peer: int) -> None:
        with self._guard(f"wait for signal {name!r}", axis):
            self._opened_signals().wait(axis, name, peer)

    @property
    def signals_on_device(self) -> bool:
        return self.signals is not None and self.signals.on_device

    def check_signals(self) -> None:
        if self.signals is not None:
            self.signals.check()

    def _opened_signals(self) -> Signals:
        self._require_open()
        assert self.signals is not None, "signals are opened before programs that have them run"
        return self.signals

    def barrier(self) -> None:
        self._control.barrier()

    def leave(self) -> None:
        """See Communicator."""
        self._leave_with([*self.kept.values(), self.signals])
        self.kept.clear()
        self.signals = None
        self._control.leave()

    def close(self) -> None:
        """As of TeamCommunicator, and what was kept with it. No graph holds its collectives any
        longer, since NCCL would wait for that. HangError for a GPU that waits for a peer in vain.
        """
        if self._is_closed:
            return
        await_gpu(self.timeout_s)
        self.barrier()  # no rank writes into another's memory any more
        self.kept.clear()
        self.signals = None
        super().close()
        self._control.close()

    def all_gather_object(self, value: P, axis: str = "") -> list[P]:
        return self._control.all_gather_object(value, axis)
