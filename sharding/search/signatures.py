"""Ops by class: equal signatures share options, costs and loop domains, so layers cost nothing.

Comes in: the ops of a program. Goes out: a class number per op and its memoised options. Used by
propagate.py, search.py and resolve.py.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from distmega.program.types import Op, Program, Tensor, accesses
from distmega.sharding.search.options import Options, op_signature, split_options

Taken = tuple[tuple[str, int], ...]
"""Iteration axes that mesh axes before divide, and what they have left of them on one rank."""


@dataclass(slots=True)
class OptionTable:
    """Memo of one program's op classes."""

    tensors: Mapping[str, Tensor]
    sorted_otherwise: frozenset[str] = frozenset()
    """Names of ops that take rows as sorted by other groups than they are."""
    _classes: dict[Hashable, int] = field(default_factory=dict)
    _class_of: dict[str, int] = field(default_factory=dict)
    _options: dict[tuple[int, int, Taken], Options] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> "OptionTable":
        """A table over a program's tensors."""
        return OptionTable(program.tensor_map(), _sorted_otherwise(program))

    def class_of(self, op: Op) -> int:
        """Number of the op's class; ops of one class differ in names only."""
        found = self._class_of.get(op.name)
        if found is None:
            signature = op_signature(op, self.tensors), op.name in self.sorted_otherwise
            found = self._classes.setdefault(signature, len(self._classes))
            self._class_of[op.name] = found
        return found

    def options(self, op: Op, num_ranks: int, taken: Taken = ()) -> Options:
        """split_options, once per class."""
        key = self.class_of(op), num_ranks, taken
        if key not in self._options:
            self._options[key] = split_options(
                op,
                self.tensors,
                num_ranks,
                dict(taken),
                whole_groups=op.name in self.sorted_otherwise,
            )
        return self._options[key]


def _sorted_otherwise(program: Program) -> frozenset[str]:
    """Names of ops on rows that another op left as sorted by other groups. Where groups start is
    the same where two ops find it from the same operands.
    """
    found: dict[str, Hashable] = {}
    sorted_by: dict[str, Hashable] = {}
    names = set[str]()
    for op in program.ops:
        found |= {w.tensor: (n, op.kind, op.axes, op.reads) for n, w in enumerate(op.writes)}
        for access in accesses(op):
            for index in access.dims:
                if index.is_grouped:
                    starts = op.reads[index.starts].tensor
                    groups = found.get(starts, starts)
                    if access in op.writes:
                        sorted_by[access.tensor] = groups
                    elif sorted_by.get(access.tensor, groups) != groups:
                        names.add(op.name)
    return frozenset(names)
