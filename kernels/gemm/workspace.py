"""Memory that the ranks of a team write into each other: rooms for data, and event words.

In: the NCCL team of a mesh axis. Out: a Workspace. Calls that use it are counted (epochs); even and
odd ones have a room each. No call ends on a rank before all ranks have started it, so two calls
later a room is free again on all of them. Next: overlap.py.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distmega.errors import RequestError
from distmega.hostir.nccl import NcclCommunicator
from distmega.kernels.symmetric import open_symmetric

NUM_WORDS = 2**18
"""Event words of each kind."""
WORD_BYTES = 4
ALIGNMENT_BYTES = 256


class Workspace:
    """Two rooms of `room_bytes` in every rank's memory. All ranks make it together and use it in
    the same order, each on one stream at a time.
    """

    def __init__(self, comm: NcclCommunicator, axis: str, room_bytes: int) -> None:
        """Raises LaunchError if the ranks do not reach each other's memory."""
        self.room_bytes = -(-room_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.epoch = 0
        self._at_words = 2 * self.room_bytes
        num_bytes = self._at_words + 2 * NUM_WORDS * WORD_BYTES
        self._memory = open_symmetric(comm, axis, num_bytes)
        self.rank, self.num_ranks = self._memory.place, self._memory.num_ranks
        self.stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        starts = (0, self.room_bytes, self._at_words)
        *self._rooms, self.peers = (self._addresses(start) for start in starts)

    def room(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The current call's room in the memory of a rank. RequestError if it is too small."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.room_bytes:
            raise RequestError(
                f"tensor of {num_bytes} bytes in a workspace for {self.room_bytes}",
                expected="room for the whole gathered tensor, or twice that of the result",
                remedy="make a larger Workspace",
            )
        return self._memory.tensor(rank, shape, dtype, (self.epoch & 1) * self.room_bytes)

    @property
    def rooms(self) -> Tensor:
        """Addresses of all ranks' rooms of the current call, int64 [num_ranks]."""
        return self._rooms[self.epoch & 1]

    def events(self, rank: int) -> Tensor:
        """Words of a rank that kernels write; `peers` has their addresses, int64 [num_ranks]."""
        return self._words(rank, 0)

    def arrivals(self, rank: int) -> Tensor:
        """Words of a rank that a stream writes behind its copies, uint32."""
        return self._words(rank, NUM_WORDS).view(torch.uint32)

    def _words(self, rank: int, first: int) -> Tensor:
        start = self._at_words + first * WORD_BYTES
        return self._memory.tensor(rank, (NUM_WORDS,), torch.int32, start)

    def _addresses(self, start: int) -> Tensor:
        addresses = [pointer + start for pointer in self._memory.pointers]
        return torch.tensor(addresses, dtype=torch.int64, device=self._memory.local.device)


_workspaces: dict[tuple[NcclCommunicator, str], Workspace] = {}


def workspace_of(comm: NcclCommunicator, axis: str, room_bytes: int) -> Workspace:
    """The workspace of a team, which makes it together when it is first asked for, or asked for
    with larger rooms than before.
    """
    known = _workspaces.get((comm, axis))
    if known is None or known.room_bytes < room_bytes:
        torch.cuda.synchronize()
        known = _workspaces[comm, axis] = Workspace(comm, axis, room_bytes)
    return known
