"""Which elements an element is made of: followed back through the access maps of ops.

In: a draft, and the input that holds positions. Out: for elements of a tensor the terms
factor * element of one source tensor that they are sums of, and the values of elements that depend
on positions alone, for every position. Used by rotations.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from distmega.hostir.library.pointwise import pointwise
from distmega.hostir.library.torch_types import torch_dtype
from distmega.program import expr
from distmega.program.dtypes import HALVES
from distmega.program.kinds import kind_of
from distmega.program.types import Access, Op
from distmega.torch_import.forms.draft import Draft

Ints = NDArray[np.int64]
Coords = tuple[Ints, ...]
"""Of elements of a tensor, an array a dim."""

MAX_TERMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementTerm:
    """coefficient * factor * source, element by element. positions: in the source, row-major.
    factor: a tensor that depends on positions alone, "" for 1; coords: of its elements.
    """

    coefficient: NDArray[np.float64]
    positions: Ints
    factor: str = ""
    coords: Coords = ()


@dataclass(slots=True)
class Elements:
    """Follows elements. num_positions: values of positions are looked at up to this. same: tensor
    that depends on positions alone -> the first one that is computed like it.
    """

    draft: Draft
    positions: str
    num_positions: int
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    producers: dict[str, Op] = field(init=False)
    by_position: set[str] = field(init=False)
    same: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = self.draft.producers()
        self.by_position = {self.positions}
        firsts: dict[object, str] = {}
        for op in self.draft.ops:
            names = {read.tensor for read in op.reads}
            known = {name for name in names if name in self.constants}
            traced = kind_of(op).only_copies or kind_of(op).is_elementwise
            if traced and names & self.by_position and names <= self.by_position | known:
                self.by_position.update(write.tensor for write in op.writes)
                reads = tuple(
                    replace(read, tensor=self.same.get(read.tensor, read.tensor))
                    for read in op.reads
                )
                for write in op.writes:
                    what = op.kind, op.axes, op.attrs, reads, write.dims
                    self.same[write.tensor] = firsts.setdefault(what, write.tensor)

    def base(self, name: str) -> str:
        """The tensor below views."""
        while (op := self.producers.get(name)) is not None and op.is_view:
            name = op.reads[0].tensor
        return name

    def trace(self, name: str, coords: Coords) -> tuple[str, list[ElementTerm]] | None:
        """The source of elements and their terms; None for elements of positions alone."""
        if name in self.by_position:
            return None
        op = self.producers.get(name)
        found = None
        if op is not None and kind_of(op).only_copies:
            found = self.moved(op, coords)
        elif op is not None and kind_of(op).is_elementwise:
            found = self.combined(op, coords)
        if found is not None and len(found[1]) <= MAX_TERMS:
            return found
        shape = self.draft.tensors[name].shape
        positions = np.ravel_multi_index(coords, shape) if shape else np.zeros_like(coords[0])
        return name, [ElementTerm(coefficient=np.ones(len(positions)), positions=positions)]

    def moved(self, op: Op, coords: Coords) -> tuple[str, list[ElementTerm]] | None:
        """Through an op that moves elements."""
        parts = []
        for read in op.reads:
            at, inside = self.operand(op, read, coords)
            found = self.trace(read.tensor, at)
            if found is None:
                return None
            terms = [replace(term, coefficient=term.coefficient * inside) for term in found[1]]
            parts.append((found[0], [term for term in terms if term.coefficient.any()]))
        parts = [part for part in parts if part[1]]
        if len({source for source, _ in parts}) != 1:
            return None
        return parts[0][0], [term for _, terms in parts for term in terms]

    def combined(self, op: Op, coords: Coords) -> tuple[str, list[ElementTerm]] | None:
        """Through an expression that is linear in one source."""
        operands = [(read.tensor, self.operand(op, read, coords)[0]) for read in op.reads]
        found = self.linear(expr.parse(str(op.attr("expr"))), operands)
        if not isinstance(found, list) or not found:
            return None
        sources = {source for source, _ in found}
        return (sources.pop(), [term for _, term in found]) if len(sources) == 1 else None

    def linear(
        self, tree: expr.Expr, operands: Sequence[tuple[str, Coords]]
    ) -> list[tuple[str, ElementTerm]] | tuple[str, Coords] | float | None:
        """Terms, an element of positions alone, a number, or None for what is no sum of terms."""
        match tree:
            case expr.Const(value):
                return float(value)
            case expr.Arg(index):
                name, coords = operands[index]
                if name in self.by_position:
                    return self.same.get(name, name), coords
                traced = self.trace(name, coords)
                return [(traced[0], term) for term in traced[1]] if traced else None
        parts = [self.linear(part, operands) for part in tree.args]
        if any(part is None for part in parts):
            return None
        match tree.fn, parts:
            case "neg", [list() as terms]:
                return _scaled(terms, -1.0)
            case ("add" | "sub") as fn, [list() as first, list() as second]:
                return first + (second if fn == "add" else _scaled(second, -1.0))
            case "mul", [list() as terms, float() as number]:
                return _scaled(terms, number)
            case "mul", [float() as number, list() as terms]:
                return _scaled(terms, number)
            case "mul", [list() as terms, tuple() as factor]:
                return _multiplied(terms, factor)
            case "mul", [tuple() as factor, list() as terms]:
                return _multiplied(terms, factor)
        return None

    def operand(self, op: Op, read: Access, coords: Coords) -> tuple[Coords, NDArray[np.bool_]]:
        """Elements of an operand for those of a result, and whether these take one of it."""
        axes: dict[str, Ints] = {}
        for index, at in zip(op.writes[0].dims, coords, strict=True):
            left = (at - index.offset) // index.stride
            for name in reversed(index.axes):
                extent = op.axis(name).extent
                axes[name], left = left % extent, left // extent
        inside = np.ones(len(coords[0]) if coords else 1, dtype=bool)
        found = []
        shape = self.draft.tensors[read.tensor].shape
        for index, extent in zip(read.dims, shape, strict=True):
            at = np.zeros(len(inside), dtype=np.int64)
            for name in index.axes:
                at = at * op.axis(name).extent + axes.get(name, 0)
            at = at * index.stride + index.offset
            inside &= (at >= 0) & (at < extent)
            found.append(np.clip(at, 0, extent - 1))
        return tuple(found), inside

    def values_of(self, term: ElementTerm, part: slice, row: int) -> torch.Tensor | None:
        """coefficient * factor of some elements at every position, [elements, positions] in fp32;
        None if they depend on another row's position.
        """
        scale = torch.from_numpy(term.coefficient[part]).float()[:, None]
        if not term.factor:
            return scale.expand(-1, self.num_positions).clone()
        values = self.values(term.factor, tuple(at[part] for at in term.coords), row)
        return None if values is None else values * scale

    def values(self, name: str, coords: Coords, row: int) -> torch.Tensor | None:
        """Elements of a tensor at every position."""
        if name == self.positions:
            if (coords[0] != row).any():
                return None
            return torch.arange(self.num_positions).expand(len(coords[0]), -1)
        if name in self.constants:
            positions = tuple(torch.from_numpy(each) for each in coords)
            return self.constants[name][positions][:, None].expand(-1, self.num_positions)
        op = self.producers[name]
        operands = []
        for read in op.reads:
            at, inside = self.operand(op, read, coords)
            found = self.values(read.tensor, at, row)
            if found is None:
                return None
            operands.append((found, torch.from_numpy(inside)[:, None]))
        if not kind_of(op).is_elementwise:
            total = operands[0][0]
            for values, taken in operands[1:]:
                total = torch.where(taken, values, total)
            return total
        dtype = self.draft.tensors[name].dtype
        wide = torch.float32 if dtype in HALVES else torch_dtype(dtype)
        tree = expr.parse(str(op.attr("expr")))
        made: torch.Tensor = pointwise(tree, [x for x, _ in operands], wide)
        return made


Terms = list[tuple[str, ElementTerm]]


def _scaled(terms: Terms, number: float) -> Terms:
    return [(s, replace(term, coefficient=term.coefficient * number)) for s, term in terms]


def _multiplied(terms: Terms, factor: tuple[str, Coords]) -> Terms | None:
    if any(term.factor for _, term in terms):
        return None
    return [(s, replace(term, factor=factor[0], coords=factor[1])) for s, term in terms]
