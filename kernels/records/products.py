"""Bodies of instructions that multiply: contractions of any strides, by tensor cores where both
operands are of one half type.

In: a record and the arenas. Out: what the instruction of the same name writes (isa/opcodes.py).
Sums are f32, of whole numbers i64, of f64 f64. Next on the walk: attention.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-any-return"

import triton
from triton import language as tl

from distmega.kernels.records.specs import PRODUCT_UNITS, RecordSpec
from distmega.kernels.records.words import (
    by_strides,
    has,
    multiple,
    number,
    operand,
    read,
    space_of,
    type_of,
    wide_type,
    write,
)
from distmega.kernels.runtime.arena import Space
from distmega.program.dtypes import HALVES

SUMMED: tl.constexpr = tl.constexpr(64)
"""Elements of a sum that tensor cores are given together."""
HALF_BYTES = 2
LINE: tl.constexpr = tl.constexpr(128 // HALF_BYTES)
"""Elements of a cache line."""
FETCHED: tl.constexpr = tl.constexpr(256)
"""Lines that an SM's threads ask for together."""
STAGE_BYTES = 160 * 1024
"""Of the SM's shared memory, for blocks of sums."""
UNITS = {name: n for n, name in enumerate(PRODUCT_UNITS)}
STEPS = {"x": 0, "w": 2, "out": 4}
"""Where a spec by tiles has the strides of an operand."""


@triton.constexpr_function
def by_halves(spec: RecordSpec):
    """Whether both operands are of one half type."""
    x, w = type_of(spec, "x").dtype, type_of(spec, "w").dtype
    return x == w and x in HALVES


@triton.constexpr_function
def by_dot(spec: RecordSpec):
    """Whether Triton multiplies tiles as a whole: not those of numbers of 64 bits."""
    return wide_type(spec, "x") == tl.float32


@triton.constexpr_function
def tile_m(spec: RecordSpec):
    return spec.widths[0] if by_dot(spec) else 4


@triton.constexpr_function
def tile_n(spec: RecordSpec):
    return spec.widths[1] if by_dot(spec) else 32


@triton.constexpr_function
def tile_k(spec: RecordSpec):
    return 128 if by_halves(spec) else 32 if by_dot(spec) else 16


@triton.jit
def products_of(x, w, total, mask_x, mask_w, spec: tl.constexpr):
    """Adds the products of two tiles, given by pointers to their elements, to a sum."""
    if by_halves(spec):
        left = tl.load(x, mask=mask_x, other=0.0)
        return tl.dot(left, tl.load(w, mask=mask_w, other=0.0), total)
    wide: tl.constexpr = wide_type(spec, "x")
    left = read(x, mask_x, spec, "x")
    right = read(w, mask_w, spec, "w").to(wide)
    if by_dot(spec):
        return tl.dot(left, right, total, input_precision="ieee")
    return total + tl.sum(left[:, :, None] * right[None, :, :], 1)


@triton.constexpr_function
def unit_of(spec: RecordSpec, name):
    """What divides one of PRODUCT_UNITS."""
    return spec.units[UNITS[name]]


@triton.constexpr_function
def step_of(spec: RecordSpec, name, dim):
    """Of x along m, k, of w along n, k, of out along m, n."""
    return spec.steps[STEPS[name] + dim]


@triton.constexpr_function
def num_stages(spec: RecordSpec):
    """Blocks of the sum that are on their way, as many as the SM's memory holds."""
    block = sum(spec.widths) * SUMMED.value * HALF_BYTES
    return min(6, STAGE_BYTES // block)


@triton.constexpr_function
def has_weight(spec: RecordSpec):
    """Whether what a record multiplies by is known before the launch, and lies side by side."""
    return spec.opcode == "Linear" and by_strides(spec) and space_of(spec, "w") == Space.WEIGHT


@triton.constexpr_function
def sums_side_by_side(spec: RecordSpec):
    """Whether a weight's elements lie side by side along k, rather than along n."""
    return step_of(spec, "w", 1) == 1


@triton.jit
def fetch(pointers):
    """Brings the cache lines of some elements into the L2 cache, where they may not be yet."""
    # Triton's loads would wait for what they load
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_weight(record, arenas, spec: tl.constexpr):
    """Asks for the first blocks that a Linear is going to multiply by, as many as it has on their
    way. What it asked for beyond would only stand before these.
    """
    w = operand(record, arenas, spec, "w")
    num_n = number(record, spec, "n")
    num_k = tl.minimum(number(record, spec, "k"), SUMMED * num_stages(spec))
    if sums_side_by_side(spec):
        rows, step = num_n, step_of(spec, "w", 0)
        lines = tl.cdiv(num_k, LINE)
    else:
        rows, step = num_k, step_of(spec, "w", 1)
        lines = tl.cdiv(num_n, LINE)
    for start in range(0, rows * lines, FETCHED):
        line = tl.minimum(start + tl.arange(0, FETCHED), rows * lines - 1)
        fetch(w + line % rows * step + line // rows * LINE)


@triton.jit
def tiled(record, arenas, spec: tl.constexpr):
    """A Linear by tiles: loads are asynchronous, several blocks of the sum ahead."""
    x = operand(record, arenas, spec, "x", unit_of(spec, "x"))
    w = operand(record, arenas, spec, "w", unit_of(spec, "w"))
    out = operand(record, arenas, spec, "out", unit_of(spec, "out"))
    num_m = multiple(record, spec, "m", unit_of(spec, "m"))
    num_n = multiple(record, spec, "n", unit_of(spec, "n"))
    num_k = multiple(record, spec, "k", unit_of(spec, "k"))
    rows, columns = tl.arange(0, tile_m(spec)), tl.arange(0, tile_n(spec))
    depth = tl.arange(0, SUMMED)
    for m0 in range(0, num_m, tile_m(spec)):
        m = m0 + rows
        for n0 in range(0, num_n, tile_n(spec)):
            n = n0 + columns
            total = tl.full([tile_m(spec), tile_n(spec)], 0.0, tl.float32)
            for k0 in tl.range(0, num_k, SUMMED, num_stages=num_stages(spec)):
                k = k0 + depth
                left = tl.load(
                    x + (m * step_of(spec, "x", 0))[:, None] + (k * step_of(spec, "x", 1))[None, :],
                    mask=(m < num_m)[:, None] & (k < num_k)[None, :],
                    other=0.0,
                )
                right = tl.load(
                    w + (k * step_of(spec, "w", 1))[:, None] + (n * step_of(spec, "w", 0))[None, :],
                    mask=(k < num_k)[:, None] & (n < num_n)[None, :],
                    other=0.0,
                )
                total = tl.dot(left, right, total)
            if has(spec, "bias"):
                bias = operand(record, arenas, spec, "bias")
                step = number(record, spec, "bias_stride")
                total += read(bias + n * step, n < num_n, spec, "bias")[None, :].to(tl.float32)
            to = (
                out
                + (m * step_of(spec, "out", 0))[:, None]
                + (n * step_of(spec, "out", 1))[None, :]
            )
            write(to, total, (m < num_m)[:, None] & (n < num_n)[None, :], spec, "out")


@triton.jit
def linear(record, arenas, spec: tl.constexpr):
    if by_strides(spec):
        tiled(record, arenas, spec)
    else:
        in_any_order(record, arenas, spec)


@triton.jit
def in_any_order(record, arenas, spec: tl.constexpr):
    """A Linear of any types and strides."""
    x, w = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "w")
    out, num_m = operand(record, arenas, spec, "out"), number(record, spec, "m")
    num_n, num_k = number(record, spec, "n"), number(record, spec, "k")
    x_m, x_k = number(record, spec, "x_strides", 0), number(record, spec, "x_strides", 1)
    w_n, w_k = number(record, spec, "w_strides", 0), number(record, spec, "w_strides", 1)
    for m0 in range(0, num_m, tile_m(spec)):
        m = m0 + tl.arange(0, tile_m(spec))
        for n0 in range(0, num_n, tile_n(spec)):
            n = n0 + tl.arange(0, tile_n(spec))
            total = tl.full([tile_m(spec), tile_n(spec)], 0, wide_type(spec, "x"))
            for k0 in range(0, num_k, tile_k(spec)):
                k = k0 + tl.arange(0, tile_k(spec))
                total = products_of(
                    x + (m * x_m)[:, None] + (k * x_k)[None, :],
                    w + (k * w_k)[:, None] + (n * w_n)[None, :],
                    total,
                    (m < num_m)[:, None] & (k < num_k)[None, :],
                    (k < num_k)[:, None] & (n < num_n)[None, :],
                    spec,
                )
            if has(spec, "bias"):
                bias = operand(record, arenas, spec, "bias")
                step = number(record, spec, "bias_stride")
                total += read(bias + n * step, n < num_n, spec, "bias")[None, :].to(total.dtype)
            to = out + (m * number(record, spec, "out_strides", 0))[:, None]
            to += (n * number(record, spec, "out_strides", 1))[None, :]
            write(to, total, (m < num_m)[:, None] & (n < num_n)[None, :], spec, "out")


@triton.jit
def along(record, spec: tl.constexpr, strides: tl.constexpr, k):
    """Elements from the first to number k of the three dims that are summed over."""
    inner, middle = number(record, spec, "sums", 2), number(record, spec, "sums", 1)
    offset = k % inner * number(record, spec, strides, 3)
    offset += k // inner % middle * number(record, spec, strides, 2)
    return offset + k // (inner * middle) * number(record, spec, strides, 1)


@triton.jit
def contract(record, arenas, spec: tl.constexpr):
    x, w = operand(record, arenas, spec, "x"), operand(record, arenas, spec, "w")
    out, num_m = operand(record, arenas, spec, "out"), number(record, spec, "m")
    num_n, num_k = number(record, spec, "n"), number(record, spec, "sums", 0)
    num_k *= number(record, spec, "sums", 1) * number(record, spec, "sums", 2)
    x_m, w_n = number(record, spec, "x_strides", 0), number(record, spec, "w_strides", 0)
    for m0 in range(0, num_m, tile_m(spec)):
        m = m0 + tl.arange(0, tile_m(spec))
        for n0 in range(0, num_n, tile_n(spec)):
            n = n0 + tl.arange(0, tile_n(spec))
            total = tl.full([tile_m(spec), tile_n(spec)], 0, wide_type(spec, "x"))
            for k0 in range(0, num_k, tile_k(spec)):
                k = k0 + tl.arange(0, tile_k(spec))
                total = products_of(
                    x + (m * x_m)[:, None] + along(record, spec, "x_strides", k)[None, :],
                    w + along(record, spec, "w_strides", k)[:, None] + (n * w_n)[None, :],
                    total,
                    (m < num_m)[:, None] & (k < num_k)[None, :],
                    (k < num_k)[:, None] & (n < num_n)[None, :],
                    spec,
                )
            mask = (m < num_m)[:, None] & (n < num_n)[None, :]
            if has(spec, "bias"):
                bias = operand(record, arenas, spec, "bias")
                near = bias + (m * number(record, spec, "bias_strides", 0))[:, None]
                near += (n * number(record, spec, "bias_strides", 1))[None, :]
                total += read(near, mask, spec, "bias").to(total.dtype)
            to = out + (m * number(record, spec, "out_strides", 0))[:, None]
            to += (n * number(record, spec, "out_strides", 1))[None, :]
            write(to, total, mask, spec, "out")
