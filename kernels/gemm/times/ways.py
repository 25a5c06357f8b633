"""How long a matmul and a collective take in each way of running them.

Comes in: a Product, the machine's OverlapRates, which `distmega doctor --calibrate` measures. Goes
out: predicted microseconds by way, as planners ask. Chunks and rings are pipelines of parts; whole
matmuls are matmul_ways.py's. sharding/overlap/pairs.py chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from distmega.errors import counted
from distmega.kernels.gemm.times.matmul_ways import (
    has_peer_collective,
    kernel_problem,
    library_us,
    nccl_us,
    peer_us,
    sent_bytes,
    tiles_choice,
    transfer_us,
)
from distmega.kernels.gemm.times.rates import OverlapRates
from distmega.kernels.gemm.times.tile_times import ceil_div
from distmega.sharding.overlap.products import Collective, Extents, Product, Way
from distmega.sharding.search.cost import Machine


@dataclass(frozen=True, slots=True)
class MatmulModel:
    """The OverlapModel of a machine of such rates."""

    rates: OverlapRates

    @property
    def host_us(self) -> float:
        """See OverlapModel."""
        return self.rates.host_us

    @property
    def replay_us(self) -> float:
        """See OverlapModel."""
        return self.rates.replay_us

    @property
    def rank_rows(self) -> int:
        """See OverlapModel."""
        return self.rates.kernel_multiples[0]

    def way_times_us(
        self, product: Product, chunk_counts: Sequence[int], *, peer_copies: bool = False
    ) -> tuple[dict[tuple[Way, int], float], dict[str, str]]:
        """Predicted microseconds of each way that is possible, by way and number of chunks, and why
        the others are not. peer_copies: whether a collective through peer memory may stand in for
        the kernel.
        """
        rates, collective, extents = self.rates, product.collective, product.extents
        times: dict[tuple[Way, int], float] = {
            ("sequential", 0): nccl_us(collective, extents, rates)
        }
        refused: dict[str, str] = {}
        extent = extents.columns if collective == "reduce_scatter" else extents.rows
        counts = [count for count in chunk_counts if count <= extent]
        if collective == "all_gather":
            refused["chunks"] = "a sum over ranks; parts of a gather come around a ring"
            counts = []
        for count in counts:
            times["chunks", count] = chunks_us(collective, extents, rates, count)
        if not counts:
            refused.setdefault("chunks", f"at most {counted(extent, 'chunk')}")
        if collective == "all_reduce":
            refused["ring"] = "an all-gather or a reduce-scatter"
        else:
            times["ring", extents.num_ranks] = ring_us(collective, extents, rates)
        peer_copies = peer_copies and product.dtype in rates.kernel_dtypes
        reason = kernel_problem(collective, extents, product.dtype, rates)
        if not reason:
            times["kernel", 0] = fused_us(collective, extents, rates)
        elif peer_copies and has_peer_collective(collective, extents, rates):
            times["kernel", 0] = peer_us(collective, extents, rates)
        else:
            refused["kernel"] = reason
        return times, refused


def rates_of(machine: Machine) -> OverlapRates:
    """The rates of a machine of this package's kernels."""
    assert isinstance(machine.overlap, MatmulModel), machine
    return machine.overlap.rates


def chunks_us(collective: Collective, extents: Extents, rates: OverlapRates, count: int) -> float:
    """Chunks on streams, of rows, or of columns where rows are scattered: a pipeline of two stages,
    which slow each other down.
    """
    if collective == "reduce_scatter":
        chunk = replace(extents, columns=ceil_div(extents.columns, count))
    else:
        chunk = replace(extents, rows=ceil_div(extents.rows, count))
    part = library_us(chunk, rates)
    moved = transfer_us(collective, sent_bytes(collective, extents) / count, rates)
    both = _beside(part, moved, rates.beside_factor)
    return part + moved + (count - 1) * both


def ring_us(collective: Collective, extents: Extents, rates: OverlapRates) -> float:
    """Each rank's part at a time, while the next comes from, or the last sum goes to, a neighbour.

    A gather begins with what is here and a scatter ends with it, so one part has no transfer
    beside it.
    """
    size = extents.num_ranks
    part = library_us(replace(extents, rows=extents.rows // size), rates)
    sent = sent_bytes(collective, extents)
    moved = rates.peer_us + sent / (size - 1) / rates.peer_bytes_per_us
    return part + (size - 1) * _beside(part, moved, rates.ring_factor)


def _beside(one: float, other: float, factor: float) -> float:
    """Time of two things side by side: the longer where the factor is 1, both in turn where 2."""
    return max(one, other) + (factor - 1) * min(one, other)


@cache
def fused_us(collective: Collective, extents: Extents, rates: OverlapRates) -> float:
    """One kernel with its collective beside it, or the library's matmul and a collective by peer
    memory, whichever is quicker; where ranks share cores, one after the other.
    """
    if not rates.slice_us:
        return nccl_us(collective, extents, rates)
    us = tiles_choice(collective, extents, rates).us
    if has_peer_collective(collective, extents, rates):
        us = min(us, peer_us(collective, extents, rates))
    return us
