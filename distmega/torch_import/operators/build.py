"""Build: a ProgramBuilder with what rules need at hand, in terms of captured values.

In: values (values.py) and what torch says of a node's result. Out: values; ops are added to the
program on the way, named after the module and node they come from. Next on the walk: table.py.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distmega.errors import CaptureError, ProgramError
from distmega.hostir.library.torch_types import HOLDERS, dtype_name, hold, torch_dtype
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.dtypes import HALVES, ITEM_BYTES
from distmega.program.types import KNOWN
from distmega.torch_import.operators.values import (
    Constant,
    Foreign,
    Spread,
    TensorValue,
    Value,
    is_float,
    uniform_value,
    value_dtype,
)

LARGEST_WHOLE = 2**53
"""Whole numbers up to this are exact in an expression."""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What torch says of one result of a node."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Build:
    """A program under construction.

    constants: tensors by the name of their weight. results: those of the node at hand. base: what
    its ops are called.
    """

    p: ProgramBuilder
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    results: tuple[NodeResult, ...] = ()
    base: str = ""
    _num_ops: int = 0

    def start(self, base: str, results: Sequence[NodeResult]) -> None:
        """Begins a node."""
        self.base, self.results, self._num_ops = base, tuple(results), 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the node's first result."""
        return self.results[0].shape

    @property
    def dtype(self) -> str:
        """Of the node's first result."""
        return self.results[0].dtype

    def name(self) -> str:
        """A name for an op of the node that nothing has, the module's own tensors among it."""
        name = ""
        while not name or self.p.is_taken(name):
            name = f"{self.base}@{self._num_ops}" if self._num_ops else self.base
            self._num_ops += 1
        return name

    def handle(self, value: Value) -> Handle:
        """A value as a tensor of the program: a constant becomes a weight, a Spread is expanded."""
        if isinstance(value, Handle):
            return value
        if isinstance(value, Spread):
            return self.p.expand(value.source, value.shape, name=self.name())
        if isinstance(value, bool | int | float):
            return self.handle(Constant(torch.tensor(value)))
        assert isinstance(value, Constant), value
        return self.constant(value.tensor)

    def held(self, value: Value) -> tuple[Value, str]:
        """A tensor in an element type of programs, and torch's name of its own where it is another.
        CaptureError for a sparse constant.
        """
        if isinstance(value, Foreign):
            return value.held, value.dtype
        if isinstance(value, Constant) and value.tensor.dtype in HOLDERS:
            require_dense(value.tensor, f"a constant of {self.base}")
            return Constant(hold(value.tensor.detach())), str(value.tensor.dtype)
        return value, ""

    def constant(self, tensor: torch.Tensor) -> Handle:
        """A weight that holds a known tensor, named by what it holds, so that programs can share
        it; one number is stored once. CaptureError for a sparse one.
        """
        require_dense(tensor, f"a constant of {self.base}")
        shape = tuple(tensor.shape)
        number = uniform_value(Constant(tensor))
        if number is not None and tensor.numel() > 1:
            one = self.constant(tensor.flatten()[:1].reshape([1] * len(shape)).clone())
            return self.p.expand(one, shape, name=self.name())
        tensor = torch.empty(shape, dtype=tensor.dtype).copy_(tensor.detach())
        dtype = require_dtype(dtype_name(tensor.dtype), self.base)
        name = constant_name(tensor)
        self.constants[name] = tensor
        return self.p.weight(name, shape, dtype)

    def pointwise(
        self, text: str, *operands: Value, dtype: str = "", shape: tuple[int, ...] | None = None
    ) -> TensorValue:
        """An expression with operands in place of {0}, {1} ...; numbers are written into it.

        dtype, shape: of the result, by default those of the node.
        """
        if not dtype:
            compares = self.dtype == "bool" and len(operands) == 2
            operands = self._compared(*operands) if compares else self._promoted(operands)
        words, handles = [], list[Handle]()
        for operand in operands:
            number = uniform_value(operand)
            if isinstance(number, float) or (number is not None and abs(number) <= LARGEST_WHOLE):
                words.append(number_text(number))
                continue
            found = operand.source if isinstance(operand, Spread) else self.handle(operand)
            words.append(f"a{len(handles)}")
            handles.append(found)
        assert handles, f"{text} of constants alone"
        dtype = require_dtype(dtype or self.dtype, self.base)
        made = self.p.pointwise(text.format(*words), *handles, dtype=dtype, name=self.name())
        return self.spread(made, self.shape if shape is None else shape)

    def spread(self, value: Handle, shape: Sequence[int]) -> Handle | Spread:
        """A handle as if repeated to `shape`."""
        return value if value.shape == tuple(shape) else Spread(value, tuple(shape))

    def cast(self, value: TensorValue, dtype: str) -> TensorValue:
        """A tensor in another element type."""
        if value_dtype(value) == dtype:
            return value
        if isinstance(value, Constant):
            return Constant(value.tensor.to(torch_dtype(dtype)))
        text = "{0}" if dtype != "bool" else "1 - eq({0}, 0)"
        if dtype in ("i32", "i64") and value_dtype(value) in ("f32", "f64", "f16", "bf16"):
            text = "where(lt({0}, 0), -floor(-{0}), floor({0}))"
        return self.pointwise(text, value, dtype=dtype, shape=value.shape)

    def reshape(self, value: TensorValue, shape: Sequence[int]) -> TensorValue:
        """The same elements in row-major order; shares storage where strides allow it."""
        shape = tuple(shape)
        if value.shape == shape:
            return value
        if isinstance(value, Constant):
            return Constant(value.tensor.reshape(shape))
        if isinstance(value, Spread):
            found = self._reshaped_spread(value, shape)
            if found is not None:
                return found
        x = self.handle(value)
        try:
            return self._viewed(lambda view: self.p.reshape(x, shape, view=view, name=self.name()))
        except ProgramError:
            flat = self._viewed(
                lambda view: self.p.reshape(x, (math.prod(shape),), view=view, name=self.name())
            )
            return self.p.reshape(flat, shape, view=True, name=self.name())

    def _reshaped_spread(self, value: Spread, shape: tuple[int, ...]) -> Spread | None:
        """A spread whose repeated dims stay as they are, with dims of extent 1 put in or out."""
        source = (1,) * (len(value.shape) - len(value.source.shape)) + value.source.shape
        kept = [(mine, whole) for mine, whole in zip(source, value.shape, strict=True) if whole > 1]
        if [extent for extent in shape if extent > 1] != [whole for _, whole in kept]:
            return None
        left = iter(kept)
        wanted = [next(left)[0] if extent > 1 else 1 for extent in shape]
        return Spread(self.handle(self.reshape(value.source, wanted)), shape)

    def transpose(self, value: TensorValue, order: Sequence[int]) -> TensorValue:
        """Dims in a new order."""
        if list(order) == list(range(len(value.shape))):
            return value
        if isinstance(value, Constant):
            return Constant(value.tensor.permute(*order))
        if isinstance(value, Spread):
            front = len(value.shape) - len(value.source.shape)
            source = self.reshape(value.source, (1,) * front + value.source.shape)
            turned = self.handle(self.transpose(source, order))
            return Spread(turned, tuple(value.shape[dim] for dim in order))
        return self.p.transpose(value, order, view=True, name=self.name())

    def to_last(self, value: TensorValue, dim: int) -> TensorValue:
        """The tensor with one dim moved behind the others."""
        rank = len(value.shape)
        return self.transpose(value, [*(n for n in range(rank) if n != dim % rank), dim % rank])

    def from_last(self, value: TensorValue, dim: int) -> TensorValue:
        """The tensor with its last dim moved to place `dim`; undoes to_last."""
        rank = len(value.shape)
        order = list(range(rank - 1))
        order.insert(dim % rank, rank - 1)
        return self.transpose(value, order)

    def slice(
        self, value: TensorValue, dim: int, start: int, stop: int, step: int = 1
    ) -> TensorValue:
        """value[start:stop:step] along a dim, bounds as Python clips them."""
        dim %= len(value.shape)
        start, stop, step = slice(start, stop, step).indices(value.shape[dim])
        if (start, stop, step) == (0, value.shape[dim], 1):
            return value
        if isinstance(value, Constant):
            return Constant(value.tensor[(slice(None),) * dim + (slice(start, stop, step),)])
        if isinstance(value, Spread):
            behind = dim - len(value.shape) + len(value.source.shape)
            length = len(range(start, stop, step))
            shape = tuple(length if n == dim else e for n, e in enumerate(value.shape))
            if behind < 0 or value.source.shape[behind] == 1:
                return Spread(value.source, shape)
            source = self.handle(self.slice(value.source, behind, start, stop, step))
            return self.spread(source, shape)
        return self.p.slice(value, dim, start, stop, step, view=True, name=self.name())

    def expand(self, value: TensorValue, shape: Sequence[int]) -> TensorValue:
        """The tensor repeated to a shape it broadcasts to."""
        if isinstance(value, Constant):
            return Constant(value.tensor.expand(tuple(shape)))
        source = value.source if isinstance(value, Spread) else value
        return self.spread(source, shape)

    def rows(self, table: TensorValue, ids: TensorValue) -> TensorValue:
        """table[ids] along dim 0, of ids of any shape."""
        width = math.prod(table.shape[1:])
        flat = self.handle(self.reshape(ids, (math.prod(ids.shape),)))
        matrix = self.handle(self.reshape(table, (table.shape[0], width)))
        found = self.p.embedding(flat, matrix, name=self.name())
        return self.reshape(found, (*ids.shape, *table.shape[1:]))

    def linear(
        self, x: TensorValue, w: TensorValue, bias: TensorValue | None = None, spec: str = ""
    ) -> Handle:
        """See ProgramBuilder.linear."""
        operand = None if bias is None else self.handle(bias)
        return self.p.linear(self.handle(x), self.handle(w), operand, spec, name=self.name())

    def _promoted(self, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        """Operands in the type of the node's result, where that is a float of more digits than
        those that are no plain numbers have: torch converts them before it computes. Whole numbers
        beside halves lose digits so.
        """
        left = [each for each in operands if isinstance(each, TensorValue)]
        types = {value_dtype(each) for each in left if uniform_value(each) is None}
        enough = "f64" in types if self.dtype == "f64" else any(map(is_float, types))
        if enough and self.dtype in HALVES:
            return tuple(self._rounded(each) for each in operands)
        if not is_float(self.dtype) or enough:
            return operands
        return tuple(
            self._converted(each, self.dtype) if isinstance(each, TensorValue) else each
            for each in operands
        )

    def _rounded(self, value: Value) -> Value:
        """Whole numbers in the node's halves; one of no dim is computed with as it is."""
        if not isinstance(value, TensorValue) or uniform_value(value) is not None:
            return value
        is_rounded = value.shape and value_dtype(value) in ("i32", "i64")
        return self.cast(value, self.dtype) if is_rounded else value

    def _compared(self, x: Value, y: Value) -> tuple[Value, ...]:
        """Two operands in the type in which torch compares them."""
        operands = (x, y)
        common = dtype_name(torch.result_type(_like(x), _like(y)))
        if not is_float(common):
            return operands
        return tuple(
            self._converted(each, common)
            if isinstance(each, TensorValue)
            else torch.tensor(each, dtype=torch_dtype(common)).item()
            for each in operands
        )

    def _converted(self, value: TensorValue, dtype: str) -> TensorValue:
        """A tensor in a type of floats, unless it is computed with as in that type anyhow."""
        found = value_dtype(value)
        is_same = found == "bool" or (found in HALVES and dtype == "f32")
        return value if is_same else self.cast(value, dtype)

    def _viewed(self, make: Callable[[bool], Handle]) -> Handle:
        """As a view where that is possible, otherwise as a copy."""
        try:
            return make(True)
        except ProgramError:
            return make(False)


def _like(value: Value) -> Any:
    """A tensor of that shape and type without values; a number as it is."""
    if isinstance(value, bool | int | float):
        return value
    assert isinstance(value, TensorValue), value
    return torch.empty(value.shape, dtype=torch_dtype(value_dtype(value)), device="meta")


def constant_name(tensor: torch.Tensor) -> str:
    """Of a weight that holds a known tensor, which is contiguous: equal ones have one name."""
    what = f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}".encode()
    content = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    return f"{KNOWN}{hashlib.sha256(what + content).hexdigest()[:12]}"


def number_text(number: float | int | bool) -> str:
    """A number as an expression."""
    if isinstance(number, float) and math.isnan(number):
        return "(log(0) - log(0))"
    if number == math.inf:
        return "(-log(0))"
    if number == -math.inf:
        return "log(0)"
    return f"({float(number)!r})"


def require_dense(tensor: torch.Tensor, name: str) -> None:
    """CaptureError for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name} is a {str(tensor.layout).removeprefix('torch.')} tensor",
            expected="dense tensors",
            remedy="use to_dense() before, or keep this part out of what is captured",
        )


def require_dtype(dtype: str, where: str) -> str:
    """The dtype. CaptureError for one that programs can't hold."""
    if dtype not in ITEM_BYTES:
        raise CaptureError(
            f"{where!r} gives a tensor of {dtype}",
            expected=f"one of {', '.join(ITEM_BYTES)}",
            remedy="convert it in the module, or keep this part out of what is captured",
        )
    return dtype
