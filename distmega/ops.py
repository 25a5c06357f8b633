"""The closed set of ops. Each function states one op as iteration axes and access maps, and infers its outputs.

A function takes the op's name and operand tensors, and returns the Op with the tensors it writes. Users call the
methods of ProgramBuilder instead, which add names and checks. The meaning of each kind (what is computed at each point)
is `hostir/library.py`, one function a kind.
"""

import math
from collections.abc import Sequence

from distmega import expr
from distmega.errors import ProgramError
from distmega.program import Access, Attr, Axis, Index, Op, Tensor

KINDS = (
    "linear", "pointwise", "reduce", "rms_norm", "rope", "attention", "kv_append", "embedding",
    "slice", "concat", "reshape", "transpose", "view", "set", "argmax",
)  # fmt: skip
"""Kinds that a user's program may hold."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "take_shard")
"""Kinds that appear only in a rank's local program, put there by sharding. take_shard slices locally: no bytes move."""

Built = tuple[Op, tuple[Tensor, ...]]


def _index(*axes: str) -> Index:
    return Index(axes=axes)


def _access(tensor: Tensor, *axes: str) -> Access:
    return Access(tensor=tensor.name, dims=tuple(_index(axis) for axis in axes))


def _op(name: str, kind: str, axes: Sequence[Axis], reads: Sequence[Access], out: Sequence[Access], **attrs: Attr) -> Op:
    return Op(name=name, kind=kind, axes=tuple(axes), reads=tuple(reads), writes=tuple(out), attrs=tuple(sorted(attrs.items())))


def _bad(name: str, found: str, expected: str, remedy: str = "change the operands") -> ProgramError:
    return ProgramError(f"op {name!r}: {found}", expected=expected, remedy=remedy)


def _names(prefix: str, num: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(num)]


def linear(name: str, x: Tensor, w: Tensor, bias: Tensor | None = None, spec: str = "") -> Built:
    """Contraction by named axes: out = sum over axes missing from the output of x * w, plus bias.

    spec: like "m k, n k -> m n", or "m k, n k, n -> m n" with a bias. By default the last dims of x and w contract.
    Sums in fp32 or wider; output dtype is x's.
    """
    spec = spec or _default_spec(x, w, bias)
    left, arrow, right = spec.partition("->")
    operands = [part.split() for part in left.split(",")]
    tensors = [x, w] if bias is None else [x, w, bias]
    out_axes = right.split()
    if not arrow or len(operands) != len(tensors):
        raise _bad(name, f"spec {spec!r} for {len(tensors)} operands", "one comma-separated group an operand and '->'")
    extents: dict[str, int] = {}
    for tensor, axes in zip(tensors, operands, strict=True):
        if len(axes) != len(tensor.shape) or len(set(axes)) != len(axes):
            raise _bad(name, f"spec group {axes} for {tensor.name!r} of shape {tensor.shape}", "one new axis name a dim")
        for axis, extent in zip(axes, tensor.shape, strict=True):
            if extents.setdefault(axis, extent) != extent:
                raise _bad(name, f"axis {axis!r} is {extents[axis]} and {extent} ({tensor.name!r})", "equal extents")
    unknown = [axis for axis in out_axes if axis not in extents]
    stray = [axis for axis in (operands[2] if bias else []) if axis not in out_axes]
    if unknown or stray:
        raise _bad(name, f"spec {spec!r}", "output axes among x and w, bias axes among the output")
    reduced = [axis for axis in extents if axis not in out_axes]
    axes = [Axis(name=a, extent=extents[a]) for a in out_axes]
    axes += [Axis(name=a, extent=extents[a], role="reduce", combine="sum") for a in reduced]
    out = Tensor(name=name, shape=tuple(extents[a] for a in out_axes), dtype=x.dtype)
    reads = [_access(tensor, *names) for tensor, names in zip(tensors, operands, strict=True)]
    return _op(name, "linear", axes, reads, [_access(out, *out_axes)]), (out,)


def _default_spec(x: Tensor, w: Tensor, bias: Tensor | None) -> str:
    rows = " ".join(_names("m", len(x.shape) - 1))
    return f"{rows} k, n k{', n' if bias else ''} -> {rows} n"


def pointwise(name: str, text: str, *args: Tensor) -> Built:
    """An expression of expr.py over a0, a1, ...; dims align from the right and broadcast where the extent is 1."""
    tree = expr.parse(text)
    if expr.num_args(tree) != len(args):
        raise _bad(name, f"expression {text!r} over {len(args)} operands", f"{expr.num_args(tree)} operands")
    rank = max(len(a.shape) for a in args)
    shape = [1] * rank
    for a in args:
        for i, extent in enumerate(a.shape, start=rank - len(a.shape)):
            if extent != 1 and shape[i] not in (1, extent):
                raise _bad(name, f"shapes {[a.shape for a in args]}", "shapes that broadcast from the right")
            shape[i] = max(shape[i], extent)
    axes = [Axis(name=n, extent=e) for n, e in zip(_names("i", rank), shape, strict=True)]
    reads = []
    for a in args:
        names = axes[rank - len(a.shape) :]
        dims = (_index(n.name) if e == n.extent else Index() for n, e in zip(names, a.shape, strict=True))
        reads.append(Access(tensor=a.name, dims=tuple(dims)))
    out = Tensor(name=name, shape=tuple(shape), dtype=args[0].dtype)
    return _op(name, "pointwise", axes, reads, [_access(out, *_names("i", rank))], expr=str(tree)), (out,)


def reduce(name: str, x: Tensor, dim: int, combine: str = "sum") -> Built:
    """Combines one dim away with "sum", "max" or "min"."""
    dim = _dim(name, x, dim)
    if combine not in ("sum", "max", "min"):
        raise _bad(name, f"combine {combine!r}", "sum, max or min", "choose one of these")
    names = _names("i", len(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, x.shape, strict=True)]
    axes[dim] = Axis(name=names[dim], extent=x.shape[dim], role="reduce", combine=combine)
    kept = [n for i, n in enumerate(names) if i != dim]
    out = Tensor(name=name, shape=tuple(e for i, e in enumerate(x.shape) if i != dim), dtype=x.dtype)
    return _op(name, "reduce", axes, [_access(x, *names)], [_access(out, *kept)], combine=combine), (out,)


def rms_norm(name: str, x: Tensor, weight: Tensor, eps: float) -> Built:
    """x / sqrt(mean(x^2 over the last dim) + eps) * weight, in fp32; weight has the extent of the last dim."""
    if weight.shape != x.shape[-1:]:
        raise _bad(name, f"weight of shape {weight.shape} for x of shape {x.shape}", f"weight of shape {x.shape[-1:]}")
    rows = _names("m", len(x.shape) - 1)
    axes = [Axis(name=n, extent=e) for n, e in zip([*rows, "d"], x.shape, strict=True)]
    axes.append(Axis(name="r", extent=x.shape[-1], role="reduce"))
    out = Tensor(name=name, shape=x.shape, dtype=x.dtype)
    reads = [_access(x, *rows, "d"), _access(x, *rows, "r"), _access(weight, "d")]
    return _op(name, "rms_norm", axes, reads, [_access(out, *rows, "d")], eps=eps), (out,)


def rope(name: str, x: Tensor, positions: Tensor, table: Tensor) -> Built:
    """Rotary embedding of x [m, ..., d] at positions [m], half-split: pairs are (i, i + d/2).

    table: [max positions, d], fp32, cosines of the d/2 angles and then their sines.
    """
    if positions.shape != x.shape[:1] or table.shape[1:] != x.shape[-1:] or x.shape[-1] % 2:
        raise _bad(name, f"x {x.shape}, positions {positions.shape}, table {table.shape}", "[m, ..., d], [m], [t, d], d even")
    middle = _names("h", len(x.shape) - 2)
    axes = [Axis(name=n, extent=e) for n, e in zip(["m", *middle, "d"], x.shape, strict=True)]
    axes.append(Axis(name="r", extent=x.shape[-1], role="reduce"))
    axes.append(Axis(name="t", extent=table.shape[0], role="reduce", lookup=True))
    out = Tensor(name=name, shape=x.shape, dtype=x.dtype)
    reads = [_access(x, "m", *middle, "d"), _access(x, "m", *middle, "r"), _access(positions, "m"), _access(table, "t", "r")]
    return _op(name, "rope", axes, reads, [_access(out, "m", *middle, "d")]), (out,)


def kv_append(name: str, cache: Tensor, x: Tensor, positions: Tensor) -> Built:
    """Writes x [m, h, d] into cache [h, t, d] at t = positions[m], in place; gives no new tensor."""
    if cache.role != "state" or cache.shape[::2] != x.shape[1:] or positions.shape != x.shape[:1]:
        raise _bad(name, f"cache {cache.shape} ({cache.role}), x {x.shape}", "state [h, t, d] and x [m, h, d]")
    axes = [Axis(name=n, extent=e) for n, e in (("h", x.shape[1]), ("d", x.shape[2]))]
    axes.append(Axis(name="m", extent=x.shape[0], role="reduce"))
    axes.append(Axis(name="t", extent=cache.shape[1], role="scatter", lookup=True))
    reads = [_access(x, "m", "h", "d"), _access(positions, "m")]
    return _op(name, "kv_append", axes, reads, [_access(cache, "h", "t", "d")]), ()


def attention(
    name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, scale: float, window: int = 0
) -> Built:
    """Causal attention of q [m, h, g, d] over caches [h, t, d] and [h, t, e]: query i sees t <= positions[i].

    h is the kv head, g the query head within its group. window > 0 also requires t > positions[i] - window.
    Output [m, h, g, e]. Softmax in fp32.
    """
    m, h, g, d = q.shape if len(q.shape) == 4 else (0, 0, 0, 0)
    t, e = k_cache.shape[1:2], v_cache.shape[2:]
    if not m or k_cache.shape != (h, *t, d) or v_cache.shape != (h, *t, *e) or positions.shape != (m,):
        raise _bad(name, f"q {q.shape}, k {k_cache.shape}, v {v_cache.shape}", "[m, h, g, d], [h, t, d], [h, t, e]")
    axes = [Axis(name=n, extent=x) for n, x in (("m", m), ("h", h), ("g", g), ("e", e[0]))]
    axes += [Axis(name="d", extent=d, role="reduce"), Axis(name="t", extent=t[0], role="reduce")]
    out = Tensor(name=name, shape=(m, h, g, e[0]), dtype=q.dtype)
    reads = [_access(q, "m", "h", "g", "d"), _access(k_cache, "h", "t", "d"), _access(v_cache, "h", "t", "e")]
    reads.append(_access(positions, "m"))
    return _op(name, "attention", axes, reads, [_access(out, "m", "h", "g", "e")], scale=scale, window=window), (out,)


def embedding(name: str, ids: Tensor, table: Tensor) -> Built:
    """Rows of table [v, d] at ids [m]: a one-hot contraction over v, of which one row is touched."""
    if len(ids.shape) != 1 or len(table.shape) != 2:
        raise _bad(name, f"ids {ids.shape}, table {table.shape}", "[m] and [v, d]")
    axes = [Axis(name="m", extent=ids.shape[0]), Axis(name="d", extent=table.shape[1])]
    axes.append(Axis(name="v", extent=table.shape[0], role="reduce", combine="sum", lookup=True))
    out = Tensor(name=name, shape=(ids.shape[0], table.shape[1]), dtype=table.dtype)
    return _op(name, "embedding", axes, [_access(ids, "m"), _access(table, "v", "d")], [_access(out, "m", "d")]), (out,)


def argmax(name: str, x: Tensor) -> Built:
    """Index of the largest element of the last dim, the lowest on ties: outputs [name].value and [name] (i64)."""
    rows = _names("m", len(x.shape) - 1)
    axes = [Axis(name=n, extent=e) for n, e in zip(rows, x.shape, strict=False)]
    axes.append(Axis(name="v", extent=x.shape[-1], role="reduce", combine="argmax"))
    value = Tensor(name=f"{name}.value", shape=x.shape[:-1], dtype=x.dtype)
    index = Tensor(name=name, shape=x.shape[:-1], dtype="i64")
    op = _op(name, "argmax", axes, [_access(x, *rows, "v")], [_access(value, *rows), _access(index, *rows)])
    return op, (value, index)


def copy(name: str, x: Tensor, into: Tensor | None = None) -> Built:
    """Kind `set`: out = x, or overwrites `into`, a state or temporary of the same shape."""
    if into is not None and into.shape != x.shape:
        raise _bad(name, f"set of {x.shape} into {into.shape}", "equal shapes")
    names = _names("i", len(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, x.shape, strict=True)]
    out = into or Tensor(name=name, shape=x.shape, dtype=x.dtype)
    return _op(name, "set", axes, [_access(x, *names)], [_access(out, *names)]), (() if into else (out,))


def slice_dim(name: str, x: Tensor, dim: int, start: int, stop: int, step: int = 1, kind: str = "slice") -> Built:
    """x[start:stop:step] along one dim. kind "view" shares x's storage."""
    dim = _dim(name, x, dim)
    if not 0 <= start < stop <= x.shape[dim] or step < 1:
        raise _bad(name, f"slice {start}:{stop}:{step} of extent {x.shape[dim]}", "0 <= start < stop <= extent, step >= 1")
    names = _names("i", len(x.shape))
    shape = tuple(-(-(stop - start) // step) if i == dim else e for i, e in enumerate(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, shape, strict=True)]
    dims = tuple(Index(axes=(n,), offset=start, stride=step) if i == dim else _index(n) for i, n in enumerate(names))
    out = Tensor(name=name, shape=shape, dtype=x.dtype)
    return _op(name, kind, axes, [Access(tensor=x.name, dims=dims)], [_access(out, *names)]), (out,)


def concat(name: str, xs: Sequence[Tensor], dim: int) -> Built:
    """Joins tensors along one dim; positions before or past an operand are simply not read from it."""
    dim = _dim(name, xs[0], dim)
    for x in xs:
        if len(x.shape) != len(xs[0].shape) or any(
            a != b for i, (a, b) in enumerate(zip(x.shape, xs[0].shape, strict=True)) if i != dim
        ):
            raise _bad(name, f"concat of {[x.shape for x in xs]} along dim {dim}", "equal shapes but for that dim")
    total = sum(x.shape[dim] for x in xs)
    names = _names("i", len(xs[0].shape))
    shape = tuple(total if i == dim else e for i, e in enumerate(xs[0].shape))
    reads, offset = [], 0
    for x in xs:
        dims = tuple(Index(axes=(n,), offset=-offset if i == dim else 0) for i, n in enumerate(names))
        reads.append(Access(tensor=x.name, dims=dims))
        offset += x.shape[dim]
    out = Tensor(name=name, shape=shape, dtype=xs[0].dtype)
    axes = [Axis(name=n, extent=e) for n, e in zip(names, shape, strict=True)]
    return _op(name, "concat", axes, reads, [_access(out, *names)], dim=dim), (out,)


def transpose(name: str, x: Tensor, order: Sequence[int], kind: str = "transpose") -> Built:
    """Dims of x in a new order: out dim i is x dim order[i]. kind "view" shares x's storage."""
    if sorted(order) != list(range(len(x.shape))):
        raise _bad(name, f"order {list(order)} for {len(x.shape)} dims", "a permutation of the dims")
    names = _names("i", len(x.shape))
    axes = [Axis(name=names[i], extent=x.shape[i]) for i in order]
    out = Tensor(name=name, shape=tuple(x.shape[i] for i in order), dtype=x.dtype)
    return _op(name, kind, axes, [_access(x, *names)], [_access(out, *(names[i] for i in order))]), (out,)


def reshape(name: str, x: Tensor, shape: Sequence[int], kind: str = "reshape") -> Built:
    """Same elements in row-major order under another shape. kind "view" shares x's storage."""
    if math.prod(shape) != x.num_elements:
        raise _bad(name, f"reshape of {x.shape} to {tuple(shape)}", f"a shape of {x.num_elements} elements")
    axes, x_dims, out_dims = _factor(name, x.shape, tuple(shape))
    out = Tensor(name=name, shape=tuple(shape), dtype=x.dtype)
    read = Access(tensor=x.name, dims=tuple(_index(*d) for d in x_dims))
    return _op(name, kind, axes, [read], [Access(tensor=name, dims=tuple(_index(*d) for d in out_dims))]), (out,)


def _factor(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[list[Axis], list[list[str]], list[list[str]]]:
    """Common refinement of two shapes: axes such that every dim of both is a composition of consecutive axes."""
    ends_old = _suffix_products(old)
    ends_new = _suffix_products(new)
    cuts = sorted({*ends_old, *ends_new}, reverse=True)
    if any(big % small for big, small in zip(cuts, cuts[1:], strict=False)):
        raise _bad(name, f"reshape of {old} to {new}", "dims that split or merge evenly", "reshape in two steps")
    axes = [Axis(name=f"i{n}", extent=big // small) for n, (big, small) in enumerate(zip(cuts, cuts[1:], strict=False))]
    spans = list(zip(cuts, cuts[1:], strict=False))

    def compose(ends: list[int]) -> list[list[str]]:
        dims = []
        for big, small in zip(ends, ends[1:], strict=False):
            dims.append([f"i{n}" for n, (hi, lo) in enumerate(spans) if hi <= big and lo >= small])
        return dims

    return axes, compose(ends_old), compose(ends_new)


def _suffix_products(shape: tuple[int, ...]) -> list[int]:
    ends = [1]
    for extent in reversed(shape):
        ends.append(ends[-1] * extent)
    return ends[::-1]


def _dim(name: str, x: Tensor, dim: int) -> int:
    if not -len(x.shape) <= dim < len(x.shape):
        raise _bad(name, f"dim {dim} of a tensor with {len(x.shape)} dims", f"-{len(x.shape)} to {len(x.shape) - 1}")
    return dim % len(x.shape)
