"""Ops that pick elements by what the data say: embedding, gather and topk.

As compute.py: names and tensors in, the Op and the tensors it writes out.

Ids of embedding and gather, positions of rope and kv_append and sequences of kv_append and packed
attention are from 0 to one less than the rows or elements there are; none counts from the end.
Those on a CPU are checked: RequestError for another, before a CompiledProgram runs if it is given
them, else when the op runs. Nobody looks at those on a GPU, where what another looks up means
nothing: library ops end in torch's assertion, kernels give zeros or another row of the table.
"""

from collections.abc import Callable, Mapping
from typing import Any

from distmega.errors import RequestError, counted
from distmega.program.kinds import (
    COUNT,
    Coordinate,
    OpKind,
    define,
    kind_of,
    local_base,
    one_a_point,
    zero_in,
)
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    make_op,
    normal_dim,
    require_integers,
    whole_number,
)
from distmega.program.types import Axis, Op, Program, Tensor

_IDS = {
    "embedding": {"v": 0},
    "gather": {"v": 1},
    "rope": {"t": 2},
    "attention": {"s": 4},
    "kv_append": {"t": 1, "s": 2},
    "route": {"g": 0},
}
"""By the axis of what they look up, if there is one: the operand that holds them. Not where a
further operand says how many rows count: what others hold is nobody's.
"""


def embedding(name: str, ids: Tensor, table: Tensor) -> Built:
    """Rows of table [v, ..., d] at ids [m], 0 to v - 1: a one-hot contraction over v, one row
    touched.
    """
    if len(ids.shape) != 1 or len(table.shape) < 2:
        raise bad_op(name, f"ids {ids.shape}, table {table.shape}", "[m] and [v, ..., d]")
    require_integers(name, ids)
    inner = [*axis_names("h", len(table.shape) - 2), "d"]
    out = Tensor(name=name, shape=(ids.shape[0], *table.shape[1:]), dtype=table.dtype)
    axes = [Axis(name=n, extent=e) for n, e in zip(["m", *inner], out.shape, strict=True)]
    axes.append(Axis(name="v", extent=table.shape[0], role="reduce", combine="sum", lookup=True))
    reads = [access(ids, "m"), access(table, "v", *inner)]
    return make_op(name, "embedding", axes, reads, [access(out, "m", *inner)]), (out,)


def gather(name: str, x: Tensor, ids: Tensor, dim: int) -> Built:
    """out[.., i, ..] = x[.., ids[.., i, ..], ..] along `dim`, of the shape of ids, which equals x's
    but for that dim.
    """
    dim = normal_dim(name, x, dim)
    pairs = [(mine, other) for n, (mine, other) in enumerate(zip(x.shape, ids.shape, strict=False))
             if n != dim]  # fmt: skip
    if len(x.shape) != len(ids.shape) or any(mine != other for mine, other in pairs):
        raise bad_op(name, f"x {x.shape}, ids {ids.shape}", f"equal dims but for dim {dim}")
    require_integers(name, ids)
    names = axis_names("i", len(x.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, ids.shape, strict=True)]
    axes.append(Axis(name="v", extent=x.shape[dim], role="reduce", lookup=True))
    read = access(x, *("v" if n == dim else each for n, each in enumerate(names)))
    out = Tensor(name=name, shape=ids.shape, dtype=x.dtype)
    reads = [read, access(ids, *names)]
    return make_op(name, "gather", axes, reads, [access(out, *names)], dim=dim), (out,)


def topk(name: str, x: Tensor, num_top: int) -> Built:
    """The num_top largest elements of the last dim, largest first, and their indices: outputs
    [name].value and [name] (i64).
    """
    num_top = whole_number(name, "num_top", num_top)
    if x.dtype == "bool":
        raise bad_op(name, f"{x.name!r} of dtype bool", "numbers", "convert it, or take argmax")
    if not x.shape or not 1 <= num_top <= x.shape[-1]:
        found = f"the {num_top} largest of rows of {x.shape}"
        raise bad_op(name, found, "from 1 to the elements of a row of x")
    rows = axis_names("m", len(x.shape) - 1)
    axes = [Axis(name=n, extent=e) for n, e in zip(rows, x.shape[:-1], strict=True)]
    axes.append(Axis(name="u", extent=x.shape[-1], role="reduce"))
    axes.append(Axis(name="c", extent=num_top, role="scatter"))
    shape = (*x.shape[:-1], num_top)
    value = Tensor(name=f"{name}.value", shape=shape, dtype=x.dtype)
    chosen = Tensor(name=name, shape=shape, dtype="i64")
    writes = [access(value, *rows, "c"), access(chosen, *rows, "c")]
    return make_op(name, "topk", axes, [access(x, *rows, "u")], writes), (value, chosen)


def require_ids(ids: Any, num: int, whose: str = "") -> None:
    """RequestError for ids on a CPU that aren't from 0 to num - 1. whose: where they came in."""
    if not ids.is_cpu:
        return
    wrong = (ids < 0) | (ids >= num)
    if bool(wrong.any()):
        raise RequestError(
            f"an id of {int(ids[wrong][0])}{whose and f' in {whose!r}'} in a table of"
            f" {counted(num, 'row')}",
            expected=f"ids from 0 to {num - 1}",
            remedy="correct the ids",
        )


def bounded_inputs(program: Program) -> dict[str, int]:
    """Inputs of which every element is an id, as it is or under another shape, and below what all
    are: the rows of the smallest table. Ids that come from a tensor that is updated are left out.
    """
    tensors, bounds = program.tensor_map(), dict[str, int]()
    source = {tensor.name: tensor.name for tensor in program.with_role("input")}
    made = {tensor.name for tensor in program.tensors if tensor.role in ("input", "weight")}
    for op in program.ops:
        counts = kind_of(op).counts_rows and len(op.reads) > 1
        ids = {} if counts else _IDS.get(op.kind, {})
        for axis, operand in ids.items():
            name = source.get(op.reads[operand].tensor) if axis in op.extents else None
            if name:
                extent = op.extents[axis]
                if op.get("base_axis", ""):
                    extent = int(str(op.attr("extent")))  # of all ranks
                bounds[name] = min(extent, bounds.get(name, extent))
        written = [access.tensor for access in op.writes]
        if not made.isdisjoint(written):
            source.clear()
        elif _keeps_all(op, tensors) and op.reads[0].tensor in source:
            source[written[0]] = source[op.reads[0].tensor]
        made.update(written)
    return bounds


def _keeps_all(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the result has every element of the one operand, and no others."""
    if len(op.reads) != 1 or not (op.is_view or kind_of(op).only_copies):
        return False
    return tensors[op.writes[0].tensor].num_elements >= tensors[op.reads[0].tensor].num_elements


def embedding_values(ids: Any, table: Any, base: int | None = None, extent: int = 0) -> Any:
    """Rows of table [v, ..., d] at ids [m]. base: the table holds the ids from there on, and the
    rows of others, which are below extent, are zeros. RequestError as of require_ids.
    """
    if base is None:
        require_ids(ids, table.shape[0])
        return table.index_select(0, ids)
    require_ids(ids, extent)
    local = ids - base
    mine = (local >= 0) & (local < table.shape[0])
    rows = table.index_select(0, local.clamp(0, table.shape[0] - 1))
    return rows.masked_fill(~mine.view(-1, *[1] * (rows.dim() - 1)), 0)


def _embedding_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    if not op.get("base_axis", ""):
        return embedding_values
    base, extent = local_base(op, coordinate), int(str(op.attr("extent")))
    return lambda ids, table: embedding_values(ids, table, base, extent)


def _gather_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    dim = int(str(op.attr("dim")))

    def run(x: Any, ids: Any) -> Any:
        require_ids(ids, x.shape[dim])
        return x.gather(dim, ids.long())

    return run


def _topk_reference(op: Op, coordinate: Coordinate) -> Callable[..., Any]:
    num_top = op.axis("c").extent
    return lambda x: tuple(x.topk(num_top, -1))


define(
    OpKind(
        name="embedding",
        in_megakernel=True,
        combine="sum",
        reads_whole=True,
        looks_up_rows=True,
        misfit=as_stated(lambda op, ids, table: embedding(op.name, ids, table)),
        masks_padding=True,
        zero_where=zero_in(1),
        reference=_embedding_reference,
    )
)
define(
    OpKind(
        name="gather",
        in_megakernel=True,
        reads_whole=True,
        attrs={"dim": COUNT},
        misfit=as_stated(lambda op, x, ids: gather(op.name, x, ids, op.attr("dim"))),
        reference=_gather_reference,
    )
)
define(
    OpKind(
        name="topk",
        in_megakernel=True,
        reads_whole=True,
        picks_elements=True,
        misfit=as_stated(lambda op, x: topk(op.name, x, op.extents.get("c", 0))),
        flops=one_a_point,
        reference=_topk_reference,
    )
)
