"""Attention that a module wrote out, of one row or of rows with caches each, as the op that
programs state, with what it adds to scores in a table.

In: a draft. Scores are a product of queries and cached keys; what stands between it and the softmax
must be linear in it, and is worked out for every position: a table of positions and heads of what
is seen, the lowest numbers for the rest. All rows must be treated alike, each by its own position.
Rows of prompts stay as they are. Used by normalise; next on the walk: rotations.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor as Values

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.ops import data_movement
from distmega.program.ops.attention import attention, biased_attention
from distmega.program.types import Access, Op, Tensor, contracts, packed_strides, view_strides
from distmega.torch_import.forms.draft import Draft, Emitter
from distmega.torch_import.forms.views import StridedView, is_whole
from distmega.torch_import.operators.build import constant_name
from distmega.torch_import.operators.values import is_float

MAX_POSITIONS = 4096
"""Up to which all are looked at."""
UNSEEN = -1e30
"""Scores below it weigh nothing."""
Affine = tuple[Values | None, Values]
"""a and b of a * score + b; a is None where that takes no score."""


def state_biases(
    draft: Draft, positions: str, num_positions: int, constants: dict[str, Values]
) -> None:
    """Replaces written-out attention over caches that rows are appended to. constants: takes the
    tables.
    """
    given = draft.tensors.get(positions)
    if given is None or num_positions > MAX_POSITIONS:
        return
    scores = _ScoreForms(draft, positions, num_positions, given.num_elements, constants)
    changes: dict[str, list[Op]] = {}
    for op in draft.ops:
        found = scores.written_out(op)
        if found is not None:
            changes[op.name] = _stated(draft, op, found, given, constants)
    draft.replace(changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AddedTable:
    """scale * score + table [heads, positions], of the last `window` positions, 0 for all."""

    scale: float
    table: Values
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenAttention:
    """Queries, caches, and what becomes of scores."""

    query: Tensor
    keys: Tensor
    values: Tensor
    added: _AddedTable


@dataclass(slots=True)
class _ScoreForms:
    """Looks at products. known: what was added, by how it is computed."""

    draft: Draft
    positions: str
    num_positions: int
    num_rows: int
    constants: Mapping[str, Values]
    producers: dict[str, Op] = field(init=False)
    appended: set[str] = field(init=False)
    known: dict[object, _AddedTable | None] = field(default_factory=dict)
    of_rows: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Whether a tensor depends on positions or a score, by both names."""

    def __post_init__(self) -> None:
        self.producers = self.draft.producers()
        self.appended = {
            op.writes[0].tensor
            for op in self.draft.ops
            if kind_of(op).appends and self.laid(op.reads[1].tensor).tensor == self.positions
        }

    def written_out(self, op: Op) -> _WrittenAttention | None:
        """The attention whose last product an op is."""
        if not contracts(op) or len(op.reads) != 2:
            return None
        values = self.cache(op.reads[1])
        if values is None:
            return None
        num_heads, _, width = values.shape[-3:]
        weights = StridedView("", 0, packed_strides(self.shape(op.reads[0].tensor)))
        if not self.multiplies(op, values, weights, summed=False):
            return None
        softmax = self.maker(op.reads[0].tensor)
        if softmax is None or softmax.kind != "softmax":
            return None
        scored = softmax.reads[0].tensor
        if self.shape(scored)[-1] != values.shape[-2]:
            return None
        product = self.product(scored)
        if product is None or len(product.reads) != 2:
            return None
        keys = self.cache(product.reads[1])
        query = self.laid(product.reads[0].tensor)
        base = self.draft.tensors[query.tensor]
        if keys is None or keys.shape[:-1] != values.shape[:-1]:
            return None
        out = self.draft.tensors[op.writes[0].tensor]
        num = self.num_rows * num_heads
        if base.num_elements != num * keys.shape[-1] or base.dtype != out.dtype:
            return None
        if out.num_elements != num * width or not self.multiplies(
            product, keys, query, summed=True
        ):
            return None
        key = self.signature(scored, product.writes[0].tensor), num_heads
        if key not in self.known:
            self.known[key] = self.added(scored, product.writes[0].tensor, num_heads)
        added = self.known[key]
        if added is None:
            return None
        return _WrittenAttention(query=base, keys=keys, values=values, added=added)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.draft.tensors[name].shape

    def is_cast(self, op: Op) -> bool:
        """Whether an op changes the float type alone."""
        names = [each.tensor for each in (*op.reads, *op.writes)]
        return (
            kind_of(op).is_elementwise
            and len(op.reads) == 1
            and str(op.attr("expr")) == "a0"
            and self.shape(names[0]) == self.shape(names[1])
            and all(is_float(self.draft.tensors[name].dtype) for name in names)
        )

    def laid(self, name: str) -> StridedView:
        """The tensor below views and casts, and how it is shown."""
        op = self.producers.get(name)
        own = StridedView(name, 0, packed_strides(self.shape(name)))
        if op is None or not (op.is_view or self.is_cast(op)):
            return own
        below = self.laid(op.reads[0].tensor)
        if not op.is_view:
            return below
        strides = view_strides(op, below.strides)
        if strides is None:
            return own
        moved = zip(op.reads[0].dims, below.strides, strict=True)
        offset = below.offset + sum(index.offset * stride for index, stride in moved)
        return StridedView(below.tensor, offset, strides)

    def cache(self, read: Access) -> Tensor | None:
        """The cache [h, t, d] of a sequence, or [m, h, t, d] of several, that an operand shows."""
        found = self.draft.tensors[self.laid(read.tensor).tensor]
        front = (self.num_rows,) if self.num_rows > 1 else ()
        fits = found.name in self.appended and found.shape[:-3] == front and len(found.shape) > 2
        return found if fits and self.shape(read.tensor) else None

    def maker(self, name: str) -> Op | None:
        """The op that makes a tensor, below views of all of it and casts."""
        op = self.producers.get(name)
        while op is not None and (op.is_view or self.is_cast(op)):
            below = op.reads[0].tensor
            shown = StridedView(below, 0, view_strides(op, packed_strides(self.shape(below))) or ())
            out = self.draft.tensors[op.writes[0].tensor]
            if not shown.strides or not is_whole(out, self.draft.tensors[below], shown):
                return None
            op = self.producers.get(below)
        return op

    def multiplies(self, op: Op, cache: Tensor, other: StridedView, *, summed: bool) -> bool:
        """Whether an op is the product of each head of a cache, its elements summed or else its
        positions, and of one row a head of the other operand, heads side by side, rows too.
        """
        num_heads, num, width = cache.shape[-3:]
        shown = self.laid(op.reads[1].tensor)
        out = packed_strides(self.shape(op.writes[0].tensor))
        by_axis = [
            _steps(op, access, strides)
            for access, strides in (
                (op.reads[0], other.strides), (op.reads[1], shown.strides), (op.writes[0], out)
            )
        ]  # fmt: skip
        inner, outer = (width, num) if summed else (num, width)
        along = (1, width) if summed else (width, 1)
        of_heads = (inner, num * width, outer)
        of_rows = (num_heads * inner, num_heads * num * width, num_heads * outer)
        products = (inner, (1, along[0], None)), (outer, (None, along[1], 1))
        wanted = (
            {(self.num_rows, of_rows), (num_heads, of_heads), *products},
            {(self.num_rows * num_heads, of_heads), *products},
        )
        found = {
            (axis.extent, tuple(steps.get(axis.name) for steps in by_axis))
            for axis in op.axes
            if axis.extent > 1
        }
        offsets = shown.offset, other.offset
        return offsets == (0, 0) and any(
            found == {each for each in one if each[0] > 1} for one in wanted
        )

    def product(self, name: str) -> Op | None:
        """The only product that a tensor is made of by views and pointwise ops."""
        found: dict[str, Op] = {}
        waiting, seen = [name], set[str]()
        while waiting:
            op = self.producers.get(waiting.pop())
            if op is None or op.name in seen:
                continue
            seen.add(op.name)
            if contracts(op):
                found[op.name] = op
            elif op.is_view or kind_of(op).is_elementwise:
                waiting += [read.tensor for read in op.reads]
            else:
                return None
        return next(iter(found.values())) if len(found) == 1 else None

    def signature(self, name: str, score: str) -> object:
        """How a tensor is computed of a score."""
        op = self.producers.get(name)
        if name == score or op is None:
            return "score" if name == score else name, self.shape(name)
        parts = tuple(self.signature(read.tensor, score) for read in op.reads)
        dims = tuple(read.dims for read in op.reads)
        return op.kind, op.attrs, dims, self.shape(name), parts

    def added(self, scored: str, score: str, num_heads: int) -> _AddedTable | None:
        """What becomes of a score, if it is the same at all positions that see it."""
        num = self.num_positions
        numbers = torch.arange(num)
        table = torch.full((num_heads, num), torch.nan, dtype=torch.float64)
        scale, window = torch.nan, 0
        for position in range(num - 1, -1, -1):
            found = self.value(scored, score, position, {})
            if found is None or found[0] is None:
                return None
            whole = found[0], found[1]
            shape = self.shape_alone(scored, score)
            a, b = (each.expand(shape).reshape(num_heads, num) for each in whole)
            seen = b > UNSEEN
            if position == num - 1:
                window, scale = int(seen[0].sum()), float(a[0, -1])
            wanted = (numbers <= position) & (numbers > position - window)
            if not torch.equal(seen, wanted.expand_as(seen)) or bool((a[seen] != scale).any()):
                return None
            new = seen & table.isnan()
            table[new] = b[new]
            if not torch.equal(table[seen], b[seen]):
                return None
        return _AddedTable(scale=scale, table=table, window=window if window < num else 0)

    def value(
        self, name: str, score: str, position: int, values: dict[str, Affine | None]
    ) -> Affine | None:
        """A tensor of one row at one position, if it is linear in the score, and all rows have it
        so. values: those that are known.
        """
        if name not in values:
            values[name] = self.new_value(name, score, position, values)
        return values[name]

    def new_value(
        self, name: str, score: str, position: int, values: dict[str, Affine | None]
    ) -> Affine | None:
        shape = self.shape_alone(name, score)
        zero = torch.zeros(shape, dtype=torch.float64)
        if name == score:
            return zero + 1, zero
        if name == self.positions:
            return None, zero + position
        op = self.producers.get(name)
        if op is None:
            return (None, self.constants[name].double()) if name in self.constants else None
        operands = [self.value(read.tensor, score, position, values) for read in op.reads]
        if any(operand is None for operand in operands):
            return None
        given = [
            _of_one(operand, self.shape(op.writes[0].tensor), shape)
            for operand in operands
            if operand is not None
        ]
        if not self.keeps_rows(op, score):
            return None
        if op.is_view:
            return _shown(op, given[0], shape)
        if any(_is_turned(read, op.writes[0]) for read in op.reads):
            return None
        try:
            found = expr.evaluate(expr.parse(str(op.attr("expr"))), given, AFFINE, _constant)
        except (KeyError, _NotLinear):  # another function
            return None
        # a constant that tells rows apart makes more of one
        zeros = torch.zeros(shape)
        same = all(value is None or (value + zeros).shape == zeros.shape for value in found)
        return found if same else None

    def is_of_rows(self, name: str, score: str) -> bool:
        """Whether a tensor depends on positions or the score."""
        key = name, score
        if key not in self.of_rows:
            op = self.producers.get(name)
            self.of_rows[key] = name in (score, self.positions) or (
                op is not None and any(self.is_of_rows(read.tensor, score) for read in op.reads)
            )
        return self.of_rows[key]

    def shape_alone(self, name: str, score: str) -> tuple[int, ...]:
        """The shape of what one row has of a tensor; the first dim is rows or begins so."""
        shape = self.shape(name)
        if self.num_rows == 1 or not self.is_of_rows(name, score) or not shape:
            return shape
        return (shape[0] // self.num_rows, *shape[1:])

    def keeps_rows(self, op: Op, score: str) -> bool:
        """Whether rows are the first dim of what an op takes and gives, each made of its own."""
        (write,) = op.writes
        if self.num_rows == 1 or not self.is_of_rows(write.tensor, score):
            return True
        reads = [read for read in op.reads if self.is_of_rows(read.tensor, score)]
        names = [each.tensor for each in (*reads, write)]
        if any(not self.shape(name) or self.shape(name)[0] % self.num_rows for name in names):
            return False
        if not op.is_view:
            first = self.shape(write.tensor)[:1]
            return all(
                len(read.dims) == len(write.dims) and self.shape(read.tensor)[:1] == first
                for read in reads
            )
        (read,) = op.reads
        packed = packed_strides(self.shape(read.tensor))
        strides = view_strides(op, packed)
        if strides is None:
            return False
        shape = self.shape(write.tensor)
        steps = zip(shape, strides, packed_strides(shape), strict=True)
        if all(num == 1 or step == own for num, step, own in steps):
            return True
        if strides[0] != packed[0]:
            return False
        last = sum((num - 1) * step for num, step in zip(shape[1:], strides[1:], strict=True))
        return last < packed[0]


class _NotLinear(Exception):
    """A score went into what is not linear in it."""


def _constant(value: float) -> Affine:
    return None, torch.tensor(value, dtype=torch.float64)


def _plain(value: Affine) -> Values:
    if value[0] is not None:
        raise _NotLinear
    return value[1]


def _sum(x: Affine, y: Affine, sign: int = 1) -> Affine:
    a = [value for value in (x[0], None if y[0] is None else sign * y[0]) if value is not None]
    return (sum(a[1:], a[0]) if a else None), x[1] + sign * y[1]


def _product(x: Affine, y: Affine) -> Affine:
    if y[0] is not None:
        x, y = y, x
    factor = _plain(y)
    return (None if x[0] is None else x[0] * factor), x[1] * factor


def _chosen(which: Affine, x: Affine, y: Affine) -> Affine:
    on = _plain(which) != 0
    b = torch.where(on, x[1], y[1])
    if x[0] is None and y[0] is None:
        return None, b
    zero = torch.zeros((), dtype=torch.float64)
    a, c = (zero if value is None else value for value in (x[0], y[0]))
    return torch.where(on, a, c), b


def _compared(holds: Callable[[Values, Values], Values]) -> Callable[[Affine, Affine], Affine]:
    return lambda x, y: (None, holds(_plain(x), _plain(y)).double())


AFFINE: Mapping[str, Callable[..., Affine]] = {
    "add": _sum, "sub": lambda x, y: _sum(x, y, -1), "mul": _product,
    "div": lambda x, y: _product(x, (None, 1 / _plain(y))), "where": _chosen,
    "neg": lambda x: _product(x, _constant(-1.0)), "eq": _compared(torch.eq),
    "lt": _compared(torch.lt), "le": _compared(torch.le),
}  # fmt: skip
"""Functions of expr.py that are linear in a score, or take none."""


def _shown(view: Op, value: Affine, shape: tuple[int, ...]) -> Affine | None:
    """A view of a value."""
    (read,) = view.reads
    source = value[1]
    strides = view_strides(view, packed_strides(source.shape))
    if strides is None or any(index.offset for index in read.dims):
        return None
    a, b = (
        None if each is None else each.expand(source.shape).contiguous().as_strided(shape, strides)
        for each in value
    )
    assert b is not None
    return a, b


def _of_one(value: Affine, whole: tuple[int, ...], alone: tuple[int, ...]) -> Affine:
    """What one row takes of an operand that has the dims of all, if that is the same for all."""

    def cut(x: Values | None) -> Values | None:
        if x is None or whole == alone or x.dim() < len(whole) or x.shape[0] != whole[0]:
            return x
        rows = x.reshape(whole[0] // alone[0], alone[0], *x.shape[1:])
        return rows[0] if bool((rows == rows[:1]).all()) else x

    a, b = (cut(x) for x in value)
    assert b is not None
    return a, b


def _is_turned(read: Access, write: Access) -> bool:
    """Whether an operand does not lie as the result does, dims from the right."""
    behind = write.dims[len(write.dims) - len(read.dims) :]
    return len(read.dims) > len(write.dims) or any(
        index.axes and index != whole for index, whole in zip(read.dims, behind, strict=True)
    )


def _steps(op: Op, access: Access, strides: tuple[int, ...]) -> dict[str, int]:
    """Elements from one index of an axis to the next."""
    found: dict[str, int] = {}
    for index, stride in zip(access.dims, strides, strict=True):
        step = stride * index.stride
        for name in reversed(index.axes):
            found[name] = step
            step *= op.axis(name).extent
    return found


def _stated(
    draft: Draft,
    op: Op,
    found: _WrittenAttention,
    positions: Tensor,
    constants: dict[str, Values],
) -> list[Op]:
    """The op's result by attention."""
    emitter = Emitter(draft)
    num_heads, _, width = found.keys.shape[-3:]
    heads = (positions.num_elements, num_heads, 1, width)
    query = data_movement.reshape(emitter.name(f"{op.name}.heads"), found.query, heads, kind="view")
    operands = emitter.add(query), found.keys, found.values, positions
    name, added = emitter.name(op.name), found.added
    table = added.table.T[:, :, None].float().contiguous()
    if bool((table == table[:1]).all()):  # the same for all positions: no difference
        mixed = attention(name, *operands, added.scale, added.window)
    else:
        constants[constant_name(table)] = table
        bias = draft.constant(constant_name(table), table.shape, "f32")
        mixed = biased_attention(name, *operands, bias, added.scale, added.window)
    out = draft.tensors[op.writes[0].tensor]
    shown, _ = data_movement.reshape(out.name, emitter.add(mixed), out.shape, kind="view")
    return [*emitter.ops, shown]
