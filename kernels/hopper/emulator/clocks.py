"""What agents of the emulated GPUs know of each other: vector clocks of two relations.

An agent is a partition of an SM, the loader warp or the compute warps, or the host of a rank. It
counts its accesses. *Done*: how many accesses of every agent are over, as far as this one can know;
whoever takes a datum that another has published learns what that one knew then. *Seen*: how many of
another's plain stores are certain to be visible here; that takes a fence before the datum was
published and one after it was taken, or a barrier inside an SM. Next on the walk: memory.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Clock = npt.NDArray[np.int32]
"""A count of accesses of each agent."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an agent knew when it published something: done, and seen at its last fence."""

    agent: int
    done: Clock
    fenced: Clock


class Agent:
    """One agent's knowledge. number: its place in the clocks; sm: -1 of a host."""

    def __init__(self, number: int, num_agents: int, rank: int, sm: int, part: str) -> None:
        self.number, self.rank, self.sm, self.part = number, rank, sm, part
        self.done: Clock = np.zeros(num_agents, dtype=np.int32)
        self.seen, self.heard, self.fenced = (np.zeros_like(self.done) for _ in range(3))

    def __str__(self) -> str:
        return f"rank {self.rank}, " + (f"SM {self.sm} ({self.part})" if self.sm >= 0 else "host")

    def tick(self) -> int:
        """Number of its next access, which is done."""
        self.done[self.number] += 1
        return int(self.done[self.number])

    def hear(self, snapshots: Sequence[Snapshot]) -> None:
        """Takes what others published: what they knew is known here; visible behind a fence."""
        for one in snapshots:
            np.maximum(self.done, one.done, out=self.done)
            np.maximum(self.heard, one.fenced, out=self.heard)

    def fence(self) -> None:
        """Orders accesses before it and after it, as fence.acq_rel does."""
        np.maximum(self.seen, self.heard, out=self.seen)
        self.seen[self.number] = self.done[self.number]
        self.fenced = self.seen.copy()

    def meet(self, other: "Agent") -> None:
        """A barrier that the other one has reached: its knowledge, and all that it stored or saw;
        fences in it are fences of both.
        """
        np.maximum(self.done, other.done, out=self.done)
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.heard, other.heard, out=self.heard)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        self.seen[other.number] = other.done[other.number]

    def snapshot(self) -> Snapshot:
        """What goes with what it publishes."""
        return Snapshot(self.number, self.done.copy(), self.fenced)
