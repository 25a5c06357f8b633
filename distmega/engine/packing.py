"""Which tokens of which prompts one pass of the model takes, and the inputs that say so.

In: prompts by slot, a budget of tokens. Out: passes, each a list of Parts whose rows lie end to
end. A prompt that does not fit into what is left of a budget is cut there, and goes on in the next
pass: what came before is in its cache by then. Used by prefill.py.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Tokens `ids` of the sequence in `slot`, at positions `position` and on. ends: they are the
    prompt's last.
    """

    slot: int
    position: int
    ids: tuple[int, ...]
    ends: bool

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.position + len(self.ids)


ROWS = ("tokens", "positions", "sequences", "starts", "last", "last_positions")
"""Inputs that say what a pass's rows are, as lay_rows orders them; see build_decoder's `prompt`."""


def pack_prompts(prompts: Mapping[int, Sequence[int]], budget: int) -> list[list[PromptPart]]:
    """Passes of at most `budget` tokens, all but the last of as many; slots in ascending order."""
    passes: list[list[PromptPart]] = []
    capacity = 0
    for slot, ids in sorted(prompts.items()):
        position = 0
        while position < len(ids):
            if not capacity:
                passes.append([])
                capacity = budget
            piece = tuple(ids[position : position + capacity])
            capacity -= len(piece)
            ends = position + len(piece) == len(ids)
            passes[-1].append(PromptPart(slot=slot, position=position, ids=piece, ends=ends))
            position += len(piece)
    return passes


def keys_a_row(parts: Sequence[PromptPart]) -> float:
    """Positions that a pass's tokens see on average, up to the end of their part: of whole prompts
    of one length, that length.
    """
    num_tokens = sum(len(part.ids) for part in parts)
    return sum(len(part.ids) * part.stop for part in parts) / num_tokens


def row_lengths(size: int, num_slots: int) -> tuple[int, ...]:
    """Elements of each of ROWS."""
    return size, size, size, num_slots + 1, num_slots, num_slots


def lay_rows(
    parts: Sequence[PromptPart], size: int, num_slots: int, *, pin_memory: bool = False
) -> Tensor:
    """The rows of a pass of ascending slots: ROWS one behind the other, i64 on the CPU. Up to
    `size` the last sequence goes on with tokens 0, whose cache rows its next tokens overwrite. A
    slot without tokens has row 0 for its last.
    """
    num_tokens = sum(len(part.ids) for part in parts)
    assert size >= num_tokens, "a size holds its tokens"
    rows = torch.zeros(
        sum(row_lengths(size, num_slots)), dtype=torch.int64, device="cpu", pin_memory=pin_memory
    )
    ends = list(accumulate(row_lengths(size, num_slots)))[:-1]
    # by NumPy, of which an assignment takes a tenth of the time that one of torch takes
    tokens, positions, sequences, starts, last, last_positions = np.split(rows.numpy(), ends)
    tokens[:num_tokens] = array("q", chain.from_iterable(part.ids for part in parts))
    counts = [0] * num_slots
    row = 0
    last_positions[:] = parts[0].position
    for part in parts:
        count = len(part.ids) if part is not parts[-1] else size - row
        positions[row : row + count] = np.arange(part.position, part.position + count)
        sequences[row : row + count] = part.slot
        last[part.slot] = row + len(part.ids) - 1
        last_positions[part.slot] = part.stop - 1
        counts[part.slot] = count
        row += count
    starts[1:] = list(accumulate(counts))
    return rows
