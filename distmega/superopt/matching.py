"""Finds where a rule fits in a program: by structure, whatever things are called.

Comes in: a Program and a RewriteRule. Goes out: Matches: the program's ops that do what the rule's
do, the tensors that stand for the rule's, and the rule at their sizes (resize.py). Names, the order
of operands that commute, how pointwise ops are cut (chains.py), extents and constants that the
rule's proof leaves free may differ. Next: rewrite.py.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations

from distmega.errors import VerifyError
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Access, Index, Op, Program, accesses, contracts
from distmega.sharding.search.cost import DEVICES
from distmega.superopt.chains import Chain, ChainFinder, joined_program
from distmega.superopt.graph.axes import Axes
from distmega.superopt.graph.cost import program_us
from distmega.superopt.resize import Constants, Sizes, confirmed_rule, resized_rule, rule_axes
from distmega.superopt.rules import RewriteRule
from distmega.superopt.symbols import NUMBERS, number_of

COMMUTATIVE = ("add", "mul", "maximum", "minimum", "eq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """ops: of the program, by name, that the rule's ops are. names: tensor of the rule's program ->
    of the program. sizes, constants: what resize.py makes the rule of.
    """

    rule: RewriteRule
    ops: tuple[str, ...]
    names: Mapping[str, str]
    sizes: Sizes
    constants: Constants

    @property
    def sized(self) -> RewriteRule:
        """The rule at the program's sizes, unconfirmed."""
        return resized_rule(self.rule, self.sizes, self.constants)

    def confirm(self) -> RewriteRule:
        """The rule at the program's sizes, compared in floats. VerifyError where it is not as good
        there.
        """
        return confirmed_rule(self.rule, self.sizes, self.constants)

    @property
    def saved_us(self) -> float:
        """What the rule's kernels save on its machine, as measured, or by the model that found them
        where nobody did: pointwise ops in a row count as one kernel, which they become without the
        rule.
        """
        sized = self.sized
        if sized.measured_us:
            return sized.saved_us
        return joined_us(self.rule, self.sizes, self.constants) - sized.graph_us


@cache
def joined_us(rule: RewriteRule, sizes: Sizes, constants: Constants) -> float:
    """Predicted time of the rule's program op by op, pointwise ops in a row as one."""
    made = resized_rule(rule, sizes, constants)
    return program_us(joined_program(made.program), DEVICES[made.machine])


@dataclass(frozen=True, slots=True)
class _State:
    """What is bound so far. extents: of the axes of the rule's program."""

    names: Mapping[str, str] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[float, float] = field(default_factory=dict)
    taken: frozenset[str] = frozenset()


@cache
def _pattern(rule: RewriteRule) -> Program:
    return joined_program(rule.program)


def find_matches(
    program: Program, rules: Sequence[RewriteRule], kept: Container[str] = ()
) -> Iterator[Match]:
    """Places where the rules' ops stand and their sizes are free, by rules, then by position of the
    last op. Whether the ops can be replaced there is not looked at. kept: names of ops that stay.
    """
    chains, by_kind = ChainFinder(program, kept), dict[str, list[Chain]]()
    for op in program.ops:
        if op.name in kept:
            continue
        for link in chains.links(op):
            by_kind.setdefault(op.kind, []).append(link)
    for rule in rules:
        yield from _Matcher(program, rule, by_kind).run()


class _Matcher:
    """One rule against one program."""

    def __init__(
        self, program: Program, rule: RewriteRule, links: Mapping[str, Sequence[Chain]]
    ) -> None:
        self.program, self.rule, self.links = program, rule, links
        self.tensors = program.tensor_map()
        self.pattern = _pattern(rule)
        self.wanted = self.pattern.tensor_map()
        self.axes: Axes = rule_axes(rule)
        self.ops = tuple(reversed(self.pattern.ops))
        self.position = {op.name: n for n, op in enumerate(program.ops)}
        self.makers: dict[str, list[Chain]] = {}
        for found in links.values():
            for link in found:
                for access in link.op.writes:
                    self.makers.setdefault(access.tensor, []).append(link)

    def run(self) -> Iterator[Match]:
        """Matches at sizes that the proof leaves free."""
        seen: set[tuple[frozenset[str], Sizes]] = set()
        for state in self.extend(0, _State()):
            match = self.finished(state)
            key = match and (frozenset(match.ops), match.sizes)
            if match and key not in seen:
                seen.add((frozenset(match.ops), match.sizes))
                yield match

    def extend(self, index: int, state: _State) -> Iterator[_State]:
        """Binds the pattern's ops from the last one up, each by what reads its result if any."""
        if index == len(self.ops):
            yield state
            return
        wanted = self.ops[index]
        out = state.names.get(wanted.writes[0].tensor)
        links = self.links.get(wanted.kind, ()) if out is None else self.makers.get(out, ())
        for link in links:
            if _may_be(wanted, link.op) and state.taken.isdisjoint(link.members):
                free = replace(state, taken=state.taken.union(link.members))
                for found in self.op(wanted, link.op, free):
                    yield from self.extend(index + 1, found)

    def finished(self, state: _State) -> Match | None:
        """The match, if the rule has these sizes."""
        sizes = tuple((axis, state.extents.get(axis, 0)) for axis in self.axes.extents)
        constants = tuple(sorted(state.constants.items()))
        match = Match(
            rule=self.rule,
            ops=tuple(sorted(state.taken, key=self.position.__getitem__)),
            names=state.names,
            sizes=sizes,
            constants=constants,
        )
        try:
            program = match.sized.program
        except VerifyError:
            return None
        shapes = {t.name: t.shape for t in program.tensors}
        fits = all(self.tensors[b].shape == shapes[a] for a, b in state.names.items())
        return match if fits else None

    def op(self, wanted: Op, op: Op, state: _State) -> Iterator[_State]:
        """All ways in which an op that may be the pattern's is it."""
        for order, constants in self.orders(wanted, op, state.constants):
            reads = [op.reads[position] for position in order]
            found = self.accesses(wanted, op, [*reads, *op.writes], state)
            if found is not None:
                yield replace(found, constants=constants)

    def orders(
        self, wanted: Op, op: Op, constants: Mapping[float, float]
    ) -> Iterator[tuple[tuple[int, ...], Mapping[float, float]]]:
        """Which of the op's operands are the pattern's, and constants bound by its attributes."""
        positions = tuple(range(len(op.reads)))
        mine, theirs = dict(wanted.attrs), dict(op.attrs)
        if kind_of(wanted).is_elementwise:
            a, b = (expr.parse(str(attrs.pop("expr"))) for attrs in (mine, theirs))
            if mine == theirs:
                for order, bound in _unify(a, b, {}, constants):
                    left = [n for n in positions if n not in order.values()]
                    free = [n for n in positions if n not in order]
                    for rest in permutations(left):
                        whole = order | dict(zip(free, rest, strict=True))
                        yield tuple(whole[n] for n in positions), bound
            return
        found: Mapping[float, float] | None = constants
        if wanted.kind in NUMBERS:
            found = _bind(number_of(wanted), number_of(op), constants)
            for attrs in (mine, theirs):
                del attrs[NUMBERS[wanted.kind]]
        if mine != theirs or found is None:
            return
        yield positions, found
        if contracts(wanted):
            yield (1, 0, *positions[2:]), found

    def accesses(self, wanted: Op, op: Op, found: Sequence[Access], state: _State) -> _State | None:
        """Binds tensors and axes; None where they differ."""
        names, local = dict(state.names), dict[str, str]()
        for a, b in zip(accesses(wanted), found, strict=True):
            one, two = self.wanted[a.tensor], self.tensors[b.tensor]
            if one.dtype != two.dtype or len(a.dims) != len(b.dims):
                return None
            if names.setdefault(a.tensor, b.tensor) != b.tensor:
                return None
            for x, y in zip(a.dims, b.dims, strict=True):
                if not _same_index(x, y, local):
                    return None
        if len(set(local.values())) < len(local):
            return None
        rest = [[axis.name for axis in one.axes if axis.name not in known]
                for one, known in ((wanted, local), (op, set(local.values())))]  # fmt: skip
        if len(rest[0]) != len(rest[1]):
            return None
        local |= dict(zip(*rest, strict=True))
        extents = dict(state.extents)
        for name, other in local.items():
            mine, theirs = wanted.axis(name), op.axis(other)
            if (mine.role, mine.combine, mine.lookup) != (
                theirs.role,
                theirs.combine,
                theirs.lookup,
            ):
                return None
            if not self.extent(self.axes.ops[wanted.name][name], theirs.extent, extents):
                return None
        return replace(state, names=names, extents=extents)

    def extent(self, axes: Sequence[str], extent: int, extents: dict[str, int]) -> bool:
        """Binds the extent of an op's axis, which is these of the rule's program; of several only
        those of the rule fit, that shapes are compared with in the end.
        """
        if len(axes) == 1:
            return extents.setdefault(axes[0], extent) == extent
        size = 1
        for axis in axes:
            size *= extents.setdefault(axis, self.axes.extents[axis])
        return size == extent


def _may_be(wanted: Op, op: Op) -> bool:
    """Whether an op has as much of all as the pattern's."""
    return (
        wanted.kind == op.kind
        and len(wanted.axes) == len(op.axes)
        and len(wanted.reads) == len(op.reads)
        and len(wanted.writes) == len(op.writes)
    )


def _same_index(a: Index, b: Index, local: dict[str, str]) -> bool:
    if (a.offset, a.stride, a.starts) != (b.offset, b.stride, b.starts):
        return False
    if len(a.axes) != len(b.axes):
        return False
    return all(local.setdefault(x, y) == y for x, y in zip(a.axes, b.axes, strict=True))


def _bind(
    mine: float, theirs: float, constants: Mapping[float, float]
) -> Mapping[float, float] | None:
    """With a constant of the pattern bound to one of the program; signs must agree."""
    if (mine < 0) != (theirs < 0):
        return None
    if constants.get(abs(mine), abs(theirs)) != abs(theirs):
        return None
    return {**constants, abs(mine): abs(theirs)}


def _unify(
    a: expr.Expr, b: expr.Expr, order: dict[int, int], constants: Mapping[float, float]
) -> Iterator[tuple[dict[int, int], Mapping[float, float]]]:
    """All ways in which expression b is a: the operand of b for each of a, constants bound."""
    match a, b:
        case expr.Arg(one), expr.Arg(two):
            if order.get(one, two) == two and (one in order or two not in order.values()):
                yield {**order, one: two}, constants
        case expr.Const(one), expr.Const(two):
            bound = _bind(float(one), float(two), constants)
            if bound is not None:
                yield order, bound
        case expr.Call(fn, mine), expr.Call(other, theirs):
            if fn != other or len(mine) != len(theirs):
                return
            ways = [theirs, theirs[::-1]] if fn in COMMUTATIVE else [theirs]
            for way in ways:
                yield from _unify_all(mine, way, order, constants)


def _unify_all(
    a: Sequence[expr.Expr],
    b: Sequence[expr.Expr],
    order: dict[int, int],
    constants: Mapping[float, float],
) -> Iterator[tuple[dict[int, int], Mapping[float, float]]]:
    if not a:
        yield order, constants
        return
    for found, bound in _unify(a[0], b[0], order, constants):
        yield from _unify_all(a[1:], b[1:], found, bound)
