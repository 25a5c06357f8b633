"""Searches all graphs within the bounds that compute what a program does, the fastest first.

Comes in: a Program, a DeviceRates, Limits. Goes out: Candidates, by predicted time, of different
structure each; and Progress meanwhile. For the program as it is, and once more for each reduced
axis divided in two, an e-graph is saturated, recipes are generated, those of the least work
scheduled. Nothing here depends on hashes, and on time only where the budget ends before the search
(budget.py), so that the same limits give the same result. Candidates are unproven: equivalence.py
decides. Next: optimize.py.
"""

import math
from collections.abc import Generator as Coroutine
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distmega.errors import ProgramError, counted
from distmega.program.dtypes import item_bytes
from distmega.program.types import Program
from distmega.sharding.search.cost import DeviceRates
from distmega.superopt.graph.axes import Axes, find_axes
from distmega.superopt.graph.cost import (
    SPLIT_COST,
    are_halves,
    are_matrices,
    least_us,
    num_functions,
)
from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.ugraph import UGraph
from distmega.superopt.search.assemble import assemble
from distmega.superopt.search.budget import Budget
from distmega.superopt.search.egraph import EGraph
from distmega.superopt.search.generate import Generator, OpChoice, Recipe
from distmega.superopt.search.laws import saturate
from distmega.superopt.search.schedule import KernelSchedule, Scheduler, SearchLimits
from distmega.superopt.search.terms import (
    Term,
    input_of,
    output_terms,
    split_axis,
    tensor_terms,
    without_alternatives,
)

MAX_NODES = 3000
"""Nodes of an e-graph; programs of sums of sums have more, the first ones found stay."""

LEAST_PART = 16
"""Elements of the inner part of a divided axis, at least."""

PRODUCT_WORK = 0.125
"""A multiply-add of a contraction beside a function of a map, when recipes are ranked."""

PER_STRUCTURE = 12
"""Recipes of one structure that are scheduled."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is. divided: the axis that is divided now, empty for none. num_states:
    partial recipes seen; num_recipes: whole ones; best_us: of the fastest candidate so far.
    """

    divided: str
    num_nodes: int
    num_states: int
    num_recipes: int
    num_scheduled: int
    best_us: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A graph that may compute what the program does, and its predicted time."""

    graph: UGraph
    time_us: float


@dataclass(slots=True)
class Search:
    """One search. `run` does it step by step; candidates() can be asked at any time. budget: of the
    limits' seconds, from when `run` begins, unless it is given one that has begun.
    """

    program: Program
    machine: DeviceRates
    limits: SearchLimits
    num_states: int = 0
    num_recipes: int = 0
    num_scheduled: int = 0
    budget: Budget = field(default_factory=Budget)
    _axes: Axes = field(init=False)
    _terms: dict[str, Term] = field(init=False)
    _values: dict[str, Term] = field(init=False)
    _best: dict[str, "_Ranked"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._axes = find_axes(self.program)
        self._terms = output_terms(self.program, self._axes)
        self._values = tensor_terms(self.program, self._axes)
        for name, term in self._terms.items():
            self._require_computed(name, [term.op])

    def run(self) -> Iterator[Progress]:
        """Searches; progress after every part."""
        if not self.budget.seconds:
            self.budget = Budget(self.limits.budget_s)
        yield from self._search("", {})
        for axis in self._divisible():
            if self.budget.is_over():
                return
            yield from self._search(axis, {axis: (f"{axis}_o", f"{axis}_i")})

    def candidates(self, first: int = 0) -> list[Candidate]:
        """What was found until now, the fastest first, one of each structure: as many as are kept,
        from number `first` on. The last of the first ones is that of the fewest ops in a kernel
        more than all of these have, where there is one: launches that start early make it faster
        than predicted.
        """
        found = sorted(self._best.values(), key=lambda item: item[:2])[first:]
        found = found[: self.limits.num_kept]
        apart = [] if first else self._apart(found)
        if apart:
            fewest = min(apart, key=lambda item: (len(item[2].recipe.steps), *item[:2]))
            found = [*found[: self.limits.num_kept - 1], fewest]
        return [Candidate(self._graph(item), time) for time, _, item in found]

    def _apart(self, found: Sequence["_Ranked"]) -> list["_Ranked"]:
        """Candidates in one kernel more, if all of these have as many."""
        if len({len(item.schedule.kernels) for _, _, item in found}) != 1:
            return []
        made = []
        for _, structure, item in found:
            schedule = item.scheduler.schedule_apart(item.recipe, item.extents, item.schedule)
            if schedule:
                name = f"{structure}, apart"
                made.append((round(schedule.time_us, 6), name, replace(item, schedule=schedule)))
        return made

    def _graph(self, found: "_Found") -> UGraph:
        return assemble(
            self.program, found.dims, found.roots, found.egraph, found.schedule,
            found.scheduler.types,
        )  # fmt: skip

    def _require_computed(self, name: str, forms: Sequence[str]) -> None:
        """ProgramError for an output that is an input or a number, in one of its forms."""
        if {"input", "const"}.isdisjoint(forms):
            return
        raise ProgramError(
            f"output {name!r} of program {self.program.name!r} only moves data",
            expected="outputs that are computed",
            remedy="leave it out",
        )

    def _divisible(self) -> list[str]:
        """Reduced axes that are long enough to be divided."""
        found: dict[str, None] = {}

        def visit(term: Term) -> None:
            if term.op in ("sum", "max", "min"):
                assert isinstance(term.data, tuple)
                found.update(dict.fromkeys(map(str, term.data)))
            for part in (*term.args, *term.alternatives):
                visit(part)

        for term in self._terms.values():
            visit(term)
        return [axis for axis in found if self._parts(axis)]

    def _parts(self, axis: str) -> list[int]:
        extent = self._axes.extents[axis]
        return [n for n in self.limits.splits if extent % n == 0 and extent // n >= LEAST_PART]

    def _search(self, axis: str, names: Mapping[str, tuple[str, str]]) -> Iterator[Progress]:
        egraph = EGraph(MAX_NODES)
        roots = {name: self._add(egraph, term, names) for name, term in self._terms.items()}
        values = {name: self._add(egraph, term, names) for name, term in self._values.items()}
        saturate(egraph)
        roots = {name: egraph.find(number) for name, number in roots.items()}
        for name, number in roots.items():
            self._require_computed(name, [op for op, _, _ in egraph.nodes(number)])
        if len(set(roots.values())) < len(roots):
            raise ProgramError(
                f"two outputs of program {self.program.name!r} are one value",
                expected="outputs that differ",
                remedy="leave one out",
            )
        yield self._progress(axis, egraph)
        apart = frozenset(part for parts in names.values() for part in parts)
        generator = Generator(egraph, tuple(roots.values()), apart)
        sizes = [self._sizes(axis, n) for n in (self._parts(axis) if axis else [1])]
        known = self.num_states
        ranked = _RankedRecipes(egraph, sizes[len(sizes) // 2])
        for _ in self._find_recipes(generator, ranked):
            self.num_states = known + generator.num_states
            yield self._progress(axis, egraph)
        self.num_states = known + generator.num_states
        recipes = ranked.best(self.limits.num_scheduled)
        self.num_recipes += len(recipes)
        dims = {
            name: tuple(tuple(p for a in dim for p in names.get(a, (a,))) for dim in found)
            for name, found in self._axes.tensors.items()
        }
        yield self._progress(axis, egraph)
        scheduler = Scheduler(
            egraph, self.machine, self.limits, tuple(roots.values()),
            self._types(egraph, values), SPLIT_COST if self._are_halves() else 0.0,
            least_us(self.program, self.machine),
            frozenset(outer for outer, _ in names.values()), self.budget,
        )  # fmt: skip
        for number, recipe in enumerate(recipes):
            for extents in sizes:
                if self.budget.is_over():
                    return
                for schedule in scheduler.schedules(recipe, extents):
                    self._note(_Found(egraph, roots, dims, scheduler, recipe, extents, schedule))
            self.num_scheduled += 1
            if number % 16 == 15:
                yield self._progress(axis, egraph)
        yield self._progress(axis, egraph)

    def _add(self, egraph: EGraph, term: Term, names: Mapping[str, tuple[str, str]]) -> int:
        for old, parts in names.items():
            term = split_axis(without_alternatives(term), old, parts)
        return egraph.add_term(term)

    def _are_halves(self) -> bool:
        outputs = self.program.outputs
        own = (t.dtype for t in self.program.tensors if t.role != "temp" or t.name in outputs)
        return are_halves(own)

    def _types(self, egraph: EGraph, values: Mapping[str, int]) -> dict[int, str]:
        """Types of the classes that the program itself has in memory; the widest of several."""
        known = self.program.tensor_map()
        found = {
            number: known[input_of(data)[0]].dtype
            for number in egraph.classes()
            for op, data, _ in egraph.nodes(number)
            if op == "input"
        }
        for name, value in values.items():
            number, dtype = egraph.find(value), known[name].dtype
            found[number] = max(found.get(number, dtype), dtype, key=item_bytes)
        return found

    def _progress(self, axis: str, egraph: EGraph) -> Progress:
        best = min((time for time, _, _ in self._best.values()), default=math.inf)
        counts = (self.num_states, self.num_recipes, self.num_scheduled)
        return Progress(axis, egraph.num_nodes, *counts, best)

    def _sizes(self, axis: str, parts: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, extent in self._axes.extents.items():
            if name == axis:
                found |= {f"{name}_o": parts, f"{name}_i": extent // parts}
            else:
                found[name] = extent
        return found

    def _find_recipes(self, generator: Generator, ranked: "_RankedRecipes") -> Iterator[None]:
        """Ranks recipes of all numbers of ops from the least on, `slack` more, in half of the time
        that is left, so that some can be scheduled. Stops now and then.
        """
        end = self.budget.halfway()
        for max_ops in range(generator.least(), generator.most()):
            if (yield from self._has_any(generator.recipes(max_ops), end)):
                found = generator.recipes(max_ops + self.limits.slack)
                yield from self._rank(found, ranked, end)
                return
            if self.budget.is_past(end):
                return

    def _has_any(self, recipes: Iterator[Recipe | None], end: float) -> Coroutine[None, None, bool]:
        for recipe in recipes:
            if recipe:
                return True
            if self.budget.is_past(end):
                return False
            yield
        return False

    def _rank(
        self, recipes: Iterator[Recipe | None], ranked: "_RankedRecipes", end: float
    ) -> Iterator[None]:
        for recipe in recipes:
            if self.budget.is_past(end):
                return
            if recipe:
                ranked.add(recipe)
            else:
                yield
            if ranked.num_found >= self.limits.max_recipes:
                return

    def _note(self, found: "_Found") -> None:
        structure = (
            f"{structure_of(found.recipe)} in {counted(len(found.schedule.kernels), 'kernel')}, "
            f"{num_products(found.recipe, found.egraph)} by tensor cores"
        )
        known = self._best.get(structure)
        time = round(found.schedule.time_us, 6)
        if known is None or time < known[0]:
            self._best[structure] = time, structure, found


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule, what it was made of, and what assemble needs."""

    egraph: EGraph
    roots: Mapping[str, int]
    dims: Mapping[str, Dims]
    scheduler: Scheduler
    recipe: Recipe
    extents: Mapping[str, int]
    schedule: KernelSchedule


@dataclass(slots=True)
class _RankedRecipes:
    """Recipes by their work at these sizes, several of each structure."""

    egraph: EGraph
    sizes: Mapping[str, int]
    num_found: int = 0
    _groups: dict[str, list[tuple[float, int, Recipe]]] = field(default_factory=dict)

    def add(self, recipe: Recipe) -> None:
        self.num_found += 1
        group = self._groups.setdefault(structure_of(recipe), [])
        group.append((work_of_recipe(recipe, self.egraph, self.sizes), self.num_found, recipe))
        if len(group) > 4 * PER_STRUCTURE:
            group.sort(key=lambda item: item[:2])
            del group[PER_STRUCTURE:]

    def best(self, num: int) -> list[Recipe]:
        """Those of the least work."""
        best = [item for group in self._groups.values() for item in sorted(group)[:PER_STRUCTURE]]
        best.sort(key=lambda item: item[:2])
        return [recipe for _, _, recipe in best[:num]]


_Ranked = tuple[float, str, _Found]
"""With its time, and its structure's name."""


def structure_of(recipe: Recipe) -> str:
    """What tells recipes of one structure from others: how often they reduce along which axes."""
    words = sorted(
        f"{choice.kind}[{','.join(choice.data)}]"
        for _, choice in recipe.steps
        if choice.kind != "map"
    )
    maps = sum(choice.kind == "map" for _, choice in recipe.steps)
    return " ".join([*words, f"{maps} maps"])


def num_products(recipe: Recipe, egraph: EGraph) -> int:
    """Contractions whose operands both have rows of their own."""
    return sum(
        choice.kind == "contract" and are_matrices(*map(egraph.axes, choice.args))
        for _, choice in recipe.steps
    )


def work_of_recipe(recipe: Recipe, egraph: EGraph, sizes: Mapping[str, int]) -> float:
    """Functions of all elements, multiply-adds at their share."""
    total = 0.0
    for number, choice in recipe.steps:
        total += _work(choice, egraph.axes(number), egraph, sizes)
    return total


def _work(
    choice: OpChoice, axes: frozenset[str], egraph: EGraph, sizes: Mapping[str, int]
) -> float:
    def elements(names: frozenset[str]) -> float:
        return float(math.prod(sizes.get(name, 1) for name in names))

    if choice.kind == "contract":
        return PRODUCT_WORK * elements(axes | set(choice.data))
    if choice.kind == "map":
        return num_functions("map", choice.data[0]) * elements(axes)
    return elements(egraph.axes(choice.args[0]))
