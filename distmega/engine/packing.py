"""Which tokens of which prompts one pass of the model takes, and the inputs that say so.

In: prompts by slot, a budget of tokens. Out: passes, each a list of PromptParts whose rows lie end
to end. A prompt that does not fit into what is left of a budget is cut there, and goes on in the
next pass: what came before is in its cache by then. Used by prefill.py and pass_memory.py.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from distmega.engine.calls import Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptPart:
    """Tokens `ids` of the sequence in `slot`, at positions `position` and on. ends: they are the
    prompt's last.
    """

    slot: int
    position: int
    ids: Tokens
    ends: bool

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.position + len(self.ids)


ROWS = ("tokens", "positions", "sequences", "starts", "last", "last_positions")
"""Inputs that say what a pass's rows are, as PassRows orders them; see build_decoder's `prompt`."""


def pack_prompts(prompts: Mapping[int, Tokens], budget: int) -> list[list[PromptPart]]:
    """Passes of at most `budget` tokens, all but the last of as many; slots in ascending order."""
    passes: list[list[PromptPart]] = []
    capacity = 0
    for slot, ids in sorted(prompts.items()):
        position = 0
        while position < len(ids):
            if not capacity:
                passes.append([])
                capacity = budget
            piece = ids[position : position + capacity]
            capacity -= len(piece)
            ends = position + len(piece) == len(ids)
            passes[-1].append(PromptPart(slot=slot, position=position, ids=piece, ends=ends))
            position += len(piece)
    return passes


def row_lengths(size: int, num_slots: int) -> tuple[int, ...]:
    """Elements of each of ROWS."""
    return size, size, size, num_slots + 1, num_slots, num_slots


class PassRows:
    """The rows of a pass of `size` rows on the CPU, written anew for each pass.

    memory: ROWS one behind the other, i64, and a word more that is its owner's. A GPU can read it
    by itself where it is pinned.
    """

    def __init__(
        self, size: int, num_slots: int, max_context: int, *, pin_memory: bool = False
    ) -> None:
        """max_context: no prompt is longer."""
        lengths = row_lengths(size, num_slots)
        self.memory = torch.zeros(
            sum(lengths) + 1, dtype=torch.int64, device="cpu", pin_memory=pin_memory
        )
        # plain buffers: of so few elements NumPy and torch take longer to be called than to write
        rows = _words(self.memory.numpy())[:-1]
        self._tokens, self._positions = rows[:size], rows[size : 2 * size]
        self._sequences, self._of_slots = rows[2 * size : 3 * size], rows[3 * size :]
        self._numbers = _numbers((max_context + size).bit_length())
        self._size, self._num_slots = size, num_slots
        self._spans: list[tuple[int, int, int]] = []
        """Of the pass that lies there: slot, position and number of tokens of each part."""

    def lay(self, parts: Sequence[PromptPart]) -> None:
        """Writes the rows of a pass of ascending slots. Up to `size` the last sequence goes on with
        tokens 0, whose cache rows its next tokens overwrite. A slot without tokens has row 0 for
        its last.
        """
        spans = [(part.slot, part.position, len(part.ids)) for part in parts]
        row = 0
        for part in parts:
            stop = row + len(part.ids)
            self._tokens[row:stop] = part.ids
            row = stop
        if spans != self._spans:
            self._spans = []  # until all lie there, whatever ends this
            self._lay_spans(spans)
            self._spans = spans

    def _lay_spans(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """All but the prompts' tokens, of parts each of a slot, a position and so many tokens."""
        counts, last = [0] * self._num_slots, [0] * self._num_slots
        last_positions = [spans[0][1]] * self._num_slots
        row = 0
        for number, (slot, position, count) in enumerate(spans, 1):
            stop = row + count
            last[slot] = stop - 1
            last_positions[slot] = position + count - 1
            if number == len(spans) and stop < self._size:
                self._tokens[stop:] = array("q", (0,)) * (self._size - stop)
                stop = self._size
            counts[slot] = stop - row
            self._positions[row:stop] = self._numbers[position : position + stop - row]
            self._sequences[row:stop] = array("q", (slot,)) * (stop - row)
            row = stop
        self._of_slots[:] = array("q", (0, *accumulate(counts), *last, *last_positions))


def _words(numbers: NDArray[np.int64]) -> "memoryview[int]":
    return numbers.data.cast("B").cast("q")


@cache
def _numbers(num_bits: int) -> "memoryview[int]":
    """All that have so many bits, ascending."""
    return _words(np.arange(1 << num_bits))
