"""The ring of tiles between an SM's loader warp and its compute warps, and the copy engine.

The loader asks for a tile once a slot is free and no more than `ahead` loads are under way; the
copy engine reads memory some time later; the compute warps take tiles in order and free their
slots. Next on the walk: one_row/bodies.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from distmega.kernels.hopper.emulator.clocks import Agent
from distmega.kernels.hopper.emulator.interleaving import RAN, Interleaving, Key, Steps
from distmega.kernels.hopper.emulator.numbers import Floats


@dataclass(slots=True)
class _Tile:
    """A tile that was asked for; values once it has landed."""

    read: Callable[[], Floats]
    values: Floats | None = None


class Ring:
    """Slots of one SM; advances as the copy engine."""

    kind, finite = "copies", False

    def __init__(self, order: Interleaving, rank: int, sm: int, num_slots: int, ahead: int) -> None:
        self.order, self.rank, self.sm = order, rank, sm
        self.num_slots, self.ahead = num_slots, ahead
        self.clear()

    def clear(self) -> None:
        """Makes it what a launch begins with."""
        self.slots: list[_Tile | None] = [None] * self.num_slots
        self.asked = self.taken = 0

    def has_free_slot(self) -> bool:
        """Whether the loader may ask for the next tile."""
        if self.asked - self.taken >= self.num_slots:
            return False
        before = self.asked - self.ahead
        tile = self.slots[before % self.num_slots] if before >= self.taken else None
        return before < self.taken or (tile is not None and tile.values is not None)

    def ask(self, loader: Agent, read: Callable[[], Floats]) -> Steps:
        """Steps of the loader: waits for a slot, asks for what `read` gives once it lands."""
        while not self.has_free_slot():
            yield "slot", self.rank, self.sm
        loader.tick()
        self.slots[self.asked % self.num_slots] = _Tile(read)
        self.asked += 1
        self.order.wake(("copy", self.rank, self.sm))
        yield RAN

    def advance(self) -> Key | None:
        """One of the loads under way lands."""
        flying = [
            one
            for number in range(self.taken, self.asked)
            if (one := self.slots[number % self.num_slots]) is not None and one.values is None
        ]
        if not flying:
            return "copy", self.rank, self.sm
        one = self.order.random.choice(flying)
        one.values = one.read()
        self.order.wake(("slot", self.rank, self.sm))
        self.order.wake(("tile", self.rank, self.sm))
        return RAN

    def is_here(self) -> bool:
        """Whether the next tile has landed."""
        at = self.taken
        tile = self.slots[at % self.num_slots] if at < self.asked else None
        return tile is not None and tile.values is not None

    def take(self, compute: Agent, loader: Agent) -> Floats:
        """The next tile, which has landed; its slot is free then, and void."""
        compute.meet(loader)
        slot = self.taken % self.num_slots
        tile = self.slots[slot]
        assert tile is not None, "the tile was asked for"
        assert tile.values is not None, "it has landed"
        self.slots[slot] = None
        self.taken += 1
        self.order.wake(("slot", self.rank, self.sm))
        return tile.values

    def waits_for(self) -> str:
        return ""
