"""A program while its ops are replaced by others.

In: a Program. Out: another with the same inputs, states and outputs, without ops and weights that
nobody needs. Passes look producers up, give replacements for ops by name, and declare weights that
are computed of stored ones. Next on the walk: algebra.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distmega.program.kinds import kind_of
from distmega.program.ops.parts import Built
from distmega.program.types import Op, Program, Tensor, accesses, verify_program
from distmega.torch_import.forms.derived import Derived

MADE = "@form"
"""Stands before a number in names that passes give."""

Replacements = Mapping[str, Sequence[Op]]
"""Op -> the ops in its place."""


@dataclass(slots=True)
class Draft:
    """Tensors and ops as they are now. derived: weights computed of stored ones, by name."""

    name: str
    tensors: dict[str, Tensor]
    ops: list[Op]
    outputs: tuple[str, ...]
    derived: dict[str, Derived] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> "Draft":
        """The draft that is the program."""
        return cls(program.name, program.tensor_map(), list(program.ops), program.outputs)

    def producers(self) -> dict[str, Op]:
        """Temporary tensor -> the op that makes it."""
        return {
            write.tensor: op
            for op in self.ops
            for write in op.writes
            if self.tensors[write.tensor].role == "temp"
        }

    def users(self) -> dict[str, list[Op]]:
        """Tensor -> the ops that read it."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(read.tensor for read in op.reads):
                found.setdefault(name, []).append(op)
        return found

    def weight(self, derived: Derived) -> Tensor:
        """The weight that is computed so, declared once."""
        name = derived.name
        shape, dtype = derived.shape, derived.dtype
        tensor = Tensor(name=name, shape=shape, dtype=dtype, role="weight")
        self.tensors[name] = tensor
        self.derived[name] = derived
        return tensor

    def constant(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        """A weight that is known."""
        tensor = Tensor(name=name, shape=tuple(shape), dtype=dtype, role="weight")
        self.tensors[name] = tensor
        return tensor

    def source(self, name: str) -> Derived:
        """A weight as it is computed; itself where it is stored."""
        tensor = self.tensors[name]
        return self.derived.get(name) or Derived(
            source=name, stored=tensor.shape, stored_dtype=tensor.dtype
        )

    def replace(self, changes: Replacements) -> None:
        """Puts other ops in the places of those that are named."""
        self.ops = [each for op in self.ops for each in changes.get(op.name, (op,))]

    def rename(self, names: Mapping[str, str]) -> None:
        """Lets ops read other tensors in the places of those that are named."""
        self.ops = [
            replace(
                op,
                reads=tuple(
                    replace(read, tensor=names.get(read.tensor, read.tensor)) for read in op.reads
                ),
            )
            for op in self.ops
        ]

    def name_outputs(self) -> None:
        """An output that is a whole copy of a temporary tensor is that tensor, by its own name."""
        producers = self.producers()
        for op in list(self.ops):
            if not kind_of(op).only_copies or len(op.reads) != 1 or op.is_view:
                continue
            copied, output = op.reads[0].tensor, op.writes[0].tensor
            maker, tensor = producers.get(copied), self.tensors[output]
            if output not in self.outputs or copied in self.outputs:
                continue
            same = replace(self.tensors[copied], name=output) == tensor
            if maker is None or maker.is_view or not same or op.reads[0].dims != op.writes[0].dims:
                continue
            self.ops.remove(op)
            self.rename({copied: output})
            self.ops = [
                replace(
                    each,
                    writes=tuple(
                        replace(write, tensor=output) if write.tensor == copied else write
                        for write in each.writes
                    ),
                )
                for each in self.ops
            ]
            del self.tensors[copied]
            producers = self.producers()

    def prune(self) -> None:
        """Leaves out what nobody needs."""
        needed, kept = set(self.outputs), list[Op]()
        for op in reversed(self.ops):
            writes = [write.tensor for write in op.writes]
            lasting = any(self.tensors[name].role == "state" for name in writes)
            if lasting or needed.intersection(writes):
                kept.append(op)
                needed.update(access.tensor for access in accesses(op))
        self.ops = kept[::-1]
        self.tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name in needed or tensor.role in ("input", "state")
        }
        self.derived = {name: x for name, x in self.derived.items() if name in self.tensors}

    def restore_names(self) -> None:
        """Gives tensors made by passes the names of those that they stand for, where these are
        gone.
        """
        taken = {*self.tensors, *(op.name for op in self.ops)}
        assert not any(MADE in name for name in self.outputs)
        names: dict[str, str] = {}
        for op in self.ops:
            for write in op.writes:
                old = write.tensor.partition(MADE)[0]
                if (
                    MADE in write.tensor
                    and old not in self.tensors
                    and (old not in taken or old == op.name)
                ):
                    names[write.tensor] = old
                    taken.add(old)
        self.tensors = {
            names.get(name, name): replace(tensor, name=names.get(name, name))
            for name, tensor in self.tensors.items()
        }
        self.rename(names)
        self.ops = [
            replace(
                op,
                name=names.get(op.name, op.name),
                writes=tuple(
                    replace(write, tensor=names.get(write.tensor, write.tensor))
                    for write in op.writes
                ),
            )
            for op in self.ops
        ]

    def finish(self) -> Program:
        """The program without what nobody needs."""
        self.prune()
        self.restore_names()
        tensors, ops = tuple(self.tensors.values()), tuple(self.ops)
        return verify_program(
            Program(name=self.name, tensors=tensors, ops=ops, outputs=self.outputs)
        )


@dataclass(slots=True)
class Emitter:
    """Ops on their way into a draft."""

    draft: Draft
    ops: list[Op] = field(default_factory=list)

    def add(self, built: Built) -> Tensor:
        """Appends an op; gives its first result."""
        op, outs = built
        self.ops.append(op)
        self.draft.tensors.update({out.name: out for out in outs})
        return outs[0]

    def name(self, base: str) -> str:
        """A name that no tensor has yet."""
        taken, number = self.draft.tensors, 0
        base = base.partition(MADE)[0]
        while f"{base}{MADE}{number}" in taken:
            number += 1
        return f"{base}{MADE}{number}"


def reading(op: Op, position: int, tensor: str) -> Op:
    """The op with another tensor of the same shape as one operand."""
    reads = tuple(
        replace(read, tensor=tensor) if at == position else read for at, read in enumerate(op.reads)
    )
    return replace(op, reads=reads)
