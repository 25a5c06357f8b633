"""Instructions of attention: splits of the cached positions, then a sum a query head.

Next on the walk: ../one_row/bodies/attention.py.
"""

from itertools import product

from distmega.kernels.hopper.plan.types import ITEM_BYTES, unfit
from distmega.kernels.hopper.plan.words import (
    MAX_SPLITS,
    NO_WINDOW,
    NOTHING,
    PARTIAL_EXTRA,
    RowAttention,
    RowCombine,
)
from distmega.kernels.hopper.row_plan.draft import Made, RowDraft
from distmega.kernels.tasks.fuse import FusedAttention


def add_attention(draft: RowDraft, nth: int, op: FusedAttention) -> None:
    """Splits of each kv head's queries, then a sum a query head, on the lightest SMs."""
    s = draft.attention
    assert s is not None
    source = draft.made.get(draft.storage(op.q))
    at = [draft.first_word(name) for name in (op.q, op.k, op.v)]
    sizes = (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim)
    if source is None or -1 in at:
        raise unfit(f"{op.name!r}, whose queries, keys and values no op publishes")
    if not s.apart and at != [at[0], at[0] + sizes[0], at[0] + sizes[0] + sizes[1]]:
        raise unfit(f"{op.name!r}, whose queries, keys and values lie apart, others do not")
    kind, generation = draft.turn(draft.classes[nth])
    sources = {draft.made[draft.storage(name)].generation for name in (op.q, op.k, op.v)}
    if sources != {generation}:
        raise unfit(f"{op.name!r}, which is not of the generation of its queries")
    splits = max_splits(draft)
    words = s.num_heads * splits * (s.head_dim + PARTIAL_EXTRA)
    partial = draft.reserve(f"partial {kind}", words)
    dst = draft.reserve(kind, s.num_heads * s.head_dim // 2)
    draft.made[op.out] = Made(dst, generation, s.num_heads * s.head_dim, 0, NOTHING)
    window = op.window or NO_WINDOW
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
                window=window,
                split=split,
                max_splits=splits,
                src=at[0],
                k_src=at[1],
                v_src=at[2],
                partial=partial,
                q_norm=draft.placed.vector(op.q_norm.weight) if op.q_norm else NOTHING,
                k_norm=draft.placed.vector(op.k_norm.weight) if op.k_norm else NOTHING,
                table=draft.placed.table(op.bias, "f32") if op.bias else 0,
            )
        )
    for head in range(s.num_heads):
        sm = draft.lightest[-1 - head % draft.num_sms]
        draft.queues[sm].append(
            RowCombine(
                name=op.name,
                generation=generation,
                head=head,
                window=window,
                max_splits=splits,
                partial=partial,
                dst=dst,
            )
        )


def max_splits(draft: RowDraft) -> int:
    assert draft.attention is not None
    num_tasks = draft.attention.num_kv_heads * draft.attention.num_parts
    return max(1, min(MAX_SPLITS, draft.num_sms // num_tasks))


def cache_row(draft: RowDraft, name: str, head: int) -> int:
    assert draft.attention is not None
    row_bytes = draft.attention.head_dim * ITEM_BYTES
    row, rest = divmod(draft.states.offset(name), row_bytes)
    if rest:
        raise unfit(f"cache {name!r} between rows of {row_bytes} bytes")
    return row + head * draft.attention.max_context
