"""Joins what is done to queries, keys and values between their product and attention: norms of
heads, rotations, appends to caches.

Comes in: ops of kinds rms_norm, rope and kv_append. Goes out: one op of kind fused_heads with a
part for each tensor of heads. `parts`, an attribute, has a text a part: of "norm", "rope" and
"append" those that it does, in this order. Reads: positions [m], of rotations and appends alike;
the table of angles if a part rotates; sequences [m] if rows say which of `several` caches is
theirs, which they don't where each has its `own`; then of each part x [m, ..., d] by element, by
row where it needs all of a head, and the norm's weight. Writes: a tensor or a cache a part, in
place. `eps`: of all norms. Used by fuse.py, read by hostir/library/heads.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from distmega.errors import counted
from distmega.program.dtypes import FLOATS_TO_F32
from distmega.program.kinds import kind_of
from distmega.program.ops import norms
from distmega.program.ops.attention import kv_append, rope
from distmega.program.ops.parts import Built, access_named, axis_names, bad_op, make_op
from distmega.program.types import Access, Attr, Axis, Index, Op, Tensor, accesses

T = TypeVar("T")

Step = Literal["norm", "rope", "append"]
STEPS: tuple[Step, ...] = "norm", "rope", "append"
FUSED = "fused_heads"
MAX_PARTS = 3
"""Tensors of heads that one kernel takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPart:
    """Names of a tensor of heads, of its norm's weight, of what is written; what is done."""

    x: str
    weight: str = ""
    out: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOp:
    """What an op does to heads; names are empty where nothing is read. own: row m of what is
    appended goes to cache m.
    """

    parts: tuple[HeadPart, ...]
    positions: str = ""
    table: str = ""
    sequences: str = ""
    own: bool = False
    eps: float = 0.0


def heads_op(op: Op, buffers: Mapping[str, Tensor]) -> HeadsOp | None:
    """What an op does, if that may be a part of a fused one: on tensors as a whole, of types and
    sizes that a kernel takes.
    """
    if op.kind == FUSED:
        return _stated(op)
    kind = kind_of(op)
    is_norm = op.kind == "rms_norm" and len(op.reads) == 3
    if not (is_norm or kind.rotates or kind.appends) or not all(
        _is_whole(access, op, buffers) for access in accesses(op)
    ):
        return None
    names, out = [access.tensor for access in op.reads], op.writes[0].tensor
    shape = buffers[names[0]].shape
    fits = len(shape) >= 3 and shape[-1] % 2 == 0 and buffers[out].dtype == buffers[names[0]].dtype
    if not fits or buffers[out].dtype not in FLOATS_TO_F32:
        return None
    if is_norm:
        part = HeadPart(x=names[0], weight=names[2], out=out, steps=("norm",))
        return HeadsOp(parts=(part,), eps=norms.eps_of(op))
    if kind.rotates and buffers[names[3]].dtype == "f32":
        part = HeadPart(x=names[0], out=out, steps=("rope",))
        return HeadsOp(parts=(part,), positions=names[2], table=names[3])
    has_sequences, num_dims = len(names) == 3, len(buffers[out].shape)
    own = num_dims == 4 and not has_sequences
    if kind.appends and (own or num_dims == 3 + has_sequences):
        part = HeadPart(x=names[0], out=out, steps=("append",))
        return HeadsOp(parts=(part,), positions=names[1], sequences=(*names, "")[2], own=own)
    return None


def _is_whole(access: Access, op: Op, buffers: Mapping[str, Tensor]) -> bool:
    """Whether an access has one axis a dim, over all of it."""
    extents = op.extents
    return all(
        index == Index(axes=index.axes) and len(index.axes) == 1 and extents[index.axes[0]] == size
        for index, size in zip(access.dims, buffers[access.tensor].shape, strict=True)
    )


def op_parts(op: Op) -> list[tuple[Step, ...]]:
    """What an op of kind fused_heads does, a part each."""
    texts = op.attr("parts")
    assert isinstance(texts, tuple), f"parts={texts!r} of {op.name}"
    return [tuple(step for step in STEPS if step in str(text).split()) for text in texts]


def next_heads(operands: Iterator[T], steps: Sequence[Step]) -> tuple[T, T | None]:
    """Of what an op reads: the heads of its next part and, if it has one, its norm's weight. Heads
    that a step shapes are read by element and by row.
    """
    x = next(operands)
    if steps != ("append",):
        next(operands)
    return x, next(operands) if "norm" in steps else None


def restated_heads(op: Op, *operands: Tensor) -> Built:
    """What state_heads makes of an op of kind fused_heads: of its attributes, and of what it reads
    and then what it writes. ProgramError for operands that its steps do not take.
    """
    parts = op_parts(op)
    num_reads = 1 + any("rope" in steps for steps in parts) + bool(op.attr("several"))
    num_reads += sum(1 + (steps != ("append",)) + ("norm" in steps) for steps in parts)
    if (len(op.reads), len(op.writes)) != (num_reads, len(parts)):
        found = f"{counted(len(op.reads), 'operand')} and {counted(len(op.writes), 'result')}"
        raise bad_op(op.name, found, f"{num_reads} and {len(parts)}, of its parts")
    heads, buffers = _stated(op), {each.name: each for each in operands}
    for part in heads.parts:
        require_part(op.name, heads, part, buffers)
    written = {part.out for part in heads.parts}
    if len(written) < len(parts) or written & {access.tensor for access in op.reads}:
        raise bad_op(op.name, f"results {', '.join(part.out for part in heads.parts)}", "others")
    return state_heads(op.name, heads, buffers), ()


def require_part(name: str, heads: HeadsOp, part: HeadPart, buffers: Mapping[str, Tensor]) -> None:
    """ProgramError for a part that is not what its steps make one after the other."""
    x, out = buffers[part.x], buffers[part.out]
    positions = buffers[heads.positions]
    if len(x.shape) < 3 or positions.shape != x.shape[:1]:
        raise bad_op(name, f"x {x.shape} at positions {positions.shape}", "[m, ..., d] and [m]")
    if part.weight:
        norms.rms_norm(name, x, buffers[part.weight], heads.eps)
    if "rope" in part.steps:
        rope(name, x, positions, buffers[heads.table])
    if "append" in part.steps:
        sequences = buffers[heads.sequences] if heads.sequences else None
        kv_append(name, replace(out, role="state"), x, positions, sequences)
        if heads.own != (len(out.shape) == 4 and sequences is None):
            raise bad_op(name, f"own={heads.own} and cache {out.shape}", "a cache for each row")
    elif out.shape != x.shape:
        raise bad_op(name, f"x {x.shape} and result {out.shape}", "equal shapes")
    if out.dtype != x.dtype:
        raise bad_op(name, f"x of {x.dtype} and result of {out.dtype}", "one type")


def _stated(op: Op) -> HeadsOp:
    stated, several = op_parts(op), op.attr("several")
    names = iter([access.tensor for access in op.reads])
    positions = next(names)
    table = next(names) if any("rope" in steps for steps in stated) else ""
    sequences = next(names) if several else ""
    parts = []
    for steps, write in zip(stated, op.writes, strict=True):
        x, weight = next_heads(names, steps)
        parts.append(HeadPart(x=x, weight=weight or "", out=write.tensor, steps=steps))
    return HeadsOp(
        parts=tuple(parts),
        positions=positions,
        table=table,
        sequences=sequences,
        own=bool(op.get("own", False)),
        eps=norms.eps_of(op),
    )


def chain_heads(first: HeadsOp, then: HeadsOp) -> HeadsOp | None:
    """Both, where `then` has one part, which goes on with a result of `first`; that result is no
    longer there. None if no kernel does it.
    """
    (last,) = then.parts
    parts = list(first.parts)
    for at, part in enumerate(parts):
        order = [STEPS.index(step) for step in (*part.steps, *last.steps)]
        if part.out == last.x and order == sorted({*order}):
            parts[at] = replace(part, out=last.out, steps=(*part.steps, *last.steps))
            return _joined(first, then, parts)
    return None


def set_beside(first: HeadsOp, then: HeadsOp) -> HeadsOp | None:
    """Both, where neither has to do with the other's results; None if no kernel does both."""
    parts = [*first.parts, *then.parts]
    written = {part.out for part in parts}
    read = {name for part in parts for name in (part.x, part.weight)}
    apart = len(written) == len(parts) and not written & read
    if not apart or len(parts) > MAX_PARTS or not (first.positions and then.positions):
        return None
    return _joined(first, then, parts)


def _joined(first: HeadsOp, then: HeadsOp, parts: list[HeadPart]) -> HeadsOp | None:
    """With what all parts share; None where they differ in it."""
    shared = {}
    for name in ("positions", "table", "sequences"):
        found = {getattr(each, name) for each in (first, then)} - {""}
        if len(found) > 1:
            return None
        shared[name] = next(iter(found), "")
    appends = [each for each in (first, then) if any("append" in p.steps for p in each.parts)]
    norms = [each.eps for each in (first, then) if any("norm" in p.steps for p in each.parts)]
    caches = {(each.sequences, each.own) for each in appends}
    if len({*norms}) > 1 or len(caches) > 1:
        return None
    own = any(each.own for each in appends)
    return HeadsOp(parts=tuple(parts), **shared, own=own, eps=norms[0] if norms else 0.0)


def state_heads(name: str, heads: HeadsOp, buffers: Mapping[str, Tensor]) -> Op:
    """The op of kind fused_heads."""
    first = buffers[heads.parts[0].x]
    axes = [Axis(name="m", extent=first.shape[0])]
    reads, writes = [access_named(heads.positions, "m")], []
    if heads.table:
        rows, dim = buffers[heads.table].shape
        axes.append(Axis(name="t", extent=rows, role="reduce", lookup=True))
        axes.append(Axis(name="a", extent=dim, role="reduce"))
        reads.append(access_named(heads.table, "t", "a"))
    if heads.sequences:
        reads.append(access_named(heads.sequences, "m"))
    for number, part in enumerate(heads.parts):
        shape = buffers[part.x].shape
        inner = [f"{n}_{number}" for n in axis_names("h", len(shape) - 2)]
        d, r = f"d_{number}", f"r_{number}"
        axes += [Axis(name=n, extent=e) for n, e in zip((*inner, d), shape[1:], strict=True)]
        reads.append(access_named(part.x, "m", *inner, d))
        if part.steps != ("append",):
            axes.append(Axis(name=r, extent=shape[-1], role="reduce"))
            reads.append(access_named(part.x, "m", *inner, r))
        if part.weight:
            reads.append(access_named(part.weight, d))
        if "append" not in part.steps:
            writes.append(access_named(part.out, "m", *inner, d))
            continue
        cache = buffers[part.out].shape
        slots = [Axis(name=f"c_{number}", extent=cache[-2], role="scatter", lookup=True)]
        whose = ["m"] if heads.own else []
        if len(cache) == 4 and not heads.own:
            slots.insert(0, replace(slots[0], name=f"s_{number}", extent=cache[0]))
        axes += slots
        own = [slot.name for slot in slots]
        writes.append(access_named(part.out, *whose, *own[:-1], *inner, own[-1], d))
    texts = tuple(" ".join(part.steps) for part in heads.parts)
    attrs: dict[str, Attr] = {"parts": texts, "eps": heads.eps, "several": bool(heads.sequences)}
    if heads.own:
        attrs["own"] = True
    return make_op(name, FUSED, axes, reads, writes, **attrs)


def inplace_results(op: Op) -> set[str]:
    """Results of an op that were there before it."""
    if op.kind == FUSED:
        return {part.out for part in _stated(op).parts if "append" in part.steps}
    return {access.tensor for access in op.writes} if kind_of(op).inplace else set()
