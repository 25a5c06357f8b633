"""What names stand for while the nodes of one body are made: storage, views, chunks of buffers.

Used by lower.py. A view or a slice costs nothing, so it is stated where it is first needed, and
again in another body.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from distmega.hostir.ir.nodes import Allocate, LibraryOp, Node, SliceView
from distmega.program.types import Op, Tensor, packed_strides, storage_behind, view_strides


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
        if self.is_placed(name):
            return
        if name in self.slices:
            yield from self.named(self.slices[name].buffer)
            yield self.slices[name]
            self.placed.add(name)
        elif name in self.views:
            yield from self.named(self.views[name].reads[0].tensor)
            yield LibraryOp(op=self.views[name])
            self.placed.add(name)

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
        if name not in self.views:
            return packed_strides(self.tensors[name].shape)
        view = self.views[name]
        found = view_strides(view, self.strides(view.reads[0].tensor))
        assert found is not None, f"{name} is no view"
        return found

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
