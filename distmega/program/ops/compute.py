"""The closed set of ops. Each function states one op as iteration axes and access maps, and infers
its outputs.

A function takes the op's name and operand tensors, and returns the Op with the tensors it writes.
Users call the methods of ProgramBuilder instead, which add names and checks. Ops that only move
data are in data_movement.py, norms over rows in norms.py. The meaning of each kind (what is
computed at each point) is `hostir/library/ops.py`, one function a kind.
"""

import math
from collections.abc import Set
from dataclasses import replace

from distmega.errors import ProgramError
from distmega.program import expr
from distmega.program.dtypes import is_integer
from distmega.program.kinds import (
    OpKind,
    OpWork,
    StatedOp,
    define,
    flops_a_result,
    kind_of,
    one_a_point,
    zero_if_all,
    zero_in,
)
from distmega.program.ops.parts import (
    Built,
    access,
    axis_names,
    bad_op,
    index,
    inexact_integers,
    make_op,
    normal_dim,
    require_integers,
)
from distmega.program.types import Access, Attr, Axis, Index, Op, Tensor


def communication_axis(op: Op) -> str:
    """The mesh axis whose ranks do an op together; empty for an op that a rank does alone."""
    return str(op.attr("mesh_axis")) if kind_of(op).communicates else ""


def linear(name: str, x: Tensor, w: Tensor, bias: Tensor | None = None, spec: str = "") -> Built:
    """Contraction by named axes: out = sum over axes missing from the output of x * w, plus bias.

    spec: like "m k, n k -> m n", or "m k, n k, n -> m n" with a bias. By default the last dims of x
    and w contract. Sums in fp32 or wider; output dtype is x's.
    """
    tensors = [x, w] if bias is None else [x, w, bias]
    operands, out_axes = _parse_spec(name, spec or _default_spec(x, w, bias), len(tensors))
    extents: dict[str, int] = {}
    for tensor, group in zip(tensors, operands, strict=True):
        if len(group) != len(tensor.shape):
            found = f"spec group {group} for {tensor.name!r} of shape {tensor.shape}"
            raise bad_op(name, found, "one axis name a dim")
        for axis, extent in zip(group, tensor.shape, strict=True):
            if extents.setdefault(axis, extent) != extent:
                found = f"axis {axis!r} is {extents[axis]} and {extent} ({tensor.name!r})"
                raise bad_op(name, found, "equal extents")
    reduced = [axis for axis in extents if axis not in out_axes]
    axes = [Axis(name=a, extent=extents[a]) for a in out_axes]
    axes += [Axis(name=a, extent=extents[a], role="reduce", combine="sum") for a in reduced]
    out = Tensor(name=name, shape=tuple(extents[a] for a in out_axes), dtype=x.dtype)
    reads = [access(tensor, *group) for tensor, group in zip(tensors, operands, strict=True)]
    return make_op(name, "linear", axes, reads, [access(out, *out_axes)]), (out,)


def _parse_spec(name: str, spec: str, num_operands: int) -> tuple[list[list[str]], list[str]]:
    """Axis names of each operand, and of the output."""
    left, arrow, right = spec.partition("->")
    operands, out_axes = [part.split() for part in left.split(",")], right.split()
    if not arrow or len(operands) != num_operands:
        found = f"spec {spec!r} for {num_operands} operands"
        raise bad_op(name, found, "one comma-separated group an operand and '->'")
    for group in (*operands, out_axes):
        if len(set(group)) != len(group) or not all(axis.isidentifier() for axis in group):
            raise bad_op(name, f"group {group} of spec {spec!r}", "names, each once in a group")
    if not {*out_axes} <= {*operands[0], *operands[1]}:
        raise bad_op(name, f"output {out_axes} of spec {spec!r}", "axes of x and w")
    if not {axis for group in operands[2:] for axis in group} <= {*out_axes}:
        raise bad_op(name, f"bias {operands[2]} of spec {spec!r}", "axes of the output")
    return operands, out_axes


def _default_spec(x: Tensor, w: Tensor, bias: Tensor | None) -> str:
    rows = " ".join(axis_names("m", len(x.shape) - 1))
    return f"{rows} k, n k{', n' if bias else ''} -> {rows} n"


def pointwise(name: str, text: str, *args: Tensor, dtype: str = "") -> Built:
    """An expression of expr.py over a0, a1, ...; dims align from the right and broadcast where the
    extent is 1. dtype: of the result, by default that of a0.

    Constants take the operands' type. Of integers only what is exact in a0's type is accepted,
    unless dtype says what to convert to; sums and products out of range wrap around.
    """
    tree = expr.parse(text)
    if not args or expr.num_args(tree) != len(args):
        found = f"expression {text!r} over {len(args)} operands"
        raise bad_op(name, found, f"{max(expr.num_args(tree), 1)} operands")
    if not dtype and (part := expr.inexact_part(tree, [a.dtype for a in args])):
        raise inexact_integers(text, part, args[0].dtype)
    rank = max(len(a.shape) for a in args)
    shape = [1] * rank
    for a in args:
        for i, extent in enumerate(a.shape, start=rank - len(a.shape)):
            if extent != 1 and shape[i] not in (1, extent):
                found = f"shapes {[a.shape for a in args]}"
                raise bad_op(name, found, "shapes that broadcast from the right")
            shape[i] = max(shape[i], extent)
    axes = [Axis(name=n, extent=e) for n, e in zip(axis_names("i", rank), shape, strict=True)]
    reads = []
    for a in args:
        names = axes[rank - len(a.shape) :]
        dims = (
            index(n.name) if e == n.extent else Index() for n, e in zip(names, a.shape, strict=True)
        )
        reads.append(Access(tensor=a.name, dims=tuple(dims)))
    out = Tensor(name=name, shape=tuple(shape), dtype=dtype or args[0].dtype)
    converts = out.dtype != args[0].dtype or (dtype and is_integer(dtype))
    other: dict[str, Attr] = {"dtypes": (out.dtype,)} if converts else {}
    write = access(out, *axis_names("i", rank))
    return make_op(name, "pointwise", axes, reads, [write], expr=str(tree), **other), (out,)


def reduce(name: str, x: Tensor, dim: int, combine: str = "sum") -> Built:
    """Combines one dim away with "sum", "max" or "min"."""
    dim = normal_dim(name, x, dim)
    if combine not in ("sum", "max", "min"):
        raise bad_op(name, f"combine {combine!r}", "sum, max or min", "choose one of these")
    names = axis_names("i", len(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, x.shape, strict=True)]
    axes[dim] = Axis(name=names[dim], extent=x.shape[dim], role="reduce", combine=combine)
    kept = [n for i, n in enumerate(names) if i != dim]
    out = Tensor(
        name=name, shape=tuple(e for i, e in enumerate(x.shape) if i != dim), dtype=x.dtype
    )
    return make_op(
        name, "reduce", axes, [access(x, *names)], [access(out, *kept)], combine=combine
    ), (out,)


def rope(name: str, x: Tensor, positions: Tensor, table: Tensor) -> Built:
    """Rotary embedding of x [m, ..., d] at positions [m], half-split: pairs are (i, i + d/2).

    table: [max positions, d], fp32, cosines of the d/2 angles and then their sines.
    """
    fits = positions.shape == x.shape[:1] and table.shape[1:] == x.shape[-1:]
    if not fits or len(x.shape) < 2 or len(table.shape) != 2 or x.shape[-1] % 2:
        found = f"x {x.shape}, positions {positions.shape}, table {table.shape}"
        raise bad_op(name, found, "[m, ..., d], [m], [t, d], d even")
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
    shapes = (q.shape, k_cache.shape, v_cache.shape, positions.shape)
    own = cache_rows(k_cache)
    if own and packed:
        own = ("s",)
    if tuple(map(len, shapes)) != (4, 3 + len(own), 3 + len(own), 1):
        raise _bad_attention(name, shapes)
    (m, h, g, d), (t, e) = q.shape, v_cache.shape[-2:]
    num_caches = k_cache.shape[0] if own == ("s",) else 1
    rows = {"m": (m, h), "s": (num_caches, h), "": (h,)}[own[0] if own else ""]
    caches_fit = k_cache.shape == (*rows, t, d) and v_cache.shape == (*rows, t, e)
    if not caches_fit or positions.shape != (m,):
        raise _bad_attention(name, shapes)
    if window < 0 or not math.isfinite(scale) or not 0 <= softcap < math.inf:
        found = f"scale {scale}, window {window}, softcap {softcap}"
        expected = "finite ones, the window and the softcap at least 0"
        raise bad_op(name, found, expected, "change these")
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
        sequences, starts = packed
        if sequences.shape != (m,) or starts.shape != (num_caches + 1,):
            found = f"sequences {sequences.shape} and starts {starts.shape}"
            expected = f"[{m}] and [{num_caches + 1}], of {num_caches} caches"
            raise bad_op(name, found, expected)
        for given in packed:
            require_integers(name, given)
        if own:
            axes.append(Axis(name="s", extent=num_caches, role="reduce", lookup=True))
        axes.append(Axis(name="r", extent=num_caches + 1, role="reduce"))
        reads += [access(sequences, "m"), access(starts, "r")]
        attrs["packed"] = m
    return make_op(name, "attention", axes, reads, [access(out, "m", "h", "g", "e")], **attrs), (
        out,
    )


def _bad_attention(name: str, shapes: tuple[tuple[int, ...], ...]) -> ProgramError:
    expected = "q [m, h, g, d], k [h, t, d], v [h, t, e] (or both [m, h, t, ...]), positions [m]"
    return bad_op(name, f"shapes {', '.join(map(str, shapes))}", expected)


def embedding(name: str, ids: Tensor, table: Tensor) -> Built:
    """Rows of table [v, d] at ids [m]: a one-hot contraction over v, one row touched."""
    if len(ids.shape) != 1 or len(table.shape) != 2:
        raise bad_op(name, f"ids {ids.shape}, table {table.shape}", "[m] and [v, d]")
    require_integers(name, ids)
    axes = [Axis(name="m", extent=ids.shape[0]), Axis(name="d", extent=table.shape[1])]
    axes.append(Axis(name="v", extent=table.shape[0], role="reduce", combine="sum", lookup=True))
    out = Tensor(name=name, shape=(ids.shape[0], table.shape[1]), dtype=table.dtype)
    return make_op(
        name,
        "embedding",
        axes,
        [access(ids, "m"), access(table, "v", "d")],
        [access(out, "m", "d")],
    ), (out,)


def argmax(name: str, x: Tensor) -> Built:
    """Index of the largest element of the last dim, the lowest on ties: outputs [name].value and
    [name] (i64).
    """
    if not x.shape:
        raise bad_op(name, "x without dims", "[..., v]")
    rows = axis_names("m", len(x.shape) - 1)
    axes = [Axis(name=n, extent=e) for n, e in zip(rows, x.shape[:-1], strict=True)]
    axes.append(Axis(name="v", extent=x.shape[-1], role="reduce", combine="argmax"))
    value = Tensor(name=f"{name}.value", shape=x.shape[:-1], dtype=x.dtype)
    index = Tensor(name=name, shape=x.shape[:-1], dtype="i64")
    op = make_op(
        name,
        "argmax",
        axes,
        [access(x, *rows, "v")],
        [access(value, *rows), access(index, *rows)],
    )
    return op, (value, index)


MAX_PARTS = 8
"""Parts of a row whose largest elements `top` finds apart, so that ranks can share the work."""


def top(name: str, x: Tensor, num_top: int) -> Built:
    """The num_top largest of each part of a row of x [m, v], largest first: [m, s, num_top].

    The row is s equal parts: as many as divide it, at most MAX_PARTS, with num_top elements each.
    """
    if len(x.shape) != 2 or not 1 <= num_top <= x.shape[-1]:
        found = f"the {num_top} largest of rows of {x.shape}"
        raise bad_op(name, found, "x [m, v] and at least 1, at most v of them")
    rows, extent = x.shape
    fitting = (n for n in range(1, MAX_PARTS + 1) if extent % n == 0 and extent // n >= num_top)
    num_parts = max(fitting)
    axes = [Axis(name="m", extent=rows), Axis(name="s", extent=num_parts)]
    axes.append(Axis(name="u", extent=extent // num_parts, role="reduce"))
    axes.append(Axis(name="c", extent=num_top, role="scatter"))
    out = Tensor(name=name, shape=(rows, num_parts, num_top), dtype=x.dtype)
    read = Access(tensor=x.name, dims=(index("m"), index("s", "u")))
    return make_op(name, "top", axes, [read], [access(out, "m", "s", "c")]), (out,)


def cutoff(name: str, x: Tensor, settings: Tensor) -> Built:
    """What may be sampled: limits [m, 2] f32, the temperature and the least logit, of rows of x
    [m, ...].

    settings [m, 3] f32: temperature, top_k (0: all), top_p. Of x over temperature, the top_k
    largest, and of these the largest that together make up top_p of their probability; what equals
    the last of either is kept with it. x holds all logits, or at least the top_k largest.
    """
    rows = x.shape[0] if x.shape else 0
    if len(x.shape) < 2 or settings.shape != (rows, 3) or settings.dtype != "f32":
        found = f"x {x.shape}, settings {settings.shape} of dtype {settings.dtype}"
        raise bad_op(name, found, "[m, ...] and f32 [m, 3]")
    inner = axis_names("v", len(x.shape) - 1)
    axes = [Axis(name="m", extent=rows), Axis(name="i", extent=3, role="reduce")]
    axes += [Axis(name=n, extent=e, role="reduce") for n, e in zip(inner, x.shape[1:], strict=True)]
    axes.append(Axis(name="j", extent=2, role="scatter"))
    out = Tensor(name=name, shape=(rows, 2), dtype="f32")
    reads = [access(x, "m", *inner), access(settings, "m", "i")]
    return make_op(name, "cutoff", axes, reads, [access(out, "m", "j")]), (out,)


def sample(name: str, x: Tensor, limits: Tensor, seeds: Tensor, positions: Tensor) -> Built:
    """An index of each row of logits x [m, v], sampled by their softmax over a temperature: outputs
    [name].value f32 and [name] i64, [m].

    limits [m, 2] f32: temperature, least logit that may be sampled. seeds, positions: i64 [m]; the
    sample depends on them and on the logits alone. It is the argmax of logit + temperature * noise,
    with Gumbel noise of its own for each seed, position and index, so that ranks that hold parts
    of a row sample together as they find an argmax together.
    """
    rows = x.shape[:1]
    shapes = (limits.shape, seeds.shape, positions.shape)
    if len(x.shape) != 2 or shapes != ((*rows, 2), rows, rows) or limits.dtype != "f32":
        found = f"x {x.shape}, limits {limits.shape} of dtype {limits.dtype}, "
        found += f"seeds {seeds.shape}, positions {positions.shape}"
        raise bad_op(name, found, "[m, v], f32 [m, 2], [m], [m]")
    require_integers(name, seeds)
    require_integers(name, positions)
    axes = [Axis(name="m", extent=rows[0])]
    axes.append(Axis(name="v", extent=x.shape[1], role="reduce", combine="argmax"))
    axes.append(Axis(name="j", extent=2, role="reduce"))
    value = Tensor(name=f"{name}.value", shape=rows, dtype="f32")
    chosen = Tensor(name=name, shape=rows, dtype="i64")
    reads = [access(x, "m", "v"), access(limits, "m", "j")]
    reads += [access(seeds, "m"), access(positions, "m")]
    writes = [access(value, "m"), access(chosen, "m")]
    return make_op(name, "sample", axes, reads, writes), (value, chosen)


def _attention_flops(op: StatedOp, work: OpWork) -> int:
    """Scores, their softmax and the sum of values, of every query and position."""
    sizes = work.sizes
    rows = math.prod(sizes[name] for name in ("b", "m", "h", "g", "t") if name in sizes)
    return rows * (2 * sizes["d"] + 2 * sizes["e"] + 4)


def _linear_is_zero(op: StatedOp, holders: Set[int], zero: Set[int]) -> bool:
    added = set(range(2, len(op.reads)))
    return bool(zero - added) and added <= zero


def _formula(op: StatedOp) -> expr.Expr:
    return expr.parse(str(op.attr("expr")))


define(
    OpKind(
        name="linear",
        reads_apart=True,
        added_from=2,
        zero_where=_linear_is_zero,
        flops=lambda op, work: 2 * work.points,
    )
)
define(
    OpKind(
        name="pointwise",
        is_elementwise=True,
        zero_where=lambda op, holders, zero: expr.is_zero(_formula(op), frozenset(zero)),
        finite_where=lambda op, zero: expr.is_finite(_formula(op), frozenset(zero)),
        flops=lambda op, work: work.points * expr.num_flops(_formula(op)),
        grouped_flops=lambda op, points: points * expr.num_flops(_formula(op)),
    )
)
define(OpKind(name="reduce", zero_where=zero_if_all, flops=one_a_point))
define(OpKind(name="rope", zero_where=zero_in(0), flops=flops_a_result(4)))
ATTENTION = OpKind(
    name="attention",
    mixes_values=True,
    reads_positions=True,
    host_reads="positions",
    zero_where=zero_in(2),
    flops=_attention_flops,
)
define(ATTENTION)
define(OpKind(name="kv_append", inplace=True, zero_where=zero_in(0)))
define(OpKind(name="embedding", masks_padding=True, zero_where=zero_in(1)))
define(OpKind(name="argmax", masks_padding=True, flops=one_a_point))
define(OpKind(name="top", chooses_token=True))
define(OpKind(name="cutoff", chooses_token=True))
define(OpKind(name="sample", chooses_token=True, masks_padding=True, flops=one_a_point))

COLLECTIVE = OpKind(name="all_to_all", origin="sharding", communicates=True, is_clipped=True)
define(replace(COLLECTIVE, name="reduce_scatter", scatters_sums=True))
define(COLLECTIVE)
define(replace(COLLECTIVE, name="all_gather", reaches_all=True, gathers_all=True))
define(replace(COLLECTIVE, name="all_reduce", reaches_all=True, is_clipped=False))
# slices locally: no bytes move
define(OpKind(name="take_shard", origin="sharding", is_clipped=True))
