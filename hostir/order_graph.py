"""The graph of what host programs order: vertices of all ranks, edges, accesses of buffers,
exchanges.

orders.py fills it from programs; check.py searches it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Box = tuple[tuple[int, int], ...]
"""Half-open range per dim of a buffer."""

Meeting = tuple[object, ...]
"""What exchanges must agree on to match, and between whom: ("team", ...) or ("pair", ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One use of part of a buffer, from vertex `start` until vertex `done` has completed.

    writes: excludes others, as frees do too. fills: gives contents. needs_contents: reads them.
    """

    buffer: str
    box: Box
    start: int
    done: int
    writes: bool
    fills: bool
    needs_contents: bool

    def overlaps(self, other: "Access") -> bool:
        """Whether both use a common element."""
        pairs = zip(self.box, other.box, strict=True)
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)


@dataclass(slots=True)
class OrderGraph:
    """Vertices by number. follows: what has completed before a vertex starts, on every device.
    issued: what the host or a communicator has started or completed before, which bounds progress
    but orders no memory. exchanges: (start, done) on each rank; alone: those of kernels beside
    which there may be none.
    """

    labels: list[str] = field(default_factory=list)
    follows: list[list[int]] = field(default_factory=list)
    issued: list[list[int]] = field(default_factory=list)
    accesses: dict[tuple[int, str, int], list[Access]] = field(default_factory=dict)
    exchanges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    alone: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, label: str, follows: Sequence[int], issued: Sequence[int]) -> int:
        """A new vertex."""
        self.labels.append(label)
        self.follows.append(list(follows))
        self.issued.append(list(issued))
        return len(self.labels) - 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """One side of an exchange: the vertices at which it starts and has completed, and what both
    sides must agree on.
    """

    start: int
    done: int
    terms: tuple[object, ...]


@dataclass(slots=True)
class Exchanges:
    """Exchanges of one rank, in the order of their start, by whom they meet."""

    teams: dict[Meeting, list[Exchange]] = field(default_factory=dict)
    sends: dict[Meeting, list[Exchange]] = field(default_factory=dict)
    recvs: dict[Meeting, list[Exchange]] = field(default_factory=dict)
