"""Writes each kernel of a uGraph as Triton source: its grid, its loop, its accumulators.

In: a UGraph, and for each kernel how many iterations' loads are under way. Out: the text of one
Python module, a function a kernel, which runner.py compiles. It goes by the graph's structure
alone: loads by their axes' strides, contractions of two operands that both have axes of their own
by tensor cores and others by multiply-adds, an accumulator of a rescaling (ugraph.rescalings)
relative to the maximum so far, operands side by side (`cat`) piece by piece and never copied.

Contractions are as exact as the proof takes them to be: a value that no 16-bit type holds is given
to tensor cores as the sum of two bf16 values, and as f32 where the program's own tensors are f32.
Next: runner.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distmega.errors import UnsupportedError
from distmega.kernels.ugraphs.values import (
    HALVES,
    LEAST_DOT,
    BlockLayout,
    BlockValue,
    Groups,
    Piece,
    is_wide,
    padded_sizes,
)
from distmega.program import expr
from distmega.program.dtypes import item_bytes
from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.ugraph import (
    BlockOp,
    Kernel,
    Load,
    Store,
    UGraph,
    is_accumulator,
    joint_extents,
    rescaling_operands,
    rescalings,
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

LAZY_ELEMENTS = 32
"""Elements a thread, at most, of an accumulator that is reduced once, after the loop."""

LOWEST = "-3.0e38"
"""What a maximum starts from: finite, so that differences of maxima are never nan."""

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
EXTREMES = {"max": ("tl.max", "tl.maximum", LOWEST), "min": ("tl.min", "tl.minimum", "3.0e38")}


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


@dataclass(frozen=True, slots=True)
class _Accumulator:
    """A value that a loop gathers, under name `acc` until it is over. wide: not yet reduced along
    the axes that go; groups: its form as tensor cores leave it, empty for others.
    """

    op: BlockOp
    acc: str
    axes: tuple[str, ...]
    wide: tuple[str, ...] = ()
    groups: Groups = ()


class _Writer:
    """Writes one kernel."""

    def __init__(self, graph: UGraph, kernel: Kernel, launch: GraphLaunch) -> None:
        self.graph, self.kernel, self.launch = graph, kernel, launch
        self.extents = joint_extents(graph)
        self.layout = BlockLayout(
            list(self.extents), tile_extents(kernel, self.extents), padded_sizes(graph, kernel)
        )
        self.tensors = graph.tensor_map()
        self.arguments = {name: f"t{n}" for n, name in enumerate(kernel_tensors(kernel))}
        self.names = {op.name: f"v{n}" for n, op in enumerate(kernel.ops)}
        self.values: dict[str, BlockValue] = {}
        self.lines: list[str] = []
        self.indent = "    "
        self.late = rescalings(kernel)
        self.is_early = launch.starts_early(kernel)
        self.is_wide = is_wide(graph)

    def put(self, line: str) -> None:
        self.lines.append(self.indent + line)

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
            axis, count = kernel.loop
            stages = self.launch.stages
            self.put(f"for i in tl.range(0, {count}, num_stages={stages}):")
            self.indent += "    "
            self.put(f"o_{axis} = i * {self.layout.tile(axis)}")
            self.put_loads("body")
            accumulators = self.put_body()
            for store in kernel.stores:
                if store.fmap >= 0:
                    self.put_store(store)
            self.indent = "    "
            for one in accumulators:
                self.finish(one)
        self.put_ops("after")
        for store in kernel.stores:
            if store.fmap < 0:
                self.put_store(store)
        return self.head() + "\n".join(self.lines) + "\n"

    def head(self) -> str:
        arguments = ", ".join(self.arguments.values())
        return f"@triton.jit\ndef {self.kernel.name}({arguments}):\n"

    def write_turns(self) -> str:
        """The body of a kernel whose blocks are taken in turn. What is the same for all of them is
        loaded and computed once; what the next block reads, ahead, but for small tiles.
        """
        kernel, count, step = self.kernel, self.kernel.num_blocks, self.launch.resident
        if kernel.loop:
            raise self.unsupported("blocks with a loop of their own, taken in turn")
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
                self.put_op(op)
        self.put(f"for turn in tl.range(tl.program_id(0), {count}, {step}, num_stages=1):")
        self.indent += "    "
        self.put_offsets(f"turn + {step}")
        for load in ahead:
            self.put_load(load, suffix="_next", inside=f"turn < {count - step}")
        self.put_offsets("turn")
        for load in small:
            self.put_load(load)
        for op in ops:
            if op.name not in common:
                self.put_op(op)
        for store in kernel.stores:
            self.put_store(store)
        for load in ahead:
            name = f"x{kernel.loads.index(load)}"
            self.put(f"{name} = {name}_next")
        return "\n".join(self.lines) + "\n"

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
        self.put(f"block = {block}")
        for axis, parts in reversed(self.kernel.grid):
            self.put(f"o_{axis} = block % {parts} * {self.layout.tile(axis)}")
            self.put(f"block = block // {parts}")

    def put_ranges(self) -> None:
        used = {a for load in self.kernel.loads for dim in load.dims for a in dim}
        for store in self.kernel.stores:
            used |= set(self.tensors[store.name].axes)
        for axis in self.layout.dims(tuple(used)):
            self.put(f"r_{axis} = tl.arange(0, {self.layout.size(axis)})")

    def put_start(self, later: Sequence[Load] = ()) -> list[Load]:
        """Lets the next kernel start, and waits for the one before. Loads that came before that:
        of tensors that are constant, without those that come later.
        """
        self.put("gdc_launch_dependents()")
        first = [
            load
            for load in self.kernel.loads
            if load.tensor in self.launch.constant and load.fmap < 0 and load not in later
        ]
        for load in first:
            self.put_load(load)
        if not self.launch.resident:
            self.put_prefetches(first)
        self.put("gdc_wait()")
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
        self.put(f"lane = tl.arange(0, {threads})")
        self.put(f"row = tl.minimum(lane // {pieces}, {count - 1})")
        inner = set(axes[len(rows) :])
        terms = [self.arguments[load.tensor], f"lane % {pieces} * {run // pieces}"]
        stride = 1
        for axis in reversed(axes):
            if axis in self.kernel.parts and not (loop and axis == loop[0]):
                terms.append(f"o_{axis} * {stride}")
            if axis not in inner:
                terms.append(f"row % {sizes[axis]} * {stride}")
                self.put(f"place = {' + '.join(terms)}")
                terms = ["place"]
                self.put(f"row = row // {sizes[axis]}")
            stride *= self.extents[axis]
        self.put(f"prefetch({' + '.join(terms)}, {run * item // pieces})")

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
        self.put(f'{name}{suffix} = tl.load({position}{mask}, eviction_policy="{policy}")')
        exact = tensor.dtype if tensor.dtype in HALVES else ""
        self.values[load.name] = BlockValue((Piece(name, axes, exact, zeroed=True),))

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
        value = self.values[store.name]
        if value.joined:
            raise self.unsupported(f"{store.name!r}, operands side by side, is stored")
        axes = self.layout.dims(tensor.axes)
        (piece,) = value.pieces
        inside = self.layout.inside(axes, axes)
        mask = f", mask={inside}" if inside else ""
        position = self.position(tensor.name, tensor.dims, axes)
        self.put(f"tl.store({position}, {self.layout.spread(piece.name, piece.axes, axes)}{mask})")

    def put_ops(self, stage: str) -> None:
        for op in self.kernel.ops:
            if op.stage == stage:
                self.put_op(op)

    def put_op(self, op: BlockOp) -> None:
        """An op that is no accumulator."""
        if op.kind == "cat":
            self.values[op.name] = self.joined(op)
            return
        made = self.computed(op)
        pieces = []
        for number, (text, axes) in enumerate(made):
            name = self.names[op.name] + (f"_{number}" if len(made) > 1 else "")
            self.put(f"{name} = {text}")
            pieces.append(Piece(name, axes, "", zeroed=not self.layout.is_padded(axes)))
        args = [self.values[arg] for arg in op.args]
        beside = next((value for value in args if value.joined), None)
        if beside is not None and len(pieces) > 1:
            self.values[op.name] = BlockValue(tuple(pieces), beside.joined, beside.inner)
        else:
            self.values[op.name] = BlockValue(tuple(pieces))

    def joined(self, op: BlockOp) -> BlockValue:
        """Two operands side by side: nothing is moved."""
        args = [self.values[arg] for arg in op.args]
        if any(value.joined for value in args):
            raise self.unsupported(f"{op.name!r} joins what is joined")
        return BlockValue(tuple(value.pieces[0] for value in args), op.joined, op.reduced)

    def computed(self, op: BlockOp) -> list[tuple[str, tuple[str, ...]]]:
        """Expressions of an op's pieces with their axes; one if it reduces the joined axis."""
        args = [self.values[arg] for arg in op.args]
        beside = next((value for value in args if value.joined), None)
        if beside is None:
            return [self.expression(op, [value.pieces[0] for value in args], op.reduced)]
        parts = []
        for number, inner in enumerate(beside.inner):
            pieces = [v.pieces[number] if v.joined else v.pieces[0] for v in args]
            reduced = tuple(inner if axis == beside.joined else axis for axis in op.reduced)
            parts.append(self.expression(op, pieces, reduced))
        if beside.joined not in op.reduced:
            return parts
        axes = parts[0][1]
        if op.kind in EXTREMES:
            return [(f"{EXTREMES[op.kind][1]}({', '.join(text for text, _ in parts)})", axes)]
        return [(" + ".join(text for text, _ in parts), axes)]

    def expression(
        self, op: BlockOp, pieces: Sequence[Piece], reduced: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """One op on one piece of each operand."""
        if op.kind == "map":
            axes = self.layout.dims([axis for piece in pieces for axis in piece.axes])
            return self.formula(op.expr, [self.wide(piece, axes) for piece in pieces]), axes
        if op.kind == "contract":
            groups = self.matrix_groups(pieces, reduced)
            if groups:
                text, groups = self.product(pieces, groups, "")
                axes = self.layout.dims([axis for group in groups for axis in group])
                return f"{self.layout.from_matrix(text, groups)}", axes
        text, axes = self.unreduced(op, pieces, reduced)
        return self.reduced(op.kind, text, axes, reduced)

    def formula(self, text: str, operands: Sequence[str]) -> str:
        return _formula(expr.parse(text), operands)

    def wide(self, piece: Piece, axes: Sequence[str]) -> str:
        """A piece in f32 with dims for `axes`."""
        text = f"{piece.name}.to(tl.float32)" if piece.exact else piece.name
        return self.layout.spread(text, piece.axes, axes)

    def unreduced(
        self, op: BlockOp, pieces: Sequence[Piece], reduced: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """What a reduction reduces, with nothing in its padding that counts."""
        axes = self.layout.dims([axis for piece in pieces for axis in piece.axes])
        text = " * ".join(self.wide(piece, axes) for piece in pieces)
        inside = self.layout.inside([a for a in axes if a in reduced], axes)
        is_clean = op.kind in ("contract", "sum") and all(piece.zeroed for piece in pieces)
        if inside and not is_clean:
            neutral = EXTREMES[op.kind][2] if op.kind in EXTREMES else "0.0"
            text = f"tl.where({inside}, {text}, {neutral})"
        absent = [a for a in reduced if a not in axes and self.layout.tile(a) > 1]
        if absent and op.kind in ("contract", "sum"):
            raise self.unsupported(f"{op.name!r} reduces {absent}, along which nothing varies")
        return text, axes

    def reduced(
        self, kind: str, text: str, axes: Sequence[str], reduced: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """A block reduced along some of its axes, the last one first."""
        call = EXTREMES[kind][0] if kind in EXTREMES else "tl.sum"
        for number in reversed(range(len(axes))):
            if axes[number] in reduced:
                text = f"{call}({text}, {number})"
        return text, tuple(axis for axis in axes if axis not in reduced)

    def matrix_groups(self, pieces: Sequence[Piece], reduced: Sequence[str]) -> Groups:
        """Batch, rows, columns and reduced axes of a product for tensor cores; () for others."""
        a, b = (set(piece.axes) for piece in pieces)
        gone = [axis for axis in self.layout.dims(tuple(a | b)) if axis in reduced]
        fits = set(gone) <= a & b and self.layout.elements(gone) >= LEAST_DOT
        both, one, two = (
            self.layout.dims(tuple(found - set(gone))) for found in (a & b, a - b, b - a)
        )
        return (both, one, two, tuple(gone)) if fits and one and two else ()

    def product(self, pieces: Sequence[Piece], groups: Groups, acc: str) -> tuple[str, Groups]:
        """A product by tensor cores, added to `acc` if there is one; its form."""
        both, one, two, gone = groups
        a, b = pieces
        if self.layout.elements(one) < self.layout.elements(two):
            one, two, a, b = two, one, b, a
        batch = (both,) if both else ()
        left = self.factors(a, (*batch, one, gone), gone)
        right = self.factors(b, (*batch, gone, two), gone)
        precision = ', input_precision="ieee"' if self.is_wide else ""
        for x_number, x in enumerate(left):
            for y_number, y in enumerate(right):
                if x_number + y_number < 2:
                    acc = f"tl.dot({x}, {y}{f', {acc}' if acc else ''}{precision})"
        return acc, (*batch, one, two)

    def factors(self, piece: Piece, groups: Groups, gone: Sequence[str]) -> list[str]:
        """A block as a matrix for tensor cores; as the sum of several of 16 bits."""
        text = piece.name
        inside = self.layout.inside([axis for axis in piece.axes if axis in gone], piece.axes)
        if inside and not piece.zeroed:
            text = f"tl.where({inside}, {text}, 0.0)"
        text = self.layout.to_matrix(text, piece.axes, groups)
        if self.is_wide:
            return [f"{text}.to(tl.float32)" if piece.exact else text]
        if piece.exact == "bf16":
            return [text]
        name = f"m{len(self.lines)}"
        self.put(f"{name} = {text}{'.to(tl.float32)' if piece.exact else ''}")
        self.put(f"{name}_high = {name}.to(tl.bfloat16)")
        self.put(f"{name}_low = ({name} - {name}_high.to(tl.float32)).to(tl.bfloat16)")
        return [f"{name}_high", f"{name}_low"]

    def put_body(self) -> list[_Accumulator]:
        """The loop's ops. Accumulators start before the loop, in forms that are known only now."""
        above = len(self.lines)
        while not self.lines[above - 1].lstrip().startswith("for i in"):
            above -= 1
        starts: list[str] = []
        ends: list[str] = []
        found: list[_Accumulator] = []
        for op in self.kernel.ops:
            if op.stage != "body":
                continue
            if not is_accumulator(self.kernel, op):
                self.put_op(op)
                continue
            made = self.accumulate(op, f"{self.names[op.name]}_acc", ends)
            found.append(made)
            groups = made.groups or tuple((axis,) for axis in made.wide or made.axes)
            shape = tuple(self.layout.elements(group) for group in groups)
            first = EXTREMES[op.kind][2] if op.kind in EXTREMES else "0.0"
            starts.append(f"    {made.acc} = tl.full({shape}, {first}, tl.float32)")
        for line in ends:
            self.put(line)
        self.lines[above - 1 : above - 1] = starts
        return found

    def accumulate(self, op: BlockOp, acc: str, ends: list[str]) -> _Accumulator:
        """Puts one iteration of an accumulator."""
        args = [self.values[arg] for arg in op.args]
        alpha = self.rescaling(op)
        pieces = [value.pieces[0] for value in args]
        if not any(value.joined for value in args):
            if op.kind == "contract" and (groups := self.matrix_groups(pieces, op.reduced)):
                return self.accumulate_product(op, acc, pieces, groups, alpha)
            text, axes = self.unreduced(op, pieces, op.reduced)
            threads = 32 * self.launch.num_warps
            is_small = self.layout.elements(axes) <= LAZY_ELEMENTS * threads
            if is_small and not alpha and not self.is_top(op):
                self.put(f"{acc} = {self.combined(op, acc, text)}")
                left = tuple(axis for axis in axes if axis not in op.reduced)
                return _Accumulator(op, acc, left, wide=axes)
        ((text, axes),) = self.computed(op)
        if self.is_top(op):
            new = self.names[op.name]
            self.put(f"{new} = {self.combined(op, acc, text)}")
            self.values[op.name] = BlockValue((Piece(new, axes, "", zeroed=False),))
            ends.append(f"{acc} = {new}")
            return _Accumulator(op, acc, axes)
        for factor, mine in alpha:
            self.put(f"{acc} = {acc} * {self.layout.spread(factor, mine, axes)}")
        self.put(f"{acc} = {self.combined(op, acc, text)}")
        return _Accumulator(op, acc, axes)

    def accumulate_product(
        self,
        op: BlockOp,
        acc: str,
        pieces: Sequence[Piece],
        groups: Groups,
        alpha: Sequence[tuple[str, tuple[str, ...]]],
    ) -> _Accumulator:
        """One iteration of a contraction by tensor cores, in the form in which they leave it."""
        text, form = self.product(pieces, groups, acc)
        axes = self.layout.dims([axis for group in form for axis in group])
        for factor, mine in alpha:
            whole = self.layout.spread(factor, mine, axes)
            if mine and any(len(group) != 1 for group in form):
                whole = f"tl.broadcast_to({whole}, {self.layout.shape(axes)})"
            if mine:
                whole = self.layout.to_matrix(whole, axes, form)
            self.put(f"{acc} = {acc} * {whole}")
        self.put(f"{acc} = {text}")
        return _Accumulator(op, acc, axes, groups=form)

    def combined(self, op: BlockOp, acc: str, text: str) -> str:
        if op.kind in EXTREMES:
            return f"{EXTREMES[op.kind][1]}({acc}, {text})"
        return f"{acc} + {text}"

    def is_top(self, op: BlockOp) -> bool:
        """Whether an accumulated maximum is needed while the loop runs."""
        return any(op.name in other.args for other in self.kernel.ops if other.name in self.late)

    def rescaling(self, op: BlockOp) -> list[tuple[str, tuple[str, ...]]]:
        """What the sums of the iterations before are multiplied by, as the maximum has grown: the
        rescaling itself of the maximum before, with its axes.
        """
        found = []
        for name in dict.fromkeys(arg for arg in op.args if arg in self.late):
            late = next(other for other in self.kernel.ops if other.name == name)
            pair = rescaling_operands(late.expr)
            assert pair, "rescalings are such"
            top = late.args[pair[1]]
            (piece,) = self.values[top].pieces
            operands = [piece.name, piece.name]
            operands[pair[0]] = f"{piece.name}_acc"
            made = f"{self.names[name]}_more"
            if not any(line.lstrip().startswith(f"{made} = ") for line in self.lines):
                self.put(f"{made} = {self.formula(late.expr, operands)}")
            count = op.args.count(name)
            found += [(made, piece.axes)] * count
        return found

    def finish(self, one: _Accumulator) -> None:
        """Names an accumulator's value after the loop."""
        name, text = self.names[one.op.name], one.acc
        if one.wide:
            text, _ = self.reduced(one.op.kind, text, one.wide, one.op.reduced)
        elif one.groups:
            text = self.layout.from_matrix(text, one.groups)
        self.put(f"{name} = {text}")
        piece = Piece(name, one.axes, "", zeroed=not self.layout.is_padded(one.axes))
        self.values[one.op.name] = BlockValue((piece,))

    def unsupported(self, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"graph {self.graph.name!r}, kernel {self.kernel.name!r}: {found}",
            expected="ops on blocks along axes of their own",
            remedy="run the program by library ops",
        )


def _formula(tree: expr.Expr, operands: Sequence[str]) -> str:
    """An expression as Triton source over f32 blocks."""
    match tree:
        case expr.Arg(index):
            return operands[index]
        case expr.Const(value):
            return f"({float(value)!r})"
        case expr.Call(fn, args):
            parts = [_formula(arg, operands) for arg in args]
            if fn in INFIX:
                return f"({parts[0]} {INFIX[fn]} {parts[1]})"
            if fn == "where":
                return f"tl.where({parts[0]} != 0.0, {parts[1]}, {parts[2]})"
            texts = [f"tl.cast({p}, tl.float32)" if isinstance(a, expr.Const) else p
                     for p, a in zip(parts, args, strict=True)]  # fmt: skip
            return f'{"unary" if len(args) == 1 else "binary"}("{fn}", {", ".join(texts)})'
