"""Ops by class: equal signatures share options, costs and loop domains, so layers cost nothing.

Comes in: the ops of a program. Goes out: a class number per op and its memoised options. Used by
propagate.py, search.py and resolve.py.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from distmega.program.types import Op, Program, Tensor
from distmega.sharding.search.options import Options, op_signature, split_options

Taken = tuple[tuple[str, int], ...]
"""Iteration axes that mesh axes before divide, and what they have left of them on one rank."""


@dataclass(slots=True)
class OptionTable:
    """Memo of one program's op classes."""

    tensors: Mapping[str, Tensor]
    _classes: dict[Hashable, int] = field(default_factory=dict)
    _class_of: dict[str, int] = field(default_factory=dict)
    _options: dict[tuple[int, int, Taken], Options] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> "OptionTable":
        """A table over a program's tensors."""
        return OptionTable(program.tensor_map())

    def class_of(self, op: Op) -> int:
        """Number of the op's class; ops of one class differ in names only."""
        found = self._class_of.get(op.name)
        if found is None:
            signature = op_signature(op, self.tensors)
            found = self._classes.setdefault(signature, len(self._classes))
            self._class_of[op.name] = found
        return found

    def options(self, op: Op, num_ranks: int, taken: Taken = ()) -> Options:
        """split_options, once per class."""
        key = self.class_of(op), num_ranks, taken
        if key not in self._options:
            self._options[key] = split_options(op, self.tensors, num_ranks, dict(taken))
        return self._options[key]
