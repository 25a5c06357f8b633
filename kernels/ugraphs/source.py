"""Writes each kernel of a uGraph as Triton source: its grid, its loop, its loads and stores.

In: a UGraph, and for each kernel how many iterations' loads are under way. Out: the text of one
Python module, a function a kernel, which runner.py compiles. It goes by the graph's structure
alone: loads by their axes' strides, ops as block_ops.py has them, what the loop gathers as
accumulators.py has it. Next: block_ops.py, then runner.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distmega.errors import UnsupportedError
from distmega.kernels.ugraphs.accumulators import Accumulators
from distmega.kernels.ugraphs.block_ops import BlockOps, Lines
from distmega.kernels.ugraphs.values import (
    HALVES,
    BlockLayout,
    BlockValue,
    Piece,
    padded_sizes,
)
from distmega.program.dtypes import item_bytes
from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.ugraph import (
    Kernel,
    Load,
    Store,
    UGraph,
    joint_extents,
    tile_extents,
)

HEAD = '''"""Made of uGraph {name!r} by distmega.kernels.ugraphs.source."""

import triton
import triton.language as tl

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from distmega.kernels.pipelined.pointwise.formula import binary, unary
from distmega.kernels.ugraphs.device import prefetch
'''

LEAST_PREFETCH = 2048
"""Bytes of a block that are worth a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLaunch:
    """How a kernel is compiled. stages: iterations whose loads are under way together. early:
    whether its blocks may start while the kernel before it on the stream runs, and wait for its end
    before they read, while their first tiles come into the L2 cache; the next one may start too.
    eager: of a kernel without a loop, whether its blocks do so where tiles of their own are
    constant, which they read before they wait. resident: of a kernel without a loop, how many
    blocks are launched and take all others in turn, the next one's loads under way meanwhile; 0 to
    launch all. constant: tensors that no kernel of the stream writes.
    """

    num_warps: int
    stages: int
    early: bool = False
    eager: bool = False
    resident: int = 0
    constant: frozenset[str] = frozenset()

    def starts_early(self, kernel: Kernel) -> bool:
        """Whether the kernel's blocks may start while the one before it runs."""
        own = (load for load in kernel.loads if any(dim >= 0 for dim in load.imap))
        eager = self.eager and not kernel.loop
        return self.early or (eager and any(load.tensor in self.constant for load in own))


def graph_source(graph: UGraph, launches: Sequence[GraphLaunch]) -> str:
    """The module. UnsupportedError names what no Triton kernel is written for."""
    functions = [
        _Writer(graph, kernel, launch).write()
        for kernel, launch in zip(graph.kernels, launches, strict=True)
    ]
    return "\n\n".join((HEAD.format(name=graph.name), *functions))


def kernel_tensors(kernel: Kernel) -> tuple[str, ...]:
    """Names of the tensors that a kernel's arguments are, in order."""
    loads = dict.fromkeys(load.tensor for load in kernel.loads)
    return (*loads, *(store.name for store in kernel.stores))


class _Writer:
    """Writes one kernel."""

    def __init__(self, graph: UGraph, kernel: Kernel, launch: GraphLaunch) -> None:
        self.kernel, self.launch = kernel, launch
        self.extents = joint_extents(graph)
        self.layout = BlockLayout(
            list(self.extents), tile_extents(kernel, self.extents), padded_sizes(graph, kernel)
        )
        self.tensors = graph.tensor_map()
        self.arguments = {name: f"t{n}" for n, name in enumerate(kernel_tensors(kernel))}
        self.out = Lines()
        self.ops = BlockOps(graph, kernel, self.layout, self.out)
        self.is_early = launch.starts_early(kernel)

    def write(self) -> str:
        """The function."""
        kernel = self.kernel
        if self.launch.resident:
            return self.head() + self.write_turns()
        self.put_indices()
        first = self.put_start() if self.is_early else []
        self.put_loads("before", first)
        self.put_ops("before")
        if kernel.loop:
            self.put_loop(*kernel.loop)
        self.put_ops("after")
        for store in kernel.stores:
            if store.fmap < 0:
                self.put_store(store)
        return self.head() + "\n".join(self.out.lines) + "\n"

    def put_loop(self, axis: str, count: int) -> None:
        """The iterations along an axis, and the values that they leave."""
        accumulators, start = Accumulators(self.ops, self.launch.num_warps), len(self.out.lines)
        self.out.put(f"for i in tl.range(0, {count}, num_stages={self.launch.stages}):")
        self.out.indent += "    "
        self.out.put(f"o_{axis} = i * {self.layout.tile(axis)}")
        self.put_loads("body")
        gathered = accumulators.put_body(start)
        for store in self.kernel.stores:
            if store.fmap >= 0:
                self.put_store(store)
        self.out.indent = "    "
        for one in gathered:
            accumulators.finish(one)

    def head(self) -> str:
        """The function's first lines."""
        arguments = ", ".join(self.arguments.values())
        return f"@triton.jit\ndef {self.kernel.name}({arguments}):\n"

    def write_turns(self) -> str:
        """The body of a kernel whose blocks are taken in turn. What is the same for all of them is
        loaded and computed once; what the next block reads, ahead, but for small tiles.
        """
        kernel, count, step = self.kernel, self.kernel.num_blocks, self.launch.resident
        if kernel.loop:
            raise self.ops.unsupported("blocks with a loop of their own, taken in turn")
        each = [load for load in kernel.loads if any(dim >= 0 for dim in load.imap)]
        ahead = [load for load in each if self.is_large(load)]
        common = {load.name for load in kernel.loads if load not in each}
        for op in kernel.ops:
            common |= {op.name} if common.issuperset(op.args) else set()
        self.put_ranges()
        self.put_offsets("tl.program_id(0)")
        small = [load for load in each if load not in ahead]
        done = self.put_start(small) if self.is_early else []
        self.put_loads("before", [*done, *small])
        ops = [op for stage in ("before", "after") for op in kernel.ops if op.stage == stage]
        for op in ops:
            if op.name in common:
                self.ops.put_op(op)
        self.out.put(f"for turn in tl.range(tl.program_id(0), {count}, {step}, num_stages=1):")
        self.out.indent += "    "
        self.put_offsets(f"turn + {step}")
        for load in ahead:
            self.put_load(load, suffix="_next", inside=f"turn < {count - step}")
        self.put_offsets("turn")
        for load in small:
            self.put_load(load)
        for op in ops:
            if op.name not in common:
                self.ops.put_op(op)
        for store in kernel.stores:
            self.put_store(store)
        for load in ahead:
            name = f"x{kernel.loads.index(load)}"
            self.out.put(f"{name} = {name}_next")
        return "\n".join(self.out.lines) + "\n"

    def is_large(self, load: Load) -> bool:
        """Whether a tile has an element for each thread, so that it is worth loading ahead."""
        axes = [axis for dim in load.dims for axis in dim]
        return self.layout.elements(axes) >= 32 * self.launch.num_warps

    def put_indices(self) -> None:
        """Where the block begins along each divided axis, and the indices within it."""
        if self.kernel.grid:
            self.put_offsets("tl.program_id(0)")
        self.put_ranges()

    def put_offsets(self, block: str) -> None:
        self.out.put(f"block = {block}")
        for axis, parts in reversed(self.kernel.grid):
            self.out.put(f"o_{axis} = block % {parts} * {self.layout.tile(axis)}")
            self.out.put(f"block = block // {parts}")

    def put_ranges(self) -> None:
        used = {a for load in self.kernel.loads for dim in load.dims for a in dim}
        for store in self.kernel.stores:
            used |= set(self.tensors[store.name].axes)
        for axis in self.layout.dims(tuple(used)):
            self.out.put(f"r_{axis} = tl.arange(0, {self.layout.size(axis)})")

    def put_start(self, later: Sequence[Load] = ()) -> list[Load]:
        """Lets the next kernel start, and waits for the one before. Loads that came before that:
        of tensors that are constant, without those that come later.
        """
        self.out.put("gdc_launch_dependents()")
        first = [
            load
            for load in self.kernel.loads
            if load.tensor in self.launch.constant and load.fmap < 0 and load not in later
        ]
        for load in first:
            self.put_load(load)
        if not self.launch.resident:
            self.put_prefetches(first)
        self.out.put("gdc_wait()")
        return first

    def put_prefetches(self, done: Sequence[Load]) -> None:
        """Hints for what this block alone reads first and is not read yet: the tiles of as many
        iterations as are under way together, a row of threads each.
        """
        for load in self.kernel.loads:
            own = self.tensors[load.tensor].role != "temp" and -1 not in load.imap
            if own and load not in done:
                self.put_prefetch(load)

    def put_prefetch(self, load: Load) -> None:
        axes = [axis for dim in load.dims for axis in dim]
        loop = self.kernel.loop
        sizes = {axis: self.layout.tile(axis) for axis in axes}
        if loop and loop[0] in sizes:
            sizes[loop[0]] *= min(max(self.launch.stages, 1), loop[1])
        run, rows = 1, list(axes)
        while rows:
            run *= sizes[rows[-1]]
            if sizes[rows.pop()] < self.extents[axes[len(rows)]]:
                break
        threads = 32 * self.launch.num_warps
        count = math.prod(sizes[axis] for axis in rows)
        item = item_bytes(self.tensors[load.tensor].dtype)
        pieces = 1
        while 2 * pieces * count <= threads and run * item % (32 * pieces) == 0:
            pieces *= 2
        if run * item * min(count, threads) < LEAST_PREFETCH or run * item // pieces % 16:
            return
        self.out.put(f"lane = tl.arange(0, {threads})")
        self.out.put(f"row = tl.minimum(lane // {pieces}, {count - 1})")
        inner = set(axes[len(rows) :])
        terms = [self.arguments[load.tensor], f"lane % {pieces} * {run // pieces}"]
        stride = 1
        for axis in reversed(axes):
            if axis in self.kernel.parts and not (loop and axis == loop[0]):
                terms.append(f"o_{axis} * {stride}")
            if axis not in inner:
                terms.append(f"row % {sizes[axis]} * {stride}")
                self.out.put(f"place = {' + '.join(terms)}")
                terms = ["place"]
                self.out.put(f"row = row // {sizes[axis]}")
            stride *= self.extents[axis]
        self.out.put(f"prefetch({' + '.join(terms)}, {run * item // pieces})")

    def put_loads(self, stage: str, done: Sequence[Load] = ()) -> None:
        for load in self.kernel.loads:
            if ("body" if load.fmap >= 0 else "before") == stage and load not in done:
                self.put_load(load)

    def put_load(self, load: Load, suffix: str = "", inside: str = "") -> None:
        """suffix: of its name. inside: a condition for all of it."""
        tensor = self.tensors[load.tensor]
        name = f"x{self.kernel.loads.index(load)}"
        axes = self.layout.dims([axis for dim in load.dims for axis in dim])
        position = self.position(tensor.name, load.dims, axes)
        padding = self.layout.inside(axes, axes)
        mask = " & ".join(f"({one})" for one in (padding, inside) if one)
        mask = f", mask={padding if not inside else mask}, other=0.0" if mask else ""
        shared = any(dim < 0 for dim in load.imap)
        policy = "evict_last" if shared else "evict_first"
        self.out.put(f'{name}{suffix} = tl.load({position}{mask}, eviction_policy="{policy}")')
        exact = tensor.dtype if tensor.dtype in HALVES else ""
        self.ops.values[load.name] = BlockValue((Piece(name, axes, exact, zeroed=True),))

    def position(self, tensor: str, dims: Dims, axes: Sequence[str]) -> str:
        """Pointers to a block of a tensor, along `axes`."""
        terms = [self.arguments[tensor]]
        stride = 1
        parts = self.kernel.parts
        for dim in reversed(dims):
            for axis in reversed(dim):
                scale = f" * {stride}" if stride > 1 else ""
                if axis in parts:
                    terms.append(f"o_{axis}{scale}")
                if axis in axes:
                    terms.append(f"{self.layout.spread(f'r_{axis}', (axis,), axes)}{scale}")
                stride *= self.extents[axis]
        if stride >= 2**31:
            raise UnsupportedError(
                f"tensor {tensor!r} of {stride} elements",
                expected="less than 2^31 elements, which 32-bit offsets reach",
                remedy="run the program by library ops",
            )
        return " + ".join(terms)

    def put_store(self, store: Store) -> None:
        tensor = self.tensors[store.name]
        value = self.ops.values[store.name]
        if value.joined:
            raise self.ops.unsupported(f"{store.name!r}, operands side by side, is stored")
        axes = self.layout.dims(tensor.axes)
        (piece,) = value.pieces
        inside = self.layout.inside(axes, axes)
        mask = f", mask={inside}" if inside else ""
        position = self.position(tensor.name, tensor.dims, axes)
        self.out.put(
            f"tl.store({position}, {self.layout.spread(piece.name, piece.axes, axes)}{mask})"
        )

    def put_ops(self, stage: str) -> None:
        for op in self.kernel.ops:
            if op.stage == stage:
                self.ops.put_op(op)
