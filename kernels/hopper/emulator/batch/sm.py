"""One SM of the emulated kernel of several rows, and the memory that all of them share.

In: queues and memory of a rank. Out: waits for events, loads and stores of activations and numbers.
Next on the walk: bodies.py.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BATCH, BatchInstruction
from distmega.kernels.hopper.emulator.clocks import Agent, Clock
from distmega.kernels.hopper.emulator.interleaving import Interleaving, Key, Steps
from distmega.kernels.hopper.emulator.memory import PendingStore, PlainData
from distmega.kernels.hopper.emulator.numbers import Floats, Indices
from distmega.kernels.hopper.emulator.sm import EmulatedGpu, Sm
from distmega.kernels.hopper.plan.words import MAX_SMS


class Event:
    """A counter that every SM counts up once a step, releasing what it stored before."""

    kind = "event"

    def __init__(self, order: Interleaving, rank: int, number: int, num_agents: int) -> None:
        self.order, self.rank, self.number = order, rank, number
        self.count = 0
        self.done: Clock = np.zeros(num_agents, dtype=np.int32)
        self.seen = self.done.copy()

    def apply(self, store: PendingStore) -> None:
        self.count += 1
        np.maximum(self.done, store.snapshot.done, out=self.done)
        np.maximum(self.seen, store.snapshot.fenced, out=self.seen)
        self.order.wake((self.kind, self.rank, self.number))


class Arrivals(Event):
    """A counter that some SMs count up, which tells each how many came before it."""

    kind = "arrival"

    def __init__(self, order: Interleaving, rank: int, number: int, num_agents: int) -> None:
        super().__init__(order, rank, number, num_agents)
        self.turns: dict[int, int] = {}

    def apply(self, store: PendingStore) -> None:
        self.turns[store.writer.number] = self.count
        super().apply(store)


@dataclass(slots=True, kw_only=True)
class BatchGpu(EmulatedGpu):
    """floats: what stands in the weight arena as f32. acts: bf16 of each column and sequence;
    numbers: f32; sums: squares [slots, 16, 256]; logits: [16, rows]; bests, best_rows: [16, 256];
    parts: of products of more than 16 rows; partials, arrivals: of rows whose keys several SMs
    share; given: weights and states that the host may write as
    numbers; ids: that each step of a launch chose. Elements of the cache lie one by one.
    """

    queues: BatchQueues
    floats: Floats
    given: Mapping[str, Tensor]
    events: Sequence[Event]
    acts: PlainData
    numbers: PlainData
    sums: PlainData
    logits: PlainData
    bests: PlainData
    best_rows: PlainData
    parts: PlainData
    partials: PlainData
    arrivals: Sequence[Arrivals]
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows that are computed."""
        return self.queues.rows


class BatchSm(Sm):
    """An SM with its queue."""

    gpu: BatchGpu

    def __init__(
        self, gpu: BatchGpu, sm: int, compute: Agent, loader: Agent, num_slots: int, ahead: int
    ) -> None:
        super().__init__(gpu, sm, compute, loader, num_slots, ahead)
        self.queue: Sequence[BatchInstruction] = gpu.queues.queues[sm]
        self.hit_rows: npt.NDArray[np.bool_] = np.zeros((0, BATCH), dtype=bool)
        self.hit_weights: Floats = np.zeros((0, BATCH), dtype=np.float32)
        """[experts hit, 16]: which rows have chosen each, and what it weighs in them."""
        self.num_opened = self.num_entered = 0

    def open_choice(self) -> None:
        """Says as the loader that the choice before has been read."""
        self.num_opened += 1
        self.gpu.order.wake(("opened", self.gpu.rank, self.sm))

    def await_opened(self) -> Steps:
        """Until the loader has read the choice before; by one bit, as await_choice."""
        while (self.num_opened - self.num_entered) % 2 == 0:
            self.waiting = f"{self.compute} waits for its loader to be done with a choice"
            yield "opened", self.gpu.rank, self.sm
        self.waiting = ""
        self.num_entered += 1

    def await_event(self, number: int, target: int) -> Steps:
        """Until an event has been counted up to the target; then all that came before is seen."""
        event = self.gpu.events[number]
        while event.count < target:
            self.waiting = f"{self.compute} waits for event {number}, {event.count} of {target}"
            yield "event", self.gpu.rank, number
        self.waiting = ""
        self.learn(event)

    def learn(self, event: Event) -> None:
        """Takes what those knew who have counted an event up."""
        np.maximum(self.compute.done, event.done, out=self.compute.done)
        np.maximum(self.compute.seen, event.seen, out=self.compute.seen)

    def arrive_last(self, number: int, num: int) -> Generator[Key, None, bool]:
        """Whether this SM is the last of `num` to count an arrival up, after all its stores; the
        last sees what all have stored, and sets it back.
        """
        arrivals, own = self.gpu.arrivals[number], self.compute.number
        self.fence()
        self.store(arrivals, np.zeros(1, dtype=np.int64), np.zeros(1))
        while own not in arrivals.turns:
            yield "arrival", self.gpu.rank, number
        is_last = arrivals.turns.pop(own) == num - 1
        if is_last:
            self.learn(arrivals)
            arrivals.count = 0
        return is_last

    def signal(self, number: int) -> None:
        """Counts an event up after all stores of this SM."""
        self.fence()
        self.store(self.gpu.events[number], np.zeros(1, dtype=np.int64), np.zeros(1))

    def load(self, memory: PlainData, at: Indices) -> Floats:
        """Numbers from global memory, its own late stores included."""
        self.stores.flush(memory)
        found: Floats = memory.read(self.compute, at).astype(np.float32)
        return found

    def columns(self, first: int, num: int) -> Floats:
        """[num, 16] activations of columns from `first` on, of all sequences."""
        rows = self.gpu.rows
        at = first * rows + np.arange(num * rows)
        return self.load(self.gpu.acts, at).reshape(num, rows)

    def number_indices(self, first: int, num_rows: int, row: Indices) -> Indices:
        """Of the numbers [16, num_rows] from `first` on: those of some rows, [rows * 16]."""
        rows, first = self.gpu.rows, self.first_number(first)
        at: Indices = (first + row[:, None] + np.arange(rows) * num_rows).reshape(-1)
        return at

    def first_number(self, first: int) -> int:
        """Where numbers begin that words place as if there were 16 rows."""
        return first * (self.gpu.rows // BATCH)

    def own_part(self, slot: int) -> Indices:
        """Of the squares: where this SM's are, of each sequence."""
        rows = self.gpu.rows
        at: Indices = (slot * rows + np.arange(rows)) * MAX_SMS + self.sm
        return at
