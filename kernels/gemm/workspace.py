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
from distmega.kernels.gemm.spec import WORDS
from distmega.kernels.symmetric import open_symmetric

NUM_COUNTS = 2**15
"""Words that a kernel counts stored tiles in."""
WORD_BYTES = 4
ALIGNMENT_BYTES = 256


class Workspace:
    """Two rooms of `room_bytes` in every rank's memory. All ranks make it together and use it in
    the same order, each on one stream at a time.

    stream: for copies to peers. group: of the ranks, for torch's own ops. counts: int32
    [NUM_COUNTS] of this rank, counted up by kernels.
    """

    def __init__(self, comm: NcclCommunicator, axis: str, room_bytes: int) -> None:
        """Raises LaunchError if the ranks do not reach each other's memory."""
        self.room_bytes = -(-room_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.epoch = 0
        self._at_words = 2 * self.room_bytes
        size = comm.mesh.size(axis)
        self._memory = open_symmetric(comm, axis, self._at_words + size * WORDS.value * WORD_BYTES)
        self.group = comm.group(axis)[0]
        self.backend = self._memory.backend
        self.rank, self.num_ranks = self._memory.place, self._memory.num_ranks
        self.stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.int32, device=self._memory.local.device)
        self._totals = [0] * NUM_COUNTS

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The current call's room in this rank's memory. RequestError if it is too small."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.room_bytes:
            raise RequestError(
                f"tensor of {num_bytes} bytes in a workspace for {self.room_bytes}",
                expected="room for the whole gathered tensor, or twice that of the result",
                remedy="make a larger Workspace",
            )
        start = (self.epoch & 1) * self.room_bytes
        return self._memory.local[start : start + num_bytes].view(dtype).view(*shape)

    def room_address(self, rank: int) -> int:
        """Of the current call's room in the memory of a rank."""
        return int(self._memory.pointers[rank]) + (self.epoch & 1) * self.room_bytes

    @property
    def arrivals(self) -> Tensor:
        """Words of this rank that peers' copy engines write, int32 [num_ranks, WORDS]."""
        shape = (self.num_ranks, WORDS.value)
        return self._memory.tensor(self.rank, shape, torch.int32, self._at_words)

    def arrival_address(self, rank: int, source: int, word: int) -> int:
        """Of a word in the memory of `rank` that only rank `source` writes."""
        place: int = source * WORDS.value + word
        return int(self._memory.pointers[rank]) + self._at_words + place * WORD_BYTES

    def count_address(self, index: int) -> int:
        """Of a word of `counts`."""
        return self.counts.data_ptr() + index * WORD_BYTES

    def expect_count(self, index: int, number: int) -> int:
        """What a word of `counts` holds when this call has added `number` to it."""
        self._totals[index] += number
        return self._totals[index]


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
