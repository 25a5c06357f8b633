"""Attention of packed prompts on a GPU: causal or windowed, over caches, with a prefix in them.

In: q [m, h, g, d] of rows that lie end to end, caches, and where each sequence's rows begin, as
hostir/library/ops.py's packed_attention takes them. Out: a new tensor. Passes of many rows with
heads of 64 or 128 are left to attention_kernel.py. In the kernel here, for others, a program has a
tile of rows of one sequence and one query head; which tiles there are it finds from `starts` on the
device, so that a CUDA graph serves any lengths. What neither takes, torch does. Used by
device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from distmega.hostir.library import ops as library
from distmega.hostir.library.torch_types import dtype_name
from distmega.kernels.library.attention_kernel import KEYS, ROWS, AttentionSpec, attend_kernel
from distmega.kernels.library.limits import PACKED_ALIGNED, PACKED_DIM, PACKED_DTYPES, has_tiles
from distmega.kernels.library.score_caps import cap_scores, score_factors
from distmega.kernels.powers import LOG2_E
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.kernels.runtime.memory import packed


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Rows of queries and of keys multiplied at a time; warps; slots of keys on the way."""

    rows: int
    keys: int
    warps: int
    stages: int


TILES = {
    64: AttentionTiles(rows=64, keys=64, warps=4, stages=3),
    128: AttentionTiles(rows=64, keys=64, warps=4, stages=3),
    256: AttentionTiles(rows=64, keys=64, warps=8, stages=2),
}
"""By head dim, the next power of two."""
STAGES = {64: 4, 128: 2}
"""Slots of attention_kernel.py's ring, by head dim."""
LEAST_ITEMS = {64: 2.0, 128: 1.5}
"""An SM, by head dim, from which attention_kernel.py is quicker (bench/attention.py)."""


@triton.jit
def attend_keys(acc, total, most, q, keys, values, top, start, at, lowest, behind, scale, window,
                cap, masked: tl.constexpr, ragged: tl.constexpr, windowed: tl.constexpr,
                capped: tl.constexpr, num_keys: tl.constexpr):  # fmt: skip
    """A block of keys of a sequence, from `start` on, whose key 0 is row `top` of keys and values,
    added to the sums of rows at positions `at`. masked: some of the keys lie behind some of the
    rows, or before their window. ragged: some lie outside of `lowest` to `behind`, so that no row
    sees them, and may hold anything. scale, cap: of score_factors.
    """
    key = keys.load([top + start, 0])
    scores = tl.dot(q, key.T) * scale
    if capped:
        scores = cap_scores(scores, cap)
    if masked:
        columns = start + tl.arange(0, num_keys)[None, :]
        seen = columns <= at[:, None]
        if ragged:
            seen = seen & (columns < behind)
        if windowed:
            seen = seen & (columns > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)  # of rows that saw no key so far
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    value = values.load([top + start, 0])
    if ragged:  # what is no number would be none with a weight of 0 either
        line = start + tl.arange(0, num_keys)
        value = tl.where(((line >= lowest) & (line < behind))[:, None], value, 0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
    return acc, total, larger


@triton.jit
def attend_span(acc, total, most, q, keys, values, top, first, stop, at, scale, window, cap,
                masked: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
                num_keys: tl.constexpr):  # fmt: skip
    """Keys `first` to `stop`, as attend_keys; none of them is one that no row sees."""
    for start in tl.range(first, stop, num_keys):
        acc, total, most = attend_keys(acc, total, most, q, keys, values, top, start, at, 0, 0,
                                       scale, window, cap, masked, False, windowed, capped,
                                       num_keys)  # fmt: skip
    return acc, total, most


@triton.jit
def attend_rows(q, keys, values, out, starts, positions, num_sequences, context, kv_heads,
                row_stride, head_stride, scale, window, cap, group: tl.constexpr, dim: tl.constexpr,
                padded: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
                slots: tl.constexpr, num_rows: tl.constexpr, num_keys: tl.constexpr):  # fmt: skip
    """Head program_id(0) of tile program_id(1), the last rows of the last sequence first: they see
    most keys.

    q: row_stride, head_stride in elements; out [m, kv_heads * group, dim], contiguous. keys,
    values: descriptors of the caches, [sequences * kv_heads * context, dim]. starts: i64
    [num_sequences + 1], at most `slots` sequences; positions: i64 [m]. scale, cap: of
    score_factors, which has a cap where `capped`. window: keys that a row sees, where `windowed`.
    padded: dim or the next power of two. num_rows, num_keys: of a tile. All in local memory; out
    alone is written.
    """
    head = tl.program_id(0)
    number = tl.arange(0, slots)
    known = number < num_sequences
    begin = tl.load(starts + number, mask=known, other=0).to(tl.int32)
    end = tl.load(starts + number + 1, mask=known, other=0).to(tl.int32)
    tiles = (end - begin + num_rows - 1) // num_rows
    ends = tl.cumsum(tiles, 0)
    tile = tl.sum(tiles, 0) - 1 - tl.program_id(1)
    if tile < 0:
        return
    sequence = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = number == sequence
    top = tl.sum(tl.where(mine, begin, 0), 0)
    length = tl.sum(tl.where(mine, end - begin, 0), 0)
    inner = (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * num_rows
    origin = tl.load(positions + top).to(tl.int32)

    row = inner + tl.arange(0, num_rows)
    column = tl.arange(0, padded)
    inside = (row < length)[:, None] & (column < dim)[None, :]
    line = (top + row).to(tl.int64)
    query = tl.load(q + line[:, None] * row_stride + head * head_stride + column[None, :],
                    mask=inside, other=0.0)  # fmt: skip
    at = origin + row
    near = origin + inner
    written = tl.minimum(origin + length, context)
    behind = tl.minimum(origin + inner + num_rows, written)
    lowest = 0
    if windowed:
        lowest = tl.maximum(near - window + 1, 0)
    first = lowest // num_keys * num_keys
    cache = (sequence * kv_heads + head // group) * context

    acc = tl.zeros([num_rows, padded], tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    most = tl.full([num_rows], float("-inf"), tl.float32)
    if windowed:
        if first < behind:
            acc, total, most = attend_keys(acc, total, most, query, keys, values, cache, first, at,
                                           lowest, behind, scale, window, cap, True, True, True,
                                           capped, num_keys)  # fmt: skip
        first += num_keys
    whole = tl.maximum(tl.minimum(near + 1, context) // num_keys * num_keys, first)
    # from here on there are keys that no row of the sequence sees
    ragged = tl.maximum(tl.minimum(behind, written // num_keys * num_keys), whole)
    acc, total, most = attend_span(acc, total, most, query, keys, values, cache, first, whole, at,
                                   scale, window, cap, windowed, windowed, capped,
                                   num_keys)  # fmt: skip
    acc, total, most = attend_span(acc, total, most, query, keys, values, cache, whole, ragged, at,
                                   scale, window, cap, True, windowed, capped,
                                   num_keys)  # fmt: skip
    if ragged < behind:
        acc, total, most = attend_keys(acc, total, most, query, keys, values, cache, ragged, at,
                                       lowest, behind, scale, window, cap, True, True, windowed,
                                       capped, num_keys)  # fmt: skip
    # a row that sees nothing is zero
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + (line[:, None] * (kv_heads * group) + head) * dim + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


def attend_packed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    sequences: Tensor,
    starts: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As library.packed_attention. starts, i64 [s + 1]: rows starts[i] to starts[i + 1] are those
    of sequence i, their positions follow each other.
    """
    if not _takes(q, k_cache, v_cache):
        return library.packed_attention(
            q, k_cache, v_cache, positions, sequences, scale, window, softcap
        )
    q, k_cache, v_cache = map(packed, (q, k_cache, v_cache))  # TMA reads them
    positions, starts = positions.contiguous(), starts.contiguous()
    if not softcap and takes_groups(q, scale) and has_enough_items(q):
        return attend_by_groups(q, k_cache, v_cache, positions, starts, scale, window)
    return attend_by_tiles(q, k_cache, v_cache, positions, starts, scale, window, softcap)


def has_enough_items(q: Tensor) -> bool:
    """Whether q makes LEAST_ITEMS of attention_kernel.py's items an SM, by its rows."""
    num_rows, kv_heads, group, dim = q.shape
    spec = AttentionSpec(dim=dim, group=group)
    items = num_rows * kv_heads * group / (spec.item_rows * spec.item_heads)
    return items >= LEAST_ITEMS[dim] * num_sms(q.device.index)


def takes_groups(q: Tensor, scale: float) -> bool:
    """Whether attention_kernel.py takes q, and is the quicker kernel where q has_enough_items."""
    takes = q.dtype is torch.bfloat16 and q.shape[-1] in STAGES and scale > 0
    return takes and is_hopper(q.device.index)


def attend_by_groups(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    starts: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """As attend_packed, by the kernel of two warp groups."""
    num_rows, kv_heads, group, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)
    blocks = (
        (q.view(num_rows, -1), ROWS),
        (k_cache.view(-1, dim), KEYS),
        (v_cache.view(-1, dim), KEYS),
    )
    descriptors = [
        GluonDescriptor.from_tensor(
            x,
            [rows.value, dim],
            gl.NVMMASharedLayout.get_default_for([rows.value, dim], gl.bfloat16),
        )
        for x, rows in blocks
    ]
    spec = AttentionSpec(
        dim=dim,
        group=group,
        windowed=window > 0,
        stages=STAGES[dim],
    )
    launch(
        attend_kernel, (num_sms(q.device.index),), *descriptors, out, taken, starts, positions,
        starts.shape[0] - 1, k_cache.shape[-2], kv_heads, window,
        scale * LOG2_E, spec=spec, num_warps=4,
    )  # fmt: skip
    return out


def attend_by_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    starts: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As attend_packed, by the kernel of a tile a program."""
    num_rows, kv_heads, group, dim = q.shape
    heads = q.view(num_rows, kv_heads * group, dim)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    padded = max(64, triton.next_power_of_2(dim))
    tiles = TILES[padded]
    num_sequences = starts.shape[0] - 1
    keys, values = (
        TensorDescriptor.from_tensor(cache.view(-1, dim), [tiles.keys, padded])
        for cache in (k_cache, v_cache)
    )
    most_tiles = triton.cdiv(num_rows, tiles.rows) + min(num_sequences, num_rows) - 1
    factor, cap = score_factors(scale, softcap)
    launch(
        attend_rows, (kv_heads * group, most_tiles),
        heads, keys, values, out, starts, positions, num_sequences, k_cache.shape[-2], kv_heads,
        *heads.stride()[:2], factor, window, cap, group=group, dim=dim, padded=padded,
        windowed=window > 0, capped=softcap > 0, slots=triton.next_power_of_2(num_sequences),
        num_rows=tiles.rows, num_keys=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the kernel takes tensors of these kinds."""
    caches = k_cache, v_cache
    dim = q.shape[-1]
    return (
        has_tiles(q.device)
        and dtype_name(q.dtype) in PACKED_DTYPES
        and q.is_contiguous()
        and all(x.dtype == q.dtype and x.is_contiguous() for x in caches)
        and v_cache.shape[-1] == dim <= PACKED_DIM
        and dim % PACKED_ALIGNED == 0
    )
