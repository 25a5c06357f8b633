"""Ops on groups of rows whose extents the data decide: each row goes to a few of many experts.

`route` sorts rows by group; the others run over (group, row of the group), which a grouped Index
turns into positions: "rows of expert e, whichever they are". Buffers hold the worst case, which is
all rows of all groups together, so nothing can overflow. Where ranks share the groups out, a rank
does the rows of its own groups and leaves zeros in those of others, so that the parts add up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from distmega.errors import RequestError, counted
from distmega.program import expr
from distmega.program.dtypes import is_integer
from distmega.program.kinds import (
    Coordinate,
    Misfit,
    OpKind,
    define,
    local_base,
    one_of,
    whole_numbers,
    widen,
)
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    index,
    inexact_integers,
    known_word,
    make_op,
    require_factors,
    require_integers,
    whole_number,
)
from distmega.program.types import Access, Axis, Index, Op, Tensor, grouped_index

Weighing = Literal["values", "softmax", "softmax_chosen"]
"""What top_k weighs a column by: itself, its probability among all, or among the chosen ones."""


def top_k(name: str, x: Tensor, num: int, weights: Weighing = "softmax") -> Built:
    """The columns [m, num] i32 of the num largest of each row of x [m, e], largest first and the
    lower column first on ties, and their weights [name].weights [m, num] f32.

    Computed in fp32 or wider. A weight that is not a number is an error when the op runs.
    """
    num = whole_number(name, "num", num)
    if len(x.shape) != 2 or not 1 <= num <= x.shape[-1]:
        found = f"the {num} largest of rows of shape {x.shape}"
        remedy = "choose at most as many experts per token as there are experts"
        raise bad_op(name, found, "x [m, e] and at least 1, at most e of them", remedy)
    if is_integer(x.dtype):
        raise bad_op(name, f"scores of dtype {x.dtype}", "a dtype of floats")
    known_word(name, "weights", weights, get_args(Weighing))
    rows, extent = x.shape
    axes = [Axis(name="m", extent=rows), Axis(name="e", extent=extent, role="reduce")]
    axes.append(Axis(name="c", extent=num, role="scatter"))
    chosen = Tensor(name=name, shape=(rows, num), dtype="i32")
    weight = Tensor(name=f"{name}.weights", shape=(rows, num), dtype="f32")
    writes = [access(weight, "m", "c"), access(chosen, "m", "c")]
    op = make_op(name, "top_k", axes, [access(x, "m", "e")], writes, weights=weights)
    return op, (weight, chosen)


def route(name: str, ids: Tensor, num_groups: int, num_rows: Tensor | None = None) -> Built:
    """Sorts the pairs (row, choice) of ids [m, c] by the group that each names, all i32: counts
    [num_groups], offsets [num_groups + 1], order [m * c] and slots [m, c].

    num_rows: an integer [1], the rows that are in use; pairs of others belong to no group, and come
    last. By default all are. Rows of no group are undefined in what is gathered and computed: zeros
    on ranks that share the groups out, and elsewhere what an op makes of them. Nobody who asks for
    results of rows in use sees them: scatter_add takes rows of groups alone.

    Group g has counts[g] pairs at the positions offsets[g] to offsets[g + 1], in order of their
    numbers row * c + choice. order: the number of the pair at each position. slots: the position of
    each pair. Each row names a group at most once. Ids outside of the groups are an error when the
    op runs.
    """
    num_groups = whole_number(name, "num_groups", num_groups)
    if len(ids.shape) != 2 or not ids.shape[1] <= num_groups:
        found = f"ids {ids.shape} of {num_groups} groups"
        raise bad_op(name, found, "[m, c] and at least c groups")
    require_integers(name, ids)
    rows, num = ids.shape
    axes = [Axis(name="m", extent=rows, role="reduce"), Axis(name="c", extent=num, role="reduce")]
    reads = [access(ids, "m", "c")]
    if num_rows is not None:
        require_integers(name, num_rows)
        if num_rows.shape != (1,):
            raise bad_op(name, f"num_rows {num_rows.shape}", "[1]")
        axes.append(Axis(name="u", extent=1, role="reduce"))
        reads.append(access(num_rows, "u"))
    extents = {"g": num_groups, "o": num_groups + 1, "p": rows * num, "i": rows, "j": num}
    axes += [Axis(name=n, extent=e, role="scatter") for n, e in extents.items()]
    made = {"counts": "g", "offsets": "o", "order": "p", "slots": "ij"}
    tensors = [
        Tensor(name=f"{name}.{n}", shape=tuple(extents[a] for a in over), dtype="i32")
        for n, over in made.items()
    ]
    writes = [access(t, *over) for t, over in zip(tensors, made.values(), strict=True)]
    return make_op(name, "route", axes, reads, writes), tuple(tensors)


def _group_axes(num_groups: int, rows: int, role: Literal["parallel", "reduce"]) -> list[Axis]:
    """Axes of groups and of the rows of each, at most `rows`."""
    combine = "sum" if role == "reduce" else ""
    return [
        Axis(name="e", extent=num_groups, role=role, combine=combine),
        Axis(name="r", extent=rows, role=role),
    ]


def _rows(tensor: Tensor, starts: int, *inner: str) -> Access:
    """A tensor of rows sorted by group, indexed by group and row; `starts` as of Index."""
    dims = (Index(axes=("e", "r"), starts=starts), *map(index, inner))
    return Access(tensor=tensor.name, dims=dims)


def _require_offsets(name: str, offsets: Tensor) -> int:
    """The number of groups."""
    if len(offsets.shape) != 1 or offsets.shape[0] < 2:
        raise bad_op(name, f"offsets {offsets.shape}", "[groups + 1]")
    require_integers(name, offsets)
    return offsets.shape[0] - 1


def gather_rows(
    name: str, x: Tensor, order: Tensor, offsets: Tensor, slots: Sequence[int]
) -> Built:
    """Rows of x [m, ...] sorted by group: [m * c, ...]. slots: (m, c), the shape of route's slots.

    Row p is x[order[p] // c].
    """
    num_groups = _require_offsets(name, offsets)
    rows, num = slots
    if not x.shape or x.shape[0] != rows or order.shape != (rows * num,):
        found = f"x {x.shape}, order {order.shape}, slots {tuple(slots)}"
        raise bad_op(name, found, "[m, ...], [m * c], (m, c)")
    require_integers(name, order)
    inner = axis_names("k", len(x.shape) - 1)
    axes = _group_axes(num_groups, rows, "parallel")
    axes += [Axis(name=n, extent=e) for n, e in zip(inner, x.shape[1:], strict=True)]
    axes.append(Axis(name="m", extent=rows, role="reduce", combine="sum", lookup=True))
    axes.append(Axis(name="p", extent=rows * num, role="reduce"))
    axes.append(Axis(name="o", extent=num_groups + 1, role="reduce"))
    out = Tensor(name=name, shape=(rows * num, *x.shape[1:]), dtype=x.dtype)
    reads = [access(x, "m", *inner), access(order, "p"), access(offsets, "o")]
    return make_op(name, "gather_rows", axes, reads, [_rows(out, 2, *inner)]), (out,)


def grouped_linear(name: str, x: Tensor, w: Tensor, offsets: Tensor, rows: int) -> Built:
    """Each row of x [p, k], sorted by group, times the matrix of its group of w [e, n, k]: [p, n].

    rows: the most that a group can have. Sums in fp32 or wider; the output dtype is x's.
    """
    num_groups = _require_offsets(name, offsets)
    fits = len(x.shape) == 2 and len(w.shape) == 3 and w.shape[2] == x.shape[1]
    if not fits or w.shape[0] != num_groups or not 1 <= rows <= x.shape[0]:
        found = f"x {x.shape}, w {w.shape}, offsets {offsets.shape}, {counted(rows, 'row')} a group"
        raise bad_op(name, found, "[p, k], [e, n, k], [e + 1], at most p rows")
    require_factors(name, x, [w])
    axes = _group_axes(num_groups, rows, "parallel")
    axes.append(Axis(name="n", extent=w.shape[1]))
    axes.append(Axis(name="k", extent=w.shape[2], role="reduce", combine="sum"))
    axes.append(Axis(name="o", extent=num_groups + 1, role="reduce"))
    out = Tensor(name=name, shape=(x.shape[0], w.shape[1]), dtype=x.dtype)
    reads = [_rows(x, 2, "k"), access(w, "e", "n", "k"), access(offsets, "o")]
    return make_op(name, "grouped_linear", axes, reads, [_rows(out, 2, "n")]), (out,)


def grouped_pointwise(
    name: str, text: str, args: Sequence[Tensor], offsets: Tensor, rows: int
) -> Built:
    """Kind pointwise, of equal shapes [p, ...] whose rows are sorted by group."""
    num_groups = _require_offsets(name, offsets)
    tree = expr.parse(text)
    if not args or expr.num_args(tree) != len(args):
        found = f"expression {text!r} over {counted(len(args), 'operand')}"
        raise bad_op(name, found, expr.expected_args(tree))
    if part := expr.inexact_part(tree, [a.dtype for a in args]):
        raise inexact_integers(text, part, args[0].dtype)
    if not args[0].shape or any(a.shape != args[0].shape for a in args):
        raise bad_op(name, f"shapes {[a.shape for a in args]}", "equal shapes [p, ...]")
    shape = args[0].shape
    if not 1 <= rows <= shape[0]:
        raise bad_op(
            name, f"{counted(rows, 'row')} a group of {shape[0]}", "at least 1, at most all"
        )
    inner = axis_names("i", len(shape) - 1)
    axes = _group_axes(num_groups, rows, "parallel")
    axes += [Axis(name=n, extent=e) for n, e in zip(inner, shape[1:], strict=True)]
    axes.append(Axis(name="o", extent=num_groups + 1, role="reduce"))
    out = Tensor(name=name, shape=shape, dtype=args[0].dtype)
    reads = [*(_rows(a, len(args), *inner) for a in args), access(offsets, "o")]
    writes = [_rows(out, len(args), *inner)]
    return make_op(name, "pointwise", axes, reads, writes, expr=str(tree)), (out,)


def scatter_add(name: str, y: Tensor, weights: Tensor, slots: Tensor, offsets: Tensor) -> Built:
    """Adds each row of y [m * c, n], sorted by group, times its weight to the row that it came
    from: out [m, n] = sum over choices of weights [m, c] * y[slots [m, c]].

    What belongs to no group counts as zero, whatever y holds there. Sums in fp32 or wider, in order
    of the choices, whatever the groups; the output dtype is y's.
    """
    num_groups = _require_offsets(name, offsets)
    fits = len(y.shape) == 2 and len(slots.shape) == 2 and weights.shape == slots.shape
    if not fits or y.shape[0] != slots.num_elements:
        found = f"y {y.shape}, weights {weights.shape}, slots {slots.shape}"
        raise bad_op(name, found, "[m * c, n], [m, c], [m, c]")
    require_factors(name, y, [weights])
    require_integers(name, slots)
    rows, num = slots.shape
    axes = [Axis(name="m", extent=rows), Axis(name="n", extent=y.shape[1])]
    axes.append(Axis(name="c", extent=num, role="reduce"))
    axes += _group_axes(num_groups, rows, "reduce")
    axes.append(Axis(name="o", extent=num_groups + 1, role="reduce"))
    out = Tensor(name=name, shape=(rows, y.shape[1]), dtype=y.dtype)
    reads = [_rows(y, 3, "n"), access(weights, "m", "c"), access(slots, "m", "c")]
    reads.append(access(offsets, "o"))
    return make_op(name, "scatter_add", axes, reads, [access(out, "m", "n")]), (out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRange:
    """The groups that a rank does: `first` up to `stop`, of `num` in all."""

    first: int
    stop: int
    num: int

    @property
    def is_all(self) -> bool:
        return self.stop - self.first == self.num


def group_range(op: Op, coordinate: Coordinate) -> GroupRange:
    """All groups, or the rank's where a mesh axis shares them out; the last ranks may have fewer,
    or none.
    """
    extent = op.extents["e"]
    if not op.get("group_axis", ""):
        return GroupRange(first=0, stop=extent, num=extent)
    num = int(str(op.attr("num_groups")))
    first = min(coordinate[str(op.attr("group_axis"))] * extent, num)
    return GroupRange(first=first, stop=min(first + extent, num), num=num)


def keep_groups(x: Any, offsets: Any, groups: GroupRange) -> Any:
    """x with zeros in the rows of other groups, and of none; as it is where all groups are here,
    rows of none too (see route).
    """
    if groups.is_all:
        return x
    rows = whole_numbers(offsets, len(x))
    mine = (rows >= offsets[groups.first]) & (rows < offsets[groups.stop])
    return x.masked_fill(~mine.view(-1, *[1] * (x.dim() - 1)), 0)


def _whole_groups(op: Op, tensor: Tensor) -> Tensor:
    """A tensor of one part a group as of all ranks, of which each has some."""
    if not tensor.shape:
        return tensor
    num = int(str(op.get("num_groups", tensor.shape[0])))
    return replace(tensor, shape=(num, *tensor.shape[1:]))


def _by_rows(op: Op) -> bool:
    """Whether an op is restated over rows alone (kernels/tasks/groups.py)."""
    return bool(op.get("groups", 0)) and grouped_index(op) is None


def _restated_gather(op: Op, x: Tensor, order: Tensor, offsets: Tensor) -> Built:
    """Ranks may have a part of the rows of x each."""
    whole = int(str(op.get("extent", x.shape[0] if x.shape else 0)))
    slots = (whole, order.num_elements // max(whole, 1))
    return gather_rows(op.name, replace(x, shape=(whole, *x.shape[1:])), order, offsets, slots)


def restated_product(op: Op, x: Tensor, w: Tensor, offsets: Tensor) -> Built:
    """What grouped_linear states of an op's operands, of which w has the groups of a rank."""
    rows = op.extents.get("r", 0)
    return grouped_linear(op.name, x, _whole_groups(op, w), offsets, rows)


def _restated_scatter(op: Op, y: Tensor, weights: Tensor, slots: Tensor, offsets: Tensor) -> Built:
    """Ranks may have a part of the rows that are added to each, and all of y."""
    num = min(slots.num_elements, y.shape[0] if y.shape else 0)
    here = replace(y, shape=(num, *y.shape[1:]))
    stated, made = scatter_add(op.name, here, weights, slots, offsets)
    rows = {"r": op.extents.get("r", 0)}  # of a group, on all ranks
    axes = (replace(axis, extent=rows.get(axis.name, axis.extent)) for axis in stated.axes)
    return replace(stated, axes=tuple(axes)), made


def _unless_by_rows(rule: Misfit) -> Misfit:
    return lambda op, reads, writes: None if _by_rows(op) else rule(op, reads, writes)


def top_k_values(x: Any, num: int, weights: str) -> tuple[Any, Any]:
    """Weights f32 and columns i32 of the num largest of each row; see top_k."""
    wide = x.float() if x.element_size() < 8 else x
    ordered, columns = wide.sort(dim=-1, descending=True, stable=True)
    chosen, columns = ordered[:, :num], columns[:, :num]
    if weights == "softmax":
        chosen = wide.softmax(-1).gather(1, columns)
    elif weights == "softmax_chosen":
        chosen = chosen.softmax(-1)
    if x.is_cpu and bool(chosen.isnan().any()):
        row = int(chosen.isnan().any(1).nonzero()[0, 0])
        raise RequestError(
            f"a router score of row {row} is not a number",
            expected="finite scores",
            remedy="look for NaN or infinities in the weights or activations before it",
        )
    return chosen.float(), columns.int()


def route_values(ids: Any, num_groups: int, num_rows: Any = None) -> tuple[Any, Any, Any, Any]:
    """counts, offsets, order and slots, i32; see route."""
    flat = ids.reshape(-1).long()
    pairs = whole_numbers(flat, len(flat))
    if num_rows is not None:
        if ids.is_cpu and not 0 <= int(num_rows) <= len(ids):
            raise RequestError(
                f"{counted(int(num_rows), 'row')} in use of {len(ids)} that are routed",
                expected=f"0 to {len(ids)}",
                remedy="correct the number",
            )
        flat = flat.masked_fill(pairs >= num_rows * ids.shape[1], num_groups)
    allowed = num_groups if num_rows is None else num_groups + 1
    if ids.is_cpu and not bool(((flat >= 0) & (flat < allowed)).all()):
        raise RequestError(
            f"a row sent to group {int(flat[(flat < 0) | (flat >= allowed)][0])}",
            expected=f"groups from 0 to {num_groups - 1}",
            remedy="correct the ids",
        )
    if ids.is_cpu:
        _require_distinct(flat.reshape(ids.shape), num_groups)
    _, order = flat.sort(dim=0, stable=True)
    counts = flat.new_zeros(num_groups + 1)
    counts = counts.index_add_(0, flat, flat.new_ones(len(flat)))[:num_groups]
    offsets = flat.new_zeros(num_groups + 1)
    offsets[1:] = counts.cumsum(0)
    slots = pairs.new_empty(len(pairs))
    slots[order] = pairs
    return counts.int(), offsets.int(), order.int(), slots.reshape(ids.shape).int()


def _require_distinct(ids: Any, num_groups: int) -> None:
    """RequestError for a row that names a group twice, which may then have more rows than tiles;
    rows beyond those in use name none.
    """
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < num_groups)
    if bool(twice.any()):
        row, choice = (int(each) for each in twice.nonzero()[0])
        raise RequestError(
            f"row {row} sent to group {int(ordered[row, choice])} more than once",
            expected="groups that differ, as those that top_k chooses",
            remedy="correct the ids",
        )


def scatter_values(y: Any, weights: Any, slots: Any, offsets: Any, groups: GroupRange) -> Any:
    """Weighted rows of `groups`, each added to the row it came from, in order of the choices."""
    wide = widen(y)
    out = wide.new_zeros(slots.shape[0], y.shape[1])
    here = (slots >= offsets[groups.first]) & (slots < offsets[groups.stop])
    for choice in range(slots.shape[1]):
        rows = wide.index_select(0, slots[:, choice].long())
        term = rows * weights[:, choice : choice + 1].to(wide.dtype)
        out += term.masked_fill(~here[:, choice : choice + 1], 0)
    return out.to(y.dtype)


def _top_k_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    num, weights = op.extents["c"], str(op.attr("weights"))
    return lambda x: top_k_values(x, num, weights)


def _route_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    num_groups = op.extents["g"]
    return lambda ids, num_rows=None: route_values(ids, num_groups, num_rows)


def _gather_rows_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    """Where ranks share the rows of x out, a rank gathers its own."""
    groups, extents = group_range(op, coordinate), op.extents
    whole = int(str(op.get("extent", extents["m"])))
    num_choices, base = extents["p"] // whole, local_base(op, coordinate)

    def run(x: Any, order: Any, offsets: Any) -> Any:
        rows = order.long() // num_choices - base
        if whole == x.shape[0]:
            return keep_groups(x.index_select(0, rows), offsets, groups)
        mine = (rows >= 0) & (rows < x.shape[0])
        found = x.index_select(0, rows.clamp(0, x.shape[0] - 1))
        found = found.masked_fill(~mine.view(-1, *[1] * (x.dim() - 1)), 0)
        return keep_groups(found, offsets, groups)

    return run


def _grouped_linear_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    """Where ranks share the groups out, w holds the rank's, and rows of others are zero."""
    groups = group_range(op, coordinate)

    def run(x: Any, w: Any, offsets: Any) -> Any:
        wide = widen(x)
        out = wide.new_zeros(len(x), w.shape[1])
        bounds = offsets[groups.first : groups.stop + 1].tolist()
        for position, (start, stop) in enumerate(pairwise(bounds)):
            out[start:stop] = wide[start:stop] @ widen(w[position]).transpose(0, 1)
        return out.to(x.dtype)

    return run


def _scatter_add_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    groups = group_range(op, coordinate)
    return lambda y, weights, slots, offsets: scatter_values(y, weights, slots, offsets, groups)


define(
    OpKind(
        name="top_k",
        in_megakernel=True,
        reads_whole=True,
        picks_elements=True,
        attrs={"weights": one_of(*get_args(Weighing))},
        misfit=as_stated(
            lambda op, x: top_k(op.name, x, op.extents.get("c", 0), op.attr("weights"))
        ),
        reference=_top_k_reference,
    )
)
define(
    OpKind(
        name="route",
        in_megakernel=True,
        reads_whole=True,
        counts_rows=True,
        misfit=as_stated(
            lambda op, ids, num_rows=None: route(op.name, ids, op.extents.get("g", 0), num_rows)
        ),
        reference=_route_reference,
    )
)
define(
    OpKind(
        name="gather_rows",
        in_megakernel=True,
        combine="sum",
        reads_whole=True,
        masks_padding=True,
        misfit=as_stated(_restated_gather),
        restated_misfit=_unless_by_rows(as_stated(_restated_gather)),
        grouped_flops=lambda op, points: 0,
        reference=_gather_rows_reference,
    )
)
define(
    OpKind(
        name="grouped_linear",
        in_megakernel=True,
        combine="sum",
        reads_whole=True,
        contracts=True,
        misfit=as_stated(restated_product),
        restated_misfit=_unless_by_rows(as_stated(restated_product)),
        host_reads="where groups start",
        reference=_grouped_linear_reference,
    )
)
define(
    OpKind(
        name="scatter_add",
        in_megakernel=True,
        combine="sum",
        reads_whole=True,
        linear_read=0,
        misfit=as_stated(_restated_scatter),
        restated_misfit=_unless_by_rows(as_stated(_restated_scatter)),
        reference=_scatter_add_reference,
    )
)
