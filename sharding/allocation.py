"""The allocation domain of a tensor: its dims in stride order, and which part a rank stores.

Comes in: a tensor, its Layout and the mesh. Goes out: AllocationDomain, final once finalize.py has
made it. Loaders ask `local_range` what to load; everything outside of it is zero padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distmega.program import Tensor
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.placements import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDim:
    """One dim of an allocation: extent of the whole tensor, extent stored per rank, and how.

    axis: mesh axis that divides it, "" if none does. stream: allocated per iteration of a host
    loop. contiguous: the next inner dim follows without a gap.
    """

    dim: int
    extent: int
    local_extent: int
    axis: str = ""
    stream: bool = False
    contiguous: bool = True

    def __str__(self) -> str:
        text = f"{self.dim}:{self.local_extent}"
        if self.axis:
            text += f"/{self.extent}@{self.axis}"
        return text + " stream" * self.stream + " gap" * (not self.contiguous)


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
            found = layout.shard_of(dim)
            axis, local = (found[0], found[1].chunk) if found else ("", extent)
            assert axis == "" or mesh.size(axis) * local >= extent, (tensor, layout)
            dims.append(AllocatedDim(dim=dim, extent=extent, local_extent=local, axis=axis))
        return AllocationDomain(dims=tuple(dims), partial_axes=layout.partial_axes)

    def __str__(self) -> str:
        text = f"[{', '.join(map(str, self.dims))}]"
        return text + "".join(f" partial@{axis}" for axis in self.partial_axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Extents one rank stores, in the tensor's dim order, padding included."""
        return tuple(d.local_extent for d in sorted(self.dims, key=lambda d: d.dim))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor, in its dim order."""
        return tuple(d.extent for d in sorted(self.dims, key=lambda d: d.dim))

    def local_range(self, dim: int, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Positions [start, stop) of a tensor dim that are this coordinate's; possibly none.

        They go to the front of the local dim, zeros fill the rest. A coordinate that does not hold
        the value of a partial weight has empty ranges.
        """
        found = next(d for d in self.dims if d.dim == dim)
        if any(coordinate[axis] for axis in self.partial_axes):
            return 0, 0
        start = coordinate[found.axis] * found.local_extent if found.axis else 0
        return min(start, found.extent), min(start + found.local_extent, found.extent)
