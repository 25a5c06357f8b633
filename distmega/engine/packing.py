"""Which tokens of which prompts one pass of the model takes, and the inputs that say so.

In: prompts by slot, a budget of tokens. Out: passes, each a list of Parts whose rows lie end to
end. A prompt that does not fit into what is left of a budget is cut there, and goes on in the next
pass: what came before is in its cache by then. Used by prefill.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from distmega.engine.calls import Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptPart:
    """Tokens `ids` of the sequence in `slot`, at positions `position` and on. ends: they are the
    prompt's last.
    """

    slot: int
    position: int
    ids: Tokens | Sequence[int]
    ends: bool

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.position + len(self.ids)


ROWS = ("tokens", "positions", "sequences", "starts", "last", "last_positions")
"""Inputs that say what a pass's rows are, as lay_rows orders them; see build_decoder's `prompt`."""


def pack_prompts(
    prompts: Mapping[int, Tokens | Sequence[int]], budget: int
) -> list[list[PromptPart]]:
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


def keys_a_row(parts: Sequence[PromptPart]) -> float:
    """Positions that a pass's tokens see on average, up to the end of their part: of whole prompts
    of one length, that length.
    """
    num_tokens = sum(len(part.ids) for part in parts)
    return sum(len(part.ids) * part.stop for part in parts) / num_tokens


def row_lengths(size: int, num_slots: int) -> tuple[int, ...]:
    """Elements of each of ROWS."""
    return size, size, size, num_slots + 1, num_slots, num_slots


def new_rows(size: int, num_slots: int, *, pin_memory: bool = False) -> Tensor:
    """Memory on the CPU for what lay_rows writes."""
    num_elements = sum(row_lengths(size, num_slots))
    return torch.empty(num_elements, dtype=torch.int64, device="cpu", pin_memory=pin_memory)


def lay_rows(parts: Sequence[PromptPart], size: int, num_slots: int, rows: Tensor) -> Tensor:
    """Writes the rows of a pass of ascending slots into `rows`, new_rows of as many: ROWS one
    behind the other, i64. Up to `size` the last sequence goes on with tokens 0, whose cache rows
    its next tokens overwrite. A slot without tokens has row 0 for its last.
    """
    num_tokens = sum(len(part.ids) for part in parts)
    assert size >= num_tokens, "a size holds its tokens"
    # by NumPy, of which an assignment takes a tenth of the time that one of torch takes
    numbers, bounds = rows.numpy(), accumulate(row_lengths(size, num_slots), initial=0)
    tokens, positions, sequences, starts, last, last_positions = (
        numbers[start:stop] for start, stop in pairwise(bounds)
    )
    tokens[num_tokens:] = starts[0] = last[:] = 0
    counts = [0] * num_slots
    row = 0
    last_positions[:] = parts[0].position
    for part in parts:
        num_ids = len(part.ids)
        count = num_ids if part is not parts[-1] else size - row
        tokens[row : row + num_ids] = part.ids
        positions[row : row + count] = np.arange(part.position, part.position + count)
        sequences[row : row + count] = part.slot
        last[part.slot] = row + num_ids - 1
        last_positions[part.slot] = part.stop - 1
        counts[part.slot] = count
        row += count
    starts[1:] = list(accumulate(counts))
    return rows
