"""An e-graph: classes of terms that are equal, each class closed under its terms' parts.

Comes in: Terms. Goes out: classes by number, each with its nodes (op, data, classes of operands)
and its axes. It is our own: what it is asked here are look-ups of a node, which are one dictionary
access, and laws that need each class's axes and constants, which are Python; of a general engine
(egglog, 48 MB) nothing else would be used. Next: laws.py, what is equal.
"""

from dataclasses import dataclass, field
from typing import cast

from distmega.superopt.search.terms import Data, Term, input_of

Node = tuple[str, Data, tuple[int, ...]]
"""Op, data, classes of the operands; those of add and mul sorted, as their order is free."""

COMMUTATIVE = ("add", "mul")


@dataclass(slots=True)
class EGraph:
    """Numbered classes of nodes. `find` gives the number that stands for a class now."""

    max_nodes: int = 6000
    _parents: list[int] = field(default_factory=list)
    _ids: dict[Node, int] = field(default_factory=dict)
    _nodes: dict[int, dict[Node, None]] = field(default_factory=dict)
    _uses: dict[int, dict[Node, int]] = field(default_factory=dict)
    _axes: dict[int, frozenset[str]] = field(default_factory=dict)
    _dirty: dict[int, None] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Nodes of all classes."""
        return len(self._ids)

    @property
    def is_full(self) -> bool:
        """Whether no further node may be added."""
        return len(self._ids) >= self.max_nodes

    def find(self, number: int) -> int:
        """The number of the class that this one has become."""
        parents = self._parents
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    def axes(self, number: int) -> frozenset[str]:
        """Axes along which a class's value varies."""
        return self._axes[self.find(number)]

    def nodes(self, number: int) -> list[Node]:
        """Nodes of a class, in the order in which they were found."""
        return list(self._nodes[self.find(number)])

    def classes(self) -> list[int]:
        """All classes."""
        return [number for number in self._nodes if self._parents[number] == number]

    def constant(self, number: int) -> float | None:
        """The value of a class that holds a constant."""
        for op, data, _ in self._nodes[self.find(number)]:
            if op == "const":
                assert isinstance(data, float)
                return data
        return None

    def add_term(self, term: Term) -> int:
        """The class of a term; its alternatives join it."""
        found = self.add(term.op, term.data, *map(self.add_term, term.args))
        for other in term.alternatives:
            self.merge(found, self.add_term(other))
        return found

    def canonical(self, node: Node) -> Node:
        """The node with its operands' present classes."""
        op, data, args = node
        found = tuple(map(self.find, args))
        return op, data, tuple(sorted(found)) if op in COMMUTATIVE else found

    def add(self, op: str, data: Data, *args: int) -> int:
        """The class of a node, a new one if nobody knows it."""
        node = self.canonical((op, data, args))
        known = self._ids.get(node)
        if known is not None:
            return self.find(known)
        number = len(self._parents)
        self._parents.append(number)
        self._ids[node] = number
        self._nodes[number] = {node: None}
        self._uses[number] = {}
        self._axes[number] = self._axes_of(node)
        for arg in set(node[2]):
            self._uses[arg][node] = number
        return number

    def _axes_of(self, node: Node) -> frozenset[str]:
        op, data, args = node
        found = frozenset[str]().union(*(self._axes[arg] for arg in args))
        if op == "input":
            return frozenset(name for dim in input_of(data)[1] for name in dim)
        if op in ("sum", "max", "min"):
            assert isinstance(data, tuple)
            return found - frozenset(str(name) for name in data)
        if op == "cat":
            first, second, both = cast(tuple[str, ...], data)
            return found - {first, second} | {both}
        return found

    def merge(self, a: int, b: int) -> bool:
        """Makes two classes one; whether they were two. Their axes must be the same."""
        a, b = self.find(a), self.find(b)
        if a == b or self._axes[a] != self._axes[b]:
            return False
        if len(self._uses[a]) < len(self._uses[b]):
            a, b = b, a
        self._parents[b] = a
        self._nodes[a].update(self._nodes.pop(b))
        self._uses[a].update(self._uses.pop(b))
        for number in (a, b):
            self._dirty.pop(number, None)
        self._dirty[a] = None
        return True

    def rebuild(self) -> None:
        """Restores that equal operands make equal nodes; called after merges."""
        while self._dirty:
            number, _ = self._dirty.popitem()
            for node, owner in list(self._uses[number].items()):
                new = self.canonical(node)
                owner = self.find(owner)
                if new != node:
                    self._ids.pop(node, None)
                    self._uses[self.find(number)].pop(node, None)
                    held = self._nodes[owner]
                    held.pop(node, None)
                    held[new] = None
                known = self._ids.get(new)
                if known is not None and self.find(known) != owner:
                    self.merge(known, owner)
                    owner = self.find(owner)
                self._ids[new] = owner
                for arg in set(new[2]):
                    self._uses[self.find(arg)][new] = owner
