"""Norms and softmax of rows longer than one tile holds, in plain Triton: of any length, alignment
and strides.

In: pointers and strides in elements. Out: results and sums, contiguous. In memory a row of the
results is a few elements, chunks of 16 bytes that begin at multiples of 16 bytes, and a few
elements more. So a thread moves 16 bytes at once wherever the row begins, provided that the
operands' rows begin as far from such a multiple as the results'. A program passes twice over its
row (long_rows_whole), or over one part of it: long_rows_gather leaves the statistics of all parts
in memory, long_rows_write reads those of its row. Next: norms.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from dataclasses import dataclass

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK_BYTES = 16
"""Widest access of a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRowSpec:
    """What the kernels are specialised for.

    op: rms_norm, layer_norm or softmax. threads: of a program, each of which takes a chunk of a
    tile. loads: tiles on their way at once. vector: elements of a chunk of the results. even: the
    results' rows begin and end at multiples of 16 bytes. x_wide, residual_wide, sums_wide: rows of
    x, the residual and the sums begin as far from such a multiple as the results', and their
    elements are neighbours of as many bytes; also where there is no residual. early: a launch may
    begin before what came before it ends. parts: room for the parts of a row, a power of two.
    """

    op: str
    threads: int
    loads: int
    vector: int
    even: bool
    x_wide: bool
    residual_wide: bool
    sums_wide: bool
    early: bool
    parts: int


@triton.jit
def _cut_row(y, num_columns, spec: tl.constexpr):
    """Elements of the row at y before its first chunk, and how many chunks it has."""
    vector: tl.constexpr = spec.vector
    head = 0
    if not spec.even:
        past = y.to(tl.int64) // (y.dtype.element_ty.primitive_bitwidth // 8) % vector
        head = tl.minimum(((vector - past) % vector).to(tl.int32), num_columns)
    return head, (num_columns - head) // vector


@triton.jit
def _offsets(spec: tl.constexpr):
    """The elements [threads, vector] of a tile, counted from its first."""
    lanes = tl.arange(0, spec.threads)[:, None]
    return lanes * spec.vector + tl.arange(0, spec.vector)[None, :]


@triton.jit
def _pointers(x, step, chunk, wide: tl.constexpr, spec: tl.constexpr):
    """Where the elements of the tile are that begins with a chunk of x."""
    pointers = x + tl.cast(chunk, tl.int64) * spec.vector * step + _offsets(spec) * step
    return tl.multiple_of(pointers, (16, 16)) if wide else pointers


@triton.jit
def _inside(chunk, stop, threads: tl.constexpr):
    """[threads, 1]: which threads have a chunk before `stop` of the tile that begins with one."""
    return chunk + tl.arange(0, threads)[:, None] < stop


@triton.jit
def _add(value, more, sums):
    """Elements in fp32, those of the residual added and rounded as the sums are stored."""
    value = value.to(tl.float32)
    if sums is not None:
        value = (value + more.to(tl.float32)).to(sums.dtype.element_ty).to(tl.float32)
    return value


@triton.constexpr_function
def _cache_of(spec: LongRowSpec) -> str:
    """How the second pass of a part loads: past the first-level cache before its wait; by fewer
    bytes than a thread can take, several loads share what that cache then holds.
    """
    return ".cg" if spec.x_wide and spec.residual_wide else ""


@triton.constexpr_function
def _nothing(spec: LongRowSpec) -> float:
    """What x is where there is nothing."""
    return float("-inf") if spec.op == "softmax" else 0.0


@triton.jit
def _load_chunks(x, residual, sums, x_step, residual_step, start, stop, spec: tl.constexpr,
                 cache: tl.constexpr):  # fmt: skip
    """Tiles [threads, vector] of the chunks from `start` on, and which of them are before `stop`;
    x, residual: their first chunk. All loads start before the first is waited for.
    """
    threads: tl.constexpr = spec.threads
    loads: tl.constexpr = spec.loads
    tiles, more, values, insides = (), (), (), ()
    for i in tl.static_range(loads):
        chunk = start + i * threads
        insides += (_inside(chunk, stop, threads),)
        pointers = _pointers(x, x_step, chunk, spec.x_wide, spec)
        tiles += (tl.load(pointers, mask=insides[i], other=_nothing(spec), cache_modifier=cache),)
        if residual is not None:
            pointers = _pointers(residual, residual_step, chunk, spec.residual_wide, spec)
            more += (tl.load(pointers, mask=insides[i], other=0.0, cache_modifier=cache),)
    for i in tl.static_range(loads):
        values += (_add(tiles[i], more[i] if residual is not None else None, sums),)
    return values, insides


@triton.jit
def _edge_columns(head, chunks, num_columns, wanted, spec: tl.constexpr):
    """[threads, 1]: the columns before the first chunk and behind the last, of which the first
    threads have one each, and which threads do, where `wanted`.
    """
    lanes = tl.arange(0, spec.threads)[:, None]
    vector: tl.constexpr = spec.vector
    behind = head + chunks * vector + lanes - vector
    inside = tl.where(lanes < vector, lanes < head, behind < num_columns)
    return tl.where(lanes < vector, lanes, behind), inside & wanted


@triton.jit
def _load_edges(x, residual, sums, x_step, residual_step, columns, inside, spec: tl.constexpr,
                cache: tl.constexpr):  # fmt: skip
    """Elements of a row at some of its columns; x, residual: its first element."""
    far = columns.to(tl.int64)
    value = tl.load(x + far * x_step, mask=inside, other=_nothing(spec), cache_modifier=cache)
    more = None
    if residual is not None:
        more = tl.load(residual + far * residual_step, mask=inside, other=0.0,
                       cache_modifier=cache)  # fmt: skip
    return _add(value, more, sums)


@triton.jit
def _exponent(value, top):
    """exp(value - top), zero where both are minus infinity."""
    return tl.exp(value - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _gather(values, insides, first, second, count, spec: tl.constexpr):
    """Statistics by thread after tiles more, of one or more neighbouring elements a thread.

    rms: second is the sum of squares. layer: mean, sum of squared differences from it, number of
    elements. softmax: maximum, and sum of exponentials below it.
    """
    if spec.op == "rms_norm":
        for i in tl.static_range(len(values)):
            second += tl.sum(values[i] * values[i], 1)
    elif spec.op == "layer_norm":
        added = tl.zeros_like(count)
        total = tl.zeros_like(first)
        for i in tl.static_range(len(values)):
            added += tl.sum(tl.where(insides[i], 1.0, tl.zeros_like(values[i])), 1)
            total += tl.sum(values[i], 1)
        mean = total / tl.maximum(added, 1.0)
        for i in tl.static_range(len(values)):
            gap = tl.where(insides[i], values[i] - mean[:, None], 0.0)
            second += tl.sum(gap * gap, 1)
        gap = mean - first
        share = added / tl.maximum(count + added, 1.0)
        first += gap * share
        second += gap * gap * count * share
        count += added
    else:
        top = first
        for i in tl.static_range(len(values)):
            top = tl.maximum(top, tl.max(values[i], 1))
        second *= _exponent(first, top)
        for i in tl.static_range(len(values)):
            second += tl.sum(_exponent(values[i], top[:, None]), 1)
        first = top
    return first, second, count


@triton.jit
def _merge(first, second, count, spec: tl.constexpr):
    """Statistics of many threads or parts as those of one."""
    if spec.op == "rms_norm":
        return 0.0, tl.sum(second, 0), 0.0
    elif spec.op == "layer_norm":
        total = tl.sum(count, 0)
        mean = tl.sum(first * count, 0) / tl.maximum(total, 1.0)
        gap = first - mean
        return mean, tl.sum(second + count * gap * gap, 0), total
    else:
        top = tl.max(first, 0)
        return top, tl.sum(second * _exponent(first, top), 0), 0.0


@triton.jit
def _finish(first, second, num_columns, eps, spec: tl.constexpr):
    """Offset and scale of a row: results are f(value - offset) * scale."""
    if spec.op == "softmax":
        return first, 1.0 / second
    else:
        return first, tl.rsqrt(second / num_columns + eps)


@triton.jit
def _pass_over(x, residual, y, sums, x_step, residual_step, num_columns, start, stop, edges,
               spec: tl.constexpr):  # fmt: skip
    """Statistics of chunks `start` to `stop` of a row, and where `edges` of the elements outside
    chunks; with a residual its sums are stored. x, residual, y, sums: the row.
    """
    threads: tl.constexpr = spec.threads
    loads: tl.constexpr = spec.loads
    head, chunks = _cut_row(y, num_columns, spec)
    stop = tl.minimum(stop, chunks)
    first = tl.full([threads], _nothing(spec), tl.float32)
    second = tl.zeros([threads], tl.float32)
    count = tl.zeros([threads], tl.float32)
    if not spec.even:
        columns, inside = _edge_columns(head, chunks, num_columns, edges, spec)
        value = _load_edges(x, residual, sums, x_step, residual_step, columns, inside, spec, "")
        if residual is not None:
            tl.store(sums + columns, value.to(sums.dtype.element_ty), mask=inside)
    x += head * x_step
    if residual is not None:
        residual += head * residual_step
    for chunk in range(start, stop, threads * spec.loads):
        values, insides = _load_chunks(
            x, residual, sums, x_step, residual_step, chunk, stop, spec, ""
        )
        if residual is not None:
            for i in tl.static_range(loads):
                pointers = _pointers(sums + head, 1, chunk + i * threads, spec.sums_wide, spec)
                tl.store(pointers, values[i].to(sums.dtype.element_ty), mask=insides[i])
        first, second, count = _gather(values, insides, first, second, count, spec)
    if not spec.even:
        first, second, count = _gather((value,), (inside,), first, second, count, spec)
    return _merge(first, second, count, spec)


@triton.jit
def _results(value, weight, bias, columns, inside, offset, scale, spec: tl.constexpr):
    """What is stored for elements at some columns."""
    value -= offset
    if spec.op == "softmax":
        value = tl.exp(value)
    value *= scale
    if weight is not None:
        value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _write_chunks(values, insides, weight, bias, y, head, start, offset, scale,
                  spec: tl.constexpr):  # fmt: skip
    """Stores the results of tiles from chunk `start` on of the row at y."""
    threads: tl.constexpr = spec.threads
    loads: tl.constexpr = spec.loads
    for i in tl.static_range(loads):
        chunk = start + i * threads
        columns = head + chunk * spec.vector + _offsets(spec)
        value = _results(values[i], weight, bias, columns, insides[i], offset, scale, spec)
        pointers = _pointers(y + head, 1, chunk, True, spec)
        tl.store(pointers, value.to(y.dtype.element_ty), mask=insides[i])


@triton.jit
def _start_early(spec: tl.constexpr):
    """Waits for what was launched before, and lets what is launched next begin: it may read what
    came before this launch without a wait.
    """
    if spec.early:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def long_rows_whole(x, residual, weight, bias, y, sums, x_row, x_step, residual_row, residual_step,
                    num_columns, eps, spec: tl.constexpr):  # fmt: skip
    """One program a row, of num_columns. x, residual: read, elements of a row x_step and
    residual_step apart, rows x_row and residual_row; weight, bias: [num_columns], read; y, sums:
    contiguous, written, the result and the sum of x and residual; None where there is none; all
    local memory, any float type. eps: of the norm. spec: LongRowSpec.

    The second pass begins at the end of the row, which is still in the cache.
    """
    _start_early(spec)
    step: tl.constexpr = spec.threads * spec.loads
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    y += row * num_columns
    if residual is not None:
        residual += row * residual_row
        sums += row * num_columns
    head, chunks = _cut_row(y, num_columns, spec)
    first, second, _ = _pass_over(
        x, residual, y, sums, x_step, residual_step, num_columns, 0, chunks, True, spec
    )
    offset, scale = _finish(first, second, num_columns, eps, spec)
    if not spec.even:
        columns, inside = _edge_columns(head, chunks, num_columns, True, spec)
        value = _load_edges(x, residual, sums, x_step, residual_step, columns, inside, spec, "")
        value = _results(value, weight, bias, columns, inside, offset, scale, spec)
        tl.store(y + columns, value.to(y.dtype.element_ty), mask=inside)
    x += head * x_step
    if residual is not None:
        residual += head * residual_step
    last = tl.cdiv(chunks, step) - 1
    for turn in range(last + 1):
        start = (last - turn) * step
        values, insides = _load_chunks(
            x, residual, sums, x_step, residual_step, start, chunks, spec, ""
        )
        _write_chunks(values, insides, weight, bias, y, head, start, offset, scale, spec)


@triton.jit
def long_rows_gather(x, residual, y, sums, statistics, x_row, x_step, residual_row, residual_step,
                     num_columns, num_parts, part_chunks, spec: tl.constexpr):  # fmt: skip
    """As long_rows_whole, the first pass only, of num_parts programs a row with part_chunks chunks
    each; y: not read or written, but its place. statistics: fp32 [3, rows * num_parts] in local
    memory, written: of each part.
    """
    _start_early(spec)
    program = tl.program_id(0)
    row = (program // num_parts).to(tl.int64)
    part = program % num_parts
    x += row * x_row
    y += row * num_columns
    if residual is not None:
        residual += row * residual_row
        sums += row * num_columns
    start = part * part_chunks
    found = _pass_over(
        x, residual, y, sums, x_step, residual_step, num_columns, start, start + part_chunks,
        part == 0, spec,
    )  # fmt: skip
    for i in tl.static_range(3):
        tl.store(statistics + i * tl.num_programs(0) + program, found[i])


@triton.jit
def long_rows_write(x, residual, weight, bias, y, sums, statistics, x_row, x_step, residual_row,
                    residual_step, num_columns, num_parts, part_chunks, eps,
                    spec: tl.constexpr):  # fmt: skip
    """As long_rows_whole, the second pass only, of num_parts programs a row with part_chunks chunks
    each; sums: not read or written, but of a type. statistics: as long_rows_gather left them. Rows
    come backwards: the last are in the cache.

    x and residual are read before the wait for that launch, which waited for what is before it:
    from the L2, since a first-level cache may hold what was there before.
    """
    step: tl.constexpr = spec.threads * spec.loads
    cache: tl.constexpr = _cache_of(spec)
    if spec.early:
        gdc_launch_dependents()
        if not cache:
            gdc_wait()
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // num_parts).to(tl.int64)
    part = program % num_parts
    x += row * x_row
    y += row * num_columns
    if residual is not None:
        residual += row * residual_row
    head, chunks = _cut_row(y, num_columns, spec)
    start = part * part_chunks
    stop = tl.minimum(start + part_chunks, chunks)
    if not spec.even:
        columns, inside = _edge_columns(head, chunks, num_columns, part == 0, spec)
        edges = _load_edges(x, residual, sums, x_step, residual_step, columns, inside, spec, cache)
    x += head * x_step
    if residual is not None:
        residual += head * residual_step
    values, insides = _load_chunks(
        x, residual, sums, x_step, residual_step, start, stop, spec, cache
    )
    if spec.early:
        gdc_wait()
    lanes = tl.arange(0, spec.parts)
    here = statistics + (program - part) + lanes
    known = lanes < num_parts
    apart = tl.num_programs(0)
    first = tl.load(here, mask=known, other=_nothing(spec), cache_modifier=".cg")
    second = tl.load(here + apart, mask=known, other=0.0, cache_modifier=".cg")
    count = tl.load(here + 2 * apart, mask=known, other=0.0, cache_modifier=".cg")
    first, second, _ = _merge(first, second, count, spec)
    offset, scale = _finish(first, second, num_columns, eps, spec)
    if not spec.even:
        edges = _results(edges, weight, bias, columns, inside, offset, scale, spec)
        tl.store(y + columns, edges.to(y.dtype.element_ty), mask=inside)
    _write_chunks(values, insides, weight, bias, y, head, start, offset, scale, spec)
    for chunk in range(start + step, stop, step):
        values, insides = _load_chunks(
            x, residual, sums, x_step, residual_step, chunk, stop, spec, cache
        )
        _write_chunks(values, insides, weight, bias, y, head, chunk, offset, scale, spec)
