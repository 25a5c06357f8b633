"""The graph of what host programs order: vertices of all ranks, edges, accesses of buffers,
communications; and which vertices come before which.

orders.py fills it from programs; check.py searches it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distmega.hostir.ir.nodes import Node
from distmega.hostir.ir.text import print_node

Box = tuple[tuple[int, int], ...]
"""Half-open range per dim of a buffer."""

Meeting = tuple[object, ...]
"""What communications must agree on to match, and between whom: ("team", ...) or ("pair", ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferUse:
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

    def overlaps(self, other: "BufferUse") -> bool:
        """Whether both use a common element."""
        return _overlap(self.box, other.box)


def _overlap(one: Box, other: Box) -> bool:
    pairs = zip(one, other, strict=True)
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)


def without(box: Box, hole: Box) -> list[Box]:
    """Boxes that together hold the elements of a box outside of another one."""
    if not _overlap(box, hole):
        return [box]
    found: list[Box] = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        sides = [(start, min(first, stop)), (max(last, start), stop)]
        found += [(*box[:dim], side, *box[dim + 1 :]) for side in sides if side[0] < side[1]]
        box = (*box[:dim], (max(start, first), min(stop, last)), *box[dim + 1 :])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kernel that fills its GPU, a communication or the wait for a signal, from vertex `start`
    until `done`. fills: it is a kernel. axis: of a communication, empty otherwise.
    """

    start: int
    done: int
    fills: bool = False
    axis: str = ""

    def excludes(self, other: "Link") -> bool:
        """Whether they may not run side by side. One communicator does communications of an axis in
        turn, and a wait for a signal is one warp.
        """
        communications = bool(self.axis and other.axis)
        return self.fills or other.fills or (communications and self.axis != other.axis)


@dataclass(frozen=True, slots=True)
class Label:
    """Where a vertex comes from, in words when they are asked for: of a rank's node, or `text`."""

    rank: int
    text: str = ""
    node: Node | None = None
    number: int = 0
    indices: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if self.node is None:
            return f"rank {self.rank}: {self.text}"
        at = "".join(f" {name}={value}" for name, value in self.indices)
        return f"rank {self.rank} node {self.number}{at} ({print_node(self.node)})"


@dataclass(slots=True)
class OrderGraph:
    """Vertices by number. follows: what has completed before a vertex starts, on every device.
    issued: what the host or a communicator has started or completed before, which bounds progress
    but orders no memory. links: of the chain of work on each rank that waits for peers or fills
    the GPU. counts: by counter and side, signals of one name between two ranks, or waits for these.
    """

    labels: list[Label] = field(default_factory=list)
    follows: list[list[int]] = field(default_factory=list)
    issued: list[list[int]] = field(default_factory=list)
    accesses: dict[tuple[int, str, int], list[BufferUse]] = field(default_factory=dict)
    links: dict[int, list["Link"]] = field(default_factory=dict)
    counts: dict[Meeting, list[int]] = field(default_factory=dict)

    def add(self, label: Label, follows: Sequence[int], issued: Sequence[int]) -> int:
        """A new vertex."""
        self.labels.append(label)
        self.follows.append(list(follows))
        self.issued.append(list(issued))
        return len(self.labels) - 1


@dataclass(frozen=True, slots=True)
class Communication:
    """One side of a communication: the vertices at which it starts and has completed, and what both
    sides must agree on.
    """

    start: int
    done: int
    terms: tuple[object, ...]


@dataclass(slots=True)
class Communications:
    """Communications of one rank, in the order of their start, by whom they meet."""

    teams: dict[Meeting, list[Communication]] = field(default_factory=dict)
    sends: dict[Meeting, list[Communication]] = field(default_factory=dict)
    recvs: dict[Meeting, list[Communication]] = field(default_factory=dict)


class Before:
    """Which vertices have completed before others start: one clock a vertex.

    Vertices are dealt out to chains, in each of which every vertex follows the one before; as many
    as run beside each other, so that clocks stay short. A clock counts, for each chain, the
    vertices that have completed when its own has.
    """

    def __init__(self, graph: OrderGraph, order: Sequence[int]) -> None:
        """order: all vertices, each after those it follows."""
        self.chains, self.positions = np.zeros((2, len(order)), np.int64)
        self.clocks = np.zeros((len(order), 8), np.int32)
        lengths = np.zeros(8, np.int32)
        num_chains = 0
        for vertex in order:
            follows = graph.follows[vertex]
            clock = self.clocks[follows].max(axis=0) if follows else self.clocks[vertex]
            ended = np.flatnonzero(clock[:num_chains] == lengths[:num_chains])
            chain = int(ended[0]) if ended.size else num_chains
            if chain == lengths.size:
                self.clocks = np.pad(self.clocks, ((0, 0), (0, chain)))
                lengths, clock = np.pad(lengths, (0, chain)), np.pad(clock, (0, chain))
            num_chains = max(num_chains, chain + 1)
            lengths[chain] += 1
            self.chains[vertex], self.positions[vertex] = chain, lengths[chain]
            self.clocks[vertex] = clock
            self.clocks[vertex, chain] = lengths[chain]

    def __call__(self, one: int, other: int) -> bool:
        """Whether vertex `one` has completed before vertex `other` starts."""
        return one != other and bool(self.clocks[other, self.chains[one]] >= self.positions[one])

    def each(self, one: int, others: Sequence[int]) -> NDArray[np.bool_]:
        """As a call, of one vertex and each of some others."""
        found: NDArray[np.bool_] = self.clocks[others, self.chains[one]] >= self.positions[one]
        found &= np.asarray(others) != one
        return found

    def each_of(self, ones: Sequence[int], other: int) -> NDArray[np.bool_]:
        """As a call, of each of some vertices and one other."""
        found: NDArray[np.bool_] = self.clocks[other, self.chains[ones]] >= self.positions[ones]
        found &= np.asarray(ones) != other
        return found
