"""Which ops of a program stand among like ops, so that what helps one helps the other.

Comes in: programs, one after the other as they change. Goes out: a number for each op, the same for
ops that do the same with operands of the same shapes, and whose neighbours, up to DISTANCE ops
away, do so too. A model's layers differ by names alone: what was found of one need not be looked
for in the others. Used by rewrite.py.
"""

from collections.abc import Hashable

from distmega.program.types import Access, Op, Program

DISTANCE = 3
"""As many as a kernel joins before or behind what a rule matches, which is an instruction or more:
through a residual it reaches three layers."""


class Surroundings:
    """The numbers of ops, to be compared between all programs that were asked about."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, program: Program) -> dict[str, int]:
        """By op."""
        tensors, outputs = program.tensor_map(), frozenset(program.outputs)

        def operand(access: Access) -> Hashable:
            found = tensors[access.tensor]
            role = found.role, found.name in outputs
            return access.dims, found.shape, found.dtype, role

        def alone(op: Op) -> Hashable:
            return (
                op.kind,
                op.axes,
                op.attrs,
                (*map(operand, op.reads),),
                (*map(operand, op.writes),),
            )

        users: dict[str, list[tuple[str, int]]] = {}
        for op in program.ops:
            for position, access in enumerate((*op.reads, *op.writes)):
                users.setdefault(access.tensor, []).append((op.name, position))
        beside = {
            op.name: tuple(users[access.tensor] for access in (*op.reads, *op.writes))
            for op in program.ops
        }
        found = {op.name: self._number(alone(op)) for op in program.ops}
        for _ in range(DISTANCE):
            found = {
                name: self._number(
                    (
                        found[name],
                        *(tuple(sorted((found[n], at) for n, at in each)) for each in near),
                    )
                )
                for name, near in beside.items()
            }
        return found

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
