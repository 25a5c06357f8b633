"""Instructions of attention: splits of the cached positions, then a sum a query head.

Next on the walk: ../one_row/bodies/attention.py.
"""

from collections.abc import Sequence
from itertools import product

from distmega.kernels.hopper.plan.types import ITEM_BYTES, AttentionShape, unfit
from distmega.kernels.hopper.plan.words import (
    MAX_SPLITS,
    NO_WINDOW,
    NOTHING,
    ROW_PARTIAL_EXTRA,
    RowAttention,
    RowCombine,
)
from distmega.kernels.hopper.row_plan.draft import Made, RowDraft
from distmega.kernels.tasks.fuse import FusedAttention


def add_attention(draft: RowDraft, nth: int, op: FusedAttention) -> None:
    """Splits of each kv head's queries, then a sum a query head, on the lightest SMs."""
    s = draft.attention
    assert s is not None
    at = find_sources(draft, s, op)
    kind, generation = draft.turn(draft.classes[nth])
    sources = {draft.made[draft.storage(name)].generation for name in (op.q, op.k, op.v)}
    if sources != {generation}:
        raise unfit(f"{op.name!r}, which is not of the generation of its queries")
    words = s.num_heads * max_splits(draft) * (s.head_dim + ROW_PARTIAL_EXTRA)
    partial = draft.reserve(f"partial {kind}", words)
    dst = draft.reserve(kind, s.num_heads * s.head_dim // 2)
    draft.made[op.out] = Made(dst, generation, s.num_heads * s.head_dim, 0, NOTHING)
    add_splits(draft, s, op, generation, at, partial)
    add_sums(draft, s, op, generation, partial, dst)


def find_sources(draft: RowDraft, s: AttentionShape, op: FusedAttention) -> list[int]:
    """First words of queries, keys and values. UnsupportedError where no op publishes them, or they
    lie otherwise than those of other attention.
    """
    at = [draft.first_word(name) for name in (op.q, op.k, op.v)]
    sizes = (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim)
    if draft.storage(op.q) not in draft.made or -1 in at:
        raise unfit(f"{op.name!r}, whose queries, keys and values no op publishes")
    if not s.apart and at != [at[0], at[0] + sizes[0], at[0] + sizes[0] + sizes[1]]:
        raise unfit(f"{op.name!r}, whose queries, keys and values lie apart, others do not")
    return at


def add_splits(
    draft: RowDraft,
    s: AttentionShape,
    op: FusedAttention,
    generation: int,
    at: Sequence[int],
    partial: int,
) -> None:
    """A part of the cached positions for each kv head, or a part of its queries: outputs, maxima
    and sums go to words from `partial` on.
    """
    splits = max_splits(draft)
    q_norm = draft.placed.vector(op.q_norm.weight) if op.q_norm else NOTHING
    k_norm = draft.placed.vector(op.k_norm.weight) if op.k_norm else NOTHING
    table = draft.placed.table(op.bias, "f32") if op.bias else 0
    tasks = product(range(splits), range(s.num_kv_heads), range(s.num_parts))
    for number, (split, head, part) in enumerate(tasks):
        draft.queues[draft.lightest[number % draft.num_sms]].append(
            RowAttention(
                name=op.name,
                generation=generation,
                k_row=cache_row(draft, op.k_cache, head),
                v_row=cache_row(draft, op.v_cache, head),
                head=head,
                query0=s.first_query(head, part),
                window=op.window or NO_WINDOW,
                split=split,
                max_splits=splits,
                src=at[0],
                k_src=at[1],
                v_src=at[2],
                partial=partial,
                q_norm=q_norm,
                k_norm=k_norm,
                table=table,
            )
        )


def add_sums(
    draft: RowDraft, s: AttentionShape, op: FusedAttention, generation: int, partial: int, dst: int
) -> None:
    """What each query head is of all splits, from word `dst` on."""
    for head in range(s.num_heads):
        sm = draft.lightest[-1 - head % draft.num_sms]
        draft.queues[sm].append(
            RowCombine(
                name=op.name,
                generation=generation,
                head=head,
                window=op.window or NO_WINDOW,
                max_splits=max_splits(draft),
                partial=partial,
                dst=dst,
            )
        )


def max_splits(draft: RowDraft) -> int:
    """Parts of a cache, at most: as many as give no SM a second one."""
    assert draft.attention is not None
    num_tasks = draft.attention.num_kv_heads * draft.attention.num_parts
    return max(1, min(MAX_SPLITS, draft.num_sms // num_tasks))


def cache_row(draft: RowDraft, name: str, head: int) -> int:
    """Where a head of a cache begins, in rows of a head's elements from the arena's start."""
    assert draft.attention is not None
    row_bytes = draft.attention.head_dim * ITEM_BYTES
    row, rest = divmod(draft.states.offset(name), row_bytes)
    if rest:
        raise unfit(f"cache {name!r} between rows of {row_bytes} bytes")
    return row + head * draft.attention.max_context
