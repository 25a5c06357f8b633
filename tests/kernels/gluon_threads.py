"""Runs a Gluon kernel for Hopper without a GPU: partitions as threads, of all programs at once, and
mbarriers as conditions; programs without partitions one after the other.

In: a kernel, its grid, arguments as at a launch. What a kernel's results depend on is what a GPU
allows: products are done when they are waited for, not before, and what TMA loads is there when its
mbarrier was waited for. An AssertionError says what a GPU would not: that shared memory was read
before it had come, or written while it was read; that a wait is ended by nobody; that something was
still under way at the end; that what is in front was not waited for. Layouts of registers are not
looked at; those of shared memory are, where it is seen with another shape. Known is what the
kernels that are run so need.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction

from tests.kernels.at_once import run_at_once

ATOMIC = threading.Lock()
LONGEST_WAIT_S = 8.0
UNWRITTEN = 987_654_321
"""In shared memory that holds whole numbers."""
FUNCTIONS = ("exp", "exp2", "log", "log2", "log10", "rsqrt", "abs", "erf", "tanh", "sin", "cos",
             "floor", "pow")  # fmt: skip
"""That torch calls as kernels do."""
LAYOUTS = (
    "NVMMADistributedLayout",
    "DotOperandLayout",
    "SliceLayout",
    "BlockedLayout",
    "SwizzledSharedLayout",
)
"""That nothing is asked of."""
TYPES = ("bfloat16", "float16", "float32", "int32", "int64")
TORCH_TYPES = {getattr(gluon_language, name): getattr(torch, name) for name in TYPES}
GLUON_TYPES = {torch_type: own for own, torch_type in TORCH_TYPES.items()}


def nothing(*given: object, **named: object) -> None:
    """What a kernel calls, and results don't depend on here."""


def check_static(holds: object) -> None:
    assert holds, "what a kernel is specialised for"


class Number(int):
    """A scalar of a kernel; what comparisons give is one too."""

    def to(self, dtype: object) -> "Number":
        return self


for _name in ("lt", "le", "gt", "ge", "and", "add", "radd", "sub", "rsub", "mul", "rmul",
              "floordiv", "mod"):  # fmt: skip

    def _made(self: int, other: object, name: str = f"__{_name}__") -> object:
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Number(found)

    setattr(Number, f"__{_name}__", _made)


class Tile(Tensor):
    """A tensor of a kernel: nothing changes it."""

    @property
    def type(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> "Tile":  # type: ignore[override]
        return tile(super().to(TORCH_TYPES.get(dtype, dtype)))

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other


def tile(x: Tensor) -> Tile:
    return x.as_subclass(Tile)  # type: ignore[no-any-return, no-untyped-call]


def as_mask(x: Any) -> Tensor:
    """Of what comparisons gave, with numbers among them."""
    return torch.as_tensor(x) != 0


def plain(*given: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape, which torch indexes by."""
    return tuple(x.as_subclass(Tensor) for x in torch.broadcast_tensors(*given))


@dataclass(frozen=True)
class Pointer:
    """Into a flat tensor, at an offset or many. early: it may be read before what is in front of
    the kernel has ended.
    """

    memory: Tensor
    at: Any = 0
    early: bool = False

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=GLUON_TYPES[self.memory.dtype])

    def __add__(self, offset: object) -> "Pointer":
        return replace(self, at=self.at + offset)


@dataclass(frozen=True)
class Descriptor:
    """Of a matrix that is read in blocks of so many rows. early: as of a Pointer."""

    matrix: Tensor
    rows: int
    layout: object = None
    early: bool = False

    @property
    def dtype(self) -> object:
        return GLUON_TYPES[self.matrix.dtype]

    def block(self, top: int, left: int, columns: int) -> Tensor:
        """What is outside of the matrix is zero."""
        found = self.matrix.new_zeros(self.rows, columns)
        above, before = max(-top, 0), max(-left, 0)
        inside = self.matrix[max(top, 0) : max(top + self.rows, 0),
                             max(left, 0) : max(left + columns, 0)]  # fmt: skip
        found[above : above + inside.shape[0], before : before + inside.shape[1]] = inside
        return found


@dataclass(frozen=True)
class Memory:
    """An allocation of shared memory, flat, and what is under way there: elements that loads are to
    bring, and how many products read each.
    """

    cells: Tensor
    layout: object
    coming: Tensor
    readers: Tensor
    lock: Any = field(default_factory=threading.Lock)

    def read(self, at: Tensor) -> Tensor:
        with self.lock:
            self._check_there(at)
            return self.cells[at]

    def write(self, at: Tensor, values: Tensor) -> None:
        """What is read may be written anew as it is."""
        with self.lock:
            assert not self.coming[at].any(), "shared memory is written before its load has come"
            before = self.cells[at]
            changed = (before != values) & ((before == before) | (values == values))
            assert not self.readers[at][changed].any(), "a product still reads what is written"
            self.cells[at] = values

    def start_load(self, at: Tensor) -> None:
        with self.lock:
            assert not self.coming[at].any(), "two loads, and no wait for the first"
            assert not self.readers[at].any(), "a product still reads where a load goes"
            self.coming[at] = True

    def end_load(self, at: Tensor, block: Tensor) -> None:
        with self.lock:
            self.cells[at] = block
            self.coming[at] = False

    def start_reading(self, at: Tensor) -> None:
        with self.lock:
            self._check_there(at)
            self.readers[at] += 1

    def end_reading(self, at: Tensor) -> None:
        with self.lock:
            self.readers[at] -= 1

    def _check_there(self, at: Tensor) -> None:
        assert not self.coming[at].any(), "shared memory is read before its load has come"


def positions_of(shape: Sequence[int], layout: object) -> Tensor:
    """Where elements lie in memory: row by row or, where TMA swizzles them, in strips of columns as
    wide as its pattern, the next one behind the whole of the one before. The pattern itself is a
    matter of the bytes' addresses, so it is the same for all who see them.
    """
    *outer, rows, columns = map(int, shape)
    found = torch.arange(math.prod((*outer, rows, columns)))
    if isinstance(layout, gluon_language.NVMMASharedLayout) and layout.swizzle_byte_width:
        assert not layout.transposed
        width = min(8 * layout.swizzle_byte_width // layout.element_bitwidth, columns)
        found = found.view(*outer, columns // width, rows, width).transpose(-3, -2)
    return found.reshape(*outer, rows, columns)


@dataclass(frozen=True)
class Buffer:
    """Shared memory: each element's position in an allocation."""

    memory: Memory
    at: Tensor

    @classmethod
    def allocate(cls, dtype: object, shape: Sequence[int], layout: object) -> "Buffer":
        at = positions_of(shape, layout)
        kind = TORCH_TYPES[dtype]
        cells = torch.full([at.numel()], math.nan if kind.is_floating_point else UNWRITTEN,
                           dtype=kind)  # fmt: skip
        coming, readers = (torch.zeros(at.numel(), dtype=x) for x in (torch.bool, torch.int16))
        return cls(Memory(cells, layout, coming, readers), at)

    def index(self, number: int) -> "Buffer":
        assert 0 <= number < len(self.at), "there is no such slot"
        return Buffer(self.memory, self.at[number])

    def slice(self, start: int, length: int) -> "Buffer":
        return Buffer(self.memory, self.at[start : start + int(length)])

    def permute(self, order: Sequence[int]) -> "Buffer":
        return Buffer(self.memory, self.at.permute(*order))

    def reinterpret(self, dtype: object, shape: Sequence[int], layout: object) -> "Buffer":
        """Of the same type and pattern."""
        assert TORCH_TYPES[dtype] == self.memory.cells.dtype
        assert layout == self.memory.layout
        at = positions_of(shape, layout) + self.at.min()
        assert at.numel() == self.at.numel() == self.at.max() - self.at.min() + 1
        return Buffer(self.memory, at)

    def store(self, value: Tensor) -> None:
        self.memory.write(self.at, value)

    def load(self, layout: object) -> Tile:
        return tile(self.memory.read(self.at))


@dataclass(frozen=True)
class Load:
    """Of TMA, under way: done by the wait for it."""

    into: Buffer
    block: Tensor

    def start(self) -> None:
        assert self.block.shape == self.into.at.shape, "a buffer of another shape than the block"
        self.into.memory.start_load(self.into.at)

    def end(self) -> None:
        self.into.memory.end_load(self.into.at, self.block)


@dataclass
class Barrier:
    """An mbarrier. coming: loads of the phase under way; came: of phases that were completed, and
    not waited for.
    """

    count: int
    changed: threading.Condition
    phase: int = 0
    left: int = 0
    num_bytes: int = 0
    coming: list[Load] = field(default_factory=list)
    came: list[Load] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.count

    def add(self, arrivals: int, num_bytes: int, loads: Sequence[Load] = ()) -> None:
        with self.changed:
            self.left -= arrivals
            self.num_bytes += num_bytes
            self.coming += loads
            assert self.left >= 0, "more arrivals than a phase has"
            if self.left == 0 and self.num_bytes == 0:
                self.phase, self.left = self.phase ^ 1, self.count
                self.came, self.coming = self.came + self.coming, []
            self.changed.notify_all()

    def wait(self, parity: int, longest_s: float) -> None:
        with self.changed:
            there = self.changed.wait_for(lambda: self.phase != parity, longest_s)
            assert there, "a wait that nobody ends"
            for load in self.came:
                load.end()
            self.came = []

    def check_end(self) -> None:
        assert not self.num_bytes, "bytes that an mbarrier expects and that never came"
        assert not self.came, "a load that nobody waited for"


@dataclass
class Product:
    """Under way: done by the wait for it. acc: of results or, before it is done, what it adds to,
    which may be a product before it.
    """

    a: Any
    b: Buffer
    acc: Any
    adds: bool
    done: bool = False

    @property
    def read(self) -> list[Buffer]:
        return [x for x in (self.a, self.b) if isinstance(x, Buffer)]

    def start(self) -> None:
        for buffer in self.read:
            buffer.memory.start_reading(buffer.at)

    def run(self) -> None:
        a, b = (x.load(None) if isinstance(x, Buffer) else x for x in (self.a, self.b))
        found = a.float() @ b.float()
        acc = self.acc.acc if isinstance(self.acc, Product) else self.acc
        self.acc = tile(acc + found if self.adds else found)
        self.done = True

    def end_reading(self) -> None:
        for buffer in self.read:
            buffer.memory.end_reading(buffer.at)


@dataclass
class Own:
    """Of a thread: its products under way, the oldest first, and those that are done, but maybe not
    for all warps of its partition.
    """

    pending: list[Product] = field(default_factory=list)
    done: list[Product] = field(default_factory=list)


@dataclass
class Program:
    """One program of a launch. is_alone: what was in front of the kernel has ended."""

    ids: Sequence[int]
    grid: Sequence[int]
    is_alone: bool
    threads: list[Callable[[], object]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    local: threading.local = field(default_factory=threading.local)
    owns: list[Own] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    scopes: dict[int, dict[str, Any]] = field(default_factory=dict)

    def check(self, read: Pointer | Descriptor) -> None:
        assert self.is_alone or read.early, "what is in front of the kernel may write what is read"

    def language(self) -> SimpleNamespace:
        """What `gl` is to the kernel, and `tl` to functions of both."""

        def load(
            pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = ""
        ) -> Number | Tile:
            self.check(pointer)
            if not isinstance(pointer.at, Tensor):
                assert mask is None
                return Number(pointer.memory[int(pointer.at)])
            at, inside = plain(pointer.at, as_mask(True if mask is None else mask))
            found = torch.full(at.shape, other, dtype=pointer.memory.dtype)
            found[inside] = pointer.memory[checked(at[inside])]
            return tile(found)

        def atomic_add(pointer: Pointer, value: int, sem: str) -> Number | Tile:
            with ATOMIC:
                found = load(pointer)
                pointer.memory[int(pointer.at)] += value
            return found

        def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
            self.check(pointer)
            at, value, mask = plain(pointer.at, value, as_mask(mask))
            pointer.memory[checked(at[mask])] = value[mask]

        def checked(at: Tensor) -> Tensor:
            assert bool((at >= 0).all()), "memory before a tensor"
            return at

        def full(shape: Sequence[int], value: float, dtype: object, layout: object) -> Tile:
            return tile(torch.full(tuple(map(int, shape)), value, dtype=TORCH_TYPES[dtype]))

        def total(x: Tensor, dim: int) -> Tensor | Number:
            found = x.sum(dim)
            return found if found.dim() else Number(found)

        def limit(name: str, x: Any, y: Any, propagate_nan: object = None) -> Number | Tile:
            found = getattr(torch, name)(torch.as_tensor(x), torch.as_tensor(y))
            return tile(found) if found.dim() else Number(found)

        def where(mask: Any, x: Any, y: Any) -> Tile:
            mask = as_mask(mask)
            x = x if isinstance(x, Tensor) else torch.tensor(x)
            y = y if isinstance(y, Tensor) else torch.as_tensor(y).to(x.dtype)
            return tile(torch.where(mask, x, y))

        names: dict[str, Any] = {
            **{name: getattr(gluon_language, name) for name in TYPES},
            **{name: getattr(torch, name) for name in FUNCTIONS},
            "program_id": lambda axis: Number(self.ids[axis]),
            "num_programs": lambda axis: Number(self.grid[axis]),
            "allocate_shared_memory": Buffer.allocate,
            "warp_specialize": lambda parts, warps, registers: self.threads.extend(
                partial(function, *given) for function, given in parts
            ),
            "static_range": range,
            "static_assert": check_static,
            "arange": lambda first, last, layout: tile(torch.arange(first, int(last))),
            "expand_dims": lambda x, dim: x.unsqueeze(dim),
            "convert_layout": self.convert_layout,
            "cast": lambda x, dtype: tile(torch.as_tensor(x)).to(dtype),
            "where": where,
            "max": lambda x, dim: x.max(dim).values,
            "sum": total,
            "maximum": partial(limit, "maximum"),
            "minimum": partial(limit, "minimum"),
            "join": lambda x, y: tile(torch.stack((x, y), -1)),
            "sqrt_rn": torch.sqrt,
            "full": full,
            "zeros": lambda shape, dtype, layout: full(shape, 0.0, dtype, layout),
            "load": load,
            "store": store,
            "atomic_add": atomic_add,
            "constexpr": None,
        }
        names |= dict.fromkeys(LAYOUTS, nothing)
        names["PropagateNan"] = SimpleNamespace(ALL=None)
        return SimpleNamespace(**names)

    def make_barriers(self, number: int, arrivals: int = 1) -> SimpleNamespace:
        made = [Barrier(int(arrivals), self.changed) for _ in range(number)]
        self.barriers += made
        return SimpleNamespace(index=made.__getitem__)

    def expect(self, bar: Barrier, num_bytes: int, pred: object = True) -> None:
        if pred:
            bar.add(1, int(num_bytes))

    def arrive(self, bar: Barrier, count: int = 1) -> None:
        """When all warps of the partition have come here."""
        self.end_reading()
        bar.add(count, 0)

    def wait(self, bar: Barrier, parity: int) -> None:
        """Where there is no other thread, what has not come does not come."""
        bar.wait(int(parity), LONGEST_WAIT_S if self.threads else 0.0)

    def wait_for_front(self) -> None:
        self.is_alone = True

    def tma_load(self, source: Descriptor, at: Sequence[int], bar: Barrier, into: Buffer,
                 pred: object = True) -> None:  # fmt: skip
        if pred:
            self.check(source)
            top, left = map(int, at)
            load = Load(into, source.block(top, left, into.at.shape[-1]))
            load.start()
            bar.add(0, -load.block.numel() * load.block.element_size(), [load])

    def start_product(
        self, a: Any, b: Buffer, acc: Any, use_acc: Any = True, is_async: bool = False
    ) -> Product:
        assert is_async
        found = Product(a, b, acc, bool(use_acc))
        found.start()
        self.own.pending.append(found)
        return found

    @property
    def own(self) -> Own:
        """This thread's."""
        if not hasattr(self.local, "own"):
            self.local.own = Own()
            self.owns.append(self.local.own)
        found: Own = self.local.own
        return found

    def wait_products(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        """Those that are still under way stay products, of which nothing else makes anything."""
        while len(self.own.pending) > num_outstanding:
            self.own.done.append(self.own.pending.pop(0))
            self.own.done[-1].run()
        found = tuple(x.acc if isinstance(x, Product) and x.done else x for x in deps)
        return found[0] if len(found) == 1 else found

    def end_reading(self) -> None:
        """All warps of the thread's partition have come here: its products' operands are free."""
        for each in self.own.done:
            each.end_reading()
        self.own.done = []

    def convert_layout(self, x: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
        """Through shared memory, which may be that of buffers whose last readers were products; not
        where nothing moves.
        """
        read = not assert_trivial and (self.own.pending or self.own.done)
        assert not read, "a product still reads memory that values may go through"
        return x

    def check_end(self) -> None:
        for bar in self.barriers:
            bar.check_end()
        assert not any(own.pending for own in self.owns), "products that nobody waited for"

    def scope(self, names: dict[str, Any]) -> dict[str, Any]:
        """A module's names, its functions and those that it imports bound to what stands in for the
        GPU.
        """
        if id(names) in self.scopes:
            return self.scopes[id(names)]
        found = self.scopes[id(names)] = {"min": min, "max": max}
        for name, value in names.items():
            if isinstance(value, JITFunction):
                own = self.scope(value.fn.__globals__)
                found[name] = FunctionType(value.fn.__code__, own, name, value.fn.__defaults__)
            else:
                found[name] = value.value if isinstance(value, constexpr) else value
        language = self.language()
        found |= {
            "gl": language,
            "tl": language,
            "libdevice": language,
            "mbarrier": SimpleNamespace(wait=self.wait, arrive=self.arrive, expect=self.expect),
            "make_barriers": self.make_barriers,
            "tma_load": self.tma_load,
            "reinterpret": Buffer.reinterpret,
            "warpgroup_mma": self.start_product,
            "warpgroup_mma_wait": self.wait_products,
            "mma_v2": lambda a, b, acc: tile(a.float() @ b.float() + acc),
            "fence_async_shared": nothing,
            "cta_barrier": self.end_reading,
            "gdc_wait": self.wait_for_front,
            "gdc_launch_dependents": nothing,
        }
        return found


def run_kernel(
    kernel: JITFunction[Any],
    grid: Sequence[int],
    arguments: Mapping[str, object],
    early: Collection[str] | None = None,
) -> None:
    """All programs. arguments: tensors, descriptors of them, numbers, what the kernel is
    specialised for. early: which of them may be read before what is in front of the kernel has
    ended; None where that has ended before.
    """
    parts: list[Callable[[], object]] = []
    programs = [Program(ids, grid, early is None) for ids in product(*map(range, grid))]
    given = {name: given_as(x, name in (early or ())) for name, x in arguments.items()}
    with one_torch_thread():
        for program in programs:
            program.scope(kernel.fn.__globals__)[kernel.fn.__name__](**given)
            parts += program.threads
        run_at_once(parts)
    for program in programs:
        program.check_end()


def named_arguments(
    kernel: JITFunction[Any], arguments: Sequence[object], options: Mapping[str, object]
) -> dict[str, Any]:
    """Of ahead.launch, by name; without Triton's own options, as num_warps."""
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    return {name: named[name] for name in kernel.arg_names}


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For small tensors: several spin while they wait for each other, where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def given_as(value: object, early: bool) -> object:
    """What stands for an argument in the kernel."""
    match value:
        case Tensor():  # of any strides, which are arguments of their own
            whole = value.new_empty(0).set_(value.untyped_storage())
            return Pointer(whole, value.storage_offset(), early)
        case TensorDescriptor(base=matrix, block_shape=(rows, _), layout=layout):
            return Descriptor(matrix, rows, layout, early)
        case bool():
            return value
        case int():
            return Number(value)
        case tuple():
            return tuple(given_as(x, early) for x in value)
        case _:
            return value
