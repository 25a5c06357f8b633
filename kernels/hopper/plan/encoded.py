"""What a launch takes of the queues of one row, and queues whose instructions are made when they
are asked for: a new process reads words from disk and needs instructions to explain itself alone.

In: RowQueues. Out: EncodedQueues, which can be kept without the queues, and RowQueues of these
again. `pack_queues` makes words of the queues of more rows too. Used by kernels/runners.py, both
runner.py and both emulators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import (
    UNIT_ROWS,
    WORDS,
    Instruction,
    RowLinear,
    RowPointwise,
    pack,
)

Queue = tuple[Instruction, ...]
Packed = TypeVar("Packed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedQueues:
    """words: int32 [num_sms, longest queue, WORDS], lengths: int32 [num_sms]. linear_flags: those
    that some RowLinear has. most_rows: of pointwise work that an SM does at once, 0 without any.
    """

    words: NDArray[np.int32]
    lengths: NDArray[np.int32]
    linear_flags: int
    most_rows: int
    has_barriers: bool


class LateQueues(Sequence[Queue]):
    """Instructions of every SM, planned again when one is looked at."""

    def __init__(self, encoded: EncodedQueues, plan: Callable[[], RowQueues]) -> None:
        self.encoded, self._plan = encoded, plan
        self._found: Sequence[Queue] | None = None

    def __len__(self) -> int:
        return len(self.encoded.lengths)

    @overload
    def __getitem__(self, at: int) -> Queue: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Queue]: ...
    def __getitem__(self, at: int | slice) -> Queue | Sequence[Queue]:
        if self._found is None:
            self._found = self._plan().queues
        return self._found[at]


def pack_queues(
    queues: Sequence[Sequence[Packed]], pack_one: Callable[[Packed], Sequence[int]]
) -> NDArray[np.int32]:
    """What a kernel reads of the queues of all SMs, int32 [num_sms, longest queue, WORDS], zeros
    behind shorter ones. pack_one: the words of an instruction.
    """
    words = np.zeros((len(queues), max(map(len, queues)), WORDS), np.int32)
    for sm, queue in enumerate(queues):
        if queue:
            words[sm, : len(queue)] = [*map(pack_one, queue)]
    return words


def encode_queues(queues: RowQueues) -> EncodedQueues:
    """What a launch takes of them."""
    if isinstance(queues.queues, LateQueues):
        return queues.queues.encoded
    flags = most_rows = 0
    for one in chain.from_iterable(queues.queues):
        if isinstance(one, RowLinear):
            flags |= one.flags
        elif isinstance(one, RowPointwise):
            most_rows = max(most_rows, one.num_units * UNIT_ROWS)
    return EncodedQueues(
        words=pack_queues(queues.queues, pack),
        lengths=np.array([*map(len, queues.queues)], np.int32),
        linear_flags=flags,
        most_rows=most_rows,
        has_barriers=queues.has_barriers,
    )


def fold_queues(queues: RowQueues) -> tuple[RowQueues, EncodedQueues]:
    """Queues without their instructions, and what a launch takes of these."""
    return replace(queues, queues=()), encode_queues(queues)


def unfold_queues(
    folded: tuple[RowQueues, EncodedQueues], plan: Callable[[], RowQueues]
) -> RowQueues:
    """The queues that fold_queues was given. plan: makes them anew."""
    queues, encoded = folded
    return replace(queues, queues=LateQueues(encoded, plan))
