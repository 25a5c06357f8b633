"""One SM of the emulated kernel of one row, and the GPU that it is of: what bodies work on.

In: queues and memory of a rank. Out: polls, stores, fences and tiles as the bodies use them, each
with a place where others may come between. Next on the walk: one_row/bodies.py.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.emulator.clocks import Agent, Clock
from distmega.kernels.hopper.emulator.interleaving import Interleaving, Key, Steps
from distmega.kernels.hopper.emulator.memory import (
    FlaggedWords,
    KeptNumbers,
    PendingStore,
    PlainData,
    StoreBuffer,
    StoreTarget,
)
from distmega.kernels.hopper.emulator.numbers import Floats, Indices, Words, numbers_of
from distmega.kernels.hopper.emulator.ring import Ring
from distmega.kernels.hopper.plan.types import ExpertShape, RowQueues, WeightMatrix
from distmega.kernels.hopper.plan.words import SLICE_K, TILE_K, UNIT_ROWS, Instruction

SPARE = 4096
"""Elements behind the weights: finite, and never multiplied by other than zero."""
GARBAGE = 1000.0
Mask = npt.NDArray[np.bool_]


def expert_shape_of(queues: RowQueues | BatchQueues) -> ExpertShape:
    """Extents of experts, of queues with instructions that work on them."""
    assert queues.experts is not None, "a program with such an instruction has experts"
    return queues.experts


def elements_of(weights_arena: Tensor) -> Floats:
    """The numbers of an arena of weights as the copy engine may read them, past its end too."""
    spare = np.full(SPARE, GARBAGE, dtype=np.float32)
    return np.concatenate((numbers_of(weights_arena), spare))


@dataclass(slots=True, kw_only=True)
class EmulatedGpu:
    """A rank's memory. matrices: of the weight arena, whose numbers `elements` are; embed: the
    table that ids are looked up in, or the rows that come in; rope: cosines then sines a row, of
    positions; cache: rows of keys and values; words: the symmetric buffer; peers: all ranks.
    """

    rank: int
    num_sms: int
    matrices: Sequence[WeightMatrix]
    order: Interleaving
    elements: Floats
    embed: Floats
    rope: Floats
    words: FlaggedWords
    state: PlainData
    cache: PlainData
    host: Agent
    peers: Sequence["EmulatedGpu"] = ()


@dataclass(slots=True, kw_only=True)
class RowGpu(EmulatedGpu):
    """What the kernel of one row has besides. floats: what stands in the weight arena as f32;
    settings: temperature and limits of a sample; ids: that a launch chose.
    """

    queues: RowQueues
    floats: Floats
    kept: KeptNumbers
    settings: Floats = field(default_factory=lambda: np.zeros(3, dtype=np.float32))
    seed: int = 0
    ids: dict[int, int] = field(default_factory=dict)


class Sm:
    """Two partitions that share a ring."""

    def __init__(
        self, gpu: EmulatedGpu, sm: int, compute: Agent, loader: Agent, num_slots: int, ahead: int
    ) -> None:
        self.gpu, self.sm, self.compute, self.loader = gpu, sm, compute, loader
        self.stores = StoreBuffer(gpu.order, gpu.rank, sm)
        self.ring = Ring(gpu.order, gpu.rank, sm, num_slots, ahead)
        self.begun: list[tuple[Clock, Clock]] = []
        """What the compute warps knew, and saw, when each step of the launch began."""
        self.experts: list[int] = []
        """Of each slot, once they are chosen."""
        self.weights: Floats = np.zeros(0, dtype=np.float32)
        self.num_choices = self.num_awaited = 0
        self.waiting = ""

    # flagged words

    def poll(self, at: Indices, flag: int, doing: str) -> Generator[Key, None, Words]:
        """Payloads of this rank's words, once each carries the flag; in any order."""
        found: Words = np.zeros(len(at), dtype=np.uint32)
        left = np.arange(len(at))
        while True:
            left = self.gpu.words.take(self.compute, at, flag, found, left)
            if not len(left):
                self.waiting = ""
                return found
            word = int(at[left[0]])
            self.waiting = f"{self.compute}, {doing}, waits for flag {flag} of word {word}"
            yield "word", self.gpu.rank, word

    def publish(
        self, at: Indices, payload: Words, flag: int, gpus: Sequence[EmulatedGpu] = ()
    ) -> None:
        """Flagged words to this rank's buffer, or to those of several."""
        tick, snapshot = self.compute.tick(), self.compute.snapshot()
        for gpu in gpus or (self.gpu,):
            self.stores.put(
                PendingStore(gpu.words, at, payload, flag, self.compute, snapshot, tick)
            )

    # plain data

    def store(self, memory: StoreTarget, at: Indices, values: npt.NDArray[np.generic]) -> None:
        tick, snapshot = self.compute.tick(), self.compute.snapshot()
        self.stores.put(PendingStore(memory, at, values, 0, self.compute, snapshot, tick))

    def fence(self) -> None:
        self.compute.fence()
        self.stores.fence()

    def arrive(self) -> None:
        """Tells the loader that a step begins."""
        self.begun.append((self.compute.done.copy(), self.compute.seen.copy()))
        self.gpu.order.wake(("step", self.gpu.rank, self.sm))

    def await_step(self, step: int) -> Steps:
        """Steps of the loader: until the compute warps have begun a step."""
        while len(self.begun) <= step:
            yield "step", self.gpu.rank, self.sm
        done, seen = self.begun[step]
        np.maximum(self.loader.done, done, out=self.loader.done)
        np.maximum(self.loader.seen, seen, out=self.loader.seen)

    # experts

    def choose(self, experts: list[int]) -> None:
        """Gives the loader the experts of the slots."""
        self.experts = experts
        self.weights = np.full(len(experts), np.nan, dtype=np.float32)
        self.num_choices += 1
        self.gpu.order.wake(("choice", self.gpu.rank, self.sm))

    def await_choice(self) -> Steps:
        """Steps of the loader: until the compute warps have made the next choice. An mbarrier tells
        by one bit, so that a loader that comes two choices late would wait for ever.
        """
        while (self.num_choices - self.num_awaited) % 2 == 0:
            yield "choice", self.gpu.rank, self.sm
        self.num_awaited += 1

    # tiles

    def take(self) -> Generator[Key, None, Floats]:
        """The next tile of the ring."""
        while not self.ring.is_here():
            self.waiting = f"{self.compute} waits for tile {self.ring.taken}"
            yield "tile", self.gpu.rank, self.sm
        self.waiting = ""
        return self.ring.take(self.compute, self.loader)

    def weight_tile(self, matrix: int, row: int, k: int) -> Floats:
        """[UNIT_ROWS, TILE_K]: slices of 64 columns, zeros behind the last slice and row. Where a
        row ends inside a slice, the rest is what lies behind it.
        """
        found = self.gpu.matrices[matrix]
        stop = -(-found.columns // SLICE_K) * SLICE_K
        columns = np.arange(k * TILE_K, min((k + 1) * TILE_K, stop))
        rows = row + np.arange(max(0, min(UNIT_ROWS, found.num_rows - row)))
        tile: Floats = np.zeros((UNIT_ROWS, TILE_K), dtype=np.float32)
        first = found.offset // 2
        at = first + rows[:, None] * found.columns + columns
        tile[: len(rows), : len(columns)] = self.gpu.elements[at]
        return tile

    def weight_block(self, matrix: int, row: int, column: int) -> Floats:
        """[64 rows, 64 columns]: a slice, as weight_tile has them."""
        found = self.gpu.matrices[matrix]
        block: Floats = np.zeros((SLICE_K, SLICE_K), dtype=np.float32)
        rows = row + np.arange(max(0, min(SLICE_K, found.num_rows - row)))
        if column < found.columns:
            at = found.offset // 2 + rows[:, None] * found.columns + column + np.arange(SLICE_K)
            block[: len(rows)] = self.gpu.elements[at]
        return block


@dataclass(slots=True)
class Running:
    """Steps of a partition or a host as an activity of the interleaving."""

    kind: str
    rank: int
    sm: int
    steps: Steps
    waits: Callable[[], str]
    finite: bool = True

    def advance(self) -> Key | None:
        return next(self.steps, None)

    def waits_for(self) -> str:
        return self.waits()


class RowSm(Sm):
    """An SM of the kernel of one row, with its queue."""

    gpu: RowGpu

    def __init__(
        self, gpu: RowGpu, sm: int, compute: Agent, loader: Agent, num_slots: int, ahead: int
    ) -> None:
        super().__init__(gpu, sm, compute, loader, num_slots, ahead)
        self.queue: Sequence[Instruction] = gpu.queues.queues[sm]
