"""Instructions of attention of rows over rows of the same step, or over one cache that they share.

Next on the walk: ../batch/bodies/rows.py.
"""

import math

from distmega.kernels.hopper.batch_plan.draft import FOREVER, BatchDraft
from distmega.kernels.hopper.batch_plan.proof import CHUNK
from distmega.kernels.hopper.batch_plan.results import keep_numbers, take_chunks
from distmega.kernels.hopper.batch_plan.types import (
    Given,
    RowAttentionShape,
    RowAttentionShapes,
)
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    MAX_SHAPES,
    BatchHeads,
    BatchInstruction,
    BatchRows,
    num_computed,
)
from distmega.kernels.hopper.plan.types import HEAD_DIMS, ITEM_BYTES, unfit
from distmega.kernels.hopper.plan.words import NO_WINDOW, NOTHING
from distmega.kernels.tasks.fuse import FusedAttention, FusedRowAttention, HeadsOfRows
from distmega.program.types import packed_strides

GIVEN = "bool", "f32", "bf16", "f16"
"""Types of what the runner writes as numbers."""


def attended_rows(draft: BatchDraft) -> list[FusedRowAttention]:
    return [op for op in draft.fused if isinstance(op, FusedRowAttention)]


def row_attention_shapes(draft: BatchDraft) -> RowAttentionShapes:
    """Those of all attention of rows over rows, each once."""
    ops = attended_rows(draft)
    found = tuple(dict.fromkeys(map(shape_of, ops)))
    tables = {op.table for op in ops} | {op.table for op in cached_alone(draft)}
    if len(found) > MAX_SHAPES or len(tables - {""}) > 1:
        raise unfit(f"attention of {len(found)} shapes, rotated by {sorted(tables)}")
    return RowAttentionShapes(found)


def cached_alone(draft: BatchDraft) -> list[FusedAttention]:
    """Attention over a cache of each row."""
    return [op for op in draft.fused if isinstance(op, FusedAttention)]


def shape_of(op: FusedRowAttention) -> RowAttentionShape:
    """Its extents; rows and keys are constants of the kernel only where there are several
    sequences.
    """
    is_one = op.num_sequences == 1
    return RowAttentionShape(
        num_heads=op.num_heads,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        softcap=op.softcap,
        cached=bool(op.k_cache),
        normed=op.q_norm is not None,
        rotated=bool(op.table),
        masked=bool(op.mask),
        num_queries=0 if is_one else op.num_rows,
        num_keys=0 if is_one else op.num_keys,
        mask_step=0 if is_one else op.mask_step,
    )


def add_given(draft: BatchDraft) -> None:
    """Room for what the runner writes before each launch: rows besides those that come in, heads
    that no op makes, what scores get.
    """
    tensors = draft.segment.tensor_map()
    for name in draft.others:
        num = draft.elements(name)
        number = keep_numbers(draft, -1, num, FOREVER)
        draft.number_of[name], draft.taken[name] = number, FOREVER
        draft.given[name] = Given(
            tensor=name,
            first=computed_number(draft, number),
            extents=(draft.rows[name], num),
            steps=(num, 1),
            is_rows=True,
        )
    for op in attended_rows(draft):
        for heads in (op.q, op.k, op.v):
            if heads.steps is not None:
                rows = op.num_rows if heads is op.q else op.num_keys
                num = op.num_heads if heads is op.q else op.num_kv_heads
                extents = rows * op.num_sequences, num, op.head_dim
                give(draft, heads, heads.tensor, extents, (*heads.steps, 1), heads.first)
        if op.mask:
            tensor = tensors[op.mask]
            give(draft, op.mask, op.mask, tensor.shape, packed_strides(tensor.shape))


def give(
    draft: BatchDraft,
    key: object,
    name: str,
    extents: tuple[int, ...],
    steps: tuple[int, ...],
    behind: int = 0,
) -> None:
    """Room for elements of a tensor from number `behind` on; the same of the same key."""
    tensor = draft.segment.tensor_map()[name]
    if tensor.role == "temp" or tensor.dtype not in GIVEN:
        raise unfit(f"{name!r} of {tensor.dtype} that is {tensor.role}, where it is to be given")
    if key not in draft.given:
        size = -(-math.prod(extents) // num_computed(draft.batch))
        first = computed_number(draft, keep_numbers(draft, -1, size, FOREVER))
        draft.given[key] = Given(
            tensor=name, first=first, extents=extents, steps=steps, behind=behind
        )


def computed_number(draft: BatchDraft, number: int) -> int:
    """A number of so many rows of 16 as the kernel computes them."""
    return number // BATCH * num_computed(draft.batch)


def add_row_attention(draft: BatchDraft, now: int, op: FusedRowAttention) -> None:
    """Heads that are to change or to be stored, then what rows see; all SMs share heads out."""
    number = row_attention_shapes(draft).each.index(shape_of(op))
    if op.head_dim not in HEAD_DIMS:
        raise unfit(f"{op.name!r} with heads of {op.head_dim}")
    (src, num_rows), (k_src, k_rows), (v_src, v_rows) = (
        numbers_of(draft, op, one) for one in (op.q, op.k, op.v)
    )
    if op.prepares:
        heads = prepare_heads(draft, now, op, number)
        src, num_rows = heads.dst, op.num_heads * op.head_dim
        if op.k_cache:
            k_src, v_src = heads.k_dst, heads.v_dst
        else:
            k_src, k_rows = heads.k_dst, op.num_kv_heads * op.head_dim
        append(draft, heads)
    if op.k_cache and draft.rows.get(op.q.tensor, draft.batch) != draft.batch:
        raise unfit(f"{op.name!r} of fewer rows than {draft.batch} over a cache")
    width, form = op.num_heads * op.head_dim, (op.out, None)
    dst = keep = NOTHING
    if draft.published(op.out)[1]:
        dst = CHUNK * take_chunks(draft, now, form, "attention", width)
    if op.out in draft.taken:
        draft.number_of[op.out] = keep_numbers(draft, now, width, draft.taken[op.out])
        keep = computed_number(draft, draft.number_of[op.out])
    head_step, row_step, key_step = op.mask_steps
    append(
        draft,
        BatchRows(
            name=op.name,
            num_rows=num_rows,
            src=src,
            k_src=k_src,
            k_rows=k_rows,
            v_src=v_src,
            v_rows=v_rows,
            num_keys=op.num_sequences * op.num_keys,
            dst=dst,
            keep=keep,
            scale=op.scale,
            sees=(op.window or NO_WINDOW) if op.causal else 0,
            mask=draft.given[op.mask].first if op.mask else NOTHING,
            head_step=head_step,
            row_step=row_step,
            key_step=key_step,
            shape=number,
        ),
    )


def prepare_heads(draft: BatchDraft, now: int, op: FusedRowAttention, number: int) -> BatchHeads:
    """Heads after norms and rotations, in numbers of their own, and those that a cache gets."""
    (src, num_rows), (k_src, k_rows), (v_src, v_rows) = (
        numbers_of(draft, op, one) for one in (op.q, op.k, op.v)
    )
    sizes = op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim
    dst = computed_number(draft, keep_numbers(draft, now, sizes[0], now))
    if op.k_cache:
        row_bytes = op.head_dim * ITEM_BYTES
        tensors = draft.segment.tensor_map()
        for name in (op.k_cache, op.v_cache):
            if draft.states.offset(name) % row_bytes or tensors[name].dtype != "bf16":
                found = f"{op.name!r} with cache {name!r} of {tensors[name].dtype}"
                raise unfit(f"{found}, or between rows of {row_bytes} bytes")
        k_dst, v_dst = (draft.states.offset(name) // row_bytes for name in (op.k_cache, op.v_cache))
    else:
        k_dst, v_dst = computed_number(draft, keep_numbers(draft, now, sizes[1], now)), NOTHING
    return BatchHeads(
        name=op.name,
        num_rows=num_rows,
        src=src,
        k_src=k_src,
        k_rows=k_rows,
        v_src=v_src,
        v_rows=v_rows,
        num_keys=op.num_keys,
        dst=dst,
        k_dst=k_dst,
        v_dst=v_dst,
        q_norm=draft.placed.vector(op.q_norm.weight) if op.q_norm else NOTHING,
        k_norm=draft.placed.vector(op.k_norm.weight) if op.k_norm else NOTHING,
        shape=number,
    )


def numbers_of(draft: BatchDraft, op: FusedRowAttention, heads: HeadsOfRows) -> tuple[int, int]:
    """The number that the first row's heads begin with, and how many a row has."""
    if heads.steps is not None:
        num = op.num_heads if heads is op.q else op.num_kv_heads
        return draft.given[heads].first, num * op.head_dim
    if heads.tensor not in draft.number_of:
        raise unfit(f"{op.name!r}, which takes {heads.tensor!r}, which no instruction gives")
    first = computed_number(draft, draft.number_of[heads.tensor]) + heads.first
    return first, draft.elements(heads.tensor)


def append(draft: BatchDraft, one: BatchInstruction) -> None:
    """The same instruction for all SMs."""
    for queue in draft.queues:
        queue.append(one)
