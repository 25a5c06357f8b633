"""Instructions of ops that compute, a rule a kind: classes of axes, and the instruction of a part.

Used by lowering.py through COMPUTE_RULES; rules_move.py has the ops that only move data. What an
instruction means is said in opcodes.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from distmega.kernels.isa import opcodes
from distmega.kernels.isa.opcodes import COMBINES, NORMS, Instruction, Ref
from distmega.kernels.runtime.arena import Operand
from distmega.kernels.tasks.geometry import Geometry, IterationBox, unfit
from distmega.program.types import Op, accesses


class Context(NamedTuple):
    """What a rule needs: geometry of the group, operands in access order, number of a mesh axis,
    place of expressions.
    """

    geometry: Geometry
    operands: Sequence[Operand]
    mesh_axes: tuple[str, ...]
    expression: int

    @property
    def op(self) -> Op:
        return self.geometry.op

    def ref(self, part: IterationBox, operand: int, first: int | None = None) -> Ref:
        """Operand number `operand` from the part's first element on, or from `first`."""
        where = self.operands[operand]
        at = part.firsts[operand] if first is None else first
        return Ref(space=where.space, dtype=where.dtype, base=operand + 1, first=at)

    def axis_number(self, attr: str) -> int:
        """Index of the mesh axis that an attribute names, -1 without the attribute."""
        name = str(self.op.get(attr, ""))
        return self.mesh_axes.index(name) if name else -1

    def number(self, attr: str, default: float | None = None) -> float:
        """A numeric attribute."""
        value = self.op.get(attr, default if default is not None else math.nan)
        assert isinstance(value, int | float), f"{self.op.name}.{attr} is {value!r}"
        return value

    def combine(self) -> int:
        """The op's reduction as an index into COMBINES."""
        return COMBINES.index(str(self.op.attr("combine")))

    def require_step_one(self, axis: str, operands: Sequence[int]) -> None:
        """Elements along `axis` must be neighbours: instructions have no stride for it."""
        for operand in operands:
            if self.geometry.stride(axis, operand) != 1 and self.op.axis(axis).extent > 1:
                raise unfit(self.op, f"operand {operand} steps {axis!r} unevenly")


class LoweringRule(NamedTuple):
    """How a kind becomes instructions: dims an instruction has for each class of axes, the class of
    each axis by name ("" for axes that the instruction treats whole), and the instruction of a
    part.
    """

    limits: Mapping[str, int]
    classes: Callable[[Op], Mapping[str, str]]
    emit: Callable[[Context, IterationBox], Instruction]


def _used(op: Op, operand: int) -> set[str]:
    access = list(accesses(op))[operand]
    return {name for index in access.dims for name in index.axes}


def _linear_classes(op: Op) -> dict[str, str]:
    """b, along which all operands run, is walked: an instruction for each of its elements."""
    x, w, out = _used(op, 0), _used(op, 1), _used(op, -1)
    kinds = {
        (True, False, True): "m", (False, True, True): "n", (True, True, True): "b",
        **dict.fromkeys(((True, True, False), (True, False, False), (False, True, False)), "k"),
    }  # fmt: skip
    classes = {}
    for axis in op.axes:
        where = (axis.name in x, axis.name in w, axis.name in out)
        if where not in kinds:
            raise unfit(op, f"axis {axis.name!r} is not a row, a column, a sum or a batch")
        classes[axis.name] = kinds[where]
    if len(op.reads) == 3 and any(classes[name] not in "nb" for name in _used(op, 2)):
        raise unfit(op, "the bias varies along rows")
    return classes


def _linear(context: Context, part: IterationBox) -> Instruction:
    out = len(context.operands) - 1
    if part.lengths("k") != (math.prod(a.extent for a in context.op.axes if a.role == "reduce"),):
        raise unfit(context.op, "the sums do not merge into one dim")
    m, n, k = (part.dims[name][0] for name in "mnk")
    return opcodes.Linear(
        x=context.ref(part, 0),
        w=context.ref(part, 1),
        bias=context.ref(part, 2) if out == 3 else None,
        out=context.ref(part, out),
        m=m.length,
        n=n.length,
        k=k.length,
        x_strides=(m.strides[0], k.strides[0]),
        w_strides=(n.strides[1], k.strides[1]),
        bias_stride=n.strides[2] if out == 3 else 0,
        out_strides=(m.strides[out], n.strides[out]),
    )


def all_axes(op: Op) -> dict[str, str]:
    """Every axis in one class."""
    return {axis.name: "i" for axis in op.axes}


def _pointwise(context: Context, part: IterationBox) -> Instruction:
    num_args = len(context.op.reads)
    if num_args > 4:
        raise unfit(context.op, f"{num_args} operands, an instruction has 4")
    outer, inner = part.dims["i"]
    absent = 4 - num_args
    args = [context.ref(part, i) for i in range(num_args)] + [None] * absent
    strides = [(outer.strides[i], inner.strides[i]) for i in range(num_args)] + [(0, 0)] * absent
    return opcodes.Pointwise(
        out=context.ref(part, num_args),
        a0=args[0],
        a1=args[1],
        a2=args[2],
        a3=args[3],
        expr=context.expression,
        extents=(outer.length, inner.length),
        out_strides=(outer.strides[num_args], inner.strides[num_args]),
        a0_strides=strides[0],
        a1_strides=strides[1],
        a2_strides=strides[2],
        a3_strides=strides[3],
    )


def _reduce_classes(op: Op) -> dict[str, str]:
    return {axis.name: "r" if axis.role == "reduce" else "i" for axis in op.axes}


def _reduce(context: Context, part: IterationBox) -> Instruction:
    if part.lengths("r") != (math.prod(a.extent for a in context.op.axes if a.role == "reduce"),):
        raise unfit(context.op, "the reduced axes do not merge into one dim")
    (outer, inner), (r,) = part.dims["i"], part.dims["r"]
    return opcodes.Reduce(
        x=context.ref(part, 0),
        out=context.ref(part, 1),
        combine=context.combine(),
        extents=(outer.length, r.length, inner.length),
        x_strides=(outer.strides[0], r.strides[0], inner.strides[0]),
        out_strides=(outer.strides[1], inner.strides[1]),
    )


def _norm_classes(op: Op) -> dict[str, str]:
    return {axis.name: {"d": "d", "r": ""}.get(axis.name, "m") for axis in op.axes}


def _norm(context: Context, part: IterationBox) -> Instruction:
    out = len(context.op.reads)
    context.require_step_one("d", (0, *range(2, out + 1)))
    (m,), (d,) = part.dims["m"], part.dims["d"]
    vectors = [context.ref(part, i, context.geometry.firsts[i]) for i in range(2, out)]
    return opcodes.Norm(
        x=context.ref(part, 1),
        weight=vectors[0] if vectors else None,
        bias=vectors[1] if len(vectors) > 1 else None,
        out=context.ref(part, out),
        kind=NORMS.index(context.op.kind.removesuffix("_norm")),
        rows=m.length,
        dim=context.op.axis("d").extent,
        start=d.start,
        count=d.length,
        x_stride=m.strides[0],
        out_stride=m.strides[out],
        eps=context.number("eps", 0.0),
    )


def _rope_classes(op: Op) -> dict[str, str]:
    known = {"m": "m", "d": "d", "r": "", "t": ""}
    return {axis.name: known.get(axis.name, "h") for axis in op.axes}


def _rope(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("d", (0, 4))
    context.require_step_one("r", (3,))
    context.require_step_one("m", (2,))
    (m,), (h,), (d,) = part.dims["m"], part.dims["h"], part.dims["d"]
    return opcodes.Rope(
        x=context.ref(part, 1),
        positions=context.ref(part, 2),
        table=context.ref(part, 3),
        out=context.ref(part, 4),
        rows=m.length,
        heads=h.length,
        dim=context.op.axis("d").extent,
        start=d.start,
        count=d.length,
        table_rows=context.op.axis("t").extent,
        table_stride=context.geometry.stride("t", 3),
        x_strides=(m.strides[1], h.strides[1]),
        out_strides=(m.strides[4], h.strides[4]),
    )


def _kv_append_classes(op: Op) -> dict[str, str]:
    if len(op.reads) > 2:
        raise unfit(op, "no instruction takes rows of several sequences")
    return {"h": "h", "d": "d", "m": "m", "t": ""}


def _kv_append(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("d", (0, 2))
    context.require_step_one("m", (1,))
    (m,), (h,), (d,) = part.dims["m"], part.dims["h"], part.dims["d"]
    return opcodes.KvAppend(
        x=context.ref(part, 0),
        positions=context.ref(part, 1),
        cache=context.ref(part, 2),
        rows=m.length,
        heads=h.length,
        dim=d.length,
        slots=context.op.axis("t").extent,
        x_strides=(m.strides[0], h.strides[0]),
        cache_strides=(m.strides[2], h.strides[2], context.geometry.stride("t", 2)),
    )


def _attention_classes(op: Op) -> dict[str, str]:
    if len(op.reads) > 4:
        raise unfit(op, "no instruction takes rows of several sequences")
    return {"m": "m", "h": "h", "g": "g", "e": "", "d": "", "t": ""}


def _attention(context: Context, part: IterationBox) -> Instruction:
    op, geometry = context.op, context.geometry
    context.require_step_one("d", (0, 1))
    context.require_step_one("e", (2, 4))
    context.require_step_one("m", (3,))
    d, e, t = (op.axis(name).extent for name in "det")
    steps = [(geometry.stride("t", i), geometry.stride("h", i)) for i in (1, 2)]
    if op.axis("h").extent == 1:
        steps = [(row, t * row) for row, _ in steps]
    if steps != [(d, t * d), (e, t * e)]:
        raise unfit(op, "rows or heads of the caches are not neighbours")
    sequences = [geometry.stride("m", i) for i in (1, 2)]
    heads = sequences[0] // (t * d)
    if sequences != [heads * t * d, heads * t * e]:
        raise unfit(op, "caches of sequences lie unevenly")
    if any(axis in split.axes for split in geometry.group.splits for axis in "edt"):
        raise unfit(op, "tasks split within a head or the context")
    (m,), (h,), (g,) = part.dims["m"], part.dims["h"], part.dims["g"]
    return opcodes.Attention(
        q=context.ref(part, 0),
        k=context.ref(part, 1),
        v=context.ref(part, 2),
        positions=context.ref(part, 3),
        out=context.ref(part, 4),
        m=m.length,
        h=h.length,
        g=g.length,
        d=d,
        e=e,
        t=t,
        q_strides=(m.strides[0], h.strides[0], g.strides[0]),
        out_strides=(m.strides[4], h.strides[4], g.strides[4]),
        heads=heads,
        scale=context.number("scale"),
        window=int(context.number("window", 0)),
        softcap=context.number("softcap", 0.0),
    )


def _embedding_classes(op: Op) -> dict[str, str]:
    return {"m": "m", "d": "d", "v": ""}


def _embedding(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("d", (1, 2))
    context.require_step_one("m", (0,))
    (m,), (d,) = part.dims["m"], part.dims["d"]
    return opcodes.Embedding(
        ids=context.ref(part, 0),
        table=context.ref(part, 1),
        out=context.ref(part, 2),
        rows=m.length,
        dim=d.length,
        vocab=context.op.axis("v").extent,
        table_stride=context.geometry.stride("v", 1),
        out_stride=m.strides[2],
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
    )


def _argmax_classes(op: Op) -> dict[str, str]:
    return {axis.name: "" if axis.name == "v" else "m" for axis in op.axes}


def _argmax(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("v", (0,))
    (m,) = part.dims["m"]
    vocab = context.op.axis("v").extent
    return opcodes.Argmax(
        x=context.ref(part, 0),
        value=context.ref(part, 1),
        index=context.ref(part, 2),
        rows=m.length,
        vocab=vocab,
        row_strides=(m.strides[0], m.strides[1], m.strides[2]),
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
        extent=int(context.number("extent", vocab)),
    )


def _top(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("u", (0,))
    context.require_step_one("c", (1,))
    (m,) = part.dims["m"]
    return opcodes.Top(
        x=context.ref(part, 0),
        out=context.ref(part, 1),
        rows=m.length,
        extent=context.op.axis("u").extent,
        num_top=context.op.axis("c").extent,
        strides=(m.strides[0], m.strides[1]),
    )


def _cutoff(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("i", (1,))
    context.require_step_one("j", (2,))
    (m,), candidates = part.dims["m"], part.dims["v"]
    if len(candidates) != 1 or candidates[0].strides[0] != 1:
        raise unfit(context.op, "candidates of a row are not neighbours")
    return opcodes.Cutoff(
        x=context.ref(part, 0),
        settings=context.ref(part, 1),
        limits=context.ref(part, 2),
        rows=m.length,
        extent=candidates[0].length,
        strides=(m.strides[0], m.strides[1], m.strides[2]),
    )


def _cutoff_classes(op: Op) -> dict[str, str]:
    return {axis.name: {"m": "m", "i": "", "j": ""}.get(axis.name, "v") for axis in op.axes}


def _sample(context: Context, part: IterationBox) -> Instruction:
    context.require_step_one("v", (0,))
    context.require_step_one("j", (1,))
    (m,) = part.dims["m"]
    vocab = context.op.axis("v").extent
    return opcodes.Sample(
        x=context.ref(part, 0),
        limits=context.ref(part, 1),
        seeds=context.ref(part, 2),
        positions=context.ref(part, 3),
        value=context.ref(part, 4),
        index=context.ref(part, 5),
        rows=m.length,
        vocab=vocab,
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
        extent=int(context.number("extent", vocab)),
        strides=opcodes.six(m.strides),
    )


COMPUTE_RULES: Mapping[str, LoweringRule] = {
    "linear": LoweringRule({"b": 0, "m": 1, "n": 1, "k": 1}, _linear_classes, _linear),
    "pointwise": LoweringRule({"i": 2}, all_axes, _pointwise),
    "reduce": LoweringRule({"i": 2, "r": 1}, _reduce_classes, _reduce),
    "rms_norm": LoweringRule({"m": 1, "d": 1}, _norm_classes, _norm),
    "layer_norm": LoweringRule({"m": 1, "d": 1}, _norm_classes, _norm),
    "softmax": LoweringRule({"m": 1, "d": 1}, _norm_classes, _norm),
    "rope": LoweringRule({"m": 1, "h": 1, "d": 1}, _rope_classes, _rope),
    "kv_append": LoweringRule({"m": 1, "h": 1, "d": 1}, _kv_append_classes, _kv_append),
    "attention": LoweringRule({"m": 1, "h": 1, "g": 1}, _attention_classes, _attention),
    "embedding": LoweringRule({"m": 1, "d": 1}, _embedding_classes, _embedding),
    "argmax": LoweringRule({"m": 1}, _argmax_classes, _argmax),
    "top": LoweringRule({"m": 1}, lambda op: {"m": "m", "s": "m", "u": "", "c": ""}, _top),
    "cutoff": LoweringRule({"m": 1, "v": 1}, _cutoff_classes, _cutoff),
    "sample": LoweringRule({"m": 1}, lambda op: {"m": "m", "v": "", "j": ""}, _sample),
}
