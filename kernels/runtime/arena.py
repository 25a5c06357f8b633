"""Memory of a segment: every tensor gets a place in one of four byte-addressed arenas, one a space
and rank.

In: the tensors of a segment (or of several programs that share weights and states). Out:
`ArenaLayout`s and, for each tensor of a segment, views included, an `Operand` that says where it
lies. This is the only place that decides layout: today every tensor is row-major in a region of its
own. Next on the walk: encoding.py, the words that hold offsets.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from distmega.errors import PlanError, ProgramError
from distmega.program.dtypes import item_bytes
from distmega.program.types import Access, Op, Program, Tensor, packed_strides, view_strides

ALIGNMENT_BYTES = 128
"""Every tensor starts on a multiple of this: one memory transaction, one TMA row. Device words hold
offsets in this unit, so that an int32 reaches 256 GB of one space."""

MAX_ROW_BYTES = 512
"""Rows of a state that count as short: heads of up to 256 elements of 2 bytes."""

PEER_BUFFERS = 2
"""Copies of the peer arena; a launch uses copy `epoch % 2`. A rank that is one launch ahead pushes
into the copy its peers are not reading, and it can't be two ahead: to finish a launch it needs what
its peers push in that launch."""

PEER_SUFFIX = ".recv"
"""Names of tensors that peers write end in this (../tasks/expand.py makes them)."""


def round_up(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Space(IntEnum):
    """Memory spaces. PEER is written by other ranks; ACT holds inputs, outputs and temporaries of
    one segment.
    """

    WEIGHT = 0
    STATE = 1
    ACT = 2
    PEER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """Which tensors live in one arena, and where: offsets in bytes, row-major."""

    space: Space
    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, int]
    num_bytes: int

    def offset(self, name: str) -> int:
        """Byte offset of a tensor; KeyError is a bug of the caller."""
        return self.offsets[name]

    def neighbours(self) -> dict[str, str]:
        """Tensor -> the one of its type that follows it without a gap."""
        starts = {offset: name for name, offset in self.offsets.items()}
        ends = {name: self.offsets[name] + t.num_bytes for name, t in self.tensors.items()}
        found = {name: starts[end] for name, end in ends.items() if end in starts}
        types = {name: tensor.dtype for name, tensor in self.tensors.items()}
        return {name: after for name, after in found.items() if types[name] == types[after]}

    def require(self, tensor: Tensor) -> int:
        """Byte offset of `tensor`; PlanError unless this arena holds it in this shape and dtype."""
        known = self.tensors.get(tensor.name)
        if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            found = "nothing" if known is None else _describe(known)
            raise PlanError(
                f"{self.space.name.lower()} arena holds {found} under {tensor.name!r}",
                expected=f"{_describe(tensor)}, as the segment declares it",
                remedy="plan the programs that share an arena with the same annotations",
            )
        return self.offsets[tensor.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Where a tensor lies: element i is at offset_bytes + (first + sum of i[d] * strides[d])
    items.
    """

    space: Space
    dtype: str
    offset_bytes: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """The four arenas of a segment, and the operand of each of its tensors."""

    weights: ArenaLayout
    states: ArenaLayout
    activations: ArenaLayout
    peers: ArenaLayout
    operands: Mapping[str, Operand]

    @property
    def arenas(self) -> tuple[ArenaLayout, ...]:
        """Arenas in the order of Space."""
        return (self.weights, self.states, self.activations, self.peers)


def layout_arena(space: Space, tensors: Iterable[Tensor]) -> ArenaLayout:
    """Places tensors one after another; a name met again must have the same shape and dtype (tied
    or shared tensors). States with short rows start on a multiple of these, so that caches with
    rows of one length are parts of one matrix.

    Raises PlanError for two shapes under one name, or for an arena beyond what an int32 word can
    address.
    """
    known: dict[str, Tensor] = {}
    offsets: dict[str, int] = {}
    end = 0
    for tensor in tensors:
        earlier = known.setdefault(tensor.name, tensor)
        if (earlier.shape, earlier.dtype) != (tensor.shape, tensor.dtype):
            raise PlanError(
                f"{tensor.name!r} is both {_describe(earlier)} and {_describe(tensor)}",
                expected="one local shape in all programs that share an arena",
                remedy="plan these programs with the same annotations",
            )
        if tensor.name not in offsets:
            grid = math.lcm(ALIGNMENT_BYTES, _row_bytes(tensor) if space is Space.STATE else 1)
            offsets[tensor.name] = -(-end // grid) * grid
            end = offsets[tensor.name] + tensor.num_bytes
            end = round_up(end)
    if end // ALIGNMENT_BYTES >= 2**31:
        raise PlanError(
            f"{space.name.lower()} arena of {end} bytes",
            expected=f"less than {2**31 * ALIGNMENT_BYTES} bytes on one rank",
            remedy="use more ranks",
        )
    return ArenaLayout(space=space, tensors=known, offsets=offsets, num_bytes=end)


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of a row if it is at most MAX_ROW_BYTES, else 1."""
    row_bytes = item_bytes(tensor.dtype) * (tensor.shape[-1] if tensor.shape else 1)
    return row_bytes if 0 < row_bytes <= MAX_ROW_BYTES else 1


def tensor_space(tensor: Tensor) -> Space:
    """The space a tensor belongs to, by its role and name."""
    if tensor.role == "weight":
        return Space.WEIGHT
    if tensor.role == "state":
        return Space.PEER if tensor.name.endswith(PEER_SUFFIX) else Space.STATE
    return Space.ACT


def layout_segment(
    segment: Program, *, weights: ArenaLayout | None = None, states: ArenaLayout | None = None
) -> SegmentLayout:
    """Places every tensor of a segment; `weights` and `states` are arenas it shares with other
    programs.

    Without them the segment gets arenas of its own. Raises PlanError if a shared arena lacks a
    tensor, and ProgramError for a view that no strides can express.
    """
    views = {access.tensor for op in segment.ops if op.is_view for access in op.writes}
    stored = [tensor for tensor in segment.tensors if tensor.name not in views]
    shared = {Space.WEIGHT: weights, Space.STATE: states}
    arenas = {
        space: shared.get(space)
        or layout_arena(space, (t for t in stored if tensor_space(t) is space))
        for space in Space
    }
    operands: dict[str, Operand] = {}
    for tensor in stored:
        space = tensor_space(tensor)
        offset = arenas[space].require(tensor)
        strides = packed_strides(tensor.shape)
        operands[tensor.name] = Operand(
            space=space,
            dtype=tensor.dtype,
            offset_bytes=offset,
            first=0,
            shape=tensor.shape,
            strides=strides,
        )
    tensors = segment.tensor_map()
    for op in segment.ops:
        if op.is_view:
            operands[op.writes[0].tensor] = _view(
                op, operands[op.reads[0].tensor], tensors[op.writes[0].tensor]
            )
    return SegmentLayout(
        weights=arenas[Space.WEIGHT],
        states=arenas[Space.STATE],
        activations=arenas[Space.ACT],
        peers=arenas[Space.PEER],
        operands=operands,
    )


def axis_strides(
    access: Access, operand: Operand, extents: Mapping[str, int]
) -> tuple[int, dict[str, int]]:
    """First element of an access when all axes are 0, and how far each axis steps, in elements from
    offset_bytes.
    """
    first = operand.first
    strides: dict[str, int] = {}
    for index, stride in zip(access.dims, operand.strides, strict=True):
        first += index.offset * stride
        step = stride * index.stride
        for axis in reversed(index.axes):
            strides[axis] = strides.get(axis, 0) + step
            step *= extents[axis]
    return first, strides


def _view(op: Op, source: Operand, target: Tensor) -> Operand:
    first, _ = axis_strides(op.reads[0], source, op.extents)
    strides = view_strides(op, source.strides)
    if strides is None:
        raise ProgramError(
            f"view {op.name!r} of strides {source.strides}",
            expected="dims that merge without moving elements",
            remedy="use reshape, which copies",
        )
    return Operand(
        space=source.space,
        dtype=target.dtype,
        offset_bytes=source.offset_bytes,
        first=first,
        shape=target.shape,
        strides=strides,
    )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
