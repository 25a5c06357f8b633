"""The largest element of long rows on a GPU and where it is: of few rows torch's kernel leaves most
SMs without work.

In: x [rows, n] of a type that float32 holds. Out: values [rows] and i64 indices, as argmax_values
of program/ops/sampling.py gives them. A program has a part of a row and leaves its largest as a
key, in the order of elements and, of equal ones, backwards in that of places; a second kernel
takes the largest key of each row. What the kernels do not take, torch does. Used by device_ops.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from distmega.hostir.library.pointwise import OpFunction
from distmega.kernels.library.limits import has_tiles
from distmega.kernels.runtime.ahead import launch
from distmega.program.ops.sampling import argmax_range, count_valid
from distmega.program.types import Op

COLUMNS = 4096
"""Of a part."""
LEAST_PARTS, MOST_PARTS = 4, 1024
"""Of a row: torch's kernel does shorter ones, for a second kernel costs more."""
MOST_ROWS = 1024
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOW_WORD = tl.constexpr(0xFFFFFFFF)
HIGHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_of(x):
    """i32 numbers in the order of float32 elements: zeros are equal, and on a GPU, whose sums have
    one NaN, without a sign, that is the largest.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def join_key(order, index):
    """i64 keys of i32 numbers at places `index`: of equal numbers the first place's is larger."""
    return (order.to(tl.int64) << 32) | (index ^ HIGHEST).to(tl.int64)


@triton.jit
def key_of(x, index):
    """i64 keys of float32 elements at places `index`."""
    return join_key(tl.where(x == x, order_of(x), HIGHEST), index)


@triton.jit
def find_in_parts(x, keys, n, row_stride, columns: tl.constexpr):
    """keys [rows, parts]: the largest of part program_id(0) of row program_id(1).

    x: [rows, n], rows row_stride elements apart, read. keys: i64, contiguous, written. All in local
    memory.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = part * columns + tl.arange(0, columns)
    found = tl.load(x + row * row_stride + column, mask=column < n, other=float("-inf"))
    order = order_of(found.to(tl.float32))
    most = tl.max(order, 0)
    first = tl.min(tl.where(order == most, column, HIGHEST), 0)
    tl.store(keys + row * tl.num_programs(0) + part, join_key(most, first))


@triton.jit
def find_in_keys(x, keys, values, indices, row_stride, base, num_parts, parts: tl.constexpr):
    """Row program_id(0): the largest of keys [rows, num_parts], and the element that it means.

    x: as of find_in_parts. values: of x's type, indices: i64, its place and `base` more; [rows],
    written. parts: num_parts or the next power of two. All in local memory.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, parts)
    # no key is as small
    least = tl.full([parts], -0x7FFFFFFFFFFFFFFF, tl.int64)
    every = tl.load(keys + row * num_parts + part, mask=part < num_parts, other=0)
    key = tl.max(tl.where(part < num_parts, every, least), 0)
    index = (key & LOW_WORD) ^ HIGHEST
    tl.store(values + row, tl.load(x + row * row_stride + index))
    tl.store(indices + row, index + base)


def compile_argmax(op: Op, coordinate: Mapping[str, int], otherwise: OpFunction) -> OpFunction:
    """An op of kind argmax, over long rows by the kernels; else by `otherwise`."""
    base, extent = argmax_range(op, coordinate)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x = operands[0]
        num_valid = count_valid(x.shape[-1], base, extent)
        return find_largest(x[:, :num_valid], base) if takes(x, num_valid) else otherwise(operands)

    return run


def takes(x: Tensor, num_valid: int) -> bool:
    """Whether the kernels find the largest of the first num_valid elements of each row of x."""
    if x.dim() != 2 or x.dtype not in DTYPES or not has_tiles(x.device):
        return False
    parts = triton.cdiv(num_valid, COLUMNS)
    return LEAST_PARTS <= parts <= MOST_PARTS and 0 < len(x) <= MOST_ROWS and x.stride(1) == 1


def find_largest(x: Tensor, base: int) -> tuple[Tensor, Tensor]:
    """The largest of each row of x [rows, n] and its place and `base` more, [rows] each."""
    num_rows, n = x.shape
    num_parts = triton.cdiv(n, COLUMNS)
    keys = torch.empty(num_rows, num_parts, dtype=torch.int64, device=x.device)
    values = torch.empty(num_rows, dtype=x.dtype, device=x.device)
    indices = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    launch(
        find_in_parts, (num_parts, num_rows), x, keys, n, x.stride(0), columns=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
    launch(
        find_in_keys, (num_rows,), x, keys, values, indices, x.stride(0), base, num_parts,
        parts=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip
    return values, indices
