"""Memory that the ranks of a group write into each other: rooms for data, and event words.

In: a process group of Hopper GPUs that reach each other's memory. Out: a Workspace. Calls that use
it are counted (epochs); even and odd ones have a room each. A call never ends before all ranks have
started it, so a room is free again, on all ranks, two calls later. Next: overlap.py.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from distmega.errors import LaunchError, RequestError

NUM_WORDS = 2**18
"""Event words of each kind."""
_WORD_BYTES = 4


class Workspace:
    """Rooms of `room_bytes` in every rank's memory; made by all ranks together, used on one stream
    at a time, by all ranks in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, room_bytes: int) -> None:
        """Raises LaunchError if the ranks do not reach each other's memory."""
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.room_bytes = -(-room_bytes // 256) * 256
        self.epoch = 0
        device = torch.device("cuda", torch.cuda.current_device())
        num_bytes = 2 * self.room_bytes + 2 * NUM_WORDS * _WORD_BYTES
        try:
            self._memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            self._handle = symmetric.rendezvous(self._memory, group.group_name)
        except RuntimeError as fault:
            raise LaunchError(
                f"no shared memory between {self.num_ranks} GPUs: {fault}",
                expected="GPUs of one host that reach each other (NVLink or PCIe peer access)",
                remedy="run the matmul and the collective one after the other",
            ) from fault
        self._memory[2 * self.room_bytes :].zero_()
        self._at_events = 2 * self.room_bytes // _WORD_BYTES
        self.stream = torch.cuda.Stream(device, priority=-1)
        ranks = range(self.num_ranks)
        self.peers = self._addresses([self.events(rank) for rank in ranks])
        starts = [[self._bytes(rank, n * self.room_bytes) for rank in ranks] for n in range(2)]
        self._rooms = [self._addresses(tensors) for tensors in starts]
        torch.cuda.synchronize()
        dist.barrier(group)

    def room(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The current call's room in the memory of a rank. RequestError if it is too small."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.room_bytes:
            raise RequestError(
                f"tensor of {num_bytes} bytes in a workspace for {self.room_bytes}",
                expected="room for the whole gathered or reduced tensor",
                remedy="make a larger Workspace",
            )
        start = (self.epoch & 1) * self.room_bytes // dtype.itemsize
        return self._handle.get_buffer(rank, tuple(shape), dtype, start)

    def rooms(self) -> Tensor:
        """Addresses of all ranks' rooms of the current call, int64 [num_ranks]."""
        return self._rooms[self.epoch & 1]

    def events(self, rank: int) -> Tensor:
        """Words of a rank that kernels write."""
        return self._words(rank, 0)

    def arrivals(self, rank: int) -> Tensor:
        """Words of a rank that copies on a stream are followed by."""
        return self._words(rank, NUM_WORDS)

    def _addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        addresses = [x.data_ptr() for x in tensors]
        return torch.tensor(addresses, dtype=torch.int64, device=self._memory.device)

    def _bytes(self, rank: int, start: int) -> Tensor:
        return self._handle.get_buffer(rank, (1,), torch.uint8, start)

    def _words(self, rank: int, start: int) -> Tensor:
        return self._handle.get_buffer(
            rank, (NUM_WORDS,), torch.int32, self._at_events + start
        )


_workspaces: dict[str, Workspace] = {}


def workspace_of(group: dist.ProcessGroup | None, room_bytes: int) -> Workspace:
    """The workspace of a group, by default of all ranks; all of them make it together when it is
    first asked for, or asked for with larger rooms than before.
    """
    group = group or dist.group.WORLD
    assert group is not None
    known = _workspaces.get(group.group_name)
    if known is None or known.room_bytes < room_bytes:
        known = _workspaces[group.group_name] = Workspace(group, room_bytes)
    return known
