"""Sends and receives by copy engines: no SM works on them, so matmuls beside them keep all.

Comes in: a mesh of GPUs that reach each other's memory. Goes out: CopyCommunicator, which a host
program's rings use like NCCL. A sender copies into a mailbox in the receiver's memory, which the
receiver empties; each mailbox has two slots and two flags a slot, `full` with the receiver and
`free` with the sender. Streams wait for flags and set them by themselves, without a kernel, through
the driver's stream memory operations; flags go back to where they began, so a captured graph can be
replayed. Collectives stay with NCCL.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distmega.hostir.comm.collectives import CommHandle, join_handles
from distmega.hostir.comm.communicator import flat_bytes
from distmega.hostir.comm.nccl_native import NativeNccl
from distmega.kernels.runtime.streams.stream_ops import wait_word, write_word
from distmega.kernels.runtime.symmetric import SymmetricMemory, open_symmetric
from distmega.sharding.layout.mesh import DeviceMesh

NUM_SLOTS = 2
"""Of a mailbox, which a rank has for each other member of a team."""
SLOT_BYTES = 64 * 2**20
"""Larger transfers go in pieces."""

LINE_BYTES = 128
"""Flags stand this far apart."""


@dataclass(slots=True)
class _Channel:
    """What goes one way between this rank and a peer; turns are counted alike on both sides.

    slots: where the sender writes, and the receiver reads. mine, theirs: addresses of each slot's
    flags, as this rank sees them: of the one that it waits for, in its memory, and of the one that
    it sets, in the peer's. turn: number of the next piece.
    """

    slots: tuple[Tensor, ...]
    mine: tuple[int, ...]
    theirs: tuple[int, ...]
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    turn: int = 0


class CopyCommunicator(NativeNccl):
    """See NativeNccl; sends and receives of one host's GPUs go through mailboxes, by copy
    engine.
    """

    def __init__(self, mesh: DeviceMesh, rank: int, timeout_s: float = 300.0) -> None:
        super().__init__(mesh, rank, timeout_s)
        self._arenas: list[SymmetricMemory] = []
        self._out: dict[tuple[str, int], _Channel] = {}
        self._in: dict[tuple[str, int], _Channel] = {}
        self._waiting: list[Callable[[], CommHandle]] | None = None
        for axis in mesh.names:
            if mesh.size(axis) > 1:
                self._open(axis)

    def _open(self, axis: str) -> None:
        """Mailboxes of a team: in each rank's memory two slots a member, then the flags."""
        size, here = self.mesh.size(axis), self.mesh.coordinate(self.rank)[axis]
        flags = size * NUM_SLOTS * SLOT_BYTES
        arena = open_symmetric(self, axis, flags + 2 * size * NUM_SLOTS * LINE_BYTES)
        self._arenas.append(arena)

        def slots(owner: int, sender: int) -> tuple[Tensor, ...]:
            first = sender * NUM_SLOTS
            offsets = ((first + n) * SLOT_BYTES for n in range(NUM_SLOTS))
            return tuple(arena.tensor(owner, (SLOT_BYTES,), torch.uint8, at) for at in offsets)

        def lines(owner: int, peer: int, kind: int) -> tuple[int, ...]:
            """Flags in the owner's memory about its traffic with a peer: full 0, free 1."""
            first = (kind * size + peer) * NUM_SLOTS
            base = arena.pointers[owner] + flags
            return tuple(base + (first + n) * LINE_BYTES for n in range(NUM_SLOTS))

        for peer in range(size):
            if peer != here:
                self._out[axis, peer] = _Channel(
                    slots(peer, here), lines(here, peer, 1), lines(peer, here, 0)
                )
                self._in[axis, peer] = _Channel(
                    slots(here, peer), lines(here, peer, 0), lines(peer, here, 1)
                )
                for address in lines(here, peer, 1):
                    write_word(address, 1, torch.cuda.current_stream())
        torch.cuda.synchronize()
        self.barrier()

    def send(self, axis: str, x: Tensor, peer: int) -> CommHandle:
        if (axis, peer) not in self._out:
            return super().send(axis, x, peer)
        return self._send(self._out[axis, peer], flat_bytes(x))

    def recv(self, axis: str, out: Tensor, peer: int) -> CommHandle:
        if (axis, peer) not in self._in:
            return super().recv(axis, out, peer)
        channel = self._in[axis, peer]
        if self._waiting is None:
            return self._recv(channel, out)
        self._waiting.append(lambda: self._recv(channel, out))
        return CommHandle(lambda: None)

    def begin_group(self) -> None:
        super().begin_group()
        self._waiting = []

    def end_group(self, members: Sequence[CommHandle]) -> CommHandle:
        """Receives are queued after all sends, which need no receive of this group to go on."""
        received = [start() for start in self._waiting or ()]
        self._waiting = None
        return join_handles([super().end_group(members), *received])

    def _send(self, channel: _Channel, data: Tensor) -> CommHandle:
        with self._beside(channel) as stream:
            for start, length, slot in self._turns(channel, data.numel()):
                wait_word(channel.mine[slot], 1, channel.stream)
                write_word(channel.mine[slot], 0, channel.stream)
                channel.slots[slot][:length].copy_(data[start : start + length])
                write_word(channel.theirs[slot], 1, channel.stream)
            return _finished(stream, data)

    def _recv(self, channel: _Channel, out: Tensor) -> CommHandle:
        dense = out.is_contiguous()
        with self._beside(channel) as stream:
            whole = flat_bytes(out) if dense else torch.empty_like(flat_bytes(out))
            for start, length, slot in self._turns(channel, whole.numel()):
                wait_word(channel.mine[slot], 1, channel.stream)
                write_word(channel.mine[slot], 0, channel.stream)
                whole[start : start + length].copy_(channel.slots[slot][:length])
                write_word(channel.theirs[slot], 1, channel.stream)
            if not dense:
                out.copy_(whole.view(out.dtype).view(out.shape))
            return _finished(stream, whole, out)

    def _turns(self, channel: _Channel, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Pieces of a transfer: first byte, length, slot."""
        for start in range(0, num_bytes, SLOT_BYTES):
            slot, channel.turn = channel.turn % NUM_SLOTS, channel.turn + 1
            yield start, min(SLOT_BYTES, num_bytes - start), slot

    def _beside(self, channel: _Channel) -> torch.cuda.StreamContext:
        channel.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(channel.stream)


def _finished(stream: torch.cuda.Stream, *kept: Tensor) -> CommHandle:
    """The end of what is queued on a stream so far; keeps tensors until somebody has waited."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(stream)

    def finish(held: Sequence[Tensor] = kept) -> None:
        done.wait()

    return CommHandle(finish, done.wait)
