"""What a pass of prompts takes from the host and gives it, in memory that host and GPU both read.

In: the rows of a pass, on the host; the tokens behind it, on the GPU. Out: the same on the other
side, with nothing that wakes a copy engine or asks the driver for an event, each of which takes a
GPU that was at rest some ten microseconds. Both are numbered, as the passes of a program are. Used
by prefill.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.engine.packing import PassRows, PromptPart, row_lengths
from distmega.kernels.runtime.mapped_memory import map_pinned
from distmega.models.decoder import PEAKS

NUMBER = 1 << 32
"""What a pass's number is multiplied by in the words that hold it."""
MOST_PASSES = 1 << 30
"""Behind which numbers begin anew."""
HALF = 1 << 31
MOST_POLLS = 4096
"""A microsecond or two each, after which the driver is asked whether the GPU has failed."""
EXPONENT = 0xFF << 23
"""Of f32: all ones in NaN and infinities."""


class _Polls:
    """Counts polls of words that a GPU writes. Those of a kernel that never ran don't come."""

    def __init__(self) -> None:
        self._num = 0

    def note(self) -> None:
        """One more; at times RuntimeError where the GPU has failed."""
        self._num += 1
        if not self._num % MOST_POLLS and torch.cuda.is_available():
            torch.cuda.current_stream().query()


class SentRows:
    """The rows of passes of one size, and how they reach the GPU that reads them.

    The host writes them to pinned memory. The copy to the GPU is a part of what a pass queues, so
    that one replay is all that a pass with a graph needs. The rows have a number, which the GPU
    gives back behind the copy: only then the host writes the rows of the next pass.
    """

    def __init__(self, size: int, num_slots: int, max_context: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laid = PassRows(size, num_slots, max_context, pin_memory=self._on_gpu)
        memory = self._laid.memory
        self._tensor = torch.zeros_like(memory, device=device) if self._on_gpu else memory
        self.parts = self._tensor[:-1].split(row_lengths(size, num_slots))  # type: ignore[no-untyped-call]
        """Where programs read ROWS. On a CPU they are written there."""
        self.number = self._tensor[-1:]
        """Of the rows that are there, i64 [1]."""
        self._reached = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self._on_gpu)
        self._words, self._num_reached = memory.numpy().data, self._reached.numpy().data
        self.num_laid = self._num_sent = 0
        """The number of the rows that were laid last."""
        self._mapped_rows = map_pinned(memory, device) if self._on_gpu else None
        self._mapped_reached = map_pinned(self._reached, device) if self._on_gpu else None
        self._polls = _Polls()

    def query(self) -> bool:
        """Whether the host may write, as an event would tell; RuntimeError where the GPU has
        failed.
        """
        self._polls.note()
        return self._num_reached[0] == self._num_sent

    def lay(self, parts: Sequence[PromptPart]) -> None:
        """Writes the rows of a pass. Only once `query` says so."""
        self._laid.lay(parts)
        self.num_laid = self.num_laid % MOST_PASSES + 1
        self._words[-1] = self.num_laid

    def queue_copy(self) -> None:
        """Queues the copy to the GPU, or captures it."""
        if self._mapped_rows is not None and self._mapped_reached is not None:
            # by kernels: calls take 100 us less than where a copy engine has to wake up
            torch.add(self._mapped_rows, 0, out=self._tensor)
            torch.add(self.number, 0, out=self._mapped_reached)
            return
        if self._on_gpu:
            self._tensor.copy_(self._laid.memory, non_blocking=True)
        self._reached.copy_(self.number, non_blocking=True)

    def note_sent(self) -> None:
        """The copy of what was laid is queued."""
        self._num_sent = self.num_laid


class SentTokens:
    """The token of each slot behind a pass, and how it reaches the host.

    A slot has two words: its token, and the bits of the value for which it was chosen, as f32. Each
    is 32 bits and the pass's number times NUMBER, and is written at once: the host may take it as
    soon as it has the number.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        words = torch.zeros(2, num_slots, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        mapped = map_pinned(words, device) if on_gpu else words
        self._mapped = None if mapped is None else mapped.unbind()
        self._tokens, self._values = (row.numpy().data for row in words)

    @property
    def reaches(self) -> bool:
        """Whether the host can be told so."""
        return self._mapped is not None

    def queue(self, outputs: Mapping[str, Tensor], number: Tensor) -> None:
        """Queues, or captures, that the host is told of a pass's outputs `next` and PEAKS [slots].
        number: i64 [1], of the pass.
        """
        if self._mapped is None:
            return
        bits = outputs[PEAKS].float().view(torch.int32)
        torch.add(outputs["next"], number, alpha=NUMBER, out=self._mapped[0])
        torch.add(bits, number, alpha=NUMBER, out=self._mapped[1])

    def answer(self, slots: Sequence[int], number: int) -> "PassAnswer":
        """What those slots get by the pass of this number, which is under way."""
        return PassAnswer(self._tokens, self._values, slots, NUMBER * number)


class PassAnswer:
    """The tokens of some slots, once they are there. The next pass of the program overwrites it."""

    def __init__(
        self, tokens: memoryview, values: memoryview, slots: Sequence[int], base: int
    ) -> None:
        """tokens, values: words of slots; base: that of 0."""
        self._tokens, self._values, self._slots, self._base = tokens, values, slots, base
        self._polls = _Polls()

    def query(self) -> bool:
        """Whether all have come, as an event would tell; RuntimeError where the GPU has failed."""
        self._polls.note()
        for slot in self._slots:
            for word in (self._values[slot], self._tokens[slot]):
                if not -HALF <= word - self._base < HALF:
                    return False
        return True

    def read(self) -> dict[int, tuple[int, bool]]:
        """By slot, once `query` says so: its token, and whether its value is finite."""
        return {
            slot: (
                self._tokens[slot] - self._base,
                (self._values[slot] - self._base) & EXPONENT != EXPONENT,
            )
            for slot in self._slots
        }


@dataclass(frozen=True, slots=True)
class PassMemory:
    """What passes of one size hand over, both ways."""

    rows: SentRows
    tokens: SentTokens
