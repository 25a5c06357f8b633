"""Instructions of tasks, from the geometry of each task and the rule of its op's kind.

In: a task group and where its operands lie. Out: for each task a list of instructions, in which the
`base` of a Ref is the number of the access (reads first, from 1) instead of an address: equal
layers share these lists, and encoder.py puts the addresses in. `is_encodable` tells whether an op
has instructions at all; hostir keeps the others as library ops. Next on the walk: encoder.py.
"""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

from distmega.errors import UnsupportedError, counted
from distmega.kernels.isa.opcodes import Instruction, Nop
from distmega.kernels.isa.rules import COMPUTE_RULES, Context, LoweringRule, all_axes
from distmega.kernels.isa.rules_group import GROUP_RULES
from distmega.kernels.isa.rules_move import COPY_DIMS, COPY_KINDS, MOVE_RULES, copy_instructions
from distmega.kernels.runtime.arena import Operand, Space
from distmega.kernels.tasks.geometry import make_geometry, unfit
from distmega.kernels.tasks.groups import restate_groups
from distmega.kernels.tasks.types import TaskGroup
from distmega.program.types import (
    MAX_FORMS,
    Op,
    Tensor,
    accesses,
    grouped_index,
    op_form,
    packed_strides,
)

RULES: Mapping[str, LoweringRule] = {**COMPUTE_RULES, **GROUP_RULES, **MOVE_RULES}

MESH_AXES = ("mesh_axis", "base_axis", "group_axis")
"""Attributes that name a mesh axis."""

MAX_INSTRUCTIONS = 16
"""An op that takes more than this for its whole iteration space is not worth a place in a
megakernel.
"""
_encodable: dict[Hashable, bool] = {}
"""By what decides it: layers of a model are alike."""


def lower_group(
    group: TaskGroup, operands: Sequence[Operand], mesh_axes: tuple[str, ...], expression: int
) -> list[list[Instruction]]:
    """Instructions of each task of a group; `operands` in access order. Raises UnsupportedError
    where there are none.

    mesh_axes: names of the mesh axes, in order. expression: place of the op's pointwise program in
    the constant table.
    """
    op = group.op
    if op.is_view:
        return [[Nop()] for _ in range(group.num_tasks)]
    if grouped_index(op) is not None:
        raise unfit(op, "groups of rows", "rows, as which tasks/groups.py restates them")
    if op.kind in COPY_KINDS:
        context = _context(group, operands, all_axes(op), COPY_DIMS, mesh_axes, expression)
        return [
            list(copy_instructions(context, task)) or [Nop()] for task in range(group.num_tasks)
        ]
    if op.kind not in RULES:
        raise unfit(op, "no instruction computes this kind", f"one of {', '.join(sorted(RULES))}")
    rule = RULES[op.kind]
    context = _context(group, operands, rule.classes(op), rule.limits, mesh_axes, expression)
    return [
        [
            instruction
            for part in context.geometry.parts(task)
            for instruction in (*rule.before(context, part), rule.emit(context, part))
        ]
        for task in range(group.num_tasks)
    ]


def is_encodable(
    op: Op,
    tensors: Mapping[str, Tensor],
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> bool:
    """Whether an op has instructions, and few enough to be worth a place in a megakernel. strides:
    of operands that may be views, in elements; the others are row-major.
    """
    names = [access.tensor for access in accesses(op)]
    form = op_form(op, [tensors[name] for name in names]), tuple(map(strides.get, names))
    found = _encodable.get(form)
    if found is None:
        found = why_not_encodable(op, tensors, strides, most=MAX_INSTRUCTIONS) is None
        if len(_encodable) < MAX_FORMS:
            _encodable[form] = found
    return found


def why_not_encodable(
    op: Op,
    tensors: Mapping[str, Tensor],
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    *,
    most: int,
) -> UnsupportedError | None:
    """None if an op has at most so many instructions, else what is in the way. strides: as in
    is_encodable.
    """
    mesh_axes = tuple(str(op.get(name, "")) for name in MESH_AXES)
    known, num = dict(tensors), 0
    try:
        for one, made in restate_groups(op, tensors):
            known |= {tensor.name: tensor for tensor in made}
            operands = [
                _plain_operand(known[a.tensor], strides.get(a.tensor)) for a in accesses(one)
            ]
            (instructions,) = lower_group(TaskGroup(op=one), operands, mesh_axes, 0)
            num += len(instructions)
    except UnsupportedError as error:
        return error
    return None if num <= most else unfit(op, counted(num, "instruction"), f"at most {most}")


def _context(
    group: TaskGroup,
    operands: Sequence[Operand],
    classes: Mapping[str, str],
    limits: Mapping[str, int],
    mesh_axes: tuple[str, ...],
    expression: int,
) -> Context:
    geometry = make_geometry(group, operands, classes.__getitem__, limits)
    return Context(geometry, operands, mesh_axes, expression)


def _plain_operand(tensor: Tensor, strides: tuple[int, ...] | None) -> Operand:
    return Operand(
        space=Space.ACT,
        dtype=tensor.dtype,
        offset_bytes=0,
        first=0,
        shape=tensor.shape,
        strides=packed_strides(tensor.shape) if strides is None else strides,
    )
