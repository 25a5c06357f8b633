"""Memory that the ranks of a team write into each other: buffers for data, and event words.

In: a Team. Out: a Workspace. Calls that use it take turns: even and odd ones have a symmetric
buffer and event words each. No call ends on a rank before all ranks have started it, so two calls
later a symmetric buffer is free again on all of them. A word holds 0, 1 once what it tells of is
there, and 0 again after the call that waited for it: nothing of a call is counted on the host but
its turn, so a captured graph that begins and ends at an even turn can be replayed.

Copies, the words behind them and what copies wait for are on a stream each, since an engine that
waits for another stands still for some microseconds. The stream of the calls waits for none of
these, since its next kernel would begin as much later, unless copies read what the caller may write
into again; what stays as it is is held until the end of the next call, which no peer lets come
before it has what was copied to it. That a call may follow, two later, is known all the same. Its
peers have told it in the call between that they are through with the one before, so all copies to
them are; and that its own words are 0 again is told by the first word of the call between, READY,
which that call's kernel waits for. No peer goes on to the next call before this rank's words of it
are there: those of copies follow the words that went back to 0, on one stream, and a kernel that
pushes, whose words do not, waits for READY before the first.
Next: overlap.py.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.errors import RequestError
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.gemm.times.tile_times import NUM_WORDS, PUSHED, READY
from distmega.kernels.runtime.streams.stream_ops import (
    copy_bytes,
    copy_columns,
    wait_word,
    write_word,
    write_words,
)
from distmega.kernels.runtime.symmetric import StandInTeam, Team

WORD_BYTES = 4
BUFFER_MULTIPLE_BYTES = 256
"""The size of a buffer is a multiple of this, so that what lies behind it is as well aligned."""
TURNS = 2


class Workspace:
    """Two symmetric buffers of `symmetric_bytes` in every rank's memory. All ranks make it together
    and use it in the same order, each on one stream at a time.

    team: the ranks. stream: for copies to peers. group: of the ranks, for torch's own ops.
    """

    def __init__(self, team: Team, symmetric_bytes: int) -> None:
        """Raises LaunchError if the ranks do not reach each other's memory."""
        self.symmetric_bytes = -(-symmetric_bytes // BUFFER_MULTIPLE_BYTES) * BUFFER_MULTIPLE_BYTES
        self.turn = 0
        self._held: list[Tensor | None] = [None] * TURNS
        """What copies of a turn's last call read."""
        self._queued = False
        """Whether streams of this have work that no settled stream follows yet."""
        self._at_words = TURNS * self.symmetric_bytes
        self.team = team
        self._turn_bytes = team.size * NUM_WORDS * WORD_BYTES
        num_bytes = self._at_words + TURNS * self._turn_bytes
        self._memory = team.open(num_bytes)
        self.group = team.comm.group(team.axis)[0]
        self.backend = self._memory.backend
        self.rank, self.num_ranks = self._memory.team_rank, self._memory.num_ranks
        self.stream, self._words, self._waits = (
            torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        shape = (self.num_ranks, NUM_WORDS)
        starts = [self._at_words + turn * self._turn_bytes for turn in range(TURNS)]
        self._arrivals = [
            self._memory.tensor(self.rank, shape, torch.int32, start) for start in starts
        ]
        self._buffers = self._addresses(0, self.symmetric_bytes)
        first = self._at_words + WORD_BYTES * (self.rank * NUM_WORDS + PUSHED)
        self._pushed = self._addresses(first, self._turn_bytes)
        self._counts = torch.zeros(TURNS, *shape, dtype=torch.int32, device=self.device)

    @property
    def device(self) -> torch.device:
        """This rank's GPU."""
        return self._memory.local.device

    @property
    def peers(self) -> list[int]:
        """All ranks but this one, the next first."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def begin(self) -> None:
        """The next call's turn."""
        self.turn ^= 1
        self._held[self.turn] = None

    def follow(self) -> None:
        """Copies and words come after what the current stream has been given. A call without any
        leaves this out: a graph of one chain of kernels costs the host least.
        """
        self._queued = True
        for stream in (self.stream, self._words, self._waits):
            stream.wait_stream(torch.cuda.current_stream())
        write_word(self.arrival_address(self.rank, self.rank, READY), 1, self._words)

    def send(self, target: int, source: int, num_bytes: int) -> None:
        """Copies this rank's bytes at an address to one in a peer's memory."""
        copy_bytes(target, source, num_bytes, self.stream)

    def send_columns(self, target: int, source: int, width: int, pitch: int, rows: int) -> None:
        """As send, of the first `width` bytes of each of `rows`, `pitch` bytes apart."""
        copy_columns(target, source, width, pitch, rows, self.stream)

    def sum(self, total: Tensor) -> None:
        """Sums over ranks what lies at `total` in this call's symmetric buffer of each."""
        self.join()
        if self.backend == "CUDA":
            torch.ops.symm_mem.two_shot_all_reduce_(total, "sum", self.group.group_name)
        else:
            dist.all_reduce(total, group=self.group)

    def await_count(self, index: int, value: int) -> None:
        """Later copies begin once that word of `counts` has reached a value."""
        wait_word(self.count_address(index), value, self._waits)
        self.stream.wait_stream(self._waits)

    def tell(self, peer: int, word: int) -> None:
        """Sets a word of this rank at a peer once the copies so far are there."""
        self._words.wait_stream(self.stream)
        write_word(self.arrival_address(peer, self.rank, word), 1, self._words)

    def end(
        self,
        words: Iterable[int],
        counts: Iterable[int] = (),
        *,
        copied: Tensor | None = None,
        is_final: bool = False,
    ) -> None:
        """Behind all that this call has been given, `words` of each peer and `counts` go back to 0.
        copied: the caller's, which copies of this call read. The current stream waits for these,
        since the caller may write into it again; or, if it is final, it is kept until the second
        next call begins: the one between waits for all peers, whose last call was this one then.
        """
        current = torch.cuda.current_stream()
        if copied is not None and is_final:
            self._held[self.turn] = copied
        elif copied is not None:
            current.wait_stream(self.stream)
        used = [
            self.arrival_address(self.rank, source, word)
            for source, word in product(self.peers, words)
        ]
        used.append(self.arrival_address(self.rank, self.rank, READY))
        self._words.wait_stream(current)
        write_words([*used, *map(self.count_address, counts)], 0, self._words)

    def join(self) -> None:
        """The current stream waits for all copies and writes that are queued, if there are any:
        within a capture, a stream of which it knows nothing can't be waited for.
        """
        if self._queued:
            for stream in (self.stream, self._words, self._waits):
                torch.cuda.current_stream().wait_stream(stream)
            self._queued = False
        self._held = [None] * TURNS

    def settle(self) -> None:
        """To an even turn, by a call without data if need be, and `join`. Collective."""
        if self.turn:
            self.begin()
            self.follow()
            for peer in self.peers:
                self.tell(peer, 0)
            self.await_peers(0)
            self.end([0])
        self.join()

    def rewind(self) -> None:
        """To where a settled workspace is, without work: a capture failed that had begun there."""
        self.turn, self._queued, self._held = 0, False, [None] * TURNS

    def await_peers(self, word: int, value: int = 1) -> None:
        """The current stream goes on when that word of all other ranks has reached a value, and the
        words of the call before are 0 again.
        """
        wanted = [(source, word, value) for source in self.peers]
        for source, number, least in [(self.rank, READY, 1), *wanted]:
            address = self.arrival_address(self.rank, source, number)
            wait_word(address, least, torch.cuda.current_stream())

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The current call's symmetric buffer in this rank's memory. RequestError if it is too
        small.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.symmetric_bytes:
            raise RequestError(
                f"tensor of {num_bytes} bytes in a workspace for {self.symmetric_bytes}",
                expected="room for the whole gathered tensor, or twice that of the result",
                remedy="make a larger Workspace",
            )
        start = self.turn * self.symmetric_bytes
        return self._memory.local[start : start + num_bytes].view(dtype).view(*shape)

    def peer_buffers(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """The current call's symmetric buffers of all ranks but this one, in the order of ranks."""
        others = (rank for rank in range(self.num_ranks) if rank != self.rank)
        start = self.turn * self.symmetric_bytes
        return [self._memory.tensor(rank, shape, dtype, start) for rank in others]

    def symmetric_address(self, rank: int) -> int:
        """Of the current call's symmetric buffer in the memory of a rank."""
        return int(self._memory.pointers[rank]) + self.turn * self.symmetric_bytes

    @property
    def buffers(self) -> Tensor:
        """Addresses of all ranks' symmetric buffers of the current call, int64 [num_ranks]."""
        return self._buffers[self.turn]

    @property
    def pushed(self) -> Tensor:
        """Addresses of each rank's word PUSHED of this rank, int64 [num_ranks]."""
        return self._pushed[self.turn]

    @property
    def arrivals(self) -> Tensor:
        """This call's words that peers write, int32 [num_ranks, NUM_WORDS]; those of this rank are
        left to its kernel, which sets them to 0 again, but for READY.
        """
        return self._arrivals[self.turn]

    def arrival_address(self, rank: int, source: int, word: int) -> int:
        """Of a word of this call in the memory of `rank` that only rank `source` writes."""
        position: int = source * NUM_WORDS + word
        start = self._at_words + self.turn * self._turn_bytes
        return int(self._memory.pointers[rank]) + start + position * WORD_BYTES

    @property
    def counts(self) -> Tensor:
        """This call's words that this rank's kernel counts in, int32 [num_ranks, NUM_WORDS]."""
        return self._counts[self.turn]

    def count_address(self, index: int) -> int:
        """Of a word of `counts`."""
        return self.counts.data_ptr() + index * WORD_BYTES

    def _addresses(self, start: int, turn_bytes: int) -> Tensor:
        """Of the bytes from `start` on in each rank's memory, int64 [turns, num_ranks]."""
        found = [
            [pointer + start + turn * turn_bytes for pointer in self._memory.pointers]
            for turn in range(TURNS)
        ]
        return torch.tensor(found, dtype=torch.int64, device=self.device)


class StandInWorkspace(Workspace):
    """The same for calls within launching_nothing of runtime/ahead.py: nothing is sent, told or
    waited for, and no rank needs another.
    """

    def __init__(self, workspace: Workspace) -> None:
        """workspace: for which it stands in."""
        self._buffer = torch.empty(0, device="cpu")
        team = workspace.team
        super().__init__(StandInTeam(comm=team.comm, axis=team.axis), 0)

    def follow(self) -> None:
        """Nothing comes."""

    def send(self, target: int, source: int, num_bytes: int) -> None:
        """Nothing is sent."""

    def send_columns(self, target: int, source: int, width: int, pitch: int, rows: int) -> None:
        """Nothing is sent."""

    def sum(self, total: Tensor) -> None:
        """There is nothing of others."""

    def await_count(self, index: int, value: int) -> None:
        """Nothing comes later."""

    def tell(self, peer: int, word: int) -> None:
        """Nobody is told."""

    def end(
        self,
        words: Iterable[int],
        counts: Iterable[int] = (),
        *,
        copied: Tensor | None = None,
        is_final: bool = False,
    ) -> None:
        """No word was written."""

    def settle(self) -> None:
        """Nobody else calls."""

    def await_peers(self, word: int, value: int = 1) -> None:
        """None comes."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory."""
        self._buffer = torch.empty(*shape, dtype=dtype, device=self.device)
        return self._buffer

    def peer_buffers(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """That of this rank, for each."""
        return [self._buffer] * (self.num_ranks - 1)


def workspace_of(comm: NcclCommunicator, axis: str, symmetric_bytes: int) -> Workspace:
    """The workspace of a team, which makes it together when it is first asked for, or asked for
    with larger symmetric buffers than before; the communicator keeps it.
    """
    known = comm.kept.get((Workspace, axis))
    if isinstance(known, Workspace) and known.symmetric_bytes >= symmetric_bytes:
        return known
    torch.cuda.synchronize()
    made = comm.kept[Workspace, axis] = Workspace(Team(comm=comm, axis=axis), symmetric_bytes)
    return made
