"""Communication between the ranks of a mesh: one team a mesh axis and coordinate, results bitwise
equal on all ranks.

The Communicator protocol is what the evaluator asks for. Every call starts a communication and
gives a Handle; operands belong to it until `wait`. Sums are taken in rank order, in fp32 or wider,
so each rank gets the same bits whatever the team's network does. GlooCommunicator moves bytes over
torch.distributed between CPU processes; SingleCommunicator is a mesh of one rank. A peer that fails
raises LostPeerError.
"""

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.arguments import shown
from distmega.errors import LostPeerError, MeshError, ProgramError, RankFailure
from distmega.hostir.comm.collectives import Collectives, CommHandle, Mailbox, copy_into, token
from distmega.hostir.comm.groups import close_groups, close_left, close_with, leave_groups
from distmega.hostir.comm.plain import Plain, decode_plain, encode_plain, gather_bytes
from distmega.hostir.comm.torch_names import all_gather_single
from distmega.sharding.layout.mesh import DeviceMesh

P = TypeVar("P", bound=Plain)

DATA_TAG = 0
"""Tag of sent tensors; signals have tags from 1 on."""


class Communicator(Protocol):
    """Communications of one rank with its teams. `axis` is a mesh axis; peers are coordinates on
    it.

    Tensors are on the rank's device, of any dtype; `out` has the shape that hostir/ir/rules.py
    states for the kind. On a GPU communications follow the current stream: what was queued on it
    before the call is done before, and `wait` orders the result before what is queued on it after.
    """

    mesh: DeviceMesh
    rank: int

    @property
    def signals_on_device(self) -> bool:
        """Whether GPUs signal each other without the host."""
        ...

    @property
    def timeout_s(self) -> float:
        """Bound of a communication."""
        ...

    def all_reduce(
        self, axis: str, xs: Sequence[Tensor], outs: Sequence[Tensor], combine: str
    ) -> CommHandle:
        """Combines elementwise over the team: "sum", "max", "min" of one tensor, or "argmax" of
        value and index.
        """
        ...

    def all_gather(self, axis: str, x: Tensor, out: Tensor, dim: int) -> CommHandle:
        """Joins the team's tensors along `dim`, in rank order."""
        ...

    def reduce_scatter(
        self, axis: str, x: Tensor, out: Tensor, dim: int, combine: str
    ) -> CommHandle:
        """Combines over the team; this rank keeps its part of `dim`."""
        ...

    def all_to_all(self, axis: str, x: Tensor, out: Tensor, dim: int, dst_dim: int) -> CommHandle:
        """Scatters `dst_dim` and gathers `dim`: part of the one, all of the other."""
        ...

    def broadcast(self, axis: str, x: Tensor, out: Tensor, source: int) -> CommHandle:
        """`out` becomes the source's `x`."""
        ...

    def send(self, axis: str, x: Tensor, peer: int) -> CommHandle:
        """Sends to a peer, whose receives match in order."""
        ...

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        """Receives from a peer."""
        ...

    def begin_group(self) -> None:
        """Sends and receives up to `end_group` are one exchange, whatever order peers name them."""
        ...

    def end_group(self, members: Sequence[CommHandle]) -> CommHandle:
        """Starts the group; one handle for its members, the handles of its sends and receives."""
        ...

    def signal(self, axis: str, name: str, peer: int) -> None:
        """Adds one to the peer's counter `name`."""
        ...

    def wait_signal(self, axis: str, name: str, peer: int) -> None:
        """What follows runs after one more signal `name` from the peer."""
        ...

    def check_signals(self) -> None:
        """Raises HangError for a signal that a GPU gave up waiting for; call it once the results
        behind it are there.
        """
        ...

    def barrier(self) -> None:
        """Returns when every rank of the mesh has called it."""
        ...

    def all_gather_object(self, value: P, axis: str = "") -> list[P]:
        """The plain values (plain.py) of all ranks of the mesh, or of this rank's team along an
        axis, in mesh order.
        """
        ...

    def close(self) -> None:
        """Releases what it holds. All ranks of the mesh call it together, once they use nothing
        that was made with it; from then on it takes no call but this.
        """
        ...

    def leave(self) -> None:
        """Gives up what it holds without the others, as if it were gone: that is released where
        its ranks meet next, once all of them have left it. Waits for nobody, so that a rank which
        fails tells so at once.
        """
        ...


def require_mesh(mesh: object) -> None:
    """MeshError for what is no DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"{shown(mesh)} in place of a mesh",
            expected="a DeviceMesh",
            remedy="give DeviceMesh(tp=1) for one rank",
        )


def require_communicator(comm: object, mesh: DeviceMesh) -> None:
    """ProgramError for what is no communicator, MeshError for one of another mesh, and no mesh."""
    require_mesh(mesh)
    its_mesh = getattr(comm, "mesh", None)
    if not isinstance(its_mesh, DeviceMesh):
        raise ProgramError(
            f"{shown(comm)} in place of a communicator",
            expected="how this rank reaches the others of the mesh",
            remedy="call compile_plan with the context that launch gives to each rank, or give "
            "SingleCommunicator(mesh) for one rank",
        )
    if mesh.num_ranks > 1 and its_mesh != mesh:
        raise MeshError(
            f"a communicator of {its_mesh} for {mesh}",
            expected="one of the same mesh",
            remedy="plan on the communicator's mesh, or make one of the plan's",
        )


class SingleCommunicator(Collectives):
    """A mesh of one rank, else MeshError: collectives copy, and there is nobody to send to."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.num_ranks != 1:
            raise MeshError(
                f"one process for {mesh}",
                expected="a mesh of one rank",
                remedy="start one process a rank, which gives its RankContext or makes a "
                "GlooCommunicator",
            )
        super().__init__(mesh, mesh.ranks[0])
        self._mail = Mailbox()

    def _gather(self, axis: str, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x[None]

    def _swap(self, axis: str, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        return lambda: parts[0][None]

    def broadcast(self, axis: str, x: Tensor, out: Tensor, source: int) -> CommHandle:
        return CommHandle(lambda: copy_into(out, x))

    def send(self, axis: str, x: Tensor, peer: int) -> CommHandle:
        return self._mail.send(axis, x)

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        return self._mail.recv(axis, out)

    def signal(self, axis: str, name: str, peer: int) -> None:
        self._mail.send(axis, token(), name)

    def wait_signal(self, axis: str, name: str, peer: int) -> None:
        self._mail.recv(axis, token(), name).wait()

    def barrier(self) -> None:
        """Nobody to wait for."""

    def all_gather_object(self, value: P, axis: str = "") -> list[P]:
        return [cast(P, decode_plain(encode_plain(value)))]


class TeamCommunicator(Collectives):
    """What communicators over torch.distributed share: a process group for each team of this rank.

    Needs an initialised default process group that holds the mesh's ranks. Groups are made for each
    team of each axis in the same order everywhere. timeout_s bounds every communication. Groups end
    with `close`, or once it is gone and its ranks make another one (groups.py).
    """

    def __init__(self, mesh: DeviceMesh, rank: int, backend: str, timeout_s: float) -> None:
        super().__init__(mesh, rank)
        self.timeout_s = timeout_s
        self._teams = {axis: mesh.team(axis, rank) for axis in mesh.names}
        self._team_ranks = {axis: _group_ranks(team) for axis, team in self._teams.items()}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._mail = Mailbox()
        self._backend = backend
        self._opened: list[dist.ProcessGroup] = []
        self._is_closed = False
        close_with(self, self._opened)
        with self._guard("set-up", ""):
            for axis in mesh.names:
                for team in dict.fromkeys(mesh.team(axis, each) for each in mesh.ranks):
                    group = self.open_group(team, timeout_s) if len(team) > 1 else None
                    if rank in team:
                        self._groups[axis] = group

    def open_group(self, ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
        """A process group that is closed with this. Collective over all processes, also those that
        are not in it, which get a stand-in.
        """
        timeout = timedelta(seconds=timeout_s)
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=self._backend
        )
        if self.rank in ranks:
            self._opened.append(group)
        return group

    @abstractmethod
    def barrier(self) -> None:
        """See Communicator."""

    def close(self) -> None:
        """LostPeerError if a peer is gone; nothing is released then."""
        if self._is_closed:
            return
        self.barrier()  # until then peers may read what this rank has sent
        self._is_closed = True
        close_groups(self._opened)
        self._opened.clear()
        self._groups.clear()

    def leave(self) -> None:
        """See Communicator."""
        self._leave_with(())

    def _leave_with(self, things: Sequence[object]) -> None:
        """Leaves, but keeps what peers may write into until they have left too."""
        self._is_closed = True
        leave_groups(self._opened, things)
        self._groups.clear()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ProgramError(
                f"a communication of a communicator that rank {self.rank} has closed",
                expected="one that is open",
                remedy="open another one on all ranks, or close this one later",
            )

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        """Of this rank's team along an axis, None for a team of one; of all ranks where there is
        no axis, if they have one.
        """
        self._require_open()
        return self._groups[axis]

    @contextmanager
    def _guard(self, what: str, axis: str) -> Iterator[None]:
        """Turns a fault of the network into LostPeerError, naming the communication and the
        team.
        """
        try:
            yield
        except RuntimeError as error:
            team = self._teams[axis] if axis else self.mesh.ranks
            reason = str(error).partition("\n")[0]
            where = f"over mesh axis {axis!r}, ranks {list(team)}," if axis else f"of {list(team)}"
            raise LostPeerError(
                f"{what} {where} failed on rank {self.rank}: {reason}",
                expected="every rank of the team alive",
                remedy="look for the rank that ended first, and start the job again",
            ) from error

    def _await(self, work: dist.Work) -> None:
        """Until what was started is done, or on a GPU until the current stream waits for it."""
        work.wait()

    def _arrive(self, work: dist.Work) -> Callable[[], object] | None:
        """How the current CUDA stream follows what was started; None where hosts move it."""
        return None

    def all_gather(self, axis: str, x: Tensor, out: Tensor, dim: int) -> CommHandle:
        """Straight into `out` where ranks' parts lie there one behind the other."""
        group, size = self._group(axis), self.mesh.size(axis)
        fits = out.is_contiguous() and dim == 0 and out.shape[0] == size * x.shape[0]
        if group is None or not fits or not self._is_ascending(axis):
            return super().all_gather(axis, x, out, dim)
        with self._guard("all-gather", axis):
            work = all_gather_single(flat_bytes(out), flat_bytes(x), group=group, async_op=True)
        assert work is not None, "this rank is in the team"

        def finish() -> None:
            with self._guard("all-gather", axis):
                self._await(work)

        return CommHandle(finish, self._arrive(work))

    def _is_ascending(self, axis: str) -> bool:
        """Whether the group's order of ranks is the mesh's."""
        return self._team_ranks[axis] == sorted(self._team_ranks[axis])

    def _in_rank_order(self, axis: str, found: Tensor) -> Tensor:
        """Rows, one a rank in the group's order, in that of the mesh."""
        return found if self._is_ascending(axis) else found[list(self._team_ranks[axis])]

    def _gather(self, axis: str, x: Tensor) -> Callable[[], Tensor]:
        group = self._group(axis)
        if group is None:
            return lambda: x[None]
        mine = flat_bytes(x)
        found = mine.new_empty(self.mesh.size(axis), mine.numel())
        with self._guard("gather", axis):
            work = all_gather_single(found.view(-1), mine, group=group, async_op=True)
        assert work is not None, "this rank is in the team"

        def finish() -> Tensor:
            with self._guard("gather", axis):
                self._await(work)
            return self._in_rank_order(axis, found).view(x.dtype).view(len(found), *x.shape)

        return finish

    def _swap(self, axis: str, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        group, team_ranks = self._group(axis), self._team_ranks[axis]
        if group is None:
            return lambda: parts[0][None]
        given = torch.stack(
            [flat_bytes(parts[team_ranks.index(i)]) for i in range(len(team_ranks))]
        )
        found = torch.empty_like(given)
        with self._guard("all-to-all", axis):
            work = dist.all_to_all_single(found, given, group=group, async_op=True)

        def finish() -> Tensor:
            with self._guard("all-to-all", axis):
                self._await(work)
            ordered = self._in_rank_order(axis, found)
            return ordered.view(parts[0].dtype).view(len(found), *parts[0].shape)

        return finish

    def broadcast(self, axis: str, x: Tensor, out: Tensor, source: int) -> CommHandle:
        group = self._group(axis)
        if group is None:
            return CommHandle(lambda: copy_into(out, x))
        data = flat_bytes(x).clone()
        with self._guard("broadcast", axis):
            work = dist.broadcast(data, self._teams[axis][source], group=group, async_op=True)

        def finish() -> None:
            with self._guard("broadcast", axis):
                self._await(work)
            out.copy_(data.view(out.dtype).view(out.shape))

        return CommHandle(finish)


class GlooCommunicator(TeamCommunicator):
    """Teams of CPU processes over gloo. Every rank of the mesh makes one, at the same point of its
    program. wait_s bounds a wait for tensors or a signal; values that ranks tell each other between
    programs, and barriers, may take timeout_s, since ranks load and plan at their own pace.
    """

    def __init__(
        self, mesh: DeviceMesh, rank: int, timeout_s: float = 300.0, wait_s: float | None = None
    ) -> None:
        super().__init__(mesh, rank, "gloo", timeout_s)
        self._wait_limit = timedelta(seconds=timeout_s if wait_s is None else wait_s)
        self._signals: list[dist.Work] = []
        with self._guard("set-up", ""):
            self._groups[""] = self.open_group(mesh.ranks, timeout_s)
        close_left(self.all_gather_object, mesh.ranks, timeout_s)

    def _await(self, work: dist.Work) -> None:
        work.wait(self._wait_limit)

    def send(self, axis: str, x: Tensor, peer: int) -> CommHandle:
        if self._group(axis) is None:
            return self._mail.send(axis, x)
        work = self._post_send(axis, flat_bytes(x), peer, DATA_TAG)

        def finish() -> None:
            with self._guard("send", axis):
                self._await(work)

        return CommHandle(finish)

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        if self._group(axis) is None:
            return self._mail.recv(axis, out)
        data = torch.empty(out.numel() * out.element_size(), dtype=torch.uint8, device="cpu")
        work = self._post_recv(axis, data, peer, DATA_TAG)

        def finish() -> None:
            with self._guard("receive", axis):
                self._await(work)
            out.copy_(data.view(out.dtype).view(out.shape))

        return CommHandle(finish)

    def signal(self, axis: str, name: str, peer: int) -> None:
        if self._group(axis) is None:
            self._mail.send(axis, token(), name)
            return
        self._signals = [work for work in self._signals if not work.is_completed()]
        self._signals.append(self._post_send(axis, token(), peer, _signal_tag(name)))

    def wait_signal(self, axis: str, name: str, peer: int) -> None:
        if self._group(axis) is None:
            self._mail.recv(axis, token(), name).wait()
            return
        work = self._post_recv(axis, token(), peer, _signal_tag(name))
        with self._guard(f"wait for signal {name!r}", axis):
            self._await(work)

    def _post_send(self, axis: str, data: Tensor, peer: int, tag: int) -> dist.Work:
        with self._guard("send", axis):
            group, to = self._group(axis), self._teams[axis][peer]
            work = dist.isend(data, to, group=group, tag=tag)
        assert work is not None, "this rank is in the team"
        return work

    def _post_recv(self, axis: str, data: Tensor, peer: int, tag: int) -> dist.Work:
        with self._guard("receive", axis):
            group, source = self._group(axis), self._teams[axis][peer]
            work = dist.irecv(data, source, group=group, tag=tag)
        assert work is not None, "this rank is in the team"
        return work

    def close(self) -> None:
        """As of TeamCommunicator."""
        super().close()
        self._signals.clear()

    def barrier(self) -> None:
        group = self._group("")
        with self._guard("barrier", ""):
            dist.barrier(group=group)

    def all_gather_object(self, value: P, axis: str = "") -> list[P]:
        team = self._teams[axis] if axis else self.mesh.ranks
        group = self._group(axis)
        if len(team) == 1:
            return [self._read(encode_plain(value), self.rank)]
        order = enumerate(_group_ranks(team))
        mine = encode_plain(value)
        with self._guard("exchange of values", axis):
            found = gather_bytes(mine, len(team), group)
        return [self._read(found[team_rank], team[number]) for number, team_rank in order]

    def _read(self, data: bytes, sender: int) -> Any:
        """What another rank told. RankFailure for bytes of no meaning."""
        try:
            return decode_plain(data)
        except ValueError as error:
            raise RankFailure(
                f"rank {sender} told rank {self.rank} what it can't read ({error})",
                expected="a plain value",
                remedy="run one version of distmega on all ranks, and let no one else connect",
            ) from error


def _group_ranks(team: Sequence[int]) -> list[int]:
    """Where each rank of a team stands in its process group: torch sorts the ranks of a group."""
    return [sorted(team).index(rank) for rank in team]


def flat_bytes(x: Tensor) -> Tensor:
    """x's elements, row-major, as bytes; the network then needs to know no dtype."""
    # a tensor of one element is contiguous whatever its strides say, and view(dtype) looks at them
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def _signal_tag(name: str) -> int:
    return 1 + zlib.crc32(name.encode()) % (1 << 30)
