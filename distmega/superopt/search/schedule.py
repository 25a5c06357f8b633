"""Puts a recipe's ops into kernels, each with a grid and a loop: the best by predicted time.

Comes in: a Recipe. Goes out: a Schedule of it, which assemble.py makes a UGraph of. Kernels are cut
where the recipe's order allows it; of each the grids and loops within the bounds are compared, all
grids at once. A block's shared memory is bounded. Next: assemble.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from distmega.errors import RequestError
from distmega.program.dtypes import item_bytes
from distmega.sharding.search.cost import DeviceRates
from distmega.superopt.graph.arithmetic import Array
from distmega.superopt.graph.cost import (
    VECTOR_COST,
    Work,
    are_matrices,
    kernel_us,
    num_functions,
)
from distmega.superopt.graph.ugraph import LOOPS, SHARED_BYTES, Stage, rescaling_operands
from distmega.superopt.search.budget import Budget
from distmega.superopt.search.egraph import EGraph
from distmega.superopt.search.generate import OpChoice, Recipe

Step = tuple[int, OpChoice]

LEAST_CHUNK = 16
"""Elements of a looped axis that an iteration takes, at least."""

REDUCTIONS = ("contract", "sum", "max", "min")

MODEL_ERROR = 1.1
"""How many times as long a graph may take by the model that a GPU may like better."""


LEAST = {"slack": 0, "loops": 2, "splits": 2, "budget_s": 0}
"""Limits of a search that may be 0, or must be more than 1."""
MAX_LIMIT = 2**31 - 1
"""Of any limit of a search: seconds above it are more than some clocks take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What is searched: kernels of a graph, ops beyond the least, recipes found and scheduled,
    candidates kept, parts of a loop and of a divided axis, blocks, shared bytes of a block, and
    seconds of all that, 0 for as many as it takes (budget.py).
    RequestError for numbers that leave nothing to search.
    """

    max_kernels: int = 3
    slack: int = 1
    max_recipes: int = 40000
    num_scheduled: int = 250
    num_kept: int = 12
    loops: tuple[int, ...] = LOOPS
    splits: tuple[int, ...] = (4, 8, 16, 32, 64)
    max_blocks: int = 2048
    shared_bytes: int = SHARED_BYTES
    budget_s: int = 600

    def __post_init__(self) -> None:
        for name in self.__slots__:
            found = getattr(self, name)
            least = LEAST.get(name, 1)
            numbers = found if isinstance(found, tuple) else (found,)
            fits = (type(number) is int and least <= number <= MAX_LIMIT for number in numbers)
            if not all(fits):
                raise RequestError(
                    f"search limit {name}={found!r:.80}",
                    expected=f"whole numbers of at least {least}, at most {MAX_LIMIT}",
                    remedy="leave it out for the usual limit",
                )


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Steps of one kernel, which classes it loads and stores, and how it is divided."""

    steps: tuple[Step, ...]
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    grid: tuple[tuple[str, int], ...]
    loop: tuple[str, int] | None
    stages: tuple[Stage, ...]
    time_us: float


@dataclass(frozen=True, slots=True)
class KernelSchedule:
    """Kernels in order, and the extents that they were made for."""

    kernels: tuple[KernelPlan, ...]
    extents: tuple[tuple[str, int], ...]

    @property
    def time_us(self) -> float:
        """Predicted time of all kernels."""
        return sum(kernel.time_us for kernel in self.kernels)


@dataclass(slots=True)
class Scheduler:
    """Finds kernels for recipes over one e-graph. types: of classes that the program has in memory,
    in which they are stored; others are stored in f32. split_cost: instructions an element of a
    product's operand that no 16-bit type holds. least_us: what one launch takes at least; each
    further one takes its own time more. outer: axes that count the parts of a divided one. budget:
    when it is over the best divisions into kernels until then are given.
    """

    graph: EGraph
    machine: DeviceRates
    limits: SearchLimits
    roots: tuple[int, ...]
    types: Mapping[int, str]
    split_cost: float
    least_us: float
    outer: frozenset[str]
    budget: Budget = field(default_factory=Budget)
    _known: dict[object, KernelPlan | None] = field(default_factory=dict)
    _axes: dict[int, frozenset[str]] = field(default_factory=dict)
    _grids: dict[object, tuple[tuple[str, ...], Array]] = field(default_factory=dict)

    def axes(self, number: int) -> frozenset[str]:
        """Axes of a class."""
        if number not in self._axes:
            self._axes[number] = self.graph.axes(number)
        return self._axes[number]

    def schedules(self, recipe: Recipe, extents: Mapping[str, int]) -> list[KernelSchedule]:
        """That of a recipe in one kernel, and the fastest one where that is in more; those whose
        blocks' shared memory would do.
        """
        steps = recipe.steps
        sizes = self._sizes(steps, extents)
        whole = self._cut((steps,), sizes)
        found, launch = whole, self.machine.launch_us
        cuts = _downsets(steps)
        for count in range(2, self.limits.max_kernels + 1):
            if found and found.time_us <= self.least_us + (count - 1) * launch:
                break
            for picked in combinations(cuts, count - 1):
                if self.budget.is_over():
                    break
                if all(low < high for low, high in pairwise(picked)):
                    limit = found.time_us if found else math.inf
                    cut = self._cut(_divide(steps, picked), sizes, limit)
                    found = cut if cut and cut.time_us < limit - 1e-9 else found
        return [one for one in dict.fromkeys((whole, found)) if one]

    def schedule_apart(
        self, recipe: Recipe, extents: Mapping[str, int], found: KernelSchedule
    ) -> KernelSchedule | None:
        """The fastest schedule in one kernel more than `found`, of the same recipe, if it may be as
        fast on a GPU: there the second of two kernels loads while the first one ends.
        """
        count = len(found.kernels) + 1
        if count > self.limits.max_kernels:
            return None
        sizes, best = self._sizes(recipe.steps, extents), None
        limit = MODEL_ERROR * found.time_us + self.machine.launch_us
        for picked in combinations(_downsets(recipe.steps), count - 1):
            if self.budget.is_over():
                break
            if all(low < high for low, high in pairwise(picked)):
                cut = self._cut(_divide(recipe.steps, picked), sizes, limit)
                if cut is not None and cut.time_us < limit - 1e-9:
                    best, limit = cut, cut.time_us
        return best

    def _sizes(self, steps: Sequence[Step], extents: Mapping[str, int]) -> dict[str, int]:
        sizes = dict(extents)
        for _, choice in steps:
            if choice.kind == "cat":
                k, r, both = choice.data
                sizes[both] = sizes[k] + sizes[r]
        return sizes

    def _cut(
        self,
        parts: Sequence[Sequence[Step]],
        sizes: Mapping[str, int],
        limit_us: float = math.inf,
    ) -> KernelSchedule | None:
        """The kernels of these parts; None if a part can't be one, or if all take limit_us."""
        plans = []
        for index, part in enumerate(parts):
            later = {arg for rest in parts[index + 1 :] for _, c in rest for arg in c.args}
            plans.append(self._ends(tuple(part), later))
        floors = [self._floor_us(loads, stores, sizes) for _, loads, stores in plans]
        left, kernels = sum(floors), []
        for (steps, loads, stores), floor in zip(plans, floors, strict=True):
            if left >= limit_us - 1e-9:
                return None
            kernel = self._kernel(steps, loads, stores, sizes)
            if kernel is None:
                return None
            kernels.append(kernel)
            left += kernel.time_us - floor
        return KernelSchedule(tuple(kernels), tuple(sizes.items()))

    def _ends(
        self, steps: tuple[Step, ...], later: set[int]
    ) -> tuple[tuple[Step, ...], tuple[int, ...], tuple[int, ...]]:
        """The steps, what they load and what they store."""
        made = {number for number, _ in steps}
        loads = dict.fromkeys(a for _, c in steps for a in c.args if a not in made)
        stores = tuple(n for n, _ in steps if n in later or n in self.roots)
        return steps, tuple(loads), stores

    def _floor_us(
        self, loads: Sequence[int], stores: Sequence[int], sizes: Mapping[str, int]
    ) -> float:
        """What a kernel takes at least."""
        moved = self._memory_bytes((*loads, *stores), sizes)
        return float(self.machine.launch_us + moved / self.machine.memory_bandwidth_bytes_per_us)

    def _memory_bytes(self, numbers: Sequence[int], sizes: Mapping[str, int]) -> int:
        return sum(self._bytes(n) * math.prod(sizes[a] for a in self.axes(n)) for n in numbers)

    def _kernel(
        self,
        steps: tuple[Step, ...],
        loads: tuple[int, ...],
        stores: tuple[int, ...],
        sizes: Mapping[str, int],
    ) -> KernelPlan | None:
        key = (frozenset(steps), stores, tuple(sizes.items()))
        if key not in self._known:
            self._known[key] = self._best(steps, loads, stores, sizes) if stores else None
        return self._known[key]

    def _best(
        self,
        steps: tuple[Step, ...],
        loads: tuple[int, ...],
        stores: tuple[int, ...],
        sizes: Mapping[str, int],
    ) -> KernelPlan | None:
        common = frozenset.intersection(*(self.axes(n) for n in stores))
        reduced = {a for _, c in steps if c.kind in REDUCTIONS for a in c.data}
        joined = {a for _, c in steps if c.kind == "cat" for a in c.data}
        names, grids = self._grid_table(tuple(sorted(common - reduced - joined)), sizes)
        tiles = _Tiles(names, grids, sizes)
        memory = self._memory_bytes((*loads, *stores), sizes)
        block = sum(
            (self._bytes(n) * tiles.of(self.axes(n)) for n in (*loads, *stores)), tiles.none
        )
        products, functions = self._arithmetic(steps, tiles)
        blocks = grids.prod(axis=1)
        best: KernelPlan | None = None
        for axis in (None, *sorted({a for n in loads for a in self.axes(n)} - joined)):
            stages = _stages(steps, stores, self.axes, axis)
            if stages is None:
                continue
            moving, resting = self._shared(steps, loads, tiles, axis)
            for rounds in self.limits.loops if axis else (1,):
                if axis and not self._may_loop(axis, rounds, sizes):
                    continue
                fits = moving / rounds + resting <= self.limits.shared_bytes
                if axis in names:
                    fits &= grids[:, names.index(axis)] == 1
                if not fits.any():
                    continue
                work = Work(memory, block, products, functions, blocks, rounds)
                times = np.where(fits, np.round(kernel_us(work, self.machine), 6), np.inf)
                index = int(np.lexsort((blocks, times))[0])
                if best is None or times[index] < best.time_us - 1e-9:
                    pairs = zip(names, grids[index], strict=True)
                    grid = tuple((a, int(n)) for a, n in pairs if n > 1)
                    loop = (axis, rounds) if axis else None
                    time = float(times[index])
                    best = KernelPlan(steps, loads, stores, grid, loop, stages, time)
        return best

    def _may_loop(self, axis: str, rounds: int, sizes: Mapping[str, int]) -> bool:
        """Whether an axis is divided so by a loop: evenly, and not into crumbs, unless it counts
        parts itself.
        """
        left = sizes[axis] // rounds
        return sizes[axis] % rounds == 0 and (axis in self.outer or left >= LEAST_CHUNK)

    def _grid_table(
        self, names: tuple[str, ...], sizes: Mapping[str, int]
    ) -> tuple[tuple[str, ...], Array]:
        key = names, tuple(sizes[name] for name in names)
        if key not in self._grids:
            rows = _grids_of([_parts_of(size) for size in key[1]], self.limits.max_blocks)
            self._grids[key] = names, np.array(rows, np.float64).reshape(len(rows), len(names))
        return self._grids[key]

    def _bytes(self, number: int) -> int:
        return item_bytes(self.types.get(number, "f32"))

    def _shared(
        self, steps: Sequence[Step], loads: Sequence[int], tiles: "_Tiles", loop: str | None
    ) -> tuple[Array, Array]:
        """Shared bytes that the loop divides, and the others."""
        moving, resting = tiles.none, tiles.none
        for number in loads:
            axes = self.axes(number)
            mine = self._bytes(number) * tiles.of(axes)
            moving, resting = (
                (moving + 2 * mine, resting) if loop in axes else (moving, resting + mine)
            )
        for number, choice in steps:
            if choice.kind in REDUCTIONS:
                mine = 4 * tiles.of(self.axes(number))
                inside = loop in self.axes(number)
                moving, resting = (moving + mine, resting) if inside else (moving, resting + mine)
        return moving, resting

    def _arithmetic(self, steps: Sequence[Step], tiles: "_Tiles") -> tuple[Array, Array]:
        """Multiply-adds that tensor cores do, and instructions of all else, of one block."""
        products, functions = tiles.none, tiles.none
        made = {number for number, _ in steps}
        for number, choice in steps:
            if choice.kind == "contract":
                elements = tiles.of(self.axes(number) | set(choice.data))
                if are_matrices(*(self.axes(arg) for arg in choice.args)):
                    products = products + elements
                    for arg in choice.args:
                        if arg in made or self._bytes(arg) > 2:
                            functions = functions + self.split_cost * tiles.of(self.axes(arg))
                else:
                    functions = functions + VECTOR_COST * elements
            elif choice.kind == "map":
                count = num_functions("map", choice.data[0])
                functions = functions + count * tiles.of(self.axes(number))
            elif choice.kind in REDUCTIONS:
                functions = functions + tiles.of(self.axes(choice.args[0]))
        return products, functions


class _Tiles:
    """Elements that a block has along sets of axes, for each grid."""

    def __init__(self, names: Sequence[str], grids: Array, sizes: Mapping[str, int]) -> None:
        self.none = np.zeros(len(grids))
        self._columns = {name: grids[:, index] for index, name in enumerate(names)}
        self._sizes, self._known = sizes, dict[frozenset[str], Array]()

    def of(self, axes: frozenset[str]) -> Array:
        """Elements of a block's part of a value along these axes."""
        if axes not in self._known:
            found = self.none + math.prod(self._sizes[axis] for axis in axes)
            for axis in sorted(axes & self._columns.keys()):
                found = found / self._columns[axis]
            self._known[axes] = found
        return self._known[axes]


def _grids_of(options: Sequence[Sequence[int]], max_blocks: int) -> list[tuple[int, ...]]:
    """A number of parts for each axis, in all ways that make at most max_blocks blocks."""
    found: list[tuple[tuple[int, ...], int]] = [((), 1)]
    for parts in options:
        found = [
            ((*row, n), blocks * n)
            for row, blocks in found
            for n in parts
            if blocks * n <= max_blocks
        ]
    return [row for row, _ in found]


def _parts_of(extent: int) -> list[int]:
    """Numbers of equal parts: powers of two, and those that leave a power of two each."""
    powers = [1 << n for n in range(extent.bit_length())]
    found = {n for n in powers if extent % n == 0} | {
        extent // n for n in powers if extent % n == 0
    }
    return sorted(found)


def _downsets(steps: Sequence[Step]) -> list[frozenset[int]]:
    """All sets of steps, by number, that hold what their members need; not none, not all."""
    index = {number: n for n, (number, _) in enumerate(steps)}
    needs = [[index[a] for a in choice.args if a in index] for _, choice in steps]
    found: list[frozenset[int]] = [frozenset()]
    for n, mine in enumerate(needs):
        found += [cut | {n} for cut in found if all(a in cut for a in mine)]
    cuts = [cut for cut in found if 0 < len(cut) < len(steps)]
    return sorted(cuts, key=lambda cut: (len(cut), sorted(cut)))


def _divide(steps: Sequence[Step], cuts: Sequence[frozenset[int]]) -> list[list[Step]]:
    """The steps of each kernel, in order; a cut holds all that comes before it ends."""
    edges = [frozenset[int](), *cuts, frozenset(range(len(steps)))]
    return [[steps[n] for n in sorted(high - low)] for low, high in pairwise(edges)]


def _rescales(choice: OpChoice, tops: Mapping[int, int]) -> bool:
    """Whether an op takes exp of a value less the maximum of its kind that the loop finds."""
    if choice.kind != "map" or len(choice.args) != 2:
        return False
    pair = rescaling_operands(choice.data[0])
    return pair is not None and tops.get(choice.args[pair[1]]) == choice.args[pair[0]]


def _stages(
    steps: Sequence[Step],
    stores: Sequence[int],
    axes: Callable[[int], frozenset[str]],
    loop: str | None,
) -> tuple[Stage, ...] | None:
    """Where each op stands; None if a loop along this axis can't be."""
    known: dict[int, Stage] = {}
    tops: dict[int, int] = {}
    rescaled: set[int] = set()
    found: list[Stage] = []
    for number, choice in steps:
        varies = loop is not None and any(loop in axes(arg) for arg in choice.args)
        states = [
            known.get(arg, "body" if loop is not None and loop in axes(arg) else "before")
            for arg in choice.args
        ]
        if not varies:
            stage: Stage = "after" if "after" in states else "before"
            known[number] = stage
        else:
            stage = "body"
            late = "after" in states
            if late and not _rescales(choice, tops):
                return None
            if choice.kind == "cat" and loop in choice.data:
                return None
            rescales = rescaled & set(choice.args)
            if rescales and not (choice.kind in ("contract", "sum") and choice.data == (loop,)):
                return None
            if late:
                rescaled.add(number)
            ends = choice.kind in REDUCTIONS and loop in choice.data
            if ends and choice.kind == "max" and choice.data == (loop,):
                tops[number] = choice.args[0]
            known[number] = "after" if ends else "body"
        found.append(stage)
    if rescaled & set(stores) or (loop is not None and "body" not in found):
        return None
    return tuple(found)
