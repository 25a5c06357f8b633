"""Extents of a segment's products, which say what kernel does it and how its weights lie.

In: a segment. Out: the row length of each weight matrix, and the rows that they multiply. Next on
the walk: weight_order.py.
"""

from distmega.program.kinds import kind_of
from distmega.program.types import Program, contracts


def matrix_columns(segment: Program) -> dict[str, int]:
    """Row length of each weight matrix of a segment: the extent that its products sum over; those
    of experts lie one behind the other.
    """
    columns: dict[str, int] = {}
    for op in segment.ops:
        if contracts(op):
            columns[op.reads[1].tensor] = op.num_reduced
        elif kind_of(op).contracts:
            columns[op.reads[1].tensor] = op.extents["k"]
    return columns


def count_rows(segment: Program) -> int:
    """Rows of x of a segment's linears, the most of any; 1 without linears."""
    columns, tensors = matrix_columns(segment), segment.tensor_map()
    return max(
        (
            tensors[op.reads[0].tensor].num_elements // columns[op.reads[1].tensor]
            for op in segment.ops
            if contracts(op)
        ),
        default=1,
    )
