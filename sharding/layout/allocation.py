"""The allocation domain of a tensor: its dims in stride order, and which part a rank stores.

Comes in: a tensor, its Layout and the mesh. Goes out: AllocationDomain, final once finalize.py has
made it. Loaders ask `local_slices` what to load; everything outside of it is zero padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distmega.program.types import Tensor
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDim:
    """One dim of an allocation: extent of the whole tensor, extent stored per rank, and how.

    axes: mesh axes that divide it, outermost first, each with the extent it leaves. chunk: extent
    allocated in each iteration of a host loop, 0 where a rank's whole part is allocated once.
    contiguous: the next inner dim follows without a gap.
    """

    dim: int
    extent: int
    local_extent: int
    axes: tuple[tuple[str, int], ...] = ()
    chunk: int = 0
    contiguous: bool = True

    def __str__(self) -> str:
        text = f"{self.dim}:{self.local_extent}"
        if self.axes:
            text += f"/{self.extent}" + "".join(f"@{axis}" for axis, _ in self.axes)
        if self.chunk:
            text += f" stream {self.chunk}"
        return text + " gap" * (not self.contiguous)

    @property
    def stored_extent(self) -> int:
        """Extent of one allocation."""
        return self.chunk or self.local_extent


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationDomain:
    """Dims in stride order, outermost first.

    partial_axes: mesh axes along which each coordinate holds one part of a combination; of a
    weight, coordinate 0 holds the value and the others zeros.
    """

    dims: tuple[AllocatedDim, ...]
    partial_axes: tuple[str, ...] = ()

    @staticmethod
    def of(tensor: Tensor, layout: Layout, mesh: DeviceMesh) -> "AllocationDomain":
        """The allocation of a tensor held in a resolved layout, row-major."""
        dims = []
        for dim, extent in enumerate(tensor.shape):
            axes = tuple((axis, shard.chunk) for axis, shard in layout.shards_of(dim))
            local = extent
            for axis, chunk in axes:
                assert mesh.size(axis) * chunk >= local, (tensor, layout)
                local = chunk
            dims.append(AllocatedDim(dim=dim, extent=extent, local_extent=local, axes=axes))
        return AllocationDomain(dims=tuple(dims), partial_axes=layout.partial_axes)

    def __str__(self) -> str:
        text = f"[{', '.join(map(str, self.dims))}]"
        return text + "".join(f" partial@{axis}" for axis in self.partial_axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Extents of one rank's part, in the tensor's dim order, padding included."""
        return tuple(d.local_extent for d in sorted(self.dims, key=lambda d: d.dim))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Extents of one allocation: a chunk where it is made per iteration of a host loop."""
        return tuple(d.stored_extent for d in sorted(self.dims, key=lambda d: d.dim))

    @property
    def chunk(self) -> tuple[int, int] | None:
        """Dim and extent that are allocated per iteration of a host loop, if it is."""
        return next(((d.dim, d.chunk) for d in self.dims if d.chunk), None)

    def chunked(self, dim: int, chunk: int) -> "AllocationDomain":
        """This allocation, made anew for each chunk of a dim; where it isn't the outermost, what
        lies in front of it follows at a shorter stride.
        """
        dims = (replace(d, chunk=chunk) if d.dim == dim else d for d in self.dims)
        return replace(self, dims=tuple(dims))

    def sliced(self, dim: int, extent: int) -> "AllocationDomain":
        """What an iteration sees of an allocation in full: so many positions of a dim. The next dim
        outwards then has gaps, unless it has one position or nothing was cut off.
        """
        dims = list(self.dims)
        position = next(n for n, each in enumerate(dims) if each.dim == dim)
        wide = [n for n in range(position) if dims[n].local_extent > 1]
        if wide and extent < dims[position].local_extent:
            dims[wide[-1]] = replace(dims[wide[-1]], contiguous=False)
        dims[position] = replace(dims[position], local_extent=extent)
        return replace(self, dims=tuple(dims))

    @property
    def has_gaps(self) -> bool:
        """Whether its elements do not follow each other in memory."""
        return not all(each.contiguous for each in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor, in its dim order."""
        return tuple(d.extent for d in sorted(self.dims, key=lambda d: d.dim))

    def local_range(self, dim: int, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Positions [start, stop) of a tensor dim that are this coordinate's; possibly none.

        They go to the front of the local dim, zeros fill the rest. A coordinate that does not hold
        the value of a partial weight has empty ranges.
        """
        if any(coordinate[axis] for axis in self.partial_axes):
            return 0, 0
        return self.stored_range(dim, coordinate)

    def local_slices(self, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
        """local_range of every dim: this coordinate's part of the whole tensor."""
        ranges = (self.local_range(dim, coordinate) for dim in range(len(self.dims)))
        return tuple(slice(*bounds) for bounds in ranges)

    def stored_range(self, dim: int, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Positions [start, stop) of a tensor dim that this coordinate stores, parts of a
        combination included.
        """
        found = next(d for d in self.dims if d.dim == dim)
        start, stop = 0, found.extent
        for axis, chunk in found.axes:
            start = min(start + coordinate[axis] * chunk, stop)
            stop = min(start + chunk, stop)
        return start, stop
