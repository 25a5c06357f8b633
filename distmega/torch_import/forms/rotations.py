"""Rotary embeddings that a module wrote out as the op that programs state, angles in a table.

In: a draft, and for how many positions. Each element of what attention reads is followed back to
the elements that it is made of: a rotation takes two elements of one head and factors that depend
on positions alone, whichever way halves are cut, turned, joined or passed by. Pairs that lie
elsewhere than half a head apart are brought there: rows of the weights before it change places,
the same way for queries and keys, whose products stay the same. Next on the walk: elements.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distmega.program.kinds import kind_of
from distmega.program.ops import data_movement
from distmega.program.ops.attention import rope
from distmega.program.ops.compute import linear
from distmega.program.ops.norms import layer_norm, rms_norm
from distmega.program.types import Op, Tensor, contracts
from distmega.torch_import.forms.draft import Draft, Emitter, reading
from distmega.torch_import.forms.elements import Elements, ElementTerm, Ints
from distmega.torch_import.operators.build import constant_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """How heads are rotated. order: element of the head as the op wants it -> as it is. table
    [positions, d]; name: of the weight that holds it.
    """

    order: tuple[int, ...]
    table: torch.Tensor
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotation:
    """What is rotated, and how. source: the tensor before it, whose heads are runs of elements;
    heads_first: whether heads stand before rows there.
    """

    source: str
    heads_first: bool
    turn: _Turn


def state_rotations(
    draft: Draft, positions: str, num_positions: int, constants: dict[str, torch.Tensor]
) -> None:
    """Replaces the rotations of all attention over caches. constants: takes the tables."""
    elements = Elements(draft, positions, num_positions, constants)
    appends = {op.writes[0].tensor: op for op in draft.ops if kind_of(op).appends}
    changes: dict[str, list[Op]] = {}
    turns: dict[bytes, _Turn | None] = {}
    for op in draft.ops:
        if not kind_of(op).reads_positions or op.reads[1].tensor not in appends:
            continue
        append = appends[op.reads[1].tensor]
        at = op.reads[3].tensor
        if {elements.base(at), elements.base(append.reads[1].tensor)} != {positions}:
            continue
        q, k = (_rotation(elements, each.reads[0].tensor, turns) for each in (op, append))
        if q is None or k is None or q.turn.name != k.turn.name or append.name in changes:
            continue
        if q.turn.order != k.turn.order:
            continue
        constants[q.turn.name] = q.turn.table
        new = [_rotated(draft, each, turn, at) for each, turn in ((op, q), (append, k))]
        if all(new):
            changes[op.name], changes[append.name] = new
    draft.replace(changes)


def _rotation(elements: Elements, name: str, turns: dict[bytes, _Turn | None]) -> _Rotation | None:
    """The rotation whose result a tensor [m, ..., d] is."""
    shape = elements.draft.tensors[name].shape
    rows = sorted({0, shape[0] - 1})
    num_heads, width = int(np.prod(shape[1:-1])), shape[-1]
    coords = np.indices((len(rows), *shape[1:])).reshape(len(shape), -1)
    coords[0] = np.asarray(rows)[coords[0]]
    traced = elements.trace(name, tuple(coords))
    if traced is None or width % 2:
        return None
    source, terms = traced
    if not any(term.factor for term in terms):
        return None
    positions = [np.where(term.coefficient != 0, term.positions, -1) for term in terms]
    grid = np.stack(positions).reshape(len(terms), len(rows), num_heads, width)
    known = np.where(grid < 0, np.iinfo(np.int64).max, grid)
    first = known.min(axis=(0, 3))
    layout = _layout(elements.draft.tensors[source], shape[0], rows, first, width)
    if layout is None:
        return None
    inside = np.where(grid < 0, -1, grid - first[None, :, :, None])
    if (inside >= width).any() or (inside != inside[:, :1, :1]).any():
        return None
    parts = [slice(position * num_heads * width, None) for position in range(len(rows))]
    firsts = [slice(part.start, part.start + width) for part in parts]
    key = inside[:, 0, 0].tobytes() + b"".join(
        term.factor.encode()
        + bytes(term.coefficient[part])
        + b"".join(bytes(at[part]) for at in term.coords)
        for term in terms
        for part in firsts
    )
    if key not in turns:
        turns[key] = _turn(elements, terms, inside[:, 0, 0], list(zip(rows, firsts, strict=True)))
    turn = turns[key]
    if turn is None:
        return None
    return _Rotation(source=source, heads_first=layout, turn=turn)


def _layout(
    source: Tensor, num_rows: int, rows: Sequence[int], first: Ints, width: int
) -> bool | None:
    """Whether heads stand before rows in the source; None if heads are no runs that follow."""
    num_heads = first.shape[1]
    if source.num_elements != num_rows * num_heads * width:
        return None
    heads, positions = np.arange(num_heads), np.asarray(rows)[:, None]
    if np.array_equal(first, (positions * num_heads + heads) * width):
        return False
    return True if np.array_equal(first, (heads * num_rows + positions) * width) else None


def _turn(
    elements: Elements,
    terms: Sequence[ElementTerm],
    inside: Ints,
    parts: Sequence[tuple[int, slice]],
) -> _Turn | None:
    """The rotation, if each element takes itself and at most one other, which takes it too, with
    one cosine and opposite sines at all positions. inside [terms, d]: places in the head; parts:
    rows and where their first heads are.
    """
    width = inside.shape[1]
    own, other = (torch.zeros(width, elements.num_positions) for _ in range(2))
    partner = [-1] * width
    for term, positions in zip(terms, inside, strict=True):
        found = [elements.values_of(term, part, row) for row, part in parts]
        if any(values is None for values in found):
            return None
        values = found[0]
        assert values is not None
        for position, at in enumerate(map(int, positions)):
            if at == position:
                own[position] += values[position]
            elif at >= 0:
                if partner[position] not in (-1, at):
                    return None
                partner[position] = at
                other[position] += values[position]
    left = [n for n, at in enumerate(partner) if n < at]
    passed = [n for n, at in enumerate(partner) if at < 0]
    if not left or len(passed) % 2 or 2 * len(left) + len(passed) != width:
        return None
    for n in left:
        m = partner[n]
        turned = torch.equal(own[n], own[m]) and torch.equal(other[n], -other[m])
        if partner[m] != n or not turned:
            return None
    if any(not torch.equal(own[n], torch.ones_like(own[n])) for n in passed):
        return None
    half = len(passed) // 2
    right = [partner[n] for n in left]
    first, second = [*left, *passed[:half]], [*right, *passed[half:]]
    table = torch.cat([own[first], other[second]]).T.contiguous()
    return _Turn(order=(*first, *second), table=table, name=constant_name(table))


def _rotated(
    draft: Draft,
    op: Op,
    rotation: _Rotation,
    positions: str,
) -> list[Op]:
    """The op, on a rotation of what it read; empty if places can't be changed before it."""
    target = draft.tensors[op.reads[0].tensor]
    emitter = Emitter(draft)
    source = draft.tensors[rotation.source]
    turn = rotation.turn
    if turn.order != tuple(range(len(turn.order))):
        moved = _moved(draft, emitter, source, turn.order)
        if moved is None:
            return []
        source = moved
    if rotation.heads_first:
        rows, width = target.shape[0], target.shape[-1]
        name = emitter.name(f"{op.name}.heads")
        apart = data_movement.reshape(name, source, (source.num_elements // rows // width, rows,
                                                     width), kind="view")  # fmt: skip
        source = emitter.add(apart)
        name = emitter.name(f"{op.name}.heads")
        source = emitter.add(data_movement.transpose(name, source, (1, 0, 2), kind="view"))
    if source.shape != target.shape:
        name = emitter.name(f"{op.name}.heads")
        kind = "view" if not rotation.heads_first else "reshape"
        source = emitter.add(data_movement.reshape(name, source, target.shape, kind=kind))
    table = draft.constant(turn.name, turn.table.shape, "f32")
    turned = emitter.add(
        rope(emitter.name(f"{op.name}.rotated"), source, draft.tensors[positions], table)
    )
    return [*emitter.ops, reading(op, 0, turned.name)]


def _moved(draft: Draft, emitter: Emitter, source: Tensor, order: Sequence[int]) -> Tensor | None:
    """The tensor with the elements of each head in another order, made by other rows of the weights
    that it comes from. None where it does not come from a product alone.
    """
    op = draft.producers().get(source.name)
    if op is None:
        return None
    if op.is_view:
        inner = draft.tensors[op.reads[0].tensor]
        if inner.num_elements != source.num_elements or inner.shape[-1] % len(order):
            return None
        below = _moved(draft, emitter, inner, order)
        if below is None:
            return None
        return emitter.add(_again(op, below, emitter.name(source.name), source))
    if contracts(op):
        return _moved_product(draft, emitter, op, order)
    if not kind_of(op).scales_elements or source.shape[-1] % len(order):
        return None
    below = _moved(draft, emitter, draft.tensors[op.reads[0].tensor], order)
    if below is None:
        return None
    rows = _rows(source.shape[-1], order)
    vectors = [_vector(draft, read.tensor, rows) for read in op.reads[2:]]
    eps = op.attr("eps")
    assert isinstance(eps, float)
    if op.kind == "rms_norm":
        return emitter.add(rms_norm(emitter.name(source.name), below, vectors[0], eps))
    weight, bias = [*vectors, None, None][:2]
    return emitter.add(layer_norm(emitter.name(source.name), below, weight, bias, eps))


def _moved_product(draft: Draft, emitter: Emitter, op: Op, order: Sequence[int]) -> Tensor | None:
    """A product with rows of its weight in another order within each head."""
    x, w = (draft.tensors[read.tensor] for read in op.reads[:2])
    plain = w.role == "weight" and len(w.shape) == 2 and w.shape[0] % len(order) == 0
    if not plain or op.reads[1].dims[0].axes != op.writes[0].dims[-1].axes:
        return None
    rows = _rows(w.shape[0], order)
    weight = draft.weight(draft.source(w.name).take(rows))
    bias = _vector(draft, op.reads[2].tensor, rows) if len(op.reads) == 3 else None
    names = " ".join(f"m{n}" for n in range(len(x.shape) - 1))
    spec = f"{names} k, n k" + (", n" if bias else "") + f" -> {names} n"
    return emitter.add(linear(emitter.name(op.name), x, weight, bias, spec))


def _again(op: Op, source: Tensor, name: str, like: Tensor) -> tuple[Op, tuple[Tensor, ...]]:
    """A view of another tensor of the same shape."""
    out = Tensor(name=name, shape=like.shape, dtype=like.dtype)
    (read,), (write,) = op.reads, op.writes
    access = type(read)
    return Op(
        name=name,
        kind=op.kind,
        axes=op.axes,
        reads=(access(tensor=source.name, dims=read.dims),),
        writes=(access(tensor=name, dims=write.dims),),
        attrs=op.attrs,
    ), (out,)


def _vector(draft: Draft, name: str, rows: tuple[int, ...]) -> Tensor:
    return draft.weight(draft.source(name).take(rows))


def _rows(num: int, order: Sequence[int]) -> tuple[int, ...]:
    """The order of each head, head after head."""
    width = len(order)
    return tuple(start + at for start in range(0, num, width) for at in order)
