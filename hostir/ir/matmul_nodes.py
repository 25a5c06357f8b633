"""The host program's node for a matmul with its collective, and the peer memory that it needs.

Comes in: pairs of ops that sharding/overlap/pairs.py chose, from lower/lower.py. Goes out:
FusedMatmul, one of the nodes of nodes.py, and SymmetricBuffer, which a HostProgram declares. Next:
nodes.py, library/matmuls.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from distmega.program.types import Tensor
from distmega.sharding.overlap.pairs import PairKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SumNorm:
    """What becomes of a sum over ranks, row by row: `total`, the sum and `residual`, and its norm
    times `weight`, plus `bias` if there is one.
    """

    kind: Literal["rms_norm", "layer_norm"]
    eps: float
    residual: str
    total: str
    weight: str
    bias: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """Buffers beside those of the product."""
        return (self.residual, self.weight, *((self.bias,) if self.bias else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMatmul:
    """A product and its collective over a team as one kernel, which no exchange may run beside.

    x [rows, sums], w [columns, sums], out [rows, columns], each a group of dims, x with `num_rows`
    dims of rows; dim 0 is gathered or scattered. borrows: out lies in peer memory, which holds
    until the next FusedMatmul of the mesh axis. replicated: w is the same on all ranks of the team
    that gathers x, and so is out, bit by bit. forced: a user asked for one kernel; otherwise the
    device may do it in what way is quicker. mixes: an expression of a0 and a1, columns n and
    N / 2 + n of the product, which column n of out is; of gathers alone, of one dim of columns.
    norm: of the rows of a sum of one dim of columns, which out holds in its place.
    """

    kind: PairKind
    mesh_axis: str
    x: str
    w: str
    out: str
    num_rows: int = 1
    borrows: bool = False
    replicated: bool = False
    forced: bool = False
    mixes: str = ""
    norm: SumNorm | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Buffers that it reads."""
        return (self.x, self.w, *(self.norm.reads if self.norm else ()))

    @property
    def writes(self) -> tuple[str, ...]:
        """Buffers that it writes."""
        return (self.out, *((self.norm.total,) if self.norm else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricBuffer:
    """Memory that the ranks of a team write into each other's, for its fused matmuls: twice
    `num_bytes`, for one instruction and the next.
    """

    mesh_axis: str
    num_bytes: int


def needed_symmetric_buffers(
    nodes: Iterable[object], buffers: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> tuple[SymmetricBuffer, ...]:
    """The peer memory of a program's fused matmuls, the largest need of each mesh axis. sizes: of
    mesh axes.
    """
    fused = [node for node in nodes if isinstance(node, FusedMatmul)]
    return largest_symmetric_buffers(
        SymmetricBuffer(
            mesh_axis=node.mesh_axis,
            num_bytes=symmetric_bytes(node, buffers, sizes[node.mesh_axis]),
        )
        for node in fused
    )


def symmetric_bytes(node: FusedMatmul, buffers: Mapping[str, Tensor], size: int) -> int:
    """Bytes of a symmetric buffer for a node: the gathered x, or the partial result and sums."""
    if node.kind == "all_gather_matmul":
        return size * buffers[node.x].num_bytes
    whole = size if node.kind == "matmul_reduce_scatter" else 1
    return 2 * whole * buffers[node.out].num_bytes


def largest_symmetric_buffers(
    symmetric_buffers: Iterable[SymmetricBuffer],
) -> tuple[SymmetricBuffer, ...]:
    """One symmetric buffer a mesh axis, as large as the largest of them."""
    most: dict[str, int] = {}
    for symmetric_buffer in symmetric_buffers:
        most[symmetric_buffer.mesh_axis] = max(
            most.get(symmetric_buffer.mesh_axis, 0), symmetric_buffer.num_bytes
        )
    return tuple(SymmetricBuffer(mesh_axis=axis, num_bytes=need) for axis, need in most.items())
