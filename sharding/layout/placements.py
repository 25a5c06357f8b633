"""Where a tensor lives on a mesh: one placement per mesh axis, in the words users know.

Comes in: `shard(0, "tp")`, `replicate()`, or what planner.py chooses. Goes out: Layouts, whose
equality is equality of index maps, because a resolved Shard holds the extent each coordinate owns
(coordinate c owns positions c * chunk up to (c + 1) * chunk, clipped; of two mesh axes on one dim,
the one with the smaller chunk divides what the other left). Next: options.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distmega.arguments import shown
from distmega.errors import PlanError, counted
from distmega.program.types import Tensor
from distmega.sharding.layout.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Coordinate c holds positions [c * chunk, (c + 1) * chunk) of `dim`, zero-padded past its end.

    chunk 0 stands for the even division, ceil(extent / size); `resolve_layout` fills it in.
    """

    dim: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"S{self.dim}:{self.chunk}" if self.chunk else f"S{self.dim}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every coordinate holds a part; the tensor is their combination by `combine`."""

    combine: str

    def __str__(self) -> str:
        return f"P({self.combine})"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A rank's part of `dim` runs as `num` iterations of a host loop, each ceil(extent / num) long.

    The last may be shorter. num 1: never in a loop. ring: a mesh axis; iteration i runs chunk
    (i + coordinate) modulo num.
    """

    dim: int
    num: int
    ring: str = ""

    def __str__(self) -> str:
        return f"C{self.dim}:{self.num}" + (f"@{self.ring}" if self.ring else "")


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()
PAIR = Partial("argmax")
"""Parts of an argmax: value and index, combined at once by one collective."""
ROWS = Partial("rows")
"""Rows sorted by group, of which a coordinate holds those of its own groups and zeros elsewhere."""

_PLACEMENT = re.compile(r"(\w+)=(?:R|S(-?\d+)(?::(\d+))?|P\((\w+)\))")
_CHUNKS = re.compile(r"stream=C(-?\d+):(-?\d+)(?:@(\w+))?")


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements by mesh axis, sorted by axis name; axes not listed replicate.

    Of an annotation also: chunks, how host loops run over the tensor, and is_open, that the planner
    may place it likes. Neither is set in a plan.
    """

    placements: tuple[tuple[str, Placement], ...] = ()
    chunks: Chunks | None = None
    is_open: bool = False

    @staticmethod
    def of(placements: Mapping[str, Placement]) -> "Layout":
        """The layout of a mapping from mesh axis to placement."""
        kept = sorted((a, p) for a, p in placements.items() if not isinstance(p, Replicate))
        return Layout(tuple(kept)) if kept else REPLICATED

    @staticmethod
    def parse(text: str) -> "Layout":
        """Reads str(layout) back; PlanError if it does not fit."""
        placements: dict[str, Placement] = {}
        chunks: Chunks | None = None
        words = text.split() if isinstance(text, str) else [shown(text)]
        for word in words:
            loop, placed = _CHUNKS.fullmatch(word), _PLACEMENT.fullmatch(word)
            if loop and chunks is None:
                chunks = Chunks(int(loop[1]), int(loop[2]), loop[3] or "")
            elif placed and placed[1] not in placements:
                axis, dim, chunk, combine = placed.groups()
                shards = Shard(int(dim), int(chunk or 0)) if dim else REPLICATE
                placements[axis] = Partial(combine) if combine else shards
            elif word != "R":
                raise PlanError(
                    f"layout {shown(text)} holds {word!r}",
                    expected="words such as tp=S0, dp=R or stream=C0:4, one a mesh axis",
                    remedy="write what str() of a layout gives",
                )
        is_open = chunks is not None and len(words) == 1
        return Layout(Layout.of(placements).placements, chunks, is_open)

    def __str__(self) -> str:
        placed = "" if self.is_open and self.chunks else "R"
        words = [f"{axis}={placement}" for axis, placement in self.placements] or [placed]
        words += [f"stream={self.chunks}"] if self.chunks else []
        return " ".join(filter(None, words))

    def __or__(self, other: "Layout") -> "Layout":
        """Both layouts' placements and chunks. PlanError if `other` is none, or if they place one
        mesh axis or cut chunks in two ways.
        """
        if not isinstance(other, Layout):
            found = f"layout [{self}] joined with {shown(other)}"
            remedy = "join what shard, replicate and stream give"
            raise PlanError(found, expected="another layout", remedy=remedy)
        ours, theirs = dict(self.placements), dict(other.placements)
        twice = any(theirs.get(axis, placed) != placed for axis, placed in ours.items())
        if twice or (self.chunks or other.chunks) != (other.chunks or self.chunks):
            raise PlanError(
                f"layout [{self}] joined with [{other}]",
                expected="each mesh axis on one dim, and chunks of one dim",
                remedy="leave one of the two out",
            )
        is_open = self.is_open and other.is_open
        return Layout(Layout.of(ours | theirs).placements, self.chunks or other.chunks, is_open)

    def at(self, axis: str) -> Placement:
        """Placement along one mesh axis."""
        for name, placement in self.placements:
            if name == axis:
                return placement
        return REPLICATE

    def moved(self, axis: str, placement: Placement) -> "Layout":
        """This layout with another placement along one mesh axis."""
        return Layout.of({**dict(self.placements), axis: placement})

    def shards_of(self, dim: int) -> tuple[tuple[str, Shard], ...]:
        """The mesh axes that shard `dim`, outermost first: each divides what the one before left a
        coordinate, so that its chunk is the smaller one.
        """
        found = [(a, p) for a, p in self.placements if isinstance(p, Shard) and p.dim == dim]
        return tuple(sorted(found, key=lambda each: -each[1].chunk) if found[1:] else found)

    def is_innermost(self, axis: str) -> bool:
        """Whether every other mesh axis on the dim that `axis` shards leaves more of it."""
        here = self.at(axis)
        if not isinstance(here, Shard):
            return True
        return all(name == axis or p.chunk > here.chunk for name, p in self.shards_of(here.dim))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Mesh axes along which parts are still to be combined."""
        return tuple(axis for axis, p in self.placements if isinstance(p, Partial))


REPLICATED = Layout()
MOST = 2**31
"""Which no dim and no number of chunks reaches."""


def shard(dim: int, axis: str) -> Layout:
    """The layout that divides tensor dim `dim`, from the last where it is below 0, over mesh axis
    `axis`; join several with `|`.

    PlanError unless these are a whole number and a name.
    """
    _require(f"shard({shown(dim)}, {shown(axis)})", dim, axis=axis)
    return Layout(((axis, Shard(dim)),))


def replicate() -> Layout:
    """The layout in which every rank holds the whole tensor."""
    return REPLICATED


def stream(dim: int, num: int, *, ring: str = "") -> Layout:
    """Ops around the tensor run in a host loop over `num` chunks of a rank's part of `dim`, which
    counts from the last where it is below 0.

    Iterations overlap on several streams. Join it with `shard` or `replicate` by `|`; alone it
    leaves the devices to the planner. num=1 keeps the op that makes the tensor out of loops. ring:
    a mesh axis; each rank starts with the chunk of its own coordinate, so that a gather of that dim
    becomes a ring of sends and receives beside the work on each part. PlanError unless these are
    two whole numbers and a name.
    """
    _require(f"stream({shown(dim)}, {shown(num)}, ring={shown(ring)})", dim, num, axis=ring)
    return Layout(chunks=Chunks(dim, num, ring), is_open=True)


def _require(found: str, *numbers: object, axis: object) -> None:
    """PlanError unless the numbers are whole, as dims and chunks are, and the axis is a name."""
    if not all(type(number) is int and abs(number) < MOST for number in numbers):
        raise PlanError(
            found, expected="whole numbers", remedy="count dims and chunks from 0 and 1"
        )
    if not isinstance(axis, str):
        remedy = "name an axis of the mesh, such as 'tp'"
        raise PlanError(found, expected="the name of a mesh axis", remedy=remedy)


def layout_of_part(layout: Layout, dim: int) -> Layout:
    """The layout of one index of `dim`, as a tensor without that dim. PlanError where ranks share
    the dim out.
    """
    moved: dict[str, Placement] = {}
    for axis, placement in layout.placements:
        if isinstance(placement, Shard) and placement.dim >= dim:
            if placement.dim == dim:
                raise PlanError(
                    f"layout {layout} of which every rank should use one index of dim {dim}",
                    expected="a layout that does not divide that dim",
                    remedy="annotate the tensor with another dim",
                )
            placement = Shard(placement.dim - 1, placement.chunk)
        moved[axis] = placement
    return Layout.of(moved)


def local_shape(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Extents one rank holds, padding included."""
    extents = list(shape)
    for _, placement in layout.placements:
        if isinstance(placement, Shard):
            extents[placement.dim] = min(extents[placement.dim], placement.chunk)
    return tuple(extents)


def fits(extent: int, size: int) -> bool:
    """Whether `extent` may be divided over `size` ranks: less than half of the whole is padding."""
    return size * -(-extent // size) < 2 * extent or size == 1


def resolve_layout(tensor: Tensor, layout: Layout, mesh: DeviceMesh) -> Layout:
    """A user's layout with chunks filled in: of mesh axes on one dim the first of the mesh is the
    outermost. PlanError if it does not fit the tensor and mesh.
    """
    resolved: dict[str, Placement] = {}
    left = list(tensor.shape)
    for axis, _ in layout.placements:
        if axis not in mesh.names:
            raise _bad(tensor, layout, f"mesh axes of {mesh}", "name an axis of the mesh")
    for axis in mesh.names:
        placement, rank, size = layout.at(axis), len(tensor.shape), mesh.size(axis)
        if not isinstance(placement, Shard):
            resolved[axis] = placement
            continue
        if not -rank <= placement.dim < rank:
            raise _bad(tensor, layout, f"a dim below {rank}", "shard a dim that the tensor has")
        dim = placement.dim % rank
        extent = left[dim]
        if not placement.chunk and not fits(extent, size):
            largest = max(n for n in range(1, size) if fits(extent, n))
            remedy = "use fewer ranks on that mesh axis or shard another dim"
            part = "" if extent == tensor.shape[dim] else f", of which {extent} are left"
            raise _bad(
                tensor,
                layout,
                f"at most {counted(largest, 'rank')} of {axis} for dim {dim}{part}",
                remedy,
            )
        chunk = placement.chunk or -(-extent // size)
        if chunk * size < extent:
            raise _bad(tensor, layout, f"chunks that cover {extent}", "leave the chunk out")
        if extent < tensor.shape[dim] and size > 1 and chunk >= extent:
            expected = f"a chunk below {extent}, which the mesh axis before leaves"
            raise _bad(tensor, layout, expected, "leave the chunk out")
        if size > 1:
            resolved[axis], left[dim] = Shard(dim, chunk), min(chunk, extent)
    return Layout.of(resolved)


def _bad(tensor: Tensor, layout: Layout, expected: str, remedy: str) -> PlanError:
    found = f"layout [{layout}] for {tensor.name!r} of shape {tensor.shape}"
    return PlanError(found, expected=expected, remedy=remedy)
