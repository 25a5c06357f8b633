"""Instructions of ops that compute, a rule a kind: classes of axes, and the instruction of a part.

Used by lowering.py through COMPUTE_RULES; rules_move.py has the ops that only move data. What an
instruction means is said in opcodes.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from distmega.kernels.isa import opcodes
from distmega.kernels.isa.opcodes import (
    ATTENDED,
    COMBINES,
    SCANS,
    ExtraOperand,
    Instruction,
    Ref,
)
from distmega.kernels.runtime.arena import Operand
from distmega.kernels.tasks.geometry import Geometry, IterationBox, unfit
from distmega.program.kinds import kind_of
from distmega.program.ops.norms import NORMS
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

    def more(self, part: IterationBox, operand: int, strides: Sequence[int]) -> ExtraOperand:
        """An operand that the instruction itself has no fields for, by up to six strides."""
        padded = (*strides, *(0,) * (6 - len(strides)))
        return ExtraOperand(x=self.ref(part, operand), strides=opcodes.six(padded))

    def stride(self, axis: str, operand: int) -> int:
        """Elements that one operand steps with an axis."""
        return self.geometry.stride(axis, operand)


def _no_operands(context: Context, part: IterationBox) -> Sequence[ExtraOperand]:
    return ()


class LoweringRule(NamedTuple):
    """How a kind becomes instructions: dims an instruction has for each class of axes, the class of
    each axis by name ("" for axes that the instruction treats whole), and the instruction of a
    part. before: what it takes besides its fields.
    """

    limits: Mapping[str, int]
    classes: Callable[[Op], Mapping[str, str]]
    emit: Callable[[Context, IterationBox], Instruction]
    before: Callable[[Context, IterationBox], Sequence[ExtraOperand]] = _no_operands


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
            raise unfit(
                op,
                f"axis {axis.name!r} is not a row, a column, a sum or a batch",
                "axes that the first or the second operand has",
            )
        classes[axis.name] = kinds[where]
    return classes


def _linear(context: Context, part: IterationBox) -> Instruction:
    out, sums = len(context.operands) - 1, part.dims["k"]
    whole = context.op.num_reduced
    if math.prod(part.lengths("k")) != whole:
        raise unfit(
            context.op,
            f"sums that do not merge into {len(sums)} dims",
            f"at most {len(sums)} dims of sums, where dims that lie side by side in one order in"
            " both operands are one",
        )
    (m,), (n,), k = part.dims["m"], part.dims["n"], sums[-1]
    if k.length != whole or (out == 3 and m.strides[2] and m.length > 1):
        return opcodes.Contract(
            x=context.ref(part, 0),
            w=context.ref(part, 1),
            bias=context.ref(part, 2) if out == 3 else None,
            out=context.ref(part, out),
            m=m.length,
            n=n.length,
            sums=opcodes.triple(part.lengths("k")),
            x_strides=opcodes.quad((m.strides[0], *part.strides("k", 0))),
            w_strides=opcodes.quad((n.strides[1], *part.strides("k", 1))),
            bias_strides=(m.strides[2], n.strides[2]) if out == 3 else (0, 0),
            out_strides=(m.strides[out], n.strides[out]),
        )
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


POINTWISE_FIELDS = 4
"""Operands that a Pointwise has fields for."""


def _pointwise(context: Context, part: IterationBox) -> Instruction:
    num_args = len(context.op.reads)
    outer, inner = part.dims["i"]
    here = range(min(num_args, POINTWISE_FIELDS))
    absent = POINTWISE_FIELDS - len(here)
    args = [context.ref(part, i) for i in here] + [None] * absent
    strides = [(outer.strides[i], inner.strides[i]) for i in here] + [(0, 0)] * absent
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


def _pointwise_operands(context: Context, part: IterationBox) -> Sequence[ExtraOperand]:
    others = range(POINTWISE_FIELDS, len(context.op.reads))
    return [context.more(part, i, part.strides("i", i)) for i in others]


def _reduce_classes(op: Op) -> dict[str, str]:
    return {axis.name: "r" if axis.role == "reduce" else "i" for axis in op.axes}


def _reduce(context: Context, part: IterationBox) -> Instruction:
    if part.lengths("r") != (context.op.num_reduced,):
        raise unfit(
            context.op,
            "the reduced axes do not merge into one dim",
            "reduced axes that lie side by side in the operand",
        )
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
    (m,), (d,) = part.dims["m"], part.dims["d"]
    vectors = [context.ref(part, i, context.geometry.firsts[i]) for i in range(2, out)]
    steps = [*(context.stride("d", i) for i in range(2, out)), 0, 0]
    return opcodes.Norm(
        x=context.ref(part, 1),
        weight=vectors[0] if vectors else None,
        bias=vectors[1] if len(vectors) > 1 else None,
        out=context.ref(part, out),
        kind=NORMS.index(context.op.kind),
        rows=m.length,
        dim=context.op.axis("d").extent,
        start=d.start,
        count=d.length,
        x_strides=(m.strides[0], context.stride("d", 0)),
        vector_strides=(steps[0], steps[1]),
        out_strides=(m.strides[out], context.stride("d", out)),
        eps=context.number("eps", 0.0),
    )


def _scan(context: Context, part: IterationBox) -> Instruction:
    (m,), (d,) = part.dims["m"], part.dims["d"]
    return opcodes.Scan(
        x=context.ref(part, 1),
        out=context.ref(part, 2),
        kind=SCANS.index(context.op.kind),
        rows=m.length,
        start=d.start,
        count=d.length,
        x_strides=(m.strides[0], context.stride("d", 0)),
        out_strides=(m.strides[2], context.stride("d", 2)),
    )


def _rope_classes(op: Op) -> dict[str, str]:
    known = {"m": "m", "d": "d", "r": "", "t": ""}
    return {axis.name: known.get(axis.name, "h") for axis in op.axes}


def _rope(context: Context, part: IterationBox) -> Instruction:
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
        table_strides=(context.stride("t", 3), context.stride("r", 3)),
        position_stride=m.strides[2],
        x_strides=(m.strides[1], h.strides[1], context.stride("r", 1)),
        out_strides=(m.strides[4], h.strides[4], d.strides[4]),
    )


def _kv_append_classes(op: Op) -> dict[str, str]:
    return {"h": "h", "d": "d", "m": "m", "t": "", "s": ""}


def _kv_append(context: Context, part: IterationBox) -> Instruction:
    (m,), (h,), (d,) = part.dims["m"], part.dims["h"], part.dims["d"]
    cache, several = len(context.op.reads), len(context.op.reads) == 3
    first = context.stride("s", cache) if several else m.strides[cache]
    return opcodes.KvAppend(
        x=context.ref(part, 0),
        positions=context.ref(part, 1),
        sequences=context.ref(part, 2) if several else None,
        cache=context.ref(part, cache),
        rows=m.length,
        heads=h.length,
        dim=d.length,
        slots=context.op.axis("t").extent,
        num_caches=context.op.axis("s").extent if several else m.length,
        x_strides=(m.strides[0], h.strides[0], d.strides[0]),
        cache_strides=(first, h.strides[cache], context.stride("t", cache), d.strides[cache]),
        vector_strides=(m.strides[1], m.strides[2] if several else 0),
    )


def _attention_classes(op: Op) -> dict[str, str]:
    """b, sequences of an `attend`, is walked: an instruction for each."""
    whole = dict.fromkeys("edtsr", "")
    return {"b": "b", "m": "m", "h": "h", "g": "g", **whole}


def _caches_follow(context: Context) -> int:
    """Heads that the caches of an Attention have from one row's to the next, 0 where all rows share
    them; -1 where these do not lie as it takes them.
    """
    op = context.op
    unread = len(op.reads) != 4 or not kind_of(op).reads_positions
    ends = (("d", 0), ("d", 1), ("e", 2), ("e", len(op.reads)), ("m", 3))
    if unread or any(context.stride(a, i) != 1 and op.axis(a).extent > 1 for a, i in ends):
        return -1
    d, e, t = (op.axis(name).extent for name in "det")
    steps = [(context.stride("t", i), context.stride("h", i)) for i in (1, 2)]
    if op.axis("h").extent == 1:
        steps = [(row, t * row) for row, _ in steps]
    sequences = [context.stride("m", i) for i in (1, 2)]
    heads = sequences[0] // (t * d)
    follow = steps == [(d, t * d), (e, t * e)] and sequences == [heads * t * d, heads * t * e]
    return heads if follow else -1


def _attended(op: Op) -> Mapping[str, int]:
    """Operand that is each of ATTENDED, of those that an op has."""
    if op.get("packed", 0):
        return {"positions": 3} | ({"sequences": 4} if "s" in op.extents else {})
    if not kind_of(op).reads_positions:
        return {"bias": 3} if len(op.reads) == 4 else {}
    return {"positions": 3} | ({"bias": 4} if len(op.reads) == 5 else {})


def _attention_operands(context: Context, part: IterationBox) -> Sequence[ExtraOperand]:
    if _caches_follow(context) >= 0:
        return ()
    (m,), (h,), (g,) = part.dims["m"], part.dims["h"], part.dims["g"]
    found = []
    for i, last in ((1, "d"), (2, "e")):
        first = context.stride("s", i) if "s" in context.op.extents else m.strides[i]
        steps = (first, h.strides[i], context.stride("t", i), context.stride(last, i))
        found.append(context.more(part, i, steps))
    for name, i in _attended(context.op).items():
        steps = (m.strides[i], h.strides[i], g.strides[i], context.stride("t", i))
        found.append(context.more(part, i, steps if name == "bias" else steps[:1]))
    return found


def _attention(context: Context, part: IterationBox) -> Instruction:
    op, geometry = context.op, context.geometry
    d, e, t = (op.axis(name).extent for name in "det")
    if any(axis in split.axes for split in geometry.group.splits for axis in "edt"):
        raise unfit(op, "tasks split within a head or the context", "tasks of whole heads")
    (m,), (h,), (g,) = part.dims["m"], part.dims["h"], part.dims["g"]
    heads, out = _caches_follow(context), len(op.reads)
    if heads < 0:
        return opcodes.Attend(
            q=context.ref(part, 0),
            out=context.ref(part, out),
            m=m.length,
            h=h.length,
            g=g.length,
            d=d,
            e=e,
            t=t,
            q_strides=(m.strides[0], h.strides[0], g.strides[0], context.stride("d", 0)),
            out_strides=(m.strides[out], h.strides[out], g.strides[out], context.stride("e", out)),
            others=sum(1 << ATTENDED.index(name) for name in _attended(op)),
            num_caches=op.extents.get("s", 1),
            scale=context.number("scale"),
            window=int(context.number("window", 0)),
            softcap=context.number("softcap", 0.0),
        )
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


def _embedding(context: Context, part: IterationBox) -> Instruction:
    (m,), (d,), table_rows = part.dims["m"], part.dims["d"], context.op.axis("v").extent
    return opcodes.Embedding(
        ids=context.ref(part, 0),
        table=context.ref(part, 1),
        out=context.ref(part, 2),
        rows=m.length,
        dim=d.length,
        table_rows=table_rows,
        id_stride=m.strides[0],
        table_strides=(context.stride("v", 1), d.strides[1]),
        out_strides=(m.strides[2], d.strides[2]),
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
        extent=int(context.number("extent", table_rows)),
    )


def _gather(context: Context, part: IterationBox) -> Instruction:
    return opcodes.Gather(
        x=context.ref(part, 0),
        ids=context.ref(part, 1),
        out=context.ref(part, 2),
        extents=opcodes.quad(part.lengths("i")),
        num=context.op.axis("v").extent,
        stride=context.stride("v", 0),
        x_strides=opcodes.quad(part.strides("i", 0)),
        ids_strides=opcodes.quad(part.strides("i", 1)),
        out_strides=opcodes.quad(part.strides("i", 2)),
    )


def classes_but(rest: str, *whole: str, **own: str) -> Callable[[Op], Mapping[str, str]]:
    """Some axes whole, some in a class of their own, all others in one."""
    known = dict.fromkeys(whole, "") | own
    return lambda op: {axis.name: known.get(axis.name, rest) for axis in op.axes}


def _argmax(context: Context, part: IterationBox) -> Instruction:
    (m,) = part.dims["m"]
    columns = context.op.axis("v").extent
    return opcodes.Argmax(
        x=context.ref(part, 0),
        value=context.ref(part, 1),
        index=context.ref(part, 2),
        rows=m.length,
        columns=columns,
        row_strides=(m.strides[0], m.strides[1], m.strides[2]),
        step=context.stride("v", 0),
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
        extent=int(context.number("extent", columns)),
    )


def _top(context: Context, part: IterationBox) -> Instruction:
    (m,), has_index = part.dims["m"], len(context.op.writes) == 2
    return opcodes.Top(
        x=context.ref(part, 0),
        values=context.ref(part, 1),
        index=context.ref(part, 2) if has_index else None,
        rows=m.length,
        extent=context.op.axis("u").extent,
        num_top=context.op.axis("c").extent,
        x_strides=(m.strides[0], context.stride("u", 0)),
        value_strides=(m.strides[1], context.stride("c", 1)),
        index_strides=(m.strides[2], context.stride("c", 2)) if has_index else (0, 0),
    )


def _cutoff(context: Context, part: IterationBox) -> Instruction:
    (m,), (candidates,) = part.dims["m"], part.dims["v"]
    row = math.prod(axis.extent for axis in context.op.axes if axis.name not in "mij")
    if candidates.length != row:
        raise unfit(
            context.op,
            "candidates of a row that do not merge into one dim",
            "candidates that lie at equal steps",
        )
    return opcodes.Cutoff(
        x=context.ref(part, 0),
        settings=context.ref(part, 1),
        limits=context.ref(part, 2),
        rows=m.length,
        extent=candidates.length,
        x_strides=(m.strides[0], candidates.strides[0]),
        setting_strides=(m.strides[1], context.stride("i", 1)),
        limit_strides=(m.strides[2], context.stride("j", 2)),
    )


def _cutoff_classes(op: Op) -> dict[str, str]:
    return {axis.name: {"m": "m", "i": "", "j": ""}.get(axis.name, "v") for axis in op.axes}


def _sample(context: Context, part: IterationBox) -> Instruction:
    (m,) = part.dims["m"]
    columns = context.op.axis("v").extent
    return opcodes.Sample(
        x=context.ref(part, 0),
        limits=context.ref(part, 1),
        seeds=context.ref(part, 2),
        positions=context.ref(part, 3),
        value=context.ref(part, 4),
        index=context.ref(part, 5),
        rows=m.length,
        columns=columns,
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
        extent=int(context.number("extent", columns)),
        strides=opcodes.six(m.strides),
        steps=(context.stride("v", 0), context.stride("j", 1)),
    )


_NORM = LoweringRule({"m": 1, "d": 1}, _norm_classes, _norm)
_SCAN = LoweringRule({"m": 1, "d": 1}, _norm_classes, _scan)
_ATTENTION = LoweringRule(
    {"b": 0, "m": 1, "h": 1, "g": 1}, _attention_classes, _attention, _attention_operands
)
_TOP = LoweringRule({"m": 1}, classes_but("m", "u", "c"), _top)

COMPUTE_RULES: Mapping[str, LoweringRule] = {
    "linear": LoweringRule({"b": 0, "m": 1, "n": 1, "k": 3}, _linear_classes, _linear),
    "pointwise": LoweringRule({"i": 2}, all_axes, _pointwise, _pointwise_operands),
    "reduce": LoweringRule({"i": 2, "r": 1}, _reduce_classes, _reduce),
    **dict.fromkeys(NORMS, _NORM),
    **dict.fromkeys(SCANS, _SCAN),
    "rope": LoweringRule({"m": 1, "h": 1, "d": 1}, _rope_classes, _rope),
    "kv_append": LoweringRule({"m": 1, "h": 1, "d": 1}, _kv_append_classes, _kv_append),
    **dict.fromkeys(("attention", "biased_attention", "attend"), _ATTENTION),
    "embedding": LoweringRule({"m": 1, "d": 1}, classes_but("d", "v", m="m"), _embedding),
    "gather": LoweringRule({"i": 4}, classes_but("i", "v"), _gather),
    "argmax": LoweringRule({"m": 1}, classes_but("m", "v"), _argmax),
    **dict.fromkeys(("top", "topk"), _TOP),
    "cutoff": LoweringRule({"m": 1, "v": 1}, _cutoff_classes, _cutoff),
    "sample": LoweringRule({"m": 1}, lambda op: {"m": "m", "v": "", "j": ""}, _sample),
}
