"""Grows graphs of ops, from what must be computed back to the inputs, in canonical order.

Comes in: an EGraph and the classes of a program's outputs. Goes out: Recipes: for every class that
a graph computes the one op that computes it. A partial recipe is extended by the op of one more
class, always the largest open one; every op in it is a node of the e-graph, so what it computes is
part of the target by the laws, and what can't be any more is never looked at. A class stands for a
value however it was found, so that no recipe comes twice. Next: schedule.py.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distmega.superopt.search.egraph import EGraph, Node
from distmega.superopt.search.terms import Data


@dataclass(frozen=True, slots=True, order=True)
class OpChoice:
    """An op on classes: kind as ugraph.BlockOp's, `data` its expression or its axes."""

    kind: str
    data: tuple[str, ...]
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How each class that is computed is: (class, op), operands before their users."""

    steps: tuple[tuple[int, OpChoice], ...]


PAUSE = 2048
"""Partial recipes between two moments at which a caller can stop."""

MAX_FORMS = 24
"""Pointwise expressions of a class that are kept, those of the fewest functions."""


@dataclass(frozen=True, slots=True)
class Form:
    """A pointwise expression: its functions, the classes that it reads, and how it is written, {}
    standing for `parts`; "" is the class itself.
    """

    cost: int
    reads: frozenset[int]
    template: str
    parts: tuple["Form", ...] = ()

    def key(self) -> tuple[int, list[int]]:
        """What forms are sorted by."""
        return self.cost, sorted(self.reads)

    def text(self, names: Mapping[int, str]) -> str:
        """The expression, with names of what it reads."""
        if not self.template:
            (number,) = self.reads
            return names[number]
        return self.template.format(*(part.text(names) for part in self.parts))


class Forms:
    """How each class can be computed in one op: by a reduction of others, or by one pointwise
    expression of inputs and of reductions' results; of expressions of the same operands the one of
    the fewest functions, since regrouping what threads do in registers makes no other graph.
    """

    def __init__(self, graph: EGraph, roots: Sequence[int]) -> None:
        self._graph = graph
        self._nodes: dict[int, list[Node]] = {}
        open_ = list(roots)
        while open_:
            number = open_.pop()
            if number not in self._nodes:
                self._nodes[number] = [graph.canonical(n) for n in graph.nodes(number)]
                open_ += [arg for _, _, args in self._nodes[number] for arg in args]
        self._forms = {number: self._anchor(number) for number in sorted(self._nodes)}
        self._close()

    def is_leaf(self, number: int) -> bool:
        """Whether a class is an input or a constant."""
        return any(op in ("input", "const") for op, _, _ in self._nodes[number])

    def _is_reduced(self, number: int) -> bool:
        return any(op in ("sum", "max", "min", "cat") for op, _, _ in self._nodes[number])

    def _anchor(self, number: int) -> dict[frozenset[int], Form]:
        value = self._graph.constant(number)
        if value is not None:
            text = repr(value) if value >= 0 else f"({value!r})"
            return {frozenset(): Form(0, frozenset(), text)}
        if self.is_leaf(number) or self._is_reduced(number):
            return {frozenset({number}): Form(0, frozenset({number}), "")}
        return {}

    def _close(self) -> None:
        """Lets forms grow from operands to users until no class has a better one."""
        changed = set(self._nodes)
        while changed:
            before, changed = changed, set()
            for number, nodes in self._nodes.items():
                if self.is_leaf(number):
                    continue
                found = dict(self._forms[number])
                for node in nodes:
                    if before & set(node[2]):
                        self._grow(number, node, found)
                kept = sorted(found.values(), key=Form.key)[:MAX_FORMS]
                if {f.reads: f.cost for f in kept} != {
                    reads: f.cost for reads, f in self._forms[number].items()
                }:
                    self._forms[number] = {form.reads: form for form in kept}
                    changed.add(number)

    def _grow(self, number: int, node: Node, found: dict[frozenset[int], Form]) -> None:
        """Adds the forms that a node makes of its operands', but those of more functions than as
        many as are kept have.
        """
        op, data, args = node
        costs = sorted(form.cost for form in found.values())
        most = costs[MAX_FORMS - 1] if len(costs) >= MAX_FORMS else math.inf
        for text, parts in _templates(self._graph, op, data, args, self._nodes):
            forms = [list(self._forms[part].values()) for part in parts]
            for inner, picked in _picks(forms, most - 1):
                reads = frozenset[int]().union(*(form.reads for form in picked))
                cost = 1 + inner
                known = found.get(reads)
                if number not in reads and (known is None or cost < known.cost):
                    found[reads] = Form(cost, reads, text, picked)

    def choices(self, number: int) -> list[OpChoice]:
        """All ops by which a class can be computed in one step; none for inputs and constants."""
        if self.is_leaf(number):
            return []
        found: dict[OpChoice, None] = {}
        for form in self._forms[number].values():
            if form.template and form.reads:
                args = tuple(sorted(form.reads))
                names = {arg: f"a{index}" for index, arg in enumerate(args)}
                found[OpChoice("map", (form.text(names),), args)] = None
        for op, data, args in self._nodes[number]:
            if op in ("sum", "max", "min", "cat"):
                assert isinstance(data, tuple)
                axes = tuple(map(str, data))
                found[OpChoice(op, axes, args)] = None
                for inner, _, pair in self._nodes[args[0]] if op == "sum" else ():
                    if inner == "mul" and all(self._graph.constant(x) is None for x in pair):
                        found[OpChoice("contract", axes, tuple(sorted(pair)))] = None
        return sorted(choice for choice in found if number not in choice.args)


def _picks(forms: Sequence[Sequence[Form]], most: float) -> Iterator[tuple[int, tuple[Form, ...]]]:
    """One form of each operand, of at most so many functions together, and how many these are.
    forms: of each operand, those of the fewest functions first.
    """
    if not forms:
        yield 0, ()
        return
    for form in forms[0]:
        if form.cost > most:
            return
        for cost, others in _picks(forms[1:], most - form.cost):
            yield form.cost + cost, (form, *others)


def _templates(
    graph: EGraph, op: str, data: Data, args: tuple[int, ...], nodes: Mapping[int, list[Node]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Pointwise functions that a node is, with {} for operands."""
    if op == "mul":
        if -1.0 in (graph.constant(args[0]), graph.constant(args[1])):
            other = args[1] if graph.constant(args[0]) == -1.0 else args[0]
            yield "(0.0 - {0})", (other,)
            return
        yield "({0} * {1})", args
        for a, b in (args, args[::-1]):
            for inner, _, parts in nodes[b]:
                if inner == "inv":
                    yield "({0} / {1})", (a, parts[0])
    elif op == "add":
        yield "({0} + {1})", args
        for a, b in (args, args[::-1]):
            for inner, _, pair in nodes[b]:
                if inner == "mul" and -1.0 in map(graph.constant, pair):
                    z = pair[1] if graph.constant(pair[0]) == -1.0 else pair[0]
                    yield "({0} - {1})", (a, z)
    elif op == "inv":
        yield "(1.0 / {0})", args
    elif op == "exp":
        yield "exp({0})", args
    elif op == "call":
        names = {f"a{index}": f"{{{index}}}" for index in range(len(args))}
        yield re.sub(r"\ba\d+\b", lambda m: names[m[0]], str(data)), args


@dataclass(slots=True)
class Generator:
    """Enumerates recipes for `roots` of at most `max_ops` ops. num_states: partial recipes seen.

    apart: axes that no op reduces at once.
    """

    graph: EGraph
    roots: tuple[int, ...]
    apart: frozenset[str] = frozenset()
    num_states: int = 0
    _choices: dict[int, list[OpChoice]] = field(default_factory=dict)
    _depth: dict[int, int] = field(default_factory=dict)
    _needs: dict[int, int] = field(default_factory=dict)
    _bits: dict[int, int] = field(default_factory=dict)
    _forms: Forms = field(init=False)

    def __post_init__(self) -> None:
        self.roots = tuple(dict.fromkeys(map(self.graph.find, self.roots)))
        self._explore()
        self._measure()

    def _explore(self) -> None:
        """Choices of every class that the roots can need."""
        self._forms = Forms(self.graph, self.roots)
        open_ = list(self.roots)
        while open_:
            number = open_.pop()
            if number not in self._choices:
                found = self._forms.choices(number)
                self._choices[number] = [c for c in found if not self._joins(c)]
                open_ += [arg for choice in self._choices[number] for arg in choice.args]

    def _joins(self, choice: OpChoice) -> bool:
        reduces = choice.kind in ("contract", "sum", "max", "min")
        return reduces and len(self.apart & set(choice.data)) > 1

    def _measure(self) -> None:
        """The least number of ops one after another that each class needs."""
        leaf = {n for n in self._choices if self._forms.is_leaf(n)}
        self._depth = {n: 0 if n in leaf else len(self._choices) for n in self._choices}
        changed = True
        while changed:
            changed = False
            for number, found in self._choices.items():
                for choice in found:
                    depth = 1 + max((self._depth[arg] for arg in choice.args), default=0)
                    if depth < self._depth[number]:
                        self._depth[number], changed = depth, True
        self._find_needs()

    def _find_needs(self) -> None:
        """For each class the classes that every recipe of it computes, as bits: itself, and what
        all its ops need.
        """
        inner = [number for number in self._choices if self._depth[number]]
        self._bits = {number: 1 << index for index, number in enumerate(inner)}
        everything = (1 << len(inner)) - 1
        self._needs = {n: everything if n in self._bits else 0 for n in self._choices}
        changed = True
        while changed:
            changed = False
            for number in inner:
                needs = everything
                for choice in self._choices[number]:
                    mine = 0
                    for arg in choice.args:
                        mine |= self._needs[arg]
                    needs &= mine
                needs |= self._bits[number]
                if needs != self._needs[number]:
                    self._needs[number], changed = needs, True

    def least(self) -> int:
        """A number of ops that no recipe is below."""
        needs = 0
        for root in self.roots:
            needs |= self._needs[root]
        return max(needs.bit_count(), *(self._depth[root] for root in self.roots))

    def most(self) -> int:
        """A number of ops that no recipe is above."""
        return len(self._bits) + 1

    def recipes(self, max_ops: int) -> Iterator[Recipe | None]:
        """All recipes of at most max_ops ops, once each, in canonical order; None now and then, so
        that the caller can stop where recipes are far apart.
        """
        chosen: dict[int, OpChoice] = {}
        open_ = tuple(sorted(root for root in self.roots if self._depth[root]))
        yield from self._extend(chosen, 0, open_, max_ops)

    def _extend(
        self, chosen: dict[int, OpChoice], done: int, open_: tuple[int, ...], max_ops: int
    ) -> Iterator[Recipe | None]:
        self.num_states += 1
        if self.num_states % PAUSE == 0:
            yield None
        if not open_:
            recipe = self._ordered(chosen)
            if not _is_wasteful(chosen, self.roots):
                yield recipe
            return
        number, rest = open_[-1], open_[:-1]
        remaining, done = max_ops - len(chosen) - 1, done | self._bits[number]
        base = 0
        for other in rest:
            base |= self._needs[other]
        for choice in self._choices[number]:
            new = [a for a in choice.args if a not in chosen and a not in rest and self._depth[a]]
            following = (*rest, *dict.fromkeys(new))
            needs = base
            for arg in new:
                needs |= self._needs[arg]
            if (needs & ~done).bit_count() > remaining or any(
                self._depth[a] > remaining for a in new
            ):
                continue
            if self._reaches(choice.args, number, chosen):
                continue
            chosen[number] = choice
            ordered = tuple(sorted(following, key=lambda a: (self._depth[a], a)))
            yield from self._extend(chosen, done, ordered, max_ops)
            del chosen[number]

    def _reaches(self, args: Sequence[int], number: int, chosen: Mapping[int, OpChoice]) -> bool:
        """Whether a class would need itself."""
        seen: set[int] = set()
        left = list(args)
        while left:
            arg = left.pop()
            if arg == number:
                return True
            if arg in chosen and arg not in seen:
                seen.add(arg)
                left += chosen[arg].args
        return False

    def _ordered(self, chosen: Mapping[int, OpChoice]) -> Recipe:
        steps: dict[int, OpChoice] = {}

        def visit(number: int) -> None:
            if number in chosen and number not in steps:
                for arg in chosen[number].args:
                    visit(arg)
                steps[number] = chosen[number]

        for root in self.roots:
            visit(root)
        return Recipe(tuple(steps.items()))


def _is_wasteful(chosen: Mapping[int, OpChoice], roots: Sequence[int]) -> bool:
    """Whether a product is only made to be summed, which a contraction does at once."""
    uses: dict[int, int] = dict.fromkeys(roots, 1)
    for choice in chosen.values():
        for arg in choice.args:
            uses[arg] = uses.get(arg, 0) + 1
    for choice in chosen.values():
        if choice.kind == "sum" and uses[choice.args[0]] == 1:
            inner = chosen.get(choice.args[0])
            if inner and inner.kind == "map" and inner.data[0] in ("(a0 * a1)", "(a0 * a0)"):
                return True
    return False
