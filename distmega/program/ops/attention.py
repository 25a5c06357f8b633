"""Attention over caches and under any mask, and what stands beside it: rotations, appends.

As compute.py: names and tensors in, the Op and the tensor it writes out. The mask of `attention`
follows from positions; that of `attend` is given, as of torch's scaled_dot_product_attention.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distmega.arguments import shown
from distmega.errors import ProgramError, counted
from distmega.program.kinds import (
    COUNT,
    NUMBER,
    POSITIVE_OR_ZERO,
    Coordinate,
    OpKind,
    OpWork,
    StatedOp,
    define,
    flops_a_result,
    whole_numbers,
    widen,
    zero_in,
)
from distmega.program.ops.lookups import require_ids
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    finite_number,
    index,
    make_op,
    require_floats,
    require_integers,
    whole_number,
)
from distmega.program.types import Access, Attr, Axis, Index, Op, Tensor

_AXES = ("b", "h", "g", "m", "t")


def rope(name: str, x: Tensor, positions: Tensor, table: Tensor) -> Built:
    """Rotary embedding of x [m, ..., d] at positions [m], half-split: pairs are (i, i + d/2).

    table: [max positions, d], fp32, cosines of the d/2 angles and then their sines.
    """
    fits = positions.shape == x.shape[:1] and table.shape[1:] == x.shape[-1:]
    if not fits or len(x.shape) < 2 or len(table.shape) != 2 or x.shape[-1] % 2:
        found = f"x {x.shape}, positions {positions.shape}, table {table.shape}"
        raise bad_op(name, found, "[m, ..., d], [m], [t, d], d even")
    require_floats(name, x)
    require_integers(name, positions)
    middle = axis_names("h", len(x.shape) - 2)
    axes = [Axis(name=n, extent=e) for n, e in zip(["m", *middle, "d"], x.shape, strict=True)]
    axes.append(Axis(name="r", extent=x.shape[-1], role="reduce"))
    axes.append(Axis(name="t", extent=table.shape[0], role="reduce", lookup=True))
    out = Tensor(name=name, shape=x.shape, dtype=x.dtype)
    reads = [
        access(x, "m", *middle, "d"),
        access(x, "m", *middle, "r"),
        access(positions, "m"),
        access(table, "t", "r"),
    ]
    return make_op(name, "rope", axes, reads, [access(out, "m", *middle, "d")]), (out,)


def kv_append(
    name: str, cache: Tensor, x: Tensor, positions: Tensor, sequences: Tensor | None = None
) -> Built:
    """Writes x [m, h, d] into cache [h, t, d] at t = positions[m], in place; no new tensor.

    With caches [m, h, t, d] each row goes into its own: rows are sequences, not tokens of one.
    sequences, [m]: row m goes into cache sequences[m] of caches [s, h, t, d].
    """
    own = cache_rows(cache) if sequences is None else ("s",)
    fits = len(cache.shape) == 3 + len(own) and len(x.shape) == 3
    fits = fits and (*cache.shape[-3:-2], cache.shape[-1]) == x.shape[1:]
    fits = fits and (own != ("m",) or cache.shape[0] == x.shape[0])
    fits = fits and (sequences is None or sequences.shape == positions.shape)
    if not fits or cache.role != "state" or positions.shape != x.shape[:1]:
        found = f"cache {cache.shape} ({cache.role}), x {x.shape}, positions {positions.shape}"
        expected = "state [h, t, d] or [m, h, t, d], x [m, h, d] and positions [m]"
        if sequences is not None:
            found += f", sequences {sequences.shape}"
            expected = "state [s, h, t, d], x [m, h, d], positions [m] and sequences [m]"
        raise bad_op(name, found, expected)
    require_integers(name, positions)
    axes = [Axis(name=n, extent=e) for n, e in (("h", x.shape[1]), ("d", x.shape[2]))]
    axes.append(Axis(name="m", extent=x.shape[0], role="parallel" if own == ("m",) else "reduce"))
    axes.append(Axis(name="t", extent=cache.shape[-2], role="scatter", lookup=True))
    reads = [access(x, "m", "h", "d"), access(positions, "m")]
    if sequences is not None:
        require_integers(name, sequences)
        axes.append(Axis(name="s", extent=cache.shape[0], role="scatter", lookup=True))
        reads.append(access(sequences, "m"))
    return make_op(name, "kv_append", axes, reads, [access(cache, *own, "h", "t", "d")]), ()


def cache_rows(cache: Tensor) -> tuple[str, ...]:
    """The row axis of a cache where each row has its own, [m, h, t, d]; empty where all share."""
    return ("m",) if len(cache.shape) == 4 else ()


def attention(
    name: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    in_order: bool = False,
    packed: tuple[Tensor, Tensor] | None = None,
    softcap: float = 0.0,
) -> Built:
    """Causal attention of q [m, h, g, d] over caches [h, t, d] and [h, t, e]: query i sees t <=
    positions[i].

    h is the kv head, g the query head within its group. window > 0 also requires t > positions[i] -
    window. Output [m, h, g, e]. Softmax in fp32. With caches [m, h, t, d] and [m, h, t, e] each row
    sees its own: rows are sequences, not tokens of one. in_order: positions are 0, 1, 2 ..., which
    allows faster kernels; the attribute is the number of rows that this holds of, all of them.

    packed: sequences [m] and starts [s + 1], of caches [s, h, t, ...], or of one without s. Row m
    sees cache sequences[m]; rows starts[i] to starts[i + 1] are those of sequence i, whose
    positions follow each other, and there are no others. The attribute `packed` is the number of
    rows of which this is said, all of them: kernels read starts, a part of the rows can't.

    softcap > 0: scores are softcap * tanh(score / softcap).
    """
    own = ("s",) if packed and cache_rows(k_cache) else cache_rows(k_cache)
    _require_caches(name, q, k_cache, v_cache, positions, own)
    (m, h, g, d), (t, e) = q.shape, v_cache.shape[-2:]
    scale, softcap = _factors(name, scale, softcap)
    window = whole_number(name, "window", window)
    if window < 0:
        raise bad_op(name, f"window {window}", "at least 0, which is none", "change window")
    if not isinstance(in_order, bool):
        raise bad_op(name, f"in_order {shown(in_order)}", "True or False", "change in_order")
    require_floats(name, q)
    require_integers(name, positions)
    axes = [Axis(name=n, extent=x) for n, x in (("m", m), ("h", h), ("g", g), ("e", e))]
    axes += [Axis(name="d", extent=d, role="reduce"), Axis(name="t", extent=t, role="reduce")]
    out = Tensor(name=name, shape=(m, h, g, e), dtype=q.dtype)
    caches = access(k_cache, *own, "h", "t", "d"), access(v_cache, *own, "h", "t", "e")
    reads = [access(q, "m", "h", "g", "d"), *caches, access(positions, "m")]
    attrs: dict[str, Attr] = {"scale": scale, "window": window}
    if in_order:
        attrs["in_order"] = m
    if softcap:
        attrs["softcap"] = softcap
    if packed:
        num_caches = k_cache.shape[0] if own else 1
        _require_packed(name, *packed, m, num_caches)
        if own:
            axes.append(Axis(name="s", extent=num_caches, role="reduce", lookup=True))
        axes.append(Axis(name="r", extent=num_caches + 1, role="reduce"))
        reads += [access(packed[0], "m"), access(packed[1], "r")]
        attrs["packed"] = m
    writes = [access(out, "m", "h", "g", "e")]
    return make_op(name, "attention", axes, reads, writes, **attrs), (out,)


def _require_caches(
    name: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    own: tuple[str, ...],
) -> None:
    """ProgramError for shapes that aren't those of attention. own: the axis of caches that are not
    shared by all rows, "m" or "s".
    """
    shapes = (q.shape, k_cache.shape, v_cache.shape, positions.shape)
    if tuple(map(len, shapes)) != (4, 3 + len(own), 3 + len(own), 1):
        raise _bad_attention(name, shapes)
    (m, h, _, d), (t, e) = q.shape, v_cache.shape[-2:]
    num_caches = m if own == ("m",) else k_cache.shape[0]
    rows = (num_caches, h) if own else (h,)
    caches_fit = k_cache.shape == (*rows, t, d) and v_cache.shape == (*rows, t, e)
    if not caches_fit or positions.shape != (m,):
        raise _bad_attention(name, shapes)


def _require_packed(
    name: str, sequences: Tensor, starts: Tensor, num_rows: int, num_caches: int
) -> None:
    if sequences.shape != (num_rows,) or starts.shape != (num_caches + 1,):
        found = f"sequences {sequences.shape} and starts {starts.shape}"
        expected = f"[{num_rows}] and [{num_caches + 1}], of {counted(num_caches, 'cache')}"
        raise bad_op(name, found, expected)
    for given in (sequences, starts):
        require_integers(name, given)


def biased_attention(
    name: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    bias: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Built:
    """As `attention`, a score of head (h, g) and position t being that and bias [t, h, g], as
    linear biases by distance are but for what a row of scores has in common.
    """
    (op, outs) = attention(name, q, k_cache, v_cache, positions, scale, window, softcap=softcap)
    expected = (k_cache.shape[-2], *q.shape[1:3])
    if bias.shape != expected or bias.dtype in ("bool", "i32", "i64"):
        raise bad_op(name, f"bias {bias.shape} of {bias.dtype}", f"{expected} of a float type")
    reads = (*op.reads, access(bias, "t", "h", "g"))
    return replace(op, kind="biased_attention", reads=reads), outs


def _factors(name: str, scale: float, softcap: float) -> tuple[float, float]:
    """Of scores, as floats, whichever numbers were given."""
    scale, cap = (
        finite_number(name, what, value) for what, value in (("scale", scale), ("softcap", softcap))
    )
    if cap < 0:
        raise bad_op(name, f"softcap {softcap}", "at least 0, which is none", "change softcap")
    return scale, cap


def _bad_attention(name: str, shapes: tuple[tuple[int, ...], ...]) -> ProgramError:
    expected = "q [m, h, g, d], k [h, t, d], v [h, t, e] (or both [m, h, t, ...]), positions [m]"
    return bad_op(name, f"shapes {', '.join(map(str, shapes))}", expected)


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> Built:
    """softmax(cap(scale * q k') + mask) v of q [b, h g, m, d], k [b, h, t, d] and v [b, h, t, e].

    h is the kv head, g the query head within its group; out [b, h g, m, e], of q's type, softmax in
    fp32. mask: bool (what may be seen) or floats (added), of four dims that are 1 or those of [b,
    h g, m, t]. A row that may see nothing is zero. softcap: cap(x) = softcap * tanh(x / softcap).
    """
    shapes = [x.shape for x in (q, k, v, mask) if x is not None]
    expected = "q [b, h g, m, d], k [b, h, t, d], v [b, h, t, e], a mask of four dims"
    if any(len(shape) != 4 for shape in shapes):
        raise bad_op(name, f"shapes {', '.join(map(str, shapes))}", expected)
    (b, heads, m, d), (_, h, t, e) = q.shape, v.shape
    if k.shape != (b, h, t, d) or v.shape[0] != b or heads % h:
        raise bad_op(name, f"shapes {', '.join(map(str, shapes))}", expected)
    scale, softcap = _factors(name, scale, softcap)
    require_floats(name, q)
    group = heads // h
    sizes = zip(_AXES[:4], (b, h, group, m), strict=True)
    axes = [Axis(name=n, extent=x) for n, x in sizes] + [Axis(name="e", extent=e)]
    axes += [Axis(name="d", extent=d, role="reduce"), Axis(name="t", extent=t, role="reduce")]
    joined = index("h", "g")
    reads = [Access(tensor=q.name, dims=(index("b"), joined, index("m"), index("d")))]
    reads += [access(k, "b", "h", "t", "d"), access(v, "b", "h", "t", "e")]
    if mask is not None:
        reads.append(_mask_access(name, mask, (b, heads, m, t)))
    out = Tensor(name=name, shape=(b, heads, m, e), dtype=q.dtype)
    write = Access(tensor=name, dims=(index("b"), joined, index("m"), index("e")))
    return make_op(name, "attend", axes, reads, [write], scale=scale, softcap=softcap), (out,)


def _mask_access(name: str, mask: Tensor, whole: tuple[int, ...]) -> Access:
    if any(mine not in (1, extent) for mine, extent in zip(mask.shape, whole, strict=True)):
        raise bad_op(name, f"mask {mask.shape}", f"dims that are 1 or those of {whole}")
    if mask.dtype in ("i32", "i64"):
        raise bad_op(name, f"mask of dtype {mask.dtype}", "bool, or a float type")
    names = (("b",), ("h", "g"), ("m",), ("t",))
    dims = zip(names, mask.shape, whole, strict=True)
    return Access(
        tensor=mask.name,
        dims=tuple(index(*axes) if mine == extent else Index() for axes, mine, extent in dims),
    )


def attention_flops(op: StatedOp, work: OpWork) -> int:
    """Scores, their softmax and the sum of values, of every query and position."""
    sizes = work.sizes
    rows = math.prod(sizes[name] for name in ("b", "m", "h", "g", "t") if name in sizes)
    return rows * (2 * sizes["d"] + 2 * sizes["e"] + 4)


def _restated_append(
    op: Op, x: Tensor, positions: Tensor, third: Tensor, fourth: Tensor | None = None
) -> Built:
    """third: the cache, or sequences where a fourth is that."""
    cache, sequences = (third, None) if fourth is None else (fourth, third)
    return kv_append(op.name, replace(cache, role="state"), x, positions, sequences)


def _restated_attention(
    op: Op, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *others: Tensor
) -> Built:
    """others: sequences and starts where rows are packed."""
    is_packed = bool(op.get("packed", 0))
    if len(others) != 2 * is_packed:
        found = f"{counted(4 + len(others), 'operand')} and packed={op.get('packed', 0)!r}"
        raise bad_op(op.name, found, "q, k, v, positions, or with packed sequences and starts too")
    packed = (others[0], others[1]) if is_packed else None
    return attention(op.name, q, k, v, positions, *_score_factors(op), packed=packed)


def _score_factors(op: Op) -> tuple[float, int]:
    return _number(op, "scale"), int(_number(op, "window"))


def _restated_attend(op: Op, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Built:
    """With the result's dims in the order that the op has, and a mask that is broadcast where it
    is: a rank may have one head of those for which it is the same.
    """
    stated, (out,) = attend(op.name, q, k, v, mask, _number(op, "scale"), _number(op, "softcap"))
    if mask is not None:
        *reads, seen = stated.reads
        pairs = zip(seen.dims, op.reads[-1].dims, mask.shape, strict=True)
        dims = (mine if (mine, extent) == (Index(), 1) else dim for dim, mine, extent in pairs)
        stated = replace(stated, reads=(*reads, replace(seen, dims=tuple(dims))))
    (write,) = stated.writes
    order = [write.dims.index(dim) for dim in op.writes[0].dims if dim in write.dims]
    if sorted(order) != [0, 1, 2, 3]:
        return stated, (out,)
    ordered, shape = zip(*((write.dims[n], out.shape[n]) for n in order), strict=True)
    return replace(stated, writes=(replace(write, dims=ordered),)), (replace(out, shape=shape),)


def rope_values(x: Any, positions: Any, table: Any) -> Any:
    """Rotates pairs (i, i + d/2) of x [m, ..., d]; table [t, d] holds cosines, then sines, of the
    d/2 angles. RequestError as of require_ids.
    """
    half = x.shape[-1] // 2
    try:
        rows = table.index_select(0, positions)
    except IndexError:  # looked for here alone: what is right costs nothing
        require_ids(positions, table.shape[0])
        raise
    rows = rows.view(x.shape[0], *[1] * (x.dim() - 2), 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    left, right = widen(x).split(half, -1)
    out = x.new_empty(x.shape)
    out[..., :half] = left * cos - right * sin
    out[..., half:] = right * cos + left * sin
    return out


def append_values(cache: Any, x: Any, positions: Any, sequences: Any = None) -> Any:
    """Writes x [m, h, d] into cache [h, t, d], or row m into cache[sequences[m]] of [s, h, t, d],
    into cache[m] without `sequences`, at t = positions[m], in place; gives the cache. RequestError
    for places outside of it that are on a CPU.
    """
    require_ids(positions, cache.shape[-2])
    if cache.dim() == 4:
        rows = whole_numbers(positions, len(x)) if sequences is None else sequences
        require_ids(rows, cache.shape[0])
        cache[rows, :, positions] = x.to(cache.dtype)
        return cache
    return cache.index_copy_(1, positions.long(), x.transpose(0, 1).to(cache.dtype))


def _attention_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    scale, softcap, window = (_number(op, name) for name in ("scale", "softcap", "window"))

    def run(q: Any, k: Any, v: Any, positions: Any, *others: Any) -> Any:
        bias = others[0] if op.kind == "biased_attention" else None
        if bias is None and others:
            require_ids(others[0], k.shape[0] if k.dim() == 4 else 1)
            if k.dim() == 4:
                k, v = k[others[0]], v[others[0]]
        return attention_values(q, k, v, positions, scale, window, softcap, bias)

    return run


def attention_values(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    scale: float,
    window: float = 0,
    softcap: float = 0.0,
    bias: Any = None,
) -> Any:
    """Of every position of a cache, the weights of unseen ones zero, so zeros for a query that sees
    none; operands as of attention and of biased_attention, of any types: computed in that of q,
    widened.
    """
    rows = widen(q)
    keys, values = k.to(rows.dtype), v.to(rows.dtype)
    at, here = whole_numbers(positions, k.shape[-2]), positions.unsqueeze(1)
    seen = (at <= here) & ((at > here - window) if window else (at >= 0))
    scores = _capped(rows @ keys.transpose(-1, -2) * scale, softcap)
    if bias is not None:
        scores = scores + bias.to(rows.dtype).permute(1, 2, 0)
    weights = _softmax(scores.masked_fill(~seen[:, None, None], -math.inf))
    # What lies in unseen positions may be anything, also no number.
    values = values.masked_fill(~seen[:, None, :, None], 0)
    return (weights @ values).to(q.dtype)


def _softmax(scores: Any) -> Any:
    """Zeros where all scores are -inf."""
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)


def _capped(scores: Any, softcap: float) -> Any:
    return (scores / softcap).tanh() * softcap if softcap else scores


def _number(op: Op, name: str) -> float:
    return float(str(op.get(name, 0)))


def _attend_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    scale, softcap = _number(op, "scale"), _number(op, "softcap")

    def run(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        rows, group = widen(q), q.shape[1] // k.shape[1]
        keys, values = (x.to(rows.dtype).repeat_interleave(group, 1) for x in (k, v))
        scores = _capped(rows @ keys.transpose(-1, -2) * scale, softcap)
        if mask is not None and mask.is_floating_point():
            scores = scores + mask.to(rows.dtype)
        elif mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return (_softmax(scores) @ values).to(q.dtype)

    return run


define(
    OpKind(
        name="rope",
        in_megakernel=True,
        reads_whole=True,
        rotates=True,
        misfit=as_stated(lambda op, x, pairs, positions, table: rope(op.name, x, positions, table)),
        zero_where=zero_in(0),
        flops=flops_a_result(4),
        reference=lambda op, coordinate: lambda x, pairs, *others: rope_values(x, *others),
    )
)
define(
    OpKind(
        name="kv_append",
        in_megakernel=True,
        reads_whole=True,
        appends=True,
        inplace=True,
        misfit=as_stated(_restated_append),
        zero_where=zero_in(0),
        reference=lambda op, coordinate: lambda *xs: append_values(xs[-1], *xs[:-1]),
    )
)
ATTENTION = OpKind(
    name="attention",
    in_megakernel=True,
    reads_whole=True,
    mixes_values=True,
    reads_positions=True,
    host_reads="positions",
    attrs={
        "scale": NUMBER,
        "window": COUNT,
        "softcap": POSITIVE_OR_ZERO.optional(),
        "in_order": COUNT.optional(),
        "packed": COUNT.optional(),
    },
    misfit=as_stated(_restated_attention),
    zero_where=zero_in(2),
    flops=attention_flops,
    reference=_attention_reference,
)
define(ATTENTION)
define(
    replace(
        ATTENTION,
        name="biased_attention",
        host_reads="",
        misfit=as_stated(
            lambda op, q, k, v, positions, bias: biased_attention(
                op.name, q, k, v, positions, bias, *_score_factors(op)
            )
        ),
    )
)
define(
    replace(
        ATTENTION,
        name="attend",
        reads_positions=False,
        host_reads="",
        attrs={"scale": NUMBER, "softcap": POSITIVE_OR_ZERO},
        misfit=as_stated(_restated_attend),
        reference=_attend_reference,
    )
)
