"""The order of weights in an arena that the persistent kernels read in place.

In: a segment, or a whole local program. Out: its weights in order; the CPU interpreter takes any
order. Next on the walk: row_plan/queues.py.
"""

from collections.abc import Iterator

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.plan.extents import matrix_columns
from distmega.kernels.tasks.fuse import FusedContraction, fuse_segment, norms_of
from distmega.program.kinds import kind_of
from distmega.program.types import Program, Tensor


def order_weights(segment: Program) -> list[Tensor]:
    """Weights in the order in which the kernel wants them in the arena: vectors first, which it
    finds by 32-bit offsets, then matrices, those of one row length together, then a table that is
    only looked up; among these in the order in which fused ops take them.
    """
    columns = matrix_columns(segment)
    tables = {op.reads[1].tensor for op in segment.ops if kind_of(op).looks_up_rows}
    last = max(columns.values(), default=0) + 1
    order = {**dict.fromkeys(tables, last), **columns}
    wanted = {name: nth for nth, name in enumerate(dict.fromkeys(_in_fused_order(segment)))}
    return sorted(
        segment.with_role("weight"),
        key=lambda weight: (order.get(weight.name, 0), wanted.get(weight.name, len(wanted))),
    )


def _in_fused_order(segment: Program) -> Iterator[str]:
    """Weights as fused ops take them, side by side where one op does; none if ops do not fuse."""
    try:
        fused = fuse_segment(segment)
    except UnsupportedError:
        return
    for op in fused:
        for norm in norms_of(op):
            yield from (norm.weight, norm.bias)
        if isinstance(op, FusedContraction):
            for stream in op.streams:
                yield from (*stream.weights, *stream.biases)
