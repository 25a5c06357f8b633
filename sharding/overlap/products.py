"""A matmul and its collective as a planner sees them, and what it asks of who runs them.

Comes in: extents and a type. Goes out: a Product, of which an OverlapModel, which the Machine that
a planner is given brings along, says how long each way takes. Next: pairs.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
"""The first before the matmul, the others behind it."""

Way = Literal["sequential", "chunks", "ring", "kernel"]
"""One after the other; chunks on streams; parts around a ring of ranks; tiles of one kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """A product A[rows, depth] B[columns, depth]^T on each of num_ranks ranks, of elements of
    item_bytes; `rows` are those of all ranks together. replicated: A is gathered and B the same on
    all ranks, and so shall the results be, bit by bit.
    """

    rows: int
    columns: int
    depth: int
    num_ranks: int = 1
    item_bytes: int = 2
    replicated: bool = False

    @property
    def flops(self) -> int:
        """Flops on one rank."""
        return 2 * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matmul on each rank of a team, and its collective."""

    collective: Collective
    extents: Extents
    dtype: str

    @property
    def symmetric_bytes(self) -> int:
        """Peer memory of one fused matmul: the gathered operand, or partial results and sums."""
        extents = self.extents
        width = extents.depth if self.collective == "all_gather" else 2 * extents.columns
        return extents.rows * width * extents.item_bytes


class OverlapModel(Protocol):
    """How long a machine takes for a matmul and its collective; kernels/gemm/times/ways.py has one.

    What a kernel needs, its tiles and their times are known to it alone.
    """

    @property
    def host_us(self) -> float:
        """Time of the host for one small op."""
        ...

    @property
    def replay_us(self) -> float:
        """The same where the op is captured in a graph."""
        ...

    @property
    def rank_rows(self) -> int:
        """What a rank's rows are a multiple of where a kernel has the collective beside it."""
        ...

    def way_times_us(
        self, product: Product, chunk_counts: Sequence[int], *, peer_copies: bool = False
    ) -> tuple[Mapping[tuple[Way, int], float], Mapping[str, str]]:
        """Predicted time by way and chunks (0 where there are none), and why other ways can't be.

        peer_copies: "kernel" may also be the library's matmul and a collective by peer memory
        alone, which takes rows that no kernel does.
        """
        ...
