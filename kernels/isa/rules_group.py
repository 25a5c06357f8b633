"""Instructions of the choice of experts, and of ops over groups of rows.

Used by lowering.py through GROUP_RULES. Grouped ops come as tasks/groups.py restates them, over the
rows of all groups. What an instruction means is said in opcodes.py.
"""

from collections.abc import Mapping

from distmega.kernels.isa import opcodes
from distmega.kernels.isa.opcodes import WEIGHINGS, Instruction
from distmega.kernels.isa.rules import Context, LoweringRule, classes_but
from distmega.kernels.tasks.geometry import IterationBox
from distmega.kernels.tasks.groups import ROW


def _groups(context: Context) -> tuple[int, int, int]:
    """Groups of a rank, all of them, and the mesh axis over which ranks share them out."""
    groups = int(context.number("groups"))
    return groups, int(context.number("num_groups", groups)), context.axis_number("group_axis")


def _choose_columns(context: Context, part: IterationBox) -> Instruction:
    (m,) = part.dims["m"]
    return opcodes.ChooseColumns(
        x=context.ref(part, 0),
        weights=context.ref(part, 1),
        chosen=context.ref(part, 2),
        rows=m.length,
        extent=context.op.axis("e").extent,
        num=context.op.axis("c").extent,
        weighing=WEIGHINGS.index(str(context.op.attr("weights"))),
        x_strides=(m.strides[0], context.stride("e", 0)),
        weight_strides=(m.strides[1], context.stride("c", 1)),
        chosen_strides=(m.strides[2], context.stride("c", 2)),
    )


def _route(context: Context, part: IterationBox) -> Instruction:
    made = len(context.op.reads)
    counts, offsets, order, slots = (context.ref(part, made + i) for i in range(4))
    return opcodes.Route(
        ids=context.ref(part, 0),
        used=context.ref(part, 1) if made == 2 else None,
        counts=counts,
        offsets=offsets,
        order=order,
        slots=slots,
        rows=context.op.axis("m").extent,
        num=context.op.axis("c").extent,
        num_groups=context.op.axis("g").extent,
        id_strides=(context.stride("m", 0), context.stride("c", 0)),
        slot_strides=(context.stride("i", made + 3), context.stride("j", made + 3)),
    )


def _gather_rows(context: Context, part: IterationBox) -> Instruction:
    (p,), (j,) = part.dims["p"], part.dims["j"]
    x_rows = context.op.axis("m").extent
    whole = int(context.number("extent", x_rows))
    groups, num_groups, group_axis = _groups(context)
    return opcodes.GatherRows(
        x=context.ref(part, 0),
        order=context.ref(part, 1),
        offsets=context.ref(part, 2),
        out=context.ref(part, 3),
        start=p.start,
        rows=p.length,
        dim=j.length,
        x_rows=x_rows,
        num_choices=context.op.axis(ROW).extent // whole,
        x_strides=(context.stride("m", 0), j.strides[0]),
        out_strides=(p.strides[3], j.strides[3]),
        axis=context.axis_number("base_axis"),
        stride=int(context.number("base_stride", 0)),
        groups=groups,
        num_groups=num_groups,
        group_axis=group_axis,
    )


def _grouped_linear(context: Context, part: IterationBox) -> Instruction:
    (p,), (n,) = part.dims["p"], part.dims["n"]
    groups, num_groups, group_axis = _groups(context)
    return opcodes.GroupedLinear(
        x=context.ref(part, 0),
        w=context.ref(part, 1),
        offsets=context.ref(part, 2),
        out=context.ref(part, 3),
        start=p.start,
        rows=p.length,
        n=n.length,
        k=context.op.axis("k").extent,
        x_strides=(p.strides[0], context.stride("k", 0)),
        w_strides=(context.stride("e", 1), n.strides[1], context.stride("k", 1)),
        out_strides=(p.strides[3], n.strides[3]),
        groups=groups,
        num_groups=num_groups,
        group_axis=group_axis,
    )


def _keep_rows(context: Context, part: IterationBox) -> Instruction:
    (p,), (j,) = part.dims["p"], part.dims["j"]
    groups, num_groups, group_axis = _groups(context)
    return opcodes.KeepRows(
        x=context.ref(part, 0),
        offsets=context.ref(part, 1),
        out=context.ref(part, 2),
        start=p.start,
        rows=p.length,
        dim=j.length,
        x_strides=(p.strides[0], j.strides[0]),
        out_strides=(p.strides[2], j.strides[2]),
        groups=groups,
        num_groups=num_groups,
        group_axis=group_axis,
    )


def _scatter_add(context: Context, part: IterationBox) -> Instruction:
    (m,), (n,) = part.dims["m"], part.dims["n"]
    groups, num_groups, group_axis = _groups(context)
    return opcodes.ScatterAdd(
        y=context.ref(part, 0),
        weights=context.ref(part, 1),
        slots=context.ref(part, 2),
        offsets=context.ref(part, 3),
        out=context.ref(part, 4),
        rows=m.length,
        dim=n.length,
        num=context.op.axis("c").extent,
        y_rows=context.op.axis(ROW).extent,
        y_strides=(context.stride(ROW, 0), n.strides[0]),
        weight_strides=(m.strides[1], context.stride("c", 1)),
        slot_strides=(m.strides[2], context.stride("c", 2)),
        out_strides=(m.strides[4], n.strides[4]),
        groups=groups,
        num_groups=num_groups,
        group_axis=group_axis,
    )


GROUP_RULES: Mapping[str, LoweringRule] = {
    "top_k": LoweringRule({"m": 1}, classes_but("m", "e", "c"), _choose_columns),
    "route": LoweringRule({}, classes_but(""), _route),
    "gather_rows": LoweringRule({"p": 1, "j": 1}, classes_but("j", "m", "o", p="p"), _gather_rows),
    "grouped_linear": LoweringRule(
        {"p": 1, "n": 1}, classes_but("n", "e", "k", "o", p="p"), _grouped_linear
    ),
    "keep_rows": LoweringRule({"p": 1, "j": 1}, classes_but("j", "o", p="p"), _keep_rows),
    "scatter_add": LoweringRule(
        {"m": 1, "n": 1}, classes_but("n", "c", "o", ROW, m="m"), _scatter_add
    ),
}
