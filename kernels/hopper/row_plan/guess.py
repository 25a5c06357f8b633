"""Guesses of experts: which a row is likely to go to, before attention has changed it.

In: fused ops. Out: the same with, of each choice of experts, the scores of the row that attention
starts from, and a FusedGuess behind attention. SMs ask the second-level cache for their tiles of
experts that are guessed; the choice itself, and so every result, is made as without. Torch-free.
Next on the walk: queues.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distmega.kernels.hopper.plan.types import ITEM_BYTES, ExpertShape, WeightMatrix
from distmega.kernels.hopper.plan.words import (
    EXPERT_ROWS,
    PAIRED,
    UNIT_ROWS,
    VECTOR_MULTIPLE,
    RowGuess,
    RowLinear,
)
from distmega.kernels.tasks.fuse import Fused, FusedContraction, FusedRouting

GUESS_BYTES = 192 * 1024
"""Bytes of tiles that an SM asks for, at most: 132 of them 25 MB, half of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGuess:
    """Tiles of the experts with the largest of these scores, as `routing` would choose."""

    name: str
    scores: str
    routing: FusedRouting


RowFused = Fused | FusedGuess


def add_guesses(fused: Sequence[Fused]) -> tuple[RowFused, ...]:
    """Guesses of all choices whose scores are of a sum x = r + product, where an op in front of the
    product takes r too: scores of r follow that op, the guess stands in front of the product.
    """
    made = {out: op for op in fused if isinstance(op, FusedContraction) for out in op.outs}
    behind: dict[str, FusedContraction] = {}
    before: dict[str, FusedGuess] = {}
    for op in fused:
        scores = made.get(op.scores) if isinstance(op, FusedRouting) else None
        last = made.get(scores.x) if scores else None
        if not isinstance(op, FusedRouting) or scores is None or last is None:
            continue
        if len(last.operands) != 1 or scores.normed or scores.operands:
            continue
        between = fused[fused.index(last) : fused.index(op)]
        if any(isinstance(one, FusedContraction) and one.experts for one in between):
            continue  # slots are still those of the choice before
        users = [
            one
            for one in fused[: fused.index(last)]
            if isinstance(one, FusedContraction) and one.x == last.operands[0]
        ]
        if users and fused.index(users[0]) + 1 < fused.index(last):
            name = f"{scores.name} guessed"
            behind[users[0].name] = replace(
                scores, name=name, x=last.operands[0], outs=(f"{scores.outs[0]} guessed",)
            )
            before[last.name] = FusedGuess(
                name=f"{op.name} guessed", scores=f"{scores.outs[0]} guessed", routing=op
            )
    found: list[RowFused] = []
    for op in fused:
        if op.name in before and isinstance(op, FusedContraction):
            found.append(before[op.name])
        found.append(op)
        if op.name in behind and isinstance(op, FusedContraction):
            found.append(behind[op.name])
    return tuple(found)


def guess_of(
    guess: RowGuess,
    linears: Sequence[tuple[RowLinear, WeightMatrix]],
    shape: ExpertShape,
) -> RowGuess:
    """The instruction with what an SM asks for: tiles of its linears of experts, each with its
    matrix, first those with rows of experts, within GUESS_BYTES.
    """
    left = GUESS_BYTES
    for one, matrix in linears:
        size = UNIT_ROWS * matrix.columns * ITEM_BYTES
        at, rest = divmod(matrix.offset, ITEM_BYTES * VECTOR_MULTIPLE)
        assert not rest, "matrices are aligned"
        if one.flags & EXPERT_ROWS:
            units = min(one.num_units, left // size)
            left -= units * size
            guess = replace(
                guess, weight_row=one.weight_row, pair_row=one.pair_row, row0=one.row0,
                num_units=units, columns=matrix.columns, first_at=at,
                paired=int(bool(one.flags & PAIRED)),
            )  # fmt: skip
        else:
            rows = min(one.num_units * UNIT_ROWS, one.num_rows - one.row0)
            units = min(-(-rows // UNIT_ROWS), left // (size * shape.num_chosen))
            left -= units * size * shape.num_chosen
            guess = replace(
                guess, last_row=one.weight_row, last_rows=min(rows, units * UNIT_ROWS),
                num_rows=one.num_rows, last_columns=matrix.columns, last_at=at,
            )  # fmt: skip
    return guess
