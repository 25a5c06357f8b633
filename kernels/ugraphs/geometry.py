"""Chooses how a uGraph's kernels are divided on a GPU: blocks, iterations, warps, loads under way.

In: a UGraph and a Machine. Out: Shapes of each kernel, the fastest by a model first. The search's
cost model (distmega/superopt/graph/cost.py) compares graphs; this one knows what a Triton kernel of
a Hopper GPU needs besides: enough bytes under way on every SM to hide memory's latency, values that
fit its registers, whole blocks that fit beside each other. A GPU can measure the first few
(runner.py). Next: source.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from distmega.errors import UnsupportedError, VerifyError
from distmega.kernels.machines import MACHINES
from distmega.kernels.ugraphs.accumulators import LAZY_ELEMENTS
from distmega.kernels.ugraphs.source import GraphLaunch, graph_source
from distmega.kernels.ugraphs.values import (
    HALVES,
    MATRIX_COLUMNS,
    MATRIX_ROWS,
    padded_sizes,
)
from distmega.program.dtypes import item_bytes
from distmega.sharding.search.cost import DEVICES, Machine
from distmega.superopt.chains import joined_program
from distmega.superopt.graph.cost import (
    CACHE_RATE,
    SPLIT_COST,
    VECTOR_COST,
    num_functions,
    program_us,
)
from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.regrid import (
    Parts,
    free_axes,
    regrid_kernel,
    resplit,
    split_pairs,
    with_kernels,
)
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.graph.ugraph import (
    SHARED_BYTES,
    BlockOp,
    Kernel,
    UGraph,
    is_accumulator,
    joint_extents,
    rescalings,
)
from distmega.superopt.rules import RewriteRule

LATENCY_US = 0.9
"""From a load to its data when memory is busy."""

ROUND_US = 0.15
"""What an iteration takes besides: barriers, and reductions among warps."""

LANES_PER_US = 128 * 1700.0
"""Instructions of an SM."""

ADD_US = 4 / 1700.0
SHUFFLE_US = 25 / 1700.0
"""Of one thread: until a sum can be added to, and until it has come to another one."""

LOAD_INSTRUCTIONS = 1.5
"""Per element of a load that is used."""

THREAD_ELEMENTS = 64
"""Elements of one value that a thread holds, at most."""

PRODUCT_ELEMENTS = 1024
"""Elements of a product's operands that a thread holds, at most: an MLP of 2 to 4 rows over all of
2048 columns at once, 1536, spilled.
"""

REGISTER_WARPS = 20
"""Warps that an SM's registers have room for, about 100 registers a thread."""

TILE_BYTES = 160 * 1024
"""Of an SM's registers, what may hold tiles of blocks that are taken in turn."""

LINE_BYTES = 128
"""What memory reads at once: shorter runs cost as much."""

START_US = 0.7
"""From the end of a kernel to the next one's first instruction, in a CUDA graph."""

EARLY_US = 0.7
"""Less of that and of the first loads' latency where blocks start early. Measured, a kernel over
180 MB of weights whose blocks each read theirs before they wait: 43.3 us, 44.2 if they do not start
early, 43.1 to read alone.
"""

STALL_US = 0.27
"""Of an iteration that waits for a load that could not be started before."""

LEAST_COPY = 4
"""Bytes a thread copies to shared memory on its own: smaller loads are not started before."""

SHARPNESS = 8
"""How closely the slowest of several limits is the time: below it, one that is near adds to it."""

MOST_BLOCKS = 4096
MOST_TURNS = 65536
"""Blocks of a kernel that divides one axis, as they may be taken in turn."""
LOOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARPS = (4, 8)
MANY_WARPS = 16
"""Besides, of a kernel that leaves SMs free: what a thread adds up one by one gets shorter."""
STAGES = (2, 3, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to divide and launch a kernel, and its time by the model."""

    kernel: Kernel
    launch: GraphLaunch
    time_us: float


def describe(kernel: Kernel, launch: GraphLaunch) -> str:
    """Such as "n:256 loop k:4, 8 warps, 3 stages"."""
    grid = " ".join(f"{axis}:{parts}" for axis, parts in kernel.grid) or "1"
    loop = f" loop {kernel.loop[0]}:{kernel.loop[1]}" if kernel.loop else ""
    turns = f", {launch.resident} at a time" if launch.resident else ""
    return f"{grid}{loop}, {launch.num_warps} warps, {launch.stages} stages{turns}"


def kernel_shapes(
    graph: UGraph, kernel: Kernel, machine: Machine, count: int, loops: Sequence[int] = LOOPS
) -> list[Shape]:
    """The fastest `count` by the model, of different grids or loops each; loops: the numbers of
    iterations that are looked at. UnsupportedError where no division fits.
    """
    found: dict[object, Shape] = {}
    for divided in _divisions(graph, kernel, loops):
        shape = min(_launched(graph, divided, machine), key=lambda one: one.time_us, default=None)
        if shape is not None:
            found[divided.grid, divided.loop] = shape
    best: list[Shape] = []
    for shape in sorted(found.values(), key=lambda one: (one.time_us, one.kernel.num_blocks)):
        if len(best) == count:
            break
        if _is_sound(graph, kernel, shape.kernel):
            best.append(shape)
    if not best:
        raise UnsupportedError(
            f"graph {graph.name!r}: no division of kernel {kernel.name!r} fits an SM",
            expected=f"blocks of at most {SHARED_BYTES} bytes and {THREAD_ELEMENTS} elements a "
            "thread of each value",
            remedy="run the program by library ops",
        )
    return best


def _is_sound(graph: UGraph, old: Kernel, new: Kernel) -> bool:
    try:
        with_kernels(graph, [new if kernel is old else kernel for kernel in graph.kernels], 2**40)
    except VerifyError:
        return False
    return True


def _divisions(graph: UGraph, kernel: Kernel, counts: Sequence[int]) -> Iterator[Kernel]:
    extents = joint_extents(graph)
    axes = free_axes(graph, kernel)
    looped = kernel.loop[0] if kernel.loop else ""
    options = [_parts_of(extents[axis]) if axis != looped else [1] for axis in axes]
    most = math.prod(extents[axis] for axis in axes if axis != looped)
    loops = [n for n in counts if looped and extents[looped] % n == 0] or [1]
    for parts in product(*options):
        blocks = math.prod(parts)
        if min(most, 64) <= blocks <= (MOST_TURNS if len(axes) == 1 else MOST_BLOCKS):
            grid: Parts = tuple(zip(axes, parts, strict=True))
            for count in loops:
                if blocks <= MOST_BLOCKS or count == 1:
                    yield regrid_kernel(graph, kernel, grid, count)


def _parts_of(extent: int) -> list[int]:
    powers = [1 << n for n in range(extent.bit_length()) if extent % (1 << n) == 0]
    return sorted({*powers, *(extent // n for n in powers)})


def _launched(graph: UGraph, kernel: Kernel, machine: Machine) -> Iterator[Shape]:
    block = _Block(graph, kernel)
    early = starts_early(kernel, machine)
    for warps in (*WARPS, MANY_WARPS) if early else WARPS:
        if block.largest > THREAD_ELEMENTS * 32 * warps:
            continue
        for resident in block.residents(warps, machine):
            launch = GraphLaunch(num_warps=warps, stages=1, early=True, resident=resident)
            yield Shape(kernel=kernel, launch=launch, time_us=block.resident_us(launch, machine))
        if block.held(warps) > PRODUCT_ELEMENTS:
            continue
        for stages in STAGES if kernel.loop else (1,):
            stages = min(stages, kernel.loop[1]) if kernel.loop else 1
            launch = GraphLaunch(num_warps=warps, stages=max(stages, 1), early=early, eager=True)
            time = block.time_us(launch, machine)
            if math.isfinite(time):
                yield Shape(kernel=kernel, launch=launch, time_us=time)


def starts_early(kernel: Kernel, machine: Machine) -> bool:
    """Whether a kernel leaves SMs free for the next one's blocks, which start early then. Where it
    doesn't, they would crowd onto the SMs that are done first and wait there for nothing: measured,
    that costs a kernel over 33 MB of weights 1 to 3 us of 12; one of a single block gains 1 us of
    2.4. Nor does it gain by that behind a small one: a linear layer behind a norm of 16 rows took
    17.0 us so, 15.3 without. Blocks that read what is constant meanwhile gain (GraphLaunch.eager).
    """
    return 2 * kernel.num_blocks <= machine.num_sms


class _Block:
    """What one block of a kernel loads, computes and holds."""

    def __init__(self, graph: UGraph, kernel: Kernel) -> None:
        self.kernel = kernel
        extents, tensors = joint_extents(graph), graph.tensor_map()
        self.extents = extents
        self.tiles = padded_sizes(graph, kernel)
        self.axes = {load.name: tuple(a for d in load.dims for a in d) for load in kernel.loads}
        self.axes |= {op.name: op.axes for op in kernel.ops}
        self.rounds = kernel.loop[1] if kernel.loop else 1
        self.weights = frozenset(t.name for t in graph.tensors if t.role == "weight")
        self.moving = self.resting = self.common = 0.0
        self.least_moving = math.inf
        for load in kernel.loads:
            item = item_bytes(tensors[load.tensor].dtype)
            run = item * self.run(load.dims)
            share = min(item * math.prod(extents[a] for a in self.axes[load.name]), LINE_BYTES)
            size = self.of(self.axes[load.name]) * item * max(1.0, share / run)
            if load.fmap >= 0:
                self.moving += size
                self.least_moving = min(self.least_moving, self.of(self.axes[load.name]) * item)
            else:
                self.resting += size
            if all(dim < 0 for dim in load.imap):
                self.common += size
        self._halves = {x.name for x in kernel.loads if tensors[x.tensor].dtype in HALVES}
        names = {x.tensor for x in kernel.loads} | {s.name for s in kernel.stores}
        self.memory = sum(
            math.prod(extents[a] for a in tensors[n].axes) * item_bytes(tensors[n].dtype)
            for n in names
        )
        self.instructions = sum(map(self._instructions, kernel.ops))
        self.largest = max(
            [self.of(axes) for axes in self.axes.values()] + list(map(self._spread, kernel.ops))
        )

    def run(self, dims: Dims) -> int:
        """Elements of a block that lie in a row in memory."""
        found = 1
        for axis in reversed([axis for dim in dims for axis in dim]):
            found *= self.tiles[axis]
            if self.tiles[axis] < self.extents[axis]:
                break
        return found

    def of(self, axes: Iterable[str]) -> int:
        return math.prod(self.tiles[axis] for axis in set(axes))

    def held(self, warps: int) -> float:
        """Elements that a thread holds of a product's operands at once: tiles of 16 x 8 are divided
        among warps, each of which has all of what it sums. Of products whose rows tensor cores read
        from shared memory themselves, none.
        """
        most = 0.0
        for op in filter(self._is_product, self.kernel.ops):
            a, b = (set(self.axes[arg]) - set(op.reduced) for arg in op.args)
            columns, rows = sorted(map(self.of, (a - b, b - a)))
            if rows >= MATRIX_ROWS and columns >= MATRIX_COLUMNS:
                continue
            down = max(1, min(warps, rows // 16))
            across = max(1, min(warps // down, columns // 8))
            tile = max(rows // down, 16) + max(columns // across, 8)
            most = max(most, tile * self.of(op.reduced) / 32)
        return most

    def _is_product(self, op: BlockOp) -> bool:
        """Whether tensor cores do it."""
        if op.kind != "contract":
            return False
        a, b = (set(self.axes[arg]) for arg in op.args)
        gone = set(op.reduced)
        sides = [self.of(found - gone) for found in (a - b, b - a)]
        return min(sides) > 1 and self.of(gone) >= 16

    def _spread(self, op: BlockOp) -> int:
        """Elements that an op holds before it reduces them."""
        if op.kind == "cat" or self._is_product(op):
            return 1
        return self.of({a for arg in op.args for a in self.axes[arg]})

    def _instructions(self, op: BlockOp) -> float:
        rounds = self.rounds if op.stage == "body" else 1
        read = LOAD_INSTRUCTIONS * sum(self.of(self.axes[arg]) for arg in op.args)
        if self._is_product(op):
            split = sum(self.of(self.axes[arg]) for arg in op.args if arg not in self._halves)
            multiplied = self.of({*op.axes, *op.reduced}) / 8
            return rounds * (read + SPLIT_COST * split + multiplied)
        if op.kind == "map":
            return rounds * num_functions("map", op.expr) * self.of(op.axes)
        if op.kind == "cat":
            return 0.0
        return rounds * VECTOR_COST * self._spread(op)

    def time_us(self, launch: GraphLaunch, machine: Machine) -> float:
        """Of the whole launch; inf where a block fits no SM."""
        kernel, rounds = self.kernel, self.rounds
        shared = launch.stages * self.moving if rounds > 1 else 0
        if shared > SHARED_BYTES - 16384:
            return math.inf
        each = -(-kernel.num_blocks // machine.num_sms)
        beside = min(each, max(1, REGISTER_WARPS // launch.num_warps))
        if shared:
            beside = int(min(beside, SHARED_BYTES // (shared + 4096)))
        rate = machine.memory_bandwidth_bytes_per_us / machine.num_sms
        block = rounds * self.moving + self.resting
        whole = self.memory * each / kernel.num_blocks
        limits = (
            whole / rate,
            each * block / (CACHE_RATE * rate),
            self.waits_us(launch, each, beside, rate),
        )
        moved = math.pow(sum(limit**SHARPNESS for limit in limits), 1 / SHARPNESS)
        computed = each * self.instructions / LANES_PER_US
        turns = -(-each // beside)
        barriers = turns * rounds * ROUND_US * (1 + self._num_reductions(launch))
        gaps = turns if beside == 1 else 1  # else another block loads meanwhile
        ends = gaps * LATENCY_US / 2 + self._chain_us(launch)
        early = replace(launch, constant=self.weights).starts_early(kernel)
        start = START_US - (EARLY_US if early else 0.0)
        if rounds > 1:
            start += LATENCY_US
            late = self.least_moving < LEAST_COPY * 32 * launch.num_warps
            ends += turns * rounds * STALL_US if late else 0.0
        return start + max(moved, computed, barriers) + ends

    def waits_us(self, launch: GraphLaunch, each: int, beside: int, rate: float) -> float:
        """What an SM waits for loads, as many at a time as are under way. With two stages an
        iteration's loads start when those of the one before are there, so that memory rests
        meanwhile: measured, an MLP of 64 rows took 29 us so, where its bytes take 16.
        """
        if self.rounds == 1:
            return each * LATENCY_US / beside
        under_way = beside * max(launch.stages - 1, 1)
        return each * self.rounds * (LATENCY_US + self.moving / rate) / under_way

    def residents(self, warps: int, machine: Machine) -> list[int]:
        """How many blocks may take all in turn: as many on each SM as fit its registers with two
        tiles each. None for products: tensor cores take tiles from shared memory, where these are
        not (an MLP of 8 rows took 123 us so, 41 by library ops).
        """
        each = self.resting - self.common
        if any(map(self._is_product, self.kernel.ops)):
            return []
        if self.kernel.loop or not self.common or self.kernel.num_blocks < 4 * machine.num_sms:
            return []
        most = int(min(REGISTER_WARPS // warps, TILE_BYTES // max(2 * each, 1)))
        return [machine.num_sms * count for count in range(1, most + 1)]

    def resident_us(self, launch: GraphLaunch, machine: Machine) -> float:
        """As time_us, of blocks that are taken in turn."""
        each, beside = self.resting - self.common, launch.resident // machine.num_sms
        turns = -(-self.kernel.num_blocks // launch.resident)
        rate = machine.memory_bandwidth_bytes_per_us / machine.num_sms
        passes = turns * beside
        limits = (
            self.memory * passes / self.kernel.num_blocks / rate,
            (passes * each + beside * self.common) / (CACHE_RATE * rate),
            turns * LATENCY_US,
        )
        moved = math.pow(sum(limit**SHARPNESS for limit in limits), 1 / SHARPNESS)
        computed = passes * self.instructions / LANES_PER_US
        start = START_US - (EARLY_US if launch.early else 0.0)
        return start + max(moved, computed) + LATENCY_US / 2 + self._chain_us(launch)

    def _chain_us(self, launch: GraphLaunch) -> float:
        """What reductions outside of the loop take one after another: each thread's own elements,
        then the threads'.
        """
        threads = 32 * launch.num_warps
        steps = math.log2(threads) * SHUFFLE_US
        return sum(
            math.ceil(self._spread(op) / threads) * ADD_US + steps
            for op in self.kernel.ops
            if op.stage != "body" and op.kind not in ("map", "cat") and not self._is_product(op)
        )

    def _num_reductions(self, launch: GraphLaunch) -> int:
        """Reductions among warps in each iteration."""
        late = rescalings(self.kernel)
        small = LAZY_ELEMENTS * 32 * launch.num_warps
        found = 0
        for op in self.kernel.ops:
            if op.stage != "body" or op.kind in ("map", "cat"):
                continue
            lazy = is_accumulator(self.kernel, op) and not late & set(op.args)
            if self._is_product(op) or (lazy and self._spread(op) <= small):
                continue
            found += 1
        return found


def shaped(graph: UGraph, shapes: Sequence[Shape]) -> tuple[UGraph, tuple[GraphLaunch, ...]]:
    """The graph with one shape of each kernel."""
    made = with_kernels(graph, [shape.kernel for shape in shapes], 2**40)
    return made, tuple(shape.launch for shape in shapes)


SPLITS = (4, 8, 16, 32, 64)
LEAST_PART = 64
"""Parts of an axis that the graph divides, and elements of each at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """A graph and how each of its kernels is launched; its time by the model."""

    graph: UGraph
    launches: tuple[GraphLaunch, ...]
    time_us: float

    def describe(self) -> str:
        """All kernels, in order."""
        return "; ".join(map(describe, self.graph.kernels, self.launches))


@cache
def rule_plan(rule: RewriteRule) -> GraphPlan:
    """The rule's graph as it was measured, or as the model likes it best where nobody measured it.
    UnsupportedError where no plan fits.
    """
    graph, machine = parse_graph(rule.graph), MACHINES[rule.machine]
    if not rule.launches:
        return graph_plans(graph, machine, 1)[0]
    launches = tuple(
        GraphLaunch(
            num_warps=warps,
            stages=stages,
            early=resident > 0 or starts_early(kernel, machine),
            eager=True,
            resident=resident,
        )
        for kernel, (warps, stages, resident) in zip(graph.kernels, rule.launches, strict=True)
    )
    return GraphPlan(graph=graph, launches=launches, time_us=rule.graph_us)


@cache
def has_plan(rule: RewriteRule) -> bool:
    """Whether the rule's graph can be launched, so that a program may be lowered by it."""
    try:
        plan = rule_plan(rule)
        graph_source(plan.graph, plan.launches)
    except UnsupportedError:
        return False
    return True


LEAST_GAIN = 0.93
"""Share of library ops' time that a plan which nobody measured may take, to be used."""


@cache
def pays(rule: RewriteRule) -> bool:
    """Whether the rule's kernels are faster than library ops: as measured; by the model that found
    them, which knows a kernel at its best, where their launches alone were chosen by measuring;
    others by this one, with room for its error.
    """
    if rule.launches:
        return rule.saved_us > 0
    library_us = program_us(joined_program(rule.program), DEVICES[rule.machine])
    return has_plan(rule) and rule_plan(rule).time_us < LEAST_GAIN * library_us


def graph_plans(
    graph: UGraph, machine: Machine, count: int, loops: Sequence[int] = LOOPS
) -> list[GraphPlan]:
    """The fastest `count` plans by the model, of these numbers of iterations. UnsupportedError
    where none fits.
    """
    found: list[GraphPlan] = []
    problem: UnsupportedError | None = None
    for variant in _variants(graph):
        try:
            shapes = [kernel_shapes(variant, k, machine, count, loops) for k in variant.kernels]
        except UnsupportedError as error:
            problem = error
            continue
        for picked in _fastest(shapes, count):
            made, launches = shaped(variant, picked)
            time = sum(shape.time_us for shape in picked)
            plan = GraphPlan(graph=made, launches=launches, time_us=time)
            found.append(plan)
    if not found and problem:
        raise problem
    return sorted(found, key=lambda plan: plan.time_us)[:count]


def _variants(graph: UGraph) -> Iterator[UGraph]:
    """The graph, and those with other numbers of parts of axes that it divides."""
    yield graph
    extents = dict(graph.extents)
    for outer, inner in split_pairs(graph):
        for parts in SPLITS:
            whole = extents[outer] * extents[inner]
            if parts != extents[outer] and whole % parts == 0 and whole // parts >= LEAST_PART:
                yield resplit(graph, outer, inner, parts)


def _fastest(shapes: Sequence[Sequence[Shape]], count: int) -> list[tuple[Shape, ...]]:
    picked = sorted(product(*shapes), key=lambda them: sum(one.time_us for one in them))
    return picked[:count]
