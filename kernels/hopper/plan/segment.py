"""What the ops of a segment must agree on, which both kernels are specialised for.

In: a segment and its fused ops. Out: its `Agreement`: ranks, the rows that come in, the choice of a
token, extents of attention, eps. UnsupportedError where ops differ. Next on the walk: queues.py.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from distmega.kernels.hopper.plan.types import AttentionShape, unfit
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    attention_extents,
    norms_of,
)
from distmega.program.types import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """num_ranks: of the team. embedding: what looks up the rows that come in, if something does;
    entry: their tensor, `rows` rows. choice: how a token is chosen from the last op's result.
    attention: what all attention ops share; eps: of all norms, 0.0 without one.
    """

    num_ranks: int
    embedding: FusedEmbedding | None
    entry: str
    rows: int
    choice: FusedChoice | None
    attention: AttentionShape | None
    eps: float


def find_agreement(
    segment: Program, fused: Sequence[Fused], *, max_rows: int, head_dims: Container[int]
) -> Agreement:
    """What all ops share. max_rows, head_dims: what the kernel takes."""
    embedding, entry = _find_entry(segment, fused)
    rows = math.prod(segment.tensor_map()[entry].shape[:-1])
    if not 1 <= rows <= max_rows:
        raise unfit(f"{rows} tokens")
    choice = _find_choice(fused)
    return Agreement(
        num_ranks=_team_size(fused),
        embedding=embedding,
        entry=entry,
        rows=rows,
        choice=choice,
        attention=_attention_shape(segment, fused, choice, rows, head_dims),
        eps=_eps(fused),
    )


def _team_size(fused: Sequence[Fused]) -> int:
    """Ranks that share ops, 1 where none do."""
    teams = {getattr(op, "num_ranks", 1) for op in fused} - {1}
    if len(teams) > 1:
        raise unfit(f"parts that {sorted(teams)} ranks share")
    return max(teams, default=1)


def _find_entry(segment: Program, fused: Sequence[Fused]) -> tuple[FusedEmbedding | None, str]:
    """The embedding, and what it gives; or the one input that contractions take."""
    tables = [op for op in fused if isinstance(op, FusedEmbedding)]
    given = {tensor.name for tensor in segment.with_role("input")}
    taken = {
        name for op in fused if isinstance(op, FusedContraction) for name in (op.x, *op.operands)
    }
    entries = [tensor for tensor in segment.tensors if tensor.name in taken & given]
    if len(tables) + len(entries) != 1:
        names = [tensor.name for tensor in entries]
        raise unfit(f"{len(tables)} embeddings and inputs {names} instead of one of them")
    if entries and entries[0].dtype != "bf16":
        raise unfit(f"input {entries[0].name!r} of {entries[0].dtype}")
    return (tables[0], tables[0].out) if tables else (None, entries[0].name)


def _find_choice(fused: Sequence[Fused]) -> FusedChoice | None:
    """The choice of a token, which is the last op."""
    choices = [op for op in fused if isinstance(op, FusedChoice)]
    if len(choices) > 1 or (choices and fused[-1] is not choices[0]):
        raise unfit("choices of tokens before other ops")
    return choices[0] if choices else None


def _attention_shape(
    segment: Program,
    fused: Sequence[Fused],
    choice: FusedChoice | None,
    num_rows: int,
    head_dims: Container[int],
) -> AttentionShape | None:
    """Extents of the attention ops, which all have the same, rotated by one table, at the same
    positions as a sample.
    """
    tensors = segment.tensor_map()
    ops = [op for op in fused if isinstance(op, FusedAttention)]
    found: set[AttentionShape] = set()
    for op in ops:
        rows, num_kv_heads, group, head_dim = attention_extents(op, tensors)
        if rows != num_rows or head_dim not in head_dims or op.window < 0:
            raise unfit(f"{rows} tokens, heads of {head_dim}")
        found.add(
            AttentionShape(
                num_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                max_context=tensors[op.k_cache].shape[-2],
                qk_norm=op.q_norm is not None,
                rotated=bool(op.table),
                scale=op.scale,
            )
        )
    tables, positions = {op.table for op in ops}, {op.positions for op in ops}
    if choice and choice.sampler and ops:
        positions.add(choice.sampler.positions)
    if len(found) > 1 or len(tables) > 1 or len(positions) > 1:
        names = sorted(tables | positions)
        raise unfit(f"attention of several shapes, or by or at several of {names}")
    return found.pop() if found else None


def _eps(fused: Sequence[Fused]) -> float:
    """Of all norms."""
    found = {norm.eps for op in fused for norm in norms_of(op)}
    if len(found) > 1:
        raise unfit(f"norms with eps {sorted(found)}")
    return found.pop() if found else 0.0
