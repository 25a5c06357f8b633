"""Which tokens of which prompts one pass of the model takes, without torch.

In: prompts by slot, a budget of tokens. Out: passes, each a list of Parts whose rows lie end to
end. A prompt that does not fit into what is left of a budget is cut there, and goes on in the next
pass: what came before is in its cache by then. Used by prefill.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the program of a pass is told of its rows; see build_decoder's `prompt`."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[int, ...]
    starts: tuple[int, ...]
    last: tuple[int, ...]
    last_positions: tuple[int, ...]


def pack_prompts(prompts: Mapping[int, Sequence[int]], budget: int) -> list[list[Part]]:
    """Passes of at most `budget` tokens, all but the last of as many; slots in ascending order."""
    passes: list[list[Part]] = []
    room = 0
    for slot, ids in sorted(prompts.items()):
        position = 0
        while position < len(ids):
            if not room:
                passes.append([])
                room = budget
            piece = tuple(ids[position : position + room])
            room -= len(piece)
            ends = position + len(piece) == len(ids)
            passes[-1].append(Part(slot=slot, position=position, ids=piece, ends=ends))
            position += len(piece)
    return passes


def lay_rows(parts: Sequence[Part], size: int, num_slots: int) -> Rows:
    """The rows of a pass of ascending slots. Up to `size` the last sequence goes on with tokens 0,
    whose cache rows its next tokens overwrite. A slot without tokens has row 0 for its last.
    """
    num_tokens = sum(len(part.ids) for part in parts)
    tokens = [token for part in parts for token in part.ids] + [0] * (size - num_tokens)
    positions: list[int] = []
    sequences: list[int] = []
    counts, last = [0] * num_slots, [0] * num_slots
    for part in parts:
        last[part.slot] = len(positions) + len(part.ids) - 1
        counts[part.slot] = len(part.ids)
        if part is parts[-1]:
            counts[part.slot] += size - num_tokens
        positions += range(part.position, part.position + counts[part.slot])
        sequences += [part.slot] * counts[part.slot]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return Rows(
        tokens=tuple(tokens),
        positions=tuple(positions),
        sequences=tuple(sequences),
        starts=tuple(starts),
        last=tuple(last),
        last_positions=tuple(positions[row] for row in last),
    )
