"""Collectives on the CPU in terms of two communications of bytes: gather, and give part i to rank
i.

Results are combined here, in rank order and in fp32 or wider, so every rank gets the same bits.
communicator.py supplies the communications.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distmega.errors import RankFailure
from distmega.hostir.library.torch_types import widen
from distmega.program.ops.compute import take_shard_values
from distmega.sharding.layout.mesh import DeviceMesh


class CommHandle:
    """A communication under way; `wait` returns once its results are there, more than once.

    arrive: lets the current CUDA stream follow the transfer alone, any number of times.
    """

    def __init__(
        self, finish: Callable[[], None], arrive: Callable[[], object] | None = None
    ) -> None:
        self._finish: Callable[[], None] | None = finish
        self._arrive = arrive

    def wait(self) -> None:
        """Blocks until done. RankFailure if a peer is gone."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    @property
    def arrives(self) -> bool:
        """Whether `follow` can tell the transfer's end."""
        return self._arrive is not None

    def follow(self) -> None:
        """The current stream goes on after the transfer; what `wait` does with it is still to do.
        Nothing where the transport can't tell.
        """
        if self._arrive is not None:
            self._arrive()


def join_handles(handles: Sequence[CommHandle]) -> CommHandle:
    """One handle for several communications."""

    def finish() -> None:
        for handle in handles:
            handle.wait()

    def arrive() -> None:
        for handle in handles:
            handle.follow()

    return CommHandle(finish, arrive)


_MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine_parts(parts: Sequence[Sequence[Tensor]], combine: str) -> tuple[Tensor, ...]:
    """One result of each rank's operands, in rank order: (x,) for sum, max and min, fp32 or wider,
    (value, index) for argmax.

    argmax takes the largest value, and the lowest index where values tie; NaN is the largest, as in
    torch.
    """
    if combine == "argmax":
        values, indices = (torch.stack(tuple(each)) for each in zip(*parts, strict=True))
        nan = values.isnan()
        best = torch.where(nan.any(0), nan, values == values.amax(0))
        last = torch.iinfo(indices.dtype).max
        at = torch.where(best, indices, last).argmin(0, keepdim=True)
        return values.gather(0, at)[0], indices.gather(0, at)[0]
    merge = _MERGES[combine]
    total = widen(parts[0][0])
    for (part,) in parts[1:]:
        total = merge(total, part)
    return (total,)


class Collectives(ABC):
    """Collectives on top of two communications of bytes, which a transport supplies."""

    timeout_s = math.inf

    def __init__(self, mesh: DeviceMesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank

    @property
    def signals_on_device(self) -> bool:
        """Hosts send them."""
        return False

    @abstractmethod
    def _gather(self, axis: str, x: Tensor) -> Callable[[], Tensor]:
        """Starts to gather; the result blocks and gives x of each rank, [ranks, *x.shape]."""

    def begin_group(self) -> None:  # noqa: B027  a transport may need nothing
        """Sends and receives need no grouping where each is under way at once."""

    def end_group(self, members: Sequence[CommHandle]) -> CommHandle:
        """One handle for the sends and receives since begin_group."""
        return join_handles(members)

    @abstractmethod
    def _swap(self, axis: str, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Starts to give part i to rank i of the team; the result gives the parts for this rank,
        [ranks, *part.shape].
        """

    def check_signals(self) -> None:  # noqa: B027  a transport that blocks raises at once
        """Nothing is given up unnoticed where waits block the host."""

    def leave(self) -> None:  # noqa: B027  a transport may hold nothing
        """Nothing to release."""

    def close(self) -> None:  # noqa: B027  a transport may hold nothing
        """Nothing to release."""

    def all_reduce(
        self, axis: str, xs: Sequence[Tensor], outs: Sequence[Tensor], combine: str
    ) -> CommHandle:
        gathers = [self._gather(axis, x) for x in xs]

        def finish() -> None:
            parts = list(zip(*(gather() for gather in gathers), strict=True))
            for out, result in zip(outs, combine_parts(parts, combine), strict=True):
                out.copy_(result)

        return CommHandle(finish)

    def all_gather(self, axis: str, x: Tensor, out: Tensor, dim: int) -> CommHandle:
        gather = self._gather(axis, x)
        return CommHandle(lambda: _join(gather(), out, dim))

    def reduce_scatter(
        self, axis: str, x: Tensor, out: Tensor, dim: int, combine: str
    ) -> CommHandle:
        swap = self._swap(axis, self._parts(axis, x, dim, out.shape[dim]))

        def finish() -> None:
            (result,) = combine_parts([(part,) for part in swap()], combine)
            out.copy_(result)

        return CommHandle(finish)

    def all_to_all(self, axis: str, x: Tensor, out: Tensor, dim: int, dst_dim: int) -> CommHandle:
        swap = self._swap(axis, self._parts(axis, x, dst_dim, out.shape[dst_dim]))
        return CommHandle(lambda: _join(swap(), out, dim))

    def _parts(self, axis: str, x: Tensor, dim: int, extent: int) -> list[Tensor]:
        """x cut along a dim into one part of `extent` a rank; what lies past its end is zero."""
        return [take_shard_values(x, dim, extent, each) for each in range(self.mesh.size(axis))]


def _join(parts: Tensor, out: Tensor, dim: int) -> None:
    """Parts [ranks, ...] along a dim, but for padding past the end of `out`."""
    num, extent = parts.shape[0], parts.shape[1 + dim]
    if out.shape[dim] == num * extent:
        apart = out.unflatten(dim, (num, extent))  # type: ignore[no-untyped-call]
        apart.copy_(parts.movedim(0, dim))
        return
    for number, part in enumerate(parts):
        inside = max(0, min(extent, out.shape[dim] - number * extent))
        into = out.narrow(dim, min(number * extent, out.shape[dim]), inside)
        into.copy_(part.narrow(dim, 0, inside))


class Mailbox:
    """What a rank that is a team by itself sends to itself."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], deque[Tensor]] = {}

    def send(self, axis: str, x: Tensor, name: str = "") -> CommHandle:
        """Keeps a copy; `name` tells signals from data."""
        self._sent.setdefault((axis, name), deque()).append(x.clone())
        return CommHandle(lambda: None)

    def recv(self, axis: str, out: Tensor, name: str = "") -> CommHandle:
        """The oldest of what was sent; RankFailure if there is nothing."""
        return CommHandle(lambda: copy_into(out, self._take(axis, name)))

    def _take(self, axis: str, name: str) -> Tensor:
        if not self._sent.get((axis, name)):
            raise RankFailure(
                f"a receive over mesh axis {axis!r} {name} from the rank itself",
                expected="a send or signal before it",
                remedy="check the host program with hostir/check/check.py",
            )
        return self._sent[axis, name].popleft()


def copy_into(out: Tensor, x: Tensor) -> None:
    """out = x, as a statement."""
    out.copy_(x)


def token() -> Tensor:
    """What a signal sends: its arrival is the message."""
    return torch.ones(1, dtype=torch.uint8, device="cpu")
