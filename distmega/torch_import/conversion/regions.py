"""Parts of an exported graph that torch runs as one op: what calls graphs (torch.cond, loops), and
what handles tensors whose shapes the data decide.

In: the nodes of a graph. Out: nodes and Regions in an order in which they can run, each region as
small as it can be. Used by converter.py.
"""

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import fx

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CHECKS = ("aten._assert_scalar.default", "aten._assert_async.msg")
"""Operators that only raise an error."""


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueRegion:
    """Nodes that run as one, in the graph's order. What enters and leaves it has a known shape, but
    for results of the whole graph.
    """

    nodes: tuple[fx.Node, ...]


def has_open_shape(value: object) -> bool:
    """Whether the shape of a tensor, or of one in a list, is known only when it is there."""
    if isinstance(value, list | tuple):
        return any(has_open_shape(each) for each in value)
    return isinstance(value, torch.Tensor) and any(type(e) is not int for e in value.shape)


def calls_graphs(node: fx.Node) -> bool:
    """Whether it is torch.cond, a loop or another operator on functions."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def order_nodes(
    nodes: Sequence[fx.Node],
    known: Collection[fx.Node],
    computes: Callable[[fx.Node], bool],
) -> Iterator[fx.Node | OpaqueRegion]:
    """The calls of a graph, those together that torch has to run together.

    known: nodes whose values are known. computes: whether a call of which all shapes are known may
    read numbers that the data decide.
    """
    calls = [node for node in nodes if node.op == "call_function"]
    fixed = _known_calls(calls, known)
    numbers = _numbers(calls, fixed, computes)
    members = _members(calls, fixed, numbers, computes)
    if not members:
        return iter(calls)
    groups = _Groups(calls)
    for node in members:
        for source in node.all_input_nodes:
            if source in members and _stays_inside(source):
                groups.join([node, source])
    groups.close(members)
    return groups.ordered(members)


def number_sources(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """What computes the numbers that nodes read of others, from tensors on."""
    inside, found = {*nodes}, list[fx.Node]()
    left = [source for node in inside for source in node.all_input_nodes]
    while left:
        node = left.pop()
        if node in inside or node.op != "call_function" or not _is_number(node):
            continue
        inside.add(node)
        found.append(node)
        left += node.all_input_nodes
    return found


def host_reads(nodes: Iterable[fx.Node]) -> str:
    """What the host reads of the device when nodes run, "" for nothing that is known."""
    for node in nodes:
        value = node.meta.get("val")
        if _is_number(node) or has_open_shape(value):
            return "numbers and shapes that data decide"
        tags = getattr(node.target, "tags", ())
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            return "numbers and shapes that data decide"
        if calls_graphs(node):
            if node.target in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop):
                return "which graph runs next"
            inner = "".join(host_reads(part.graph.nodes) for part in parts_of(node))
            if inner:
                return inner
    return ""


def parts_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that an operator calls."""
    root = node.graph.owning_module
    named = (getattr(root, str(each.target), None) for each in node.all_input_nodes
             if each.op == "get_attr")  # fmt: skip
    return [part for part in named if isinstance(part, fx.GraphModule)]


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), NUMBERS)


def _stays_inside(node: fx.Node) -> bool:
    """Whether what a node gives can't leave a region: several values, numbers, open shapes."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or has_open_shape(value)


def _known_calls(calls: Iterable[fx.Node], known: Collection[fx.Node]) -> Set[fx.Node]:
    """Calls that give the same every time."""
    fixed = {*known}
    for node in calls:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not seeded and not calls_graphs(node) and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    return fixed


def _numbers(
    calls: Iterable[fx.Node], fixed: Set[fx.Node], computes: Callable[[fx.Node], bool]
) -> Set[fx.Node]:
    """Calls that give numbers which programs compute as tensors: taken from a tensor of a known
    shape, and sums and products of these.
    """
    found = set[fx.Node]()
    for node in calls:
        if node in fixed or not _is_number(node):
            continue
        sources = [each for each in node.all_input_nodes if each not in fixed]
        if str(node.target) == "aten._local_scalar_dense.default":
            fits = not any(_stays_inside(each) for each in sources)
        else:
            fits = computes(node) and found.issuperset(sources)
        if fits:
            found.add(node)
    return found


def _members(
    calls: Iterable[fx.Node],
    fixed: Set[fx.Node],
    numbers: Set[fx.Node],
    computes: Callable[[fx.Node], bool],
) -> Set[fx.Node]:
    """Calls that can't be ops of their own."""
    found = dict[fx.Node, None]()
    for node in calls:
        if node in fixed or node in numbers:
            continue
        open_result = _is_number(node) or has_open_shape(node.meta.get("val"))
        reads_open = any(each in found and _stays_inside(each) for each in node.all_input_nodes)
        reads_numbers = any(each in numbers for each in node.all_input_nodes)
        reads_known = any(
            each in fixed and has_open_shape(each.meta.get("val")) for each in node.all_input_nodes
        )
        if (
            open_result
            or reads_open
            or reads_known
            or calls_graphs(node)
            or (reads_numbers and not computes(node))
        ):
            found[node] = None
    return found.keys()


@dataclass(slots=True)
class _Groups:
    """Calls of a graph that run together, each with its number in the graph."""

    calls: Sequence[fx.Node]
    position: dict[fx.Node, int] = field(init=False)
    group_of: dict[fx.Node, int] = field(init=False)
    nodes_of: dict[int, list[fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {node: number for number, node in enumerate(self.calls)}
        self.group_of = dict(self.position)
        self.nodes_of = {number: [node] for node, number in self.position.items()}

    def join(self, nodes: Iterable[fx.Node]) -> None:
        """Puts the groups of these nodes together."""
        first, *others = sorted({self.group_of[node] for node in nodes})
        for other in others:
            moved = self.nodes_of.pop(other)
            self.nodes_of[first] += moved
            self.group_of.update(dict.fromkeys(moved, first))

    def close(self, members: Iterable[fx.Node]) -> None:
        """Takes in what lies between nodes of one group, until no group waits for itself; results
        that are several values stay with the parts that are read of them.
        """
        left = {self.group_of[node] for node in members}
        while left:
            number = left.pop()
            if number not in self.nodes_of:
                continue  # joined with another
            between = self._reached(number, True) & self._reached(number, False)
            inner = [node for other in between | {number} for node in self.nodes_of[other]]
            parts = [
                user
                for node in inner
                if isinstance(node.meta.get("val"), list | tuple)
                for user in node.users
                if user.target is operator.getitem
            ]
            if any(self.group_of[node] != number for node in (*inner, *parts)):
                self.join([*inner, *parts])
                left.add(self.group_of[inner[0]])

    def _reached(self, start: int, forward: bool) -> set[int]:
        """Groups behind this one, or those before it."""
        seen, left = set[int](), [start]
        while left:
            for other in self._next(left.pop(), forward):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    def _next(self, number: int, forward: bool) -> set[int]:
        found = set[int]()
        for node in self.nodes_of[number]:
            for each in node.users if forward else node.all_input_nodes:
                if each in self.group_of and self.group_of[each] != number:
                    found.add(self.group_of[each])
        return found

    def ordered(self, members: Collection[fx.Node]) -> Iterator[fx.Node | OpaqueRegion]:
        """Each group after those that it reads, otherwise in the graph's order."""
        left = {number: len(self._next(number, False)) for number in self.nodes_of}
        ready = [number for number, count in left.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            number = heapq.heappop(ready)
            nodes = sorted(self.nodes_of[number], key=self.position.__getitem__)
            yield OpaqueRegion(tuple(nodes)) if any(n in members for n in nodes) else nodes[0]
            for other in self._next(number, True):
                left[other] -= 1
                if left[other] == 0:
                    heapq.heappush(ready, other)
