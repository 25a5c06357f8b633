"""Pointwise work on rows as both kernels ask for it: its operands in order, and what it must be.

In: fused ops, the embeddings that are tables besides the rows that come in. Out: ops whose formulas
take operands in one order, or an UnsupportedError. Next on the walk: row_plan/queues.py.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from distmega.kernels.hopper.plan.types import unfit
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedContraction,
    FusedEmbedding,
    FusedPointwise,
    canonical,
    substitute,
)
from distmega.program import expr

MAX_CARRIED = 2
"""Vectors that are kept and that one formula takes, at most."""


def in_order(op: Fused, tables: Container[str], first: str = "") -> Fused:
    """The op with operand `first`, if it takes that, before the others, and a table's behind."""
    if not isinstance(op, FusedContraction | FusedPointwise):
        return op
    operands = tuple(
        sorted(op.operands, key=lambda name: (name in tables) - (bool(first) and name == first))
    )
    if operands == op.operands:
        return op
    num = len(op.streams) if isinstance(op, FusedContraction) else int(bool(op.x))
    arguments = [*range(num), *(num + operands.index(name) for name in op.operands)]
    formula = canonical(substitute(op.formula, [expr.Arg(index) for index in arguments]))
    return replace(op, operands=operands, formula=formula)


def split_operands(
    op: FusedPointwise, tables: Mapping[str, FusedEmbedding], elements: Callable[[str], int]
) -> tuple[tuple[str, ...], FusedEmbedding | None]:
    """What an op carries besides x, and the table whose row it takes. elements: of a row of a
    tensor.
    """
    carried = tuple(name for name in op.operands if name not in tables)
    given = [tables[name] for name in op.operands if name in tables]
    if len(carried) > MAX_CARRIED or len(given) > 1:
        raise unfit(f"{op.name!r}, which takes {op.operands}")
    rows = elements(op.out)
    if any(elements(name) != rows for name in (*op.operands, *filter(None, [op.x]))):
        raise unfit(f"{op.name!r}, which takes rows of another size")
    return carried, given[0] if given else None
