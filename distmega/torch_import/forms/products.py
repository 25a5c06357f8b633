"""Products in the form that the built-in decoders have: weights [n, k], biases with them, a product
for each part that is used on its own.

In: a draft. Out: the same with other linears; their weights are computed of the stored ones as they
are read (derived.py). Next on the walk: rotations.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.ops.compute import linear
from distmega.program.types import KNOWN, Op, Tensor, contracts
from distmega.torch_import.forms.draft import Draft, Emitter
from distmega.torch_import.forms.views import StridedView, last_views, show, shown_by_views
from distmega.torch_import.operators.values import is_float

ADDED = ("(a0 + a1)", "a0 + a1")


def fold_weights(draft: Draft) -> None:
    """Computes expressions of one weight when it is read, not in each step."""
    changes: dict[str, list[Op]] = {}
    now: dict[str, Tensor] = {}
    for op in list(draft.ops):
        reads = [now.get(read.tensor, draft.tensors[read.tensor]) for read in op.reads]
        if not kind_of(op).is_elementwise or len(reads) != 1 or reads[0].role != "weight":
            continue
        out = draft.tensors[op.writes[0].tensor]
        text = str(op.attr("expr"))
        if out.shape != reads[0].shape or not is_float(out.dtype) or not is_float(reads[0].dtype):
            continue
        if reads[0].name not in draft.derived and reads[0].name.startswith(KNOWN):
            continue
        derived = draft.source(reads[0].name).apply(text, out.dtype)
        now[out.name] = draft.weight(derived)
        changes[op.name] = []
    draft.replace(changes)
    draft.rename({name: tensor.name for name, tensor in now.items()})


def orient_products(draft: Draft) -> None:
    """Turns stored matrices [k, n], and takes biases that are added behind into the product."""
    users = draft.users()
    changes: dict[str, list[Op]] = {}
    for op in draft.ops:
        parts = _parts(draft, op)
        if parts is None:
            continue
        x, weight, rows, turned = parts
        if turned:
            weight = draft.weight(draft.source(weight.name).turn())
        added = _added(draft, users, op, weight.shape[0])
        if not turned and added is None:
            continue
        spec = f"{rows} k, n k" + (", n" if added else "") + f" -> {rows} n"
        end, bias = added or (op, None)
        built = linear(end.writes[0].tensor, x, weight, bias, spec)
        changes[op.name] = []
        changes[end.name] = [built[0]]
        draft.tensors.update({out.name: out for out in built[1]})
    draft.replace(changes)


def _parts(draft: Draft, op: Op) -> tuple[Tensor, Tensor, str, bool] | None:
    """x [.., k], a weight, the names of x's rows, and whether the weight is [k, n]; None for
    another product.
    """
    if not contracts(op) or len(op.reads) != 2:
        return None
    x, w = (draft.tensors[read.tensor] for read in op.reads)
    axes = [[index.axes for index in read.dims] for read in (*op.reads, *op.writes)]
    if w.role != "weight" or len(w.shape) != 2 or any(len(each) != 1 for a in axes for each in a):
        return None
    (*rows, inner), matrix, (*out_rows, column) = ([each[0] for each in a] for a in axes)
    if rows != out_rows or matrix not in ([column, inner], [inner, column]):
        return None
    return x, w, " ".join(rows), matrix == [inner, column]


def _added(
    draft: Draft, users: dict[str, list[Op]], op: Op, width: int
) -> tuple[Op, Tensor] | None:
    """The op that adds a weight along the last dim to a product, and that weight."""
    name = op.writes[0].tensor
    after = users.get(name, [])
    if len(after) != 1 or name in draft.outputs or not kind_of(after[0]).is_elementwise:
        return None
    (end,) = after
    out = draft.tensors[end.writes[0].tensor]
    found = draft.tensors[name]
    if str(expr.parse(str(end.attr("expr")))) not in ADDED or len(end.reads) != 2:
        return None
    others = [read.tensor for read in end.reads if read.tensor != name]
    if len(others) != 1 or (out.shape, out.dtype) != (found.shape, found.dtype):
        return None
    bias = draft.tensors[others[0]]
    return (end, bias) if bias.role == "weight" and bias.shape == (width,) else None


@dataclass(frozen=True, slots=True)
class _Part:
    """A view of some columns of a product in all of its rows.

    counts: of each dim how many columns it counts before it goes on to the next row; 1 of rows
    alone, 0 of columns alone.
    """

    view: Op
    columns: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Parts of a product that one product makes: they have columns in common, or an op of `joins`
    beyond (see _joins).
    """

    columns: frozenset[int]
    parts: tuple[_Part, ...]
    joins: frozenset[str]

    def meets(self, other: "_Group") -> bool:
        """Whether one product must make both."""
        return bool(self.columns & other.columns or self.joins & other.joins)

    def __or__(self, other: "_Group") -> "_Group":
        return _Group(
            self.columns | other.columns, self.parts + other.parts, self.joins | other.joins
        )


def split_products(draft: Draft) -> None:
    """Products whose columns go different ways become several, each with its rows of the weight."""
    shown, users = shown_by_views(draft), draft.users()
    ends: dict[str, list[Op]] = {}
    for op in last_views(draft):
        if op.writes[0].tensor in shown:
            ends.setdefault(shown[op.writes[0].tensor].tensor, []).append(op)
    changes: dict[str, list[Op]] = {}
    joins = _joins(draft)
    for op in draft.ops:
        name = op.writes[0].tensor if op.writes else ""
        direct = [each for each in users.get(name, []) if not each.is_view]
        if contracts(op) and not direct and name not in draft.outputs:
            _split(draft, shown, op, ends.get(name, []), joins, changes)
    draft.replace(changes)


def _split(
    draft: Draft,
    shown: dict[str, StridedView],
    op: Op,
    ends: Sequence[Op],
    joins: dict[str, frozenset[str]],
    changes: dict[str, list[Op]],
) -> None:
    """Enters the parts of one product, if its views take it apart."""
    whole = draft.tensors[op.writes[0].tensor]
    x, w = (draft.tensors[read.tensor] for read in op.reads[:2])
    rows = [index.axes for index in op.reads[0].dims][:-1]
    columns_of_weight = op.reads[1].dims[0].axes == op.writes[0].dims[-1].axes
    if w.role != "weight" or len(w.shape) != 2 or not columns_of_weight:
        return
    if rows != [index.axes for index in op.writes[0].dims[:-1]]:
        return
    parts: list[_Part] = []
    for view in ends:
        part = _part(draft, shown[view.writes[0].tensor], view, whole)
        if part is None:
            return
        parts.append(part)
    groups = _together(parts, joins)
    if len(groups) < 2:
        return
    emitter = Emitter(draft)
    names = " ".join(f"m{n}" for n in range(len(rows)))
    spec = f"{names} k, n k" + (", n" if len(op.reads) == 3 else "") + f" -> {names} n"
    views: dict[str, list[Op]] = {}
    for group in groups:
        columns = tuple(sorted(group.columns))
        weight = draft.weight(draft.source(w.name).take(columns))
        bias = None
        if len(op.reads) == 3:
            bias = draft.weight(draft.source(op.reads[2].tensor).take(columns))
        made = emitter.add(linear(emitter.name(op.name), x, weight, bias, spec))
        for part in group.parts:
            seen = _seen(draft, part, shown[part.view.writes[0].tensor], columns, made, whole)
            if seen is None:
                return
            views[part.view.name] = seen
    changes.update(views)
    changes[op.name] = emitter.ops


def _together(parts: Sequence[_Part], joins: dict[str, frozenset[str]]) -> list[_Group]:
    """Groups of parts, by their first columns."""
    groups: list[_Group] = []
    for part in parts:
        joined = joins.get(part.view.writes[0].tensor, frozenset())
        now = _Group(frozenset(part.columns), (part,), joined)
        for group in [each for each in groups if each.meets(now)]:
            groups.remove(group)
            now |= group
        groups.append(now)
    return sorted(groups, key=lambda group: min(group.columns))


def _joins(draft: Draft) -> dict[str, frozenset[str]]:
    """Tensor -> the ops that join tensors to which it comes through others that move elements or
    compute them one by one: what meets there belongs together.
    """
    found: dict[str, frozenset[str]] = {}
    for op in reversed(draft.ops):
        if op.kind == "concat":
            here = frozenset({op.name})
        elif kind_of(op).only_copies or kind_of(op).is_elementwise:
            here = frozenset()
        else:
            continue
        beyond = found.get(op.writes[0].tensor, frozenset()) if op.writes else frozenset()
        for read in op.reads:
            found[read.tensor] = found.get(read.tensor, frozenset()) | here | beyond
    return found


def _part(draft: Draft, shown: StridedView, view: Op, whole: Tensor) -> _Part | None:
    """A view as columns of all rows; None for another one."""
    shape = draft.tensors[view.writes[0].tensor].shape
    width = whole.shape[-1]
    counts = [_counted(num, step, width) for num, step in zip(shape, shown.strides, strict=True)]
    rows = [num // count for num, count in zip(shape, counts, strict=True) if count]
    if math.prod(rows) != whole.num_elements // width or shown.offset >= width:
        return None
    columns = [shown.offset]
    for num, step, count in zip(shape, shown.strides, counts, strict=True):
        if count != 1:
            columns = [column + step * n for column in columns for n in range(count or num)]
    if max(columns) >= width or len(set(columns)) < len(columns):
        return None
    return _Part(view, tuple(columns), tuple(counts))


def _counted(extent: int, step: int, width: int) -> int:
    """See _Part.counts: of a dim of so many elements `step` apart, in rows of `width`."""
    if extent == 1 or (extent - 1) * step < width:
        return 0
    if step % width == 0:
        return 1
    count = width // step
    return count if width % step == 0 and extent % count == 0 else 0


def _seen(
    draft: Draft,
    part: _Part,
    shown: StridedView,
    columns: tuple[int, ...],
    made: Tensor,
    whole: Tensor,
) -> list[Op] | None:
    """The view of some columns' own product that stands for the view of the whole; None where the
    columns between are no regular ones.
    """
    out = draft.tensors[part.view.writes[0].tensor]
    at = {column: position for position, column in enumerate(columns)}
    first = at[shown.offset]
    strides, positions = [], [first]
    for dim, extent in enumerate(out.shape):
        stride = shown.strides[dim]
        count = part.counts[dim]
        if count == 1:
            strides.append(stride // whole.shape[-1] * len(columns))
            continue
        strides.append(at[shown.offset + stride] - first if extent > 1 else 1)
        if count and strides[-1] * count != len(columns):
            return None
        if extent > 1:
            positions = [
                position + strides[-1] * n for position in positions for n in range(count or extent)
            ]
    if positions != [at[column] for column in part.columns]:
        return None
    return show(draft, part.view.name, out, made, StridedView(made.name, first, tuple(strides)))
