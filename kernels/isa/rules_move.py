"""Instructions of ops that move data: copies, shards, pushes to peers, and what reads their
buffers.

Used by lowering.py through MOVE_RULES; see rules.py for the ops that compute.
"""

from collections.abc import Iterator, Mapping

from distmega.kernels.isa import opcodes
from distmega.kernels.isa.opcodes import Instruction
from distmega.kernels.isa.rules import Context, LoweringRule
from distmega.kernels.tasks.expand import PART
from distmega.kernels.tasks.geometry import IterationBox, both, inside
from distmega.program.kinds import kind_of
from distmega.program.types import Op


def copy_instructions(context: Context, task: int) -> Iterator[Instruction]:
    """Copies of a task: from each operand that reaches into its tile, what lies inside both
    tensors.
    """
    op, out = context.op, len(context.op.reads)
    written = inside(op, op.writes[0], context.operands[out].shape)
    for source, read in enumerate(op.reads):
        for clip in inside(op, read, context.operands[source].shape):
            for other in written:
                for part in context.geometry.parts(task, both(clip, other)):
                    yield _copy(context, part, source)


def _copy(context: Context, part: IterationBox, source: int) -> Instruction:
    out = len(context.op.reads)
    return opcodes.Copy(
        src=context.ref(part, source),
        dst=context.ref(part, out),
        extents=opcodes.six(part.lengths("i")),
        src_strides=opcodes.six(part.strides("i", source)),
        dst_strides=opcodes.six(part.strides("i", out)),
    )


def _rank_axis(op: Op) -> str:
    """The axis of an op that stands for the ranks of its team."""
    (name,) = (axis.name for axis in op.axes if axis.lookup)
    return name


def _take_shard_classes(op: Op) -> dict[str, str]:
    ranks = _rank_axis(op)
    (sharded,) = (index.axes for index in op.reads[0].dims if ranks in index.axes)
    return {a.name: "" if a.name == ranks else "s" if a.name in sharded else "i" for a in op.axes}


def _take_shard(context: Context, part: IterationBox) -> Instruction:
    ranks = _rank_axis(context.op)
    (dim,) = (d for d, index in enumerate(context.op.reads[0].dims) if ranks in index.axes)
    (inner,) = (name for name in context.op.reads[0].dims[dim].axes if name != ranks)
    (shard,) = part.dims["s"]
    return opcodes.TakeShard(
        src=context.ref(part, 0),
        dst=context.ref(part, 1),
        extents=opcodes.quad((shard.length, *part.lengths("i"))),
        src_strides=opcodes.quad((shard.strides[0], *part.strides("i", 0))),
        dst_strides=opcodes.quad((shard.strides[1], *part.strides("i", 1))),
        axis=context.axis_number("mesh_axis"),
        shard=context.op.axis(inner).extent,
        bound=context.operands[0].shape[dim] - shard.start,
    )


def _slot_classes(op: Op) -> dict[str, str]:
    """Every axis in one class, but for the slots of receive buffers, which instructions walk
    themselves.
    """
    buffers = op.writes if kind_of(op).writes_peers else op.reads
    (slot,) = buffers[0].dims[0].axes
    return {axis.name: "" if axis.name == slot else "i" for axis in op.axes}


def _push(context: Context, part: IterationBox) -> Instruction:
    return opcodes.Push(
        x=context.ref(part, 0),
        recv=context.ref(part, 1),
        extents=opcodes.quad(part.lengths("i")),
        x_strides=opcodes.quad(part.strides("i", 0)),
        recv_strides=opcodes.quad(part.strides("i", 1)),
        slot_stride=context.operands[1].strides[0],
        axis=context.axis_number("mesh_axis"),
    )


def _push_parts_classes(op: Op) -> dict[str, str]:
    """As of a push; s, the dim of which each rank gets its part."""
    (joined,) = (index.axes for index in op.reads[0].dims if PART in index.axes)
    return _slot_classes(op) | {name: "" if name == PART else "s" for name in joined}


def _push_parts(context: Context, part: IterationBox) -> Instruction:
    dims = context.op.reads[0].dims
    (dim,) = (d for d, index in enumerate(dims) if PART in index.axes)
    (inner,) = (name for name in dims[dim].axes if name != PART)
    (shard,) = part.dims["s"]
    return opcodes.PushParts(
        x=context.ref(part, 0),
        recv=context.ref(part, 1),
        extents=opcodes.quad((shard.length, *part.lengths("i"))),
        x_strides=opcodes.quad((shard.strides[0], *part.strides("i", 0))),
        recv_strides=opcodes.quad((shard.strides[1], *part.strides("i", 1))),
        slot_stride=context.operands[1].strides[0],
        axis=context.axis_number("mesh_axis"),
        shard=context.op.axis(inner).extent,
        bound=context.operands[0].shape[dim] - shard.start,
    )


def _sum_ranks(context: Context, part: IterationBox) -> Instruction:
    return opcodes.SumRanks(
        recv=context.ref(part, 0),
        out=context.ref(part, 1),
        combine=context.combine(),
        num_ranks=context.operands[0].shape[0],
        extents=opcodes.quad(part.lengths("i")),
        recv_strides=opcodes.quad(part.strides("i", 0)),
        out_strides=opcodes.quad(part.strides("i", 1)),
        slot_stride=context.operands[0].strides[0],
    )


def _argmax_ranks(context: Context, part: IterationBox) -> Instruction:
    (row,) = part.dims["i"]
    return opcodes.ArgmaxRanks(
        values=context.ref(part, 0),
        indices=context.ref(part, 1),
        value=context.ref(part, 2),
        index=context.ref(part, 3),
        rows=row.length,
        num_ranks=context.operands[0].shape[0],
        slot_strides=(context.operands[0].strides[0], context.operands[1].strides[0]),
        row_strides=opcodes.quad(row.strides),
    )


COPY_KINDS = ("slice", "concat", "expand", "reshape", "transpose", "set")
COPY_DIMS = {"i": 6}
"""Dims of a copy. Copies have no rule in the table: they walk operands, see copy_instructions."""

MOVE_RULES: Mapping[str, LoweringRule] = {
    "take_shard": LoweringRule({"s": 1, "i": 3}, _take_shard_classes, _take_shard),
    "push": LoweringRule({"i": 4}, _slot_classes, _push),
    "push_parts": LoweringRule({"s": 1, "i": 3}, _push_parts_classes, _push_parts),
    "sum_ranks": LoweringRule({"i": 4}, _slot_classes, _sum_ranks),
    "argmax_ranks": LoweringRule({"i": 1}, _slot_classes, _argmax_ranks),
}
