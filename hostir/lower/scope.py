"""What names stand for while the nodes of one body are made: storage, views, chunks of buffers.

Used by lower.py. A view or a slice costs nothing, so it is stated where it is first needed, and
again in another body.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from distmega.hostir.ir.nodes import Allocate, LibraryOp, Node, SliceView
from distmega.hostir.ir.uses import shown
from distmega.program.types import (
    Op,
    Tensor,
    packed_strides,
    storage_behind,
    view_chain,
    view_strides,
)


@dataclass(slots=True, kw_only=True)
class Scope:
    """What names stand for in one body. placed: those that got storage in it so far; outer: the
    body around it.
    """

    tensors: MutableMapping[str, Tensor]
    views: MutableMapping[str, Op]
    slices: Mapping[str, SliceView]
    placed: set[str]
    outer: "Scope | None" = None

    def is_placed(self, name: str) -> bool:
        """Whether a name has storage here."""
        return name in self.placed or (self.outer is not None and self.outer.is_placed(name))

    def named(self, name: str) -> Iterator[Node]:
        """The nodes that make a view or a slice stand for its part, if that isn't stated yet."""
        unstated: list[Node] = []
        while not self.is_placed(name) and (name in self.slices or name in self.views):
            if name in self.slices:
                unstated.append(self.slices[name])
                name = self.slices[name].buffer
            else:
                unstated.append(LibraryOp(op=self.views[name]))
                name = self.views[name].reads[0].tensor
        for node in reversed(unstated):
            view, _ = shown(node) or ("", "")
            yield node
            self.placed.add(view)

    def allocated(self, names: Iterable[str]) -> Iterator[Allocate]:
        """Allocations of those that have no storage yet."""
        for name in names:
            if not (self.is_placed(name) or name in self.views or name in self.slices):
                self.placed.add(name)
                yield Allocate(buffer=name)

    def storage(self, name: str) -> str:
        """What a view is a view of, at last."""
        return storage_behind(name, self.views)

    def strides(self, name: str) -> tuple[int, ...]:
        """How far each dim of a name steps through its storage, in elements."""
        strides = packed_strides(self.tensors[self.storage(name)].shape)
        for view in view_chain(name, self.views):
            found = view_strides(view, strides)
            assert found is not None, f"{name} is no view"
            strides = found
        return strides

    def written_temps(self, op: Op) -> set[str]:
        """Temporary storage that an op writes."""
        names = {self.storage(access.tensor) for access in op.writes}
        return {name for name in names if self.tensors[name].role == "temp"}

    def changes_part(self, op: Op) -> bool:
        """Whether an op writes into a chunk of a state, or through a view into any chunk."""
        for access in op.writes:
            name = self.storage(access.tensor)
            if name in self.slices and access.tensor != name:
                return True
            while name in self.slices:
                name = self.storage(self.slices[name].buffer)
                if self.tensors[name].role != "temp":
                    return True
        return False
