"""Attention of short sequences on a GPU, where a kernel's start is most of its time: keys and
values at hand, all of which each row sees, heads that may share them.

In: q [b, h g, m, d], k [b, h, t, d], v [b, h, t, e] of a half type, of any strides but the last
dim's, which is 1. Out: a new tensor of q's type, dims of [b, h g, m, e] in the order asked for. A
program has some rows of one head. The kernel may start while the one before it ends; it waits for
it before it reads. What it does not take, torch does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from distmega.hostir.library.ops import number
from distmega.hostir.library.pointwise import OpFunction
from distmega.kernels import powers
from distmega.kernels.runtime.ahead import launch
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.program.types import Op

ROWS = 64
"""Of queries, that a program has."""
KEYS = {64: 128, 128: 64}
"""Keys at a time, by the longest heads for which so many fit registers."""
ALIGNED = 16
"""Elements by whose multiples heads and rows lie apart."""
MOST_KEYS = 512
MOST_DIM = max(KEYS)
HALVES = (torch.bfloat16, torch.float16)
LOG2_E = tl.constexpr(powers.LOG2_E)


@triton.jit
def load_rows(start, lines, num_lines, line_stride, columns, num_columns):
    """Rows [lines, columns] of a matrix whose elements of a row lie together; zeros outside."""
    at = start + lines.to(tl.int64)[:, None] * line_stride + columns[None, :]
    inside = (lines < num_lines)[:, None] & (columns < num_columns)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def attend_rows(q, k, v, out, q_strides, k_strides, v_strides, out_strides, scale, heads, group, m,
                t, d: tl.constexpr, e: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
                d_padded: tl.constexpr, e_padded: tl.constexpr):  # fmt: skip
    """Rows of one head, a program each: of tiles of `rows`, then heads, then batches. q, k, v, out:
    of local memory, all read but out, written; strides in elements, of batch, head and row each.
    scale: of scores. heads: of queries, `group` of which share one of keys. m, t: rows and keys.
    d_padded, e_padded: d and e up to the next power of two, at least 16.
    """
    tiles = tl.cdiv(m, rows)
    program = tl.program_id(0)
    tile, head, batch = program % tiles, program // tiles % heads, program // tiles // heads
    line = tile * rows + tl.arange(0, rows)
    term, of_values = tl.arange(0, d_padded), tl.arange(0, e_padded)
    q += batch.to(tl.int64) * q_strides[0] + head * q_strides[1]
    k += batch.to(tl.int64) * k_strides[0] + head // group * k_strides[1]
    v += batch.to(tl.int64) * v_strides[0] + head // group * v_strides[1]
    out += batch.to(tl.int64) * out_strides[0] + head * out_strides[1]
    gdc_launch_dependents()
    gdc_wait()
    queries = load_rows(q, line, m, q_strides[2], term, d)
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, e_padded], tl.float32)
    for begin in tl.range(0, t, keys):
        column = begin + tl.arange(0, keys)
        some = load_rows(k, column, t, k_strides[2], term, d)
        other = load_rows(v, column, t, v_strides[2], of_values, e)
        scores = tl.dot(queries, some.T) * (scale * LOG2_E)
        scores = tl.where((column < t)[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        powers = tl.exp2(scores - above[:, None])
        kept = tl.exp2(highest - above)
        total = total * kept + tl.sum(powers, 1)
        acc = tl.dot(powers.to(v.dtype.element_ty), other, acc * kept[:, None])
        highest = above
    result = acc / total[:, None]
    at = out + line.to(tl.int64)[:, None] * out_strides[2] + of_values[None, :]
    inside = (line < m)[:, None] & (of_values < e)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


def compile_attend(op: Op, order: Sequence[int], otherwise: OpFunction) -> OpFunction:
    """An op of kind attend without mask and soft cap, its result's dims in `order`; by `otherwise`
    where sequences are long or many.
    """
    scale = number(op, "scale")

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        q, k, v = operands
        return (attend(q, k, v, scale, order),) if takes(q, k, v) else otherwise(operands)

    return run


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel runs on operands of these kinds, and is expected to be fastest."""
    batches, heads, rows, dim = q.shape
    on_hopper = q.is_cuda and is_hopper(q.device.index) and q.dtype in HALVES
    of_rows = {x.dtype for x in (q, k, v)} == {q.dtype} and {x.stride(3) for x in (q, k, v)} == {1}
    near = all(step % ALIGNED == 0 for x in (q, k, v) for step in x.stride()[:3])
    near = near and all(x.data_ptr() % ALIGNED == 0 for x in (q, k, v))
    short = k.shape[2] <= MOST_KEYS and max(dim, v.shape[3]) <= MOST_DIM
    if not (on_hopper and of_rows and near and short):
        return False
    return -(-rows // ROWS) * heads * batches <= num_sms(q.device.index)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, order: Sequence[int]) -> Tensor:
    """softmax(scale * q k') v in a new tensor, its dims [b, h g, m, e] in `order`, e last."""
    (batches, heads, m, d), (t, e) = q.shape, v.shape[2:]
    sizes = batches, heads, m, e
    out = torch.empty([sizes[dim] for dim in order], dtype=q.dtype, device=q.device)
    whole = out.permute([order.index(dim) for dim in range(4)])
    padded = [max(16, triton.next_power_of_2(size)) for size in (d, e)]
    keys = next(KEYS[most] for most in KEYS if max(padded) <= most)
    launch(
        attend_rows, (-(-m // ROWS) * heads * batches,),
        q, k, v, out, *(x.stride()[:3] for x in (q, k, v, whole)), scale, heads,
        heads // k.shape[1], m, t, d=d, e=e, rows=ROWS, keys=keys, d_padded=padded[0],
        e_padded=padded[1], num_warps=4, num_stages=2, launch_pdl=True,
    )  # fmt: skip
    return out
