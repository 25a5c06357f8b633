"""Ops that overwrite other elements than each reads, restated so that any order of tasks is right.

In: a segment. Out: the segment, in which an op that moves rows of a state up, or turns it in place,
reads a copy made before: tasks of one op have no order, nor have threads of a task. Next on the
walk: expand.py.
"""

from dataclasses import replace

from distmega.kernels.tasks.footprints import Footprints
from distmega.kernels.tasks.types import TaskGroup
from distmega.program.ops.data_movement import copy
from distmega.program.types import Access, Op, Program, verify_program

BEFORE = ".before"
"""Names of copies of what an op overwrites end in this and the position among its reads."""


def expand_overwrites(segment: Program) -> Program:
    """Every op with such reads behind copies of them; other ops as they are."""
    footprints, tensors = Footprints(segment), segment.tensor_map()
    ops: list[Op] = []
    for op in segment.ops:
        reads = list(op.reads)
        for position, read in enumerate(op.reads):
            if not op.is_view and _is_overwritten(footprints, op, read):
                made, (before,) = copy(f"{op.name}{BEFORE}{position}", tensors[read.tensor])
                tensors[before.name] = before
                ops.append(made)
                reads[position] = replace(read, tensor=before.name)
        ops.append(replace(op, reads=tuple(reads)))
    if tuple(ops) == segment.ops:
        return segment
    copied = replace(segment, tensors=tuple(tensors.values()), ops=tuple(ops))
    return verify_program(copied, is_restated=True)


def _is_overwritten(footprints: Footprints, op: Op, read: Access) -> bool:
    """Whether the op writes elements that it reads, but for each at its own point."""
    return any(
        footprints.base(write.tensor) == footprints.base(read.tensor)
        and write != read
        and _meet(footprints, op, write, read)
        for write in op.writes
    )


def _meet(footprints: Footprints, op: Op, write: Access, read: Access) -> bool:
    whole = TaskGroup(op=op)
    ids = (footprints.footprint(whole, access) for access in (write, read))
    return bool(footprints.overlap(*ids).any())
