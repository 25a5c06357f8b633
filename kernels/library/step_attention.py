"""Attention of one row of each sequence, and what is done to heads before it, in one launch, for
Hopper.

In: q, k and v of a row of each sequence, as parts of a matmul's result have them; norms of heads,
the table of angles, caches, positions on the device. Out: a new tensor, and the row's keys and
values in the caches. A program has a kv head of a sequence, or a part of the positions before the
row's own. Rows of the caches at these were written by earlier steps, so in a run that begins when
those are done (hostir/run/early_reads.py) it asks for the first of them before it waits for the
kernel in front of it; the row's own key it makes itself. Results are those of heads.py and
row_attention.py; row_attention.py's second kernel adds up parts. What the kernel does not take,
these two do, one after the other. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from distmega.hostir.library.heads import StepHeads, attend_in_turn
from distmega.hostir.run.early_reads import reads_states_early
from distmega.kernels.gluon_compat import cta_barrier, tma_load
from distmega.kernels.library.heads import heads_at_once, move_heads
from distmega.kernels.library.row_attention import (
    DTYPES,
    PROGRAMS_A_SM,
    add_parts,
    attend_each,
    choose_keys,
    choose_parts,
    empty_parts,
    num_programs,
)
from distmega.kernels.library.score_caps import cap_scores, score_factors
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper
from distmega.kernels.runtime.mbarriers import make_barriers
from distmega.kernels.runtime.memory import has_tma_rows

ROWS = gl.constexpr(16)
"""Of a product: query heads of a kv head, and rows of zeros."""
WARPS = gl.constexpr(4)
LEAST_STAGES, MOST_STAGES = 3, 8
"""Blocks of keys and values that a program has room for."""
SM_BYTES = 227 * 1024
"""Of shared memory that an SM's programs have."""
OTHER_BYTES = 5 * 1024 + 512
"""Of those, what a program needs besides its blocks."""
DIMS = (64, 128, 256)
MOST_ELEMENTS = 2**31
"""Of q, k or v of a sequence, and rows of all caches: places in them are 32-bit numbers."""
NUMBERS = ("num_angles", "context", "window", "num_parts")
"""Arguments that one compiled kernel takes at any value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What the kernel is specialised for.

    group: query heads that share keys, up to 16. dim: of a head. num_keys: of a block. vector:
    elements of a head that a thread of heads.py's kernel has side by side. windowed: a row sees no
    more than `window` positions. capped: scores have a cap. alone: a program has all positions.
    """

    group: int
    dim: int
    num_keys: int
    vector: int
    windowed: bool
    capped: bool
    alone: bool
    early: bool
    stages: int = LEAST_STAGES


def choose_stages(programs: int, num_sms: int, block_bytes: int) -> int:
    """Blocks in a program's ring, where each SM has an equal share of the programs at once: no SM
    has room for more then, on which programs would gather that start while others are still busy.
    """
    share_bytes = SM_BYTES // -(-programs // num_sms)
    stages = (share_bytes - OTHER_BYTES) // block_bytes
    return min(MOST_STAGES, max(LEAST_STAGES, stages))


@triton.constexpr_function
def head_layout(dim, vector):
    """Of halves of heads: Triton's for heads.py's kernel, so that its sums come out the same."""
    lanes = min(32, dim // 2 // vector)
    warps = min(WARPS.value, dim // 2 // vector // lanes)
    others = WARPS.value // warps
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [others, warps], [1, 0])


@gluon.jit
def load_block(number, first, cache, keys, values, key_slots, value_slots, ready, pred,
               spec: gl.constexpr):  # fmt: skip
    """Block `number` of a program's, from position `first` on, into its slots, under way where
    `pred`. cache: row of position 0.
    """
    slot = number % spec.stages
    row = cache + first + number * spec.num_keys
    bar = ready.index(slot)
    mbarrier.expect(bar, 4 * spec.num_keys * spec.dim, pred=pred)
    tma_load(keys, [row, 0], bar, key_slots.index(slot), pred=pred)
    tma_load(values, [row, 0], bar, value_slots.index(slot), pred=pred)


@gluon.jit
def load_halves(first, at, mask, other, spec: gl.constexpr):
    """Elements `at` of the left half of what lies there, and of its right one."""
    left = gl.load(first + at, mask=mask, other=other)
    return left, gl.load(first + spec.dim // 2 + at, mask=mask, other=other)


@gluon.jit
def shape_heads(halves, weights, angles, eps, dtype: gl.constexpr, spec: gl.constexpr):
    """Two halves of heads, normed by a weight's halves and turned by cosines and sines, if there
    are these, of `dtype`: the operations of heads.py in their order.
    """
    left, right = halves[0].to(gl.float32), halves[1].to(gl.float32)
    if weights is not None:
        squares = gl.expand_dims(gl.sum(left * left + right * right, 1), 1)
        scale = gl.rsqrt(squares / spec.dim + eps)
        left *= scale * weights[0].to(gl.float32)
        right *= scale * weights[1].to(gl.float32)
    if angles is not None:
        cos, sin = angles
        turned = left * cos - right * sin
        right = right * cos + left * sin
        left = turned
    return left.to(dtype), right.to(dtype)


@gluon.jit
def join_halves(left, right, dim: gl.constexpr):
    """[rows, dim] of two halves of them."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, dim])


@gluon.jit
def scale_scores(products, scale, cap, spec: gl.constexpr):
    """Scores in powers of two."""
    scores = products * scale
    if spec.capped:
        scores = cap_scores(scores, cap)
    return scores


@gluon.jit(do_not_specialize=NUMBERS)
def attend_appended_part(q, k, v, q_weight, k_weight, keys, values, k_cache, v_cache, out, maxima,
                         sums, positions, table, num_angles, q_strides, k_strides, v_strides,
                         context, eps, scale, window, cap, num_parts,
                         spec: gl.constexpr):  # fmt: skip
    """Part program_id(2) of what kv head program_id(0) of sequence program_id(1) sees.

    q [sequences, kv heads, group, dim], k, v [sequences, kv heads, dim], of a half type: of this
    step; q_strides, k_strides, v_strides: in elements, but that of the last dim, which is 1.
    q_weight, k_weight [dim], of norms of their heads, or None; eps: of these. table: f32
    [num_angles, dim], cosines, then sines, or None; a row at a position without angles becomes NaN.
    k_cache, v_cache: [sequences, kv heads, context, dim], contiguous; keys, values: descriptors of
    them as rows of dim, in blocks of num_keys. positions: integers [sequences]. scale, cap: of
    score_factors. window: positions that a row sees, its own too. out: [sequences, kv heads, group,
    dim], of q's type, where a part is `alone`; else f32 with `num_parts` in front, as maxima and
    sums have it, f32 [num_parts, sequences, kv heads, group]. spec: StepSpec. All in local memory;
    out, maxima, sums, and the caches at these positions are written. A row at a position that its
    cache does not have appends nothing.
    """
    dtype: gl.constexpr = k_cache.dtype.element_ty
    dim: gl.constexpr = spec.dim
    num_keys: gl.constexpr = spec.num_keys
    stages: gl.constexpr = spec.stages
    head = gl.program_id(0)
    sequence = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    kv_heads = gl.num_programs(0)
    if not spec.early:
        gdc_launch_dependents()
        gdc_wait()
    # past the first-level cache, which may hold what an earlier step's position was
    position = gl.load(positions + sequence, cache_modifier=".cg").to(gl.int64)
    own = (position >= 0) & (position < context) & (part == num_parts - 1)
    end = gl.minimum(gl.maximum(position, 0), context).to(gl.int32)
    lowest = 0
    if spec.windowed:
        lowest = gl.minimum(gl.maximum(position + 1 - window, 0), end).to(gl.int32)
    start = lowest // num_keys * num_keys
    blocks = (end - start + num_keys - 1) // num_keys
    share = (blocks + num_parts - 1) // num_parts
    first = start + part * share * num_keys
    count = gl.minimum(share, gl.maximum(blocks - part * share, 0))

    key_slots = gl.allocate_shared_memory(dtype, [stages, num_keys, dim], keys.layout)
    value_slots = gl.allocate_shared_memory(dtype, [stages, num_keys, dim], values.layout)
    ready = make_barriers(stages)
    cache = (sequence.to(gl.int32) * kv_heads + head) * context
    for number in gl.static_range(stages):
        load_block(number, first, cache, keys, values, key_slots, value_slots, ready,
                   number < count, spec)  # fmt: skip
    if spec.early:
        gdc_launch_dependents()
        gdc_wait()

    halves: gl.constexpr = head_layout(dim, spec.vector)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    left_operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    line = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, halves)), 1)
    at = gl.expand_dims(gl.arange(0, dim // 2, layout=gl.SliceLayout(0, halves)), 0)
    column = gl.arange(0, dim, layout=gl.SliceLayout(0, mma))
    there = at >= 0
    # all that is read of this step is under way before anything is done to it
    q_first = q + sequence * q_strides[0] + head * q_strides[1] + line * q_strides[2]
    q_halves = load_halves(q_first, at, (line < spec.group) & there, 0.0, spec)
    k_halves = load_halves(k + sequence * k_strides[0] + head * k_strides[1], at, there, 0.0, spec)
    value = gl.load(v + sequence * v_strides[0] + head * v_strides[1] + column)
    q_weights = None
    if q_weight is not None:
        q_weights = load_halves(q_weight, at, there, 0.0, spec)
    k_weights = None
    if k_weight is not None:
        k_weights = load_halves(k_weight, at, there, 0.0, spec)
    angles = None
    if table is not None:
        has_angles = there & (position >= 0) & (position < num_angles)
        angles = load_halves(table + position * dim, at, has_angles, float("nan"), spec)
    k_left, k_right = shape_heads(k_halves, k_weights, angles, eps, dtype, spec)
    q_left, q_right = shape_heads(q_halves, q_weights, angles, eps, dtype, spec)
    spot = (cache + position) * dim
    gl.store(k_cache + spot + at, k_left, mask=own & there)
    gl.store(k_cache + spot + dim // 2 + at, k_right, mask=own & there)
    gl.store(v_cache + spot + column, value, mask=own & (column >= 0))

    query = gl.convert_layout(join_halves(q_left, q_right, dim), left_operand)
    product = gl.sum(q_left.to(gl.float32) * k_left.to(gl.float32)
                     + q_right.to(gl.float32) * k_right.to(gl.float32), 1)  # fmt: skip
    score = gl.convert_layout(scale_scores(product, scale, cap, spec), row_layout)
    most = gl.where(own, score, float("-inf"))
    number = gl.arange(0, num_keys, layout=gl.SliceLayout(0, mma))
    key_number = gl.arange(0, num_keys, layout=gl.SliceLayout(1, right_operand))
    # weights are summed a column at a time, and columns at the end; the own key's is 1, or no
    # number where its score is none
    weight = gl.expand_dims(gl.exp2(score - score), 1)
    total = gl.zeros([ROWS, num_keys], gl.float32, layout=mma) + weight
    total = gl.where(own & (gl.expand_dims(number, 0) == 0), total, 0.0)
    acc = gl.zeros([ROWS, dim], gl.float32, layout=mma)
    acc += gl.where(own, gl.expand_dims(value.to(gl.float32), 0), 0.0)

    for it in range(count):
        slot = it % stages
        block = first + it * num_keys
        mbarrier.wait(ready.index(slot), (it // stages) & 1)
        nothing = gl.zeros([ROWS, num_keys], gl.float32, layout=mma)
        key = key_slots.index(slot).permute((1, 0)).load(right_operand)
        scores = scale_scores(mma_v2(query, key, nothing), scale, cap, spec)
        seen = block + number < end
        if spec.windowed:
            seen = seen & (block + number >= lowest)
        scores = gl.where(gl.expand_dims(seen, 0), scores, float("-inf"))
        larger = gl.maximum(most, gl.max(scores, 1))
        base = gl.where(larger == float("-inf"), 0.0, larger)  # of what saw no key so far
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
        shrink = gl.expand_dims(gl.exp2(most - base), 1)
        most = larger
        total = total * shrink + weights
        some = value_slots.index(slot).load(right_operand)
        if (block + num_keys > end) | (block < lowest):
            # what no row sees may be no number, and would be none with a weight of 0 either
            known = (block + key_number < end) & (block + key_number >= lowest)
            some = gl.where(gl.expand_dims(known, 1), some, 0.0)
        acc = mma_v2(gl.convert_layout(weights.to(dtype), left_operand), some, acc * shrink)
        fence_async_shared()  # of reads, before the copy engine writes there again
        cta_barrier()
        load_block(it + stages, first, cache, keys, values, key_slots, value_slots, ready,
                   it + stages < count, spec)  # fmt: skip

    row = gl.arange(0, ROWS, layout=row_layout)
    summed = gl.sum(total, 1)
    result = (sequence * kv_heads + head) * spec.group + row
    inside = gl.expand_dims(row < spec.group, 1) & gl.expand_dims(column < dim, 0)
    if spec.alone:
        # a row that sees nothing is zero
        shares = gl.expand_dims(gl.where(summed == 0.0, 1.0, summed), 1)
        to = out + gl.expand_dims(result * dim, 1) + gl.expand_dims(column, 0)
        gl.store(to, (acc / shares).to(dtype), mask=inside)
    else:
        result += part.to(gl.int64) * gl.num_programs(1) * kv_heads * spec.group
        to = out + gl.expand_dims(result * dim, 1) + gl.expand_dims(column, 0)
        gl.store(to, acc, mask=inside)
        gl.store(maxima + result, most, mask=row < spec.group)
        gl.store(sums + result, summed, mask=row < spec.group)


def attend_step(given: StepHeads, scale: float, window: int, softcap: float) -> None:
    """An op of kind fused_attention: in one launch, or heads and attention one after the other."""
    operands = given.q, given.k, given.v, given.q_weight, given.k_weight
    caches = given.k_cache, given.v_cache
    if takes(*operands, given.positions, given.table, *caches):
        attend_appended(
            *operands, given.eps, given.positions, given.table, *caches, scale, window, softcap,
            given.out,
        )  # fmt: skip
        return

    def attend_rows(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        attend_each(q, k_cache, v_cache, positions, scale, window, softcap, out)

    attend_in_turn(given, move_heads, attend_rows)


def attend_appended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    table: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """attend_each's result for q [s, h, g, d] after k and v [s, h, d] went to the caches [s, h, t,
    d] of their sequences, or those of a single one to [h, t, d], at `positions` int64 [s]; q and k
    by norms of their heads if they have weights [d], then rotated if there is a table of angles [t,
    d]. Of what `takes` says. Where states are read early, caches and positions are.
    """
    if k_cache.dim() == 3:
        k_cache, v_cache = k_cache.unsqueeze(0), v_cache.unsqueeze(0)
    sequences, kv_heads, group, dim = q.shape
    context = k_cache.shape[-2]
    num_parts = choose_parts(sequences * kv_heads, window or context, num_programs(q))
    num_keys = choose_keys(dim, sequences * kv_heads * num_parts, num_programs(q))
    alone = num_parts == 1
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    made = empty_parts(out, num_parts)
    block = [num_keys, dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_TYPES[q.dtype])
    blocks = (
        TensorDescriptor.from_tensor(cache.view(-1, dim), block, layout)
        for cache in (k_cache, v_cache)
    )
    factor, cap = score_factors(scale, softcap)
    spec = StepSpec(
        group=group,
        dim=dim,
        num_keys=num_keys,
        vector=vector_of(kv_heads, dim),
        windowed=window > 0,
        capped=softcap > 0,
        alone=alone,
        early=reads_states_early(),
        stages=choose_stages(
            kv_heads * sequences * num_parts,
            max(1, num_programs(q) // PROGRAMS_A_SM),
            2 * num_keys * dim * q.element_size(),
        ),
    )
    launch(
        attend_appended_part, (kv_heads, sequences, num_parts),
        q, k, v, q_weight, k_weight, *blocks, k_cache, v_cache, *made,
        positions, table, 0 if table is None else len(table), q.stride()[:3],
        k.stride()[:2], v.stride()[:2], context, eps, factor, window, cap, num_parts, spec=spec,
        num_warps=WARPS.value, launch_pdl=True,
    )  # fmt: skip
    if not alone:
        add_parts(*made, out)
    return out


GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def vector_of(num_heads: int, dim: int) -> int:
    """Elements side by side that a thread of heads.py's kernel has of num_heads heads where it sums
    their squares: as loads of them have, or loads of a weight where that has one for each thread.
    """
    half, threads = dim // 2, 32 * int(WARPS.value)
    if half >= threads:
        return 1
    return max(1, min(8, heads_at_once(num_heads, half) * half // threads))


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    positions: Tensor,
    table: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
) -> bool:
    """Whether the kernel runs on the tensors' device and takes tensors of these kinds, as
    attend_appended has them.
    """
    sequences, kv_heads, group, dim = q.shape
    caches = k_cache, v_cache
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    lead = (sequences,) if k_cache.dim() == 4 or sequences != 1 else ()
    return (
        _on_hopper(q)
        and q.numel() > 0
        and dim in DIMS
        and group <= ROWS.value
        and q.dtype in DTYPES
        and all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (k, v, *caches))
        and q.stride(-1) == 1
        and k.shape == v.shape == (sequences, kv_heads, dim)
        and all(x.shape == (*lead, kv_heads, x.shape[-2], dim) for x in caches)
        and k_cache.shape == v_cache.shape
        and all(x.is_contiguous() and has_tma_rows(x.view(-1, dim)) for x in caches)
        and sequences * kv_heads * k_cache.shape[-2] < MOST_ELEMENTS
        and all(_span(x[0]) < MOST_ELEMENTS for x in (q, k, v))
        and positions.is_contiguous()
        and all(weight.shape == (dim,) and weight.is_contiguous() for weight in weights)
        and (table is None or _takes_angles(table, dim))
    )


def _on_hopper(q: Tensor) -> bool:
    return q.is_cuda and is_hopper(q.device.index)


def _takes_angles(table: Tensor, dim: int) -> bool:
    return table.dtype == torch.float32 and table.is_contiguous() and table.shape[1] == dim


def _span(x: Tensor) -> int:
    """Elements from the first of x to its last."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
