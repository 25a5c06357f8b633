"""Operators that look elements up by numbers: rows, embeddings, the largest of a row.

In: as table.py says. Out: rules of its table. Next: pointwise.py.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from distmega.hostir.library.pointwise import pointwise
from distmega.program.builder import Handle
from distmega.program.expr import parse
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import rule
from distmega.torch_import.operators.values import (
    Constant,
    Spread,
    TensorValue,
    Value,
    is_tensor,
    value_dtype,
)


@rule("flip")
def flip(b: Build, self: TensorValue, dims: Sequence[int]) -> Value:
    x = self
    for dim in dims:
        backwards = torch.arange(x.shape[dim] - 1, -1, -1)
        x = index_select(b, x, dim, Constant(backwards))
    return x


@rule("index_select")
def index_select(b: Build, self: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    """Rows along one dim; of a dim in the middle it comes to the front for the lookup."""
    rank, dim = len(self.shape), dim % len(self.shape)
    first = b.transpose(self, [dim, *(n for n in range(rank) if n != dim)])
    found = b.rows(first, index)
    order = list(range(len(index.shape), len(found.shape)))
    order[dim:dim] = range(len(index.shape))
    return b.transpose(found, order)


@rule("index_put")
def index_put(
    b: Build,
    self: TensorValue,
    indices: Sequence[TensorValue | None],
    values: TensorValue,
    accumulate: bool = False,
) -> Value:
    """One value wherever a mask of the first dims says so."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or value_dtype(mask) != "bool" or accumulate or math.prod(values.shape) != 1:
        return NotImplemented
    rest = [1] * (len(self.shape) - len(mask.shape))
    wide = b.reshape(mask, (*mask.shape, *rest))
    return b.pointwise("where({0}, {1}, {2})", wide, b.reshape(values, ()), self)


@rule("index")
def index(b: Build, self: TensorValue, indices: Sequence[TensorValue | None]) -> Value:
    """Lookups by tensors of whole numbers in dims that stand beside each other."""
    at = [dim for dim, each in enumerate(indices) if each is not None]
    given = [each for each in indices if each is not None]
    if not at or at != list(range(at[0], at[-1] + 1)):
        return NotImplemented
    if any(value_dtype(each) not in ("i32", "i64") for each in given):
        return NotImplemented
    extents = self.shape[at[0] : at[-1] + 1]
    shape = b.shape[at[0] : at[0] + max(len(each.shape) for each in given)]
    position: Value = 0
    for number, (each, extent) in enumerate(zip(given, extents, strict=True)):
        inside = each
        if not isinstance(each, Constant) or bool((each.tensor < 0).any()):
            text = "where(lt({0}, 0), {0} + {1}, {0})"
            inside = known(b, text, each, extent, shape=each.shape)
        text, others = "{0} * {1} + {2}", math.prod(extents[:number]) * extent - extent
        if number:  # what is outside of this dim is as far outside of all
            text = f"where(lt({{2}}, 0), {{2}}, where(lt({{2}}, {{1}}), {text}, {{2}} + {{3}}))"
        operands = [position, extent, inside, *([others] if number else [])]
        position = known(b, text, *operands, shape=shape)
    joined = b.reshape(self, (*self.shape[: at[0]], math.prod(extents), *self.shape[at[-1] + 1 :]))
    assert isinstance(position, Constant | Handle | Spread)
    return index_select(b, joined, at[0], position)


def known(b: Build, text: str, *operands: Value, shape: tuple[int, ...]) -> TensorValue:
    """An expression on whole numbers, known at once where all operands are."""
    if any(is_tensor(each) and not isinstance(each, Constant) for each in operands):
        return b.pointwise(text, *operands, dtype="i64", shape=shape)
    known = [each.tensor if isinstance(each, Constant) else torch.tensor(each) for each in operands]
    words = [f"a{position}" for position in range(len(known))]
    found = pointwise(parse(text.format(*words)), known, torch.int64)
    return Constant(found.expand(shape))


@rule("embedding")
def embedding(b: Build, weight: TensorValue, indices: TensorValue, **other: Value) -> Value:
    return b.rows(weight, indices)


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    b: Build,
    weight: TensorValue,
    indices: TensorValue,
    offsets: TensorValue,
    mode: int = 0,
    per_sample_weights: TensorValue | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    **other: Value,
) -> Value:
    """Sums, means or maxima of rows, where all bags are known to be equally long."""
    if not isinstance(offsets, Constant) or padding_idx != -1 or len(indices.shape) != 1:
        return NotImplemented
    starts = offsets.tensor.tolist()
    starts = starts if include_last_offset else [*starts, indices.shape[0]]
    lengths = {stop - start for start, stop in pairwise(starts)}
    if len(lengths) != 1 or 0 in lengths or starts[0]:
        return NotImplemented
    length = lengths.pop()
    rows = b.rows(weight, b.reshape(indices, (len(starts) - 1, length)))
    if per_sample_weights is not None:
        scale = b.reshape(per_sample_weights, (len(starts) - 1, length, 1))
        rows = b.pointwise("{0} * {1}", rows, scale, shape=rows.shape)
    bags = b.p.reduce(b.handle(rows), 1, "max" if mode == 2 else "sum", name=b.name())
    if mode == 1:
        return [b.pointwise("{0} / {1}", bags, length), None, None, None]
    return [bags, None, None, None]


@rule("gather")
def gather(b: Build, self: TensorValue, dim: int, index: TensorValue, **other: Value) -> Value:
    if not self.shape:
        return NotImplemented
    dim %= len(self.shape)
    x = self
    for position, extent in enumerate(index.shape):
        if position != dim:
            x = b.slice(x, position, 0, extent)
    return b.p.gather(b.handle(x), b.handle(index), dim, name=b.name())


MAX_COMPARED = 1 << 16
"""Elements of a row times numbers that they are compared with."""


@rule("scatter.value")
def scatter_value(b: Build, self: TensorValue, dim: int, index: TensorValue, value: float) -> Value:
    """A number put where a row of numbers says: each index is compared with all of them."""
    if not self.shape or isinstance(value, complex):
        return NotImplemented
    x, numbers = b.to_last(self, dim), b.to_last(index, dim)
    *front, width = x.shape
    if tuple(front) != numbers.shape[:-1] or width * numbers.shape[-1] > MAX_COMPARED:
        return NotImplemented
    count = numbers.shape[-1]
    every = Constant(torch.arange(width).reshape(width, 1))
    row = b.reshape(_checked(b, numbers, width), (*front, 1, count))
    same = b.pointwise("eq({0}, {1})", row, every, dtype="f32", shape=(*front, width, count))
    hit = b.p.reduce(b.handle(same), len(front) + 1, "max", name=b.name())
    made = b.pointwise("where({0}, {1}, {2})", hit, value, x, shape=x.shape)
    return b.from_last(made, dim)


@rule("one_hot")
def one_hot(b: Build, self: TensorValue, num_classes: Value = -1) -> Value:
    if not isinstance(num_classes, int) or num_classes < 1:
        return NotImplemented
    row = b.reshape(_checked(b, self, num_classes), (*self.shape, 1))
    return b.pointwise("eq({0}, {1})", row, Constant(torch.arange(num_classes)))


def _checked(b: Build, ids: TensorValue, num: int) -> TensorValue:
    """Numbers that are looked up, so that those below 0 or not below `num` are named as ids of a
    table are; not where the program chose them among so many.
    """
    if isinstance(ids, Handle) and 0 < b.p.num_choices(ids) <= num:
        return ids
    return b.rows(Constant(torch.arange(num)), ids)


@rule("topk")
def topk(
    b: Build, self: TensorValue, k: int, dim: int = -1, largest: bool = True, **other: Value
) -> Value:
    if not largest:
        return NotImplemented
    values, chosen = b.p.topk(b.handle(b.to_last(self, dim)), k, name=b.name())
    return [b.from_last(values, dim), b.from_last(chosen, dim)]
