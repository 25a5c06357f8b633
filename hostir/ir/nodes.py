"""Nodes of the host program: what one rank's host does, in order, with the rank symbolic.

A HostProgram declares buffers and a body of nodes. Each node is enqueued on the current stream of
its rank; streams run side by side and are ordered by events, handles and cross-GPU signals only.
The same program runs on every rank of the mesh; a rank is named relative to the one that runs it.
lower.py makes these, uses.py says what each needs, text.py prints and parses them, verify.py states
the rules, evaluator.py runs them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distmega.errors import VerifyError
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SymmetricBuffer
from distmega.program.types import Attr, Op, Program, Tensor
from distmega.sharding.layout.mesh import DeviceMesh

FREE = "free"
"""Cross-GPU event by which a stage of a pipeline says that it has done a micro-batch."""

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A stream or an event of a bounded ring: `base`, or `base + (index + shift) % count` for the
    value of a loop index.
    """

    base: int
    index: str = ""
    count: int = 1
    shift: int = 0

    def __post_init__(self) -> None:
        indexed = self.count > 1 or self.shift
        if min(self.base, self.count - 1, self.shift) < 0 or (indexed and not self.index):
            raise VerifyError(
                f"slot base={self.base}, index={self.index!r}, count={self.count}, "
                f"shift={self.shift}",
                expected="base and shift >= 0, and count > 1 or a shift only with an index",
                remedy="name the loop index, or leave count at 1",
            )

    def at(self, indices: Mapping[str, int]) -> int:
        """The stream or event number for these values of the loop indices."""
        if not self.index:
            return self.base
        return self.base + (indices[self.index] + self.shift) % self.count

    def numbers(self, extent: int) -> set[int]:
        """All of them that a loop of that extent names."""
        return {self.base + (i + self.shift) % self.count for i in range(min(self.count, extent))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another rank of this rank's team over `mesh_axis`.

    ring: the rank `offset` further on, modulo the team. Otherwise the rank whose coordinate is
    `offset`.
    """

    mesh_axis: str
    offset: int
    ring: bool = False

    def of(self, coordinate: Mapping[str, int], mesh: DeviceMesh) -> int:
        """The peer's coordinate on `mesh_axis`, for the rank at `coordinate`."""
        if self.ring:
            return (coordinate[self.mesh_axis] + self.offset) % mesh.size(self.mesh_axis)
        return self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Storage for a temp buffer, uninitialised."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deallocate:
    """Gives a temp buffer's storage back."""

    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForLoop:
    """Runs `body` for `index` = 0 to `extent` - 1; the host issues it, streams may overlap the
    iterations.
    """

    index: str
    extent: int
    body: tuple["Node", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStream:
    """The nodes that follow are enqueued on this stream. A program starts on stream 0 and ends
    joined to it.
    """

    stream: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Marks all work enqueued so far on the current stream."""

    event: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEvent:
    """What follows on the current stream starts after the event's latest record has completed."""

    event: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Tensor `name` of a segment is buffer `buffer` of the host program."""

    name: str
    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMegakernel:
    """One launch of the megakernel of the segment of that name; args are the segment's
    `segment_args`, in that order.
    """

    kernel: str
    args: tuple[Binding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOp:
    """One op of the tensor program by library kernels; its tensors are buffers. Kind `view` names
    existing storage.
    """

    op: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Starts a collective over the teams of a mesh axis; `ins` and `outs` belong to it until
    Wait(handle).

    attrs as on ops of collective kinds (sharding/resolve/collectives.py): `combine` ("argmax"
    reduces the pair value, index), `dim` (the dim that is gathered or scattered), `dst_dim`
    (all_to_all: the dim that is scattered, while `dim` is gathered); broadcast has `source`, the
    coordinate that sends.
    """

    kind: CollectiveKind
    mesh_axis: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    handle: str
    attrs: tuple[tuple[str, Attr], ...] = ()

    def get(self, name: str, default: Attr) -> Attr:
        """The attribute of that name, or `default`."""
        return next((value for key, value in self.attrs if key == name), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Starts to send a buffer to a peer. `handle` is empty inside a coalescing group, which has one
    for all.
    """

    buffer: str
    peer: Peer
    handle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Starts to receive a buffer from a peer, in the order of that peer's sends. `handle` as for
    Send.
    """

    buffer: str
    peer: Peer
    handle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCoalescing:
    """Opens a group of sends and receives that progress together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCoalescing:
    """Closes the group and starts it."""

    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Work that follows on the current stream starts after the communication of that handle has
    completed.
    """

    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Adds one to a peer's counter of the cross-GPU event `name` when work so far on this stream
    has completed.
    """

    name: str
    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSignal:
    """Work that follows on the current stream starts after one more signal of `name` has come from
    the peer.
    """

    name: str
    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceView:
    """Names chunk number index + shift of a dim of a buffer: slice-by-stream.

    index: a loop's, or "" for 0. step: distance between chunks, 0 where it is `view`'s extent of
    that dim and the loop's chunks make up the buffer; the shorter chunk at the end of an uneven
    split needs it. swizzle: a mesh axis, for ring order: the rank's coordinate is added to the
    number, modulo the number of chunks.
    """

    view: str
    buffer: str
    dim: int
    index: str
    shift: int = 0
    step: int = 0
    swizzle: str = ""

    def start(
        self,
        indices: Mapping[str, int],
        coordinate: Mapping[str, int],
        whole: Sequence[int],
        part: Sequence[int],
    ) -> int:
        """First position of the chunk. whole, part: shapes of the buffer and of the view."""
        step = self.step or part[self.dim]
        number = (indices[self.index] if self.index else 0) + self.shift
        if self.swizzle:
            number = (number + coordinate[self.swizzle]) % (whole[self.dim] // step)
        return number * step


Node = (
    Allocate | Deallocate | ForLoop | SetStream | RecordEvent | WaitEvent | LaunchMegakernel
    | LibraryOp | Collective | Send | Recv | StartCoalescing | EndCoalescing | Wait | Signal
    | WaitSignal | SliceView | FusedMatmul
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProgram:
    """One rank's host program, the same text for all ranks of the mesh.

    Attributes:
        name: Of the program.
        mesh: The ranks that run it.
        buffers: Everything that nodes name. Inputs, weights and states are given by the caller,
            temps come from Allocate, SliceView or a library op of kind view.
        body: What the host does, in order.
        outputs: Buffers that the caller gets.
        segments: The programs of the megakernels.
        num_streams: Streams that nodes name, from 0.
        num_events: Events that nodes name, from 0.
        symmetric_buffers: Peer memory, one a mesh axis.
    """

    name: str
    mesh: DeviceMesh
    buffers: tuple[Tensor, ...]
    body: tuple[Node, ...]
    outputs: tuple[str, ...]
    segments: tuple[Program, ...] = ()
    num_streams: int = 1
    num_events: int = 0
    symmetric_buffers: tuple[SymmetricBuffer, ...] = ()

    def buffer_map(self) -> dict[str, Tensor]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    def segment_map(self) -> dict[str, Program]:
        """Segments by kernel name."""
        return {segment.name: segment for segment in self.segments}


def segment_args(segment: Program) -> tuple[Tensor, ...]:
    """Tensors that cross a segment's edge: its inputs, weights and states, then its outputs."""
    tensors = segment.tensor_map()
    given = tuple(tensor for tensor in segment.tensors if tensor.role != "temp")
    return given + tuple(tensors[o] for o in segment.outputs if tensors[o].role == "temp")


def walk_nodes(body: Sequence[Node]) -> Iterator[Node]:
    """All nodes in printed order, loops before their bodies. The position in it is a node's index
    in messages.
    """
    for node in body:
        yield node
        if isinstance(node, ForLoop):
            yield from walk_nodes(node.body)
