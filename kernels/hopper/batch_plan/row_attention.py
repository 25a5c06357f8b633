"""Instructions of attention of rows over rows of the same step, or over one cache that they share.

Next on the walk: ../batch/bodies/rows.py.
"""

from distmega.kernels.hopper.batch_plan.draft import FOREVER, BatchDraft
from distmega.kernels.hopper.batch_plan.proof import CHUNK
from distmega.kernels.hopper.batch_plan.results import keep_numbers, take_chunks
from distmega.kernels.hopper.batch_plan.types import Given, RowAttentionShape
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    NOTHING,
    BatchHeads,
    BatchInstruction,
    BatchRows,
    num_computed,
)
from distmega.kernels.hopper.plan.types import HEAD_DIMS, ITEM_BYTES, unfit
from distmega.kernels.hopper.plan.words import NO_WINDOW
from distmega.kernels.tasks.fuse import FusedRowAttention, HeadsOfRows

MASKS = "bool", "f32", "bf16", "f16"


def attended_rows(draft: BatchDraft) -> list[FusedRowAttention]:
    return [op for op in draft.fused if isinstance(op, FusedRowAttention)]


def row_attention_shape(draft: BatchDraft) -> RowAttentionShape | None:
    """What all attention over rows of the same step shares."""
    ops = attended_rows(draft)
    found = {
        RowAttentionShape(
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            softcap=op.softcap,
            cached=bool(op.k_cache),
            normed=op.q_norm is not None,
            rotated=bool(op.table),
            masked=any(each.mask for each in ops),
        )
        for op in ops
    }
    if len(found) > 1 or len({op.table for op in ops}) > 1:
        raise unfit("attention over rows of several shapes")
    return next(iter(found), None)


def add_given(draft: BatchDraft) -> None:
    """Room for what scores get, which the runner writes before each launch."""
    tensors = draft.segment.tensor_map()
    for op in attended_rows(draft):
        if op.mask and op.mask not in draft.given:
            tensor = tensors[op.mask]
            if tensor.role not in ("weight", "input") or tensor.dtype not in MASKS:
                raise unfit(
                    f"{op.name!r} with {op.mask!r}, a mask that is computed or whole numbers"
                )
            size = -(-tensor.num_elements // num_computed(draft.batch))
            first = computed_number(draft, keep_numbers(draft, -1, size, FOREVER))
            draft.given[op.mask] = Given(tensor=op.mask, first=first)


def computed_number(draft: BatchDraft, number: int) -> int:
    """A number of so many rows of 16 as the kernel computes them."""
    return number // BATCH * num_computed(draft.batch)


def add_row_attention(draft: BatchDraft, now: int, op: FusedRowAttention) -> None:
    """Heads that are to change or to be stored, then what rows see; all SMs share heads out."""
    if op.head_dim not in HEAD_DIMS:
        raise unfit(f"{op.name!r} with heads of {op.head_dim}")
    (src, num_rows), (k_src, k_rows), (v_src, v_rows) = (
        numbers_of(draft, op, one) for one in (op.q, op.k, op.v)
    )
    if op.prepares:
        heads = prepare_heads(draft, now, op)
        src, num_rows = heads.dst, op.num_heads * op.head_dim
        if op.k_cache:
            k_src, v_src = heads.k_dst, heads.v_dst
        else:
            k_src, k_rows = heads.k_dst, op.num_kv_heads * op.head_dim
        append(draft, heads)
    width, form = op.num_heads * op.head_dim, (op.out, None)
    dst = keep = NOTHING
    if draft.published(op.out)[1]:
        dst = CHUNK * take_chunks(draft, now, form, "attention", width)
    if op.out in draft.taken:
        number = keep_numbers(draft, now, width, draft.taken[op.out])
        draft.number_of[op.out] = number
        keep = computed_number(draft, number)
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
            num_keys=op.num_keys,
            dst=dst,
            keep=keep,
            scale=op.scale,
            sees=(op.window or NO_WINDOW) if op.causal else 0,
            mask=draft.given[op.mask].first if op.mask else NOTHING,
            head_step=head_step,
            row_step=row_step,
            key_step=key_step,
        ),
    )


def prepare_heads(draft: BatchDraft, now: int, op: FusedRowAttention) -> BatchHeads:
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
    )


def numbers_of(draft: BatchDraft, op: FusedRowAttention, heads: HeadsOfRows) -> tuple[int, int]:
    """The number that the first row's heads begin with, and how many a row has."""
    if heads.tensor not in draft.number_of:
        raise unfit(f"{op.name!r}, which takes {heads.tensor!r}, which no instruction gives")
    first = computed_number(draft, draft.number_of[heads.tensor]) + heads.first
    return first, draft.elements(heads.tensor)


def append(draft: BatchDraft, one: BatchInstruction) -> None:
    """The same instruction for all SMs."""
    for queue in draft.queues:
        queue.append(one)
