"""Kernels compiled once for a class of operands, then launched with little work on the host.

In: a kernel, how each tensor becomes an argument, the other arguments. Out: `Launch`, a call over
tensors, and `LaunchFamily`, the launches among which a class of operands chooses. Next:
../runtime/ahead.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from distmega.kernels.pipelined.blocks import tile_layout_of
from distmega.kernels.pipelined.choices import KernelChoice
from distmega.kernels.pipelined.tuning import known_choice, pick, version
from distmega.kernels.runtime.ahead import compiling, launches_nothing

NUM_DESCRIPTORS = 8192
"""Addresses and tiles whose descriptors are kept; each takes less than 1 KB."""


class _Address:
    """Start of a tensor as a descriptor takes it; keeps no memory alive."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=NUM_DESCRIPTORS)
def _describe(address: int, dtype: torch.dtype, block: "Block") -> TensorDescriptor:
    layout = tile_layout_of(block.tile, dtype)
    sizes = list(block.shape), list(block.strides), list(block.tile)
    return TensorDescriptor(_Address(address, dtype), *sizes, layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A tensor that tiles come from or leave to by TMA, seen with shape and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    def __call__(self, x: Tensor) -> TensorDescriptor:
        return _describe(x.data_ptr(), x.dtype, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """A tensor as `length` neighbouring elements; copied where it has another step."""

    length: int
    step: int

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.step == 1 else x.as_strided((self.length,), (self.step,)).contiguous()


def pointer(x: Tensor) -> Tensor:
    """A tensor by its address."""
    return x


Argument = Callable[[Tensor], object]


def _taker(argument: Argument) -> Argument:
    """What gives a compiled kernel its argument: an address where it takes a tensor as it is."""
    plain = argument is pointer or (isinstance(argument, Vector) and argument.step == 1)
    return Tensor.data_ptr if plain else argument


@dataclass(slots=True, kw_only=True)
class Launch:
    """A kernel for tensors of one class: the same shapes, strides, types, alignments and device.

    arguments: how each tensor becomes an argument, in the kernel's order. rest: the arguments after
    them. grid: programs. options: of the compiler. It launches with addresses: of a tensor, Triton
    would ask the driver whether it can be reached from the device.
    """

    kernel: triton.JITFunction
    arguments: Sequence[Argument]
    rest: tuple[object, ...]
    grid: int
    options: dict[str, object]
    _compiled: CompiledKernel | triton.FutureKernel | None = None
    _run: Callable[..., object] | None = None
    _takers: Sequence[Argument] = ()

    def prepare(self, tensors: Sequence[Tensor | None]) -> CompiledKernel | triton.FutureKernel:
        """Compiles, or starts to within `compiling`."""
        args = (*self._arguments(tensors), *self.rest)
        options = {"enable_fp_fusion": True, **self.options}
        self._compiled = self.kernel.warmup(*args, grid=(self.grid,), **options)
        return self._compiled

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        if launches_nothing():
            if self._run is None:
                self.prepare(tensors)
            return
        if self._run is None:
            self._run = self._loaded(tensors)
        given = zip(self._takers, tensors, strict=True)
        self._run(*[None if x is None else take(x) for take, x in given], *self.rest)

    def _arguments(self, tensors: Sequence[Tensor | None]) -> list[object]:
        return [
            None if x is None else argument(x)
            for argument, x in zip(self.arguments, tensors, strict=True)
        ]

    def _loaded(self, tensors: Sequence[Tensor | None]) -> Callable[..., object]:
        found = self._compiled or self.prepare(tensors)
        kernel = found.result() if isinstance(found, triton.FutureKernel) else found
        run: Callable[..., object] = kernel[(self.grid, 1, 1)]
        self._takers = [_taker(argument) for argument in self.arguments]
        return run


@dataclass(slots=True, kw_only=True)
class LaunchPair:
    """Two launches, one behind the other, of the tensors by their numbers and of fp32 memory for
    `between` elements, which the first writes and the second reads.
    """

    launches: tuple[Launch, Launch]
    tensors: tuple[tuple[int, ...], tuple[int, ...]]
    between: int

    def prepare(self, tensors: Sequence[Tensor | None]) -> None:
        """As Launch's."""
        for launch, given in self._given(tensors):
            launch.prepare(given)

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        for launch, given in self._given(tensors):
            launch(given)

    def _given(
        self, tensors: Sequence[Tensor | None]
    ) -> Iterator[tuple[Launch, Sequence[Tensor | None]]]:
        device = next(x.device for x in tensors if x is not None)
        between = torch.empty(self.between, dtype=torch.float32, device=device)
        for launch, numbers in zip(self.launches, self.tensors, strict=True):
            yield launch, [*(tensors[n] for n in numbers), between]


class LaunchFamily:
    """Launches for one class of operands: `choices`, best first by the model; `run` takes the one
    that was measured best, or the first.
    """

    __slots__ = ("_chosen", "_launches", "_make", "_version", "choices", "name")

    def __init__(
        self,
        name: str,
        choices: Sequence[KernelChoice],
        make: Callable[[KernelChoice], Launch | LaunchPair],
    ) -> None:
        """name: the shape class, under which tuning.py keeps the choice."""
        self.name, self.choices, self._make = name, choices, make
        self._launches: dict[KernelChoice, Launch | LaunchPair] = {}
        self._chosen: Launch | LaunchPair | None = None
        self._version = -1

    def launch(self, choice: KernelChoice) -> Launch | LaunchPair:
        """The launch of one choice, compiled when first called."""
        if choice not in self._launches:
            self._launches[choice] = self._make(choice)
        return self._launches[choice]

    def prepare(self, choices: Sequence[KernelChoice], tensors: Sequence[Tensor | None]) -> None:
        """Compiles launches of several choices at once."""
        with compiling(len(choices)):
            for choice in choices:
                self.launch(choice).prepare(tensors)

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launches on the tensors' device, which the caller has made the current one."""
        if launches_nothing():  # nor measures
            self.launch(known_choice(self.name, self.choices))(tensors)
            return
        if self._version != version():
            choice = pick(
                self.name,
                self.choices,
                prepare=lambda choices: self.prepare(choices, tensors),
                run=lambda choice: self.launch(choice)(tensors),
            )
            self._chosen, self._version = self.launch(choice), version()
        assert self._chosen is not None, "chosen with the version"
        self._chosen(tensors)
