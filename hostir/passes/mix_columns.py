"""Lets a product make one column of two: a gate and what it opens.

Comes in: a body of lower.py, after fuse.py. Where a pointwise op stands directly behind a product
and its two operands are the left and the right half of its columns, which nobody else reads, goes
out: a fused_linear, or a FusedMatmul that gathers, which writes the pointwise op's result; the
product itself is nowhere. So it is where it stands behind two products of one x, which are its two
operands, and, as a fused_groups, where these are of rows sorted by group. Next: passes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import Allocate, LibraryOp, Node
from distmega.hostir.passes.fused_kinds import is_product, op_exprs
from distmega.hostir.passes.joining import is_handed_on, join_ops, take
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.ops.axis_views import is_plain
from distmega.program.ops.parts import make_op
from distmega.program.types import Access, Op, Tensor, grouped_index

Product = LibraryOp | FusedMatmul


def mix_columns(
    body: Sequence[Node], buffers: Mapping[str, Tensor], outputs: Sequence[str]
) -> tuple[Node, ...]:
    """The body, loops included, with such products."""
    return join_ops(body, buffers, outputs, _mix)


def _mix(
    above: list[Node], node: LibraryOp, buffers: Mapping[str, Tensor], uses: Mapping[str, int]
) -> Node:
    """The product that `node` is made part of, what it no longer needs taken from `above`; or the
    node.
    """
    if (paired := _pair(above, node.op, buffers, uses)) is not None:
        return paired
    views: list[Op] = []
    at = len(above) - 1
    while at >= 0 and (isinstance(above[at], Allocate) or _view(above[at]) is not None):
        if (view := _view(above[at])) is not None:
            views.append(view)
        at -= 1
    product = above[at] if at >= 0 else node
    if not isinstance(product, LibraryOp | FusedMatmul):
        return node
    found = _product_of(product, views, node.op, buffers, uses)
    if found is None:
        return node
    gone = _result(product)
    before = [x for x in above[:at] if not (isinstance(x, Allocate) and x.buffer == gone)]
    above[:] = [*before, *(x for x in above[at + 1 :] if _view(x) is None)]
    return found


def _pair(
    above: list[Node], op: Op, buffers: Mapping[str, Tensor], uses: Mapping[str, int]
) -> LibraryOp | None:
    """The op that does two products of one x and what `op` makes of both; they and what allocates
    their results are taken from `above`. None where they do not stand there.
    """
    is_grouped = grouped_index(op) is not None
    operands = [access.tensor for access in (op.reads[:-1] if is_grouped else op.reads)]
    names = [*dict.fromkeys(operands)]
    if not kind_of(op).is_elementwise or len(names) != 2 or not _is_plain(op, buffers):
        return None
    found: dict[str, int] = {}
    at = len(above) - 1
    while at >= 0 and len(found) < 2:
        node = above[at]
        if isinstance(node, LibraryOp) and _is_plain_product(node.op, buffers, is_grouped):
            found[node.op.writes[0].tensor] = at
        elif not isinstance(node, Allocate):
            return None
        at -= 1
    trees, result = op_exprs(op), op.writes[0].tensor
    alone = all(is_handed_on(each, buffers, uses) for each in names)
    types = {buffers[each].dtype for each in (*names, result)}
    if found.keys() != {*names} or len(trees) != 1 or not alone or len(types) > 1:
        return None
    first, second = (_op_at(above, found[each]) for each in names)
    (x, upper, *starts), (other_x, lower, *others) = first.reads, second.reads
    shapes = {buffers[each.tensor].shape for each in (upper, lower)}
    if x.tensor != other_x.tensor or len(shapes) > 1 or upper.tensor == lower.tensor:
        return None
    attrs = {}
    if is_grouped:
        given = {each.tensor for each in (starts[0], *others, op.reads[-1])}
        if len(given) > 1 or first.attrs != second.attrs or _group_attrs(first) != _group_attrs(op):
            return None
        attrs = dict(first.attrs)
    take(above, {*found.values()}, found)
    reads = [x, upper, replace(upper, tensor=lower.tensor), *starts]
    made = replace(first.writes[0], tensor=result)
    if is_grouped:
        reads, made = [*map(_starting_last, reads)], _starting_last(made)
    kind = "fused_groups" if is_grouped else "fused_linear"
    formula = _renumbered(trees[0], [names.index(each) for each in operands])
    made_op = make_op(result, kind, first.axes, reads, [made], **attrs, expr=str(formula))
    return LibraryOp(op=made_op)


def _group_attrs(op: Op) -> tuple[object, object]:
    """Which groups a rank does, as group_range of program/ops/experts.py reads it."""
    return op.get("group_axis", ""), op.get("num_groups", 0)


def _starting_last(access: Access) -> Access:
    """An access of rows sorted by group to an op whose fourth operand says where groups start."""
    dims = (replace(index, starts=3) if index.is_grouped else index for index in access.dims)
    return replace(access, dims=tuple(dims))


def _op_at(body: Sequence[Node], at: int) -> Op:
    node = body[at]
    assert isinstance(node, LibraryOp), "products are"
    return node.op


def _is_plain(op: Op, buffers: Mapping[str, Tensor]) -> bool:
    """Whether an op goes through its operands and results alike, an axis a dim, or a group and its
    rows.
    """
    is_grouped = grouped_index(op) is not None
    values = [*(op.reads[:-1] if is_grouped else op.reads), *op.writes]
    whole = {tuple(index.axes for index in access.dims) for access in values}
    shapes = {buffers[access.tensor].shape for access in values}
    return len(whole) == 1 and len(shapes) == 1 and (is_grouped or all(map(is_plain, values)))


def _is_plain_product(op: Op, buffers: Mapping[str, Tensor], is_grouped: bool) -> bool:
    """Without a bias, of operands of one type; of rows sorted by group or not."""
    if not (op.kind == "grouped_linear" if is_grouped else is_product(op) and len(op.reads) == 2):
        return False
    x, w = (buffers[access.tensor] for access in op.reads[:2])
    return x.dtype == w.dtype


def _view(node: Node) -> Op | None:
    return node.op if isinstance(node, LibraryOp) and node.op.is_view else None


def _result(node: Product) -> str:
    return node.out if isinstance(node, FusedMatmul) else node.op.writes[0].tensor


def _product_of(
    node: Product,
    views: Sequence[Op],
    op: Op,
    buffers: Mapping[str, Tensor],
    uses: Mapping[str, int],
) -> Product | None:
    """The node that does both; None where `op` is no such work on the product's halves."""
    shown = {view.writes[0].tensor: view for view in views}
    name, result = _result(node), op.writes[0].tensor
    names = [access.tensor for access in op.reads]
    if not kind_of(op).is_elementwise or len(names) != 2 or shown.keys() != {*names}:
        return None
    trees = op_exprs(op)
    halves = [_half(shown[each], name, buffers) for each in names]
    if halves not in ([0, 1], [1, 0]) or len(trees) != 1 or buffers[name].role != "temp":
        return None
    alone = uses[name] == 3 and all(uses[each] == 2 for each in names)
    types = {buffers[each].dtype for each in (name, result)}
    if not _is_plain(op, buffers) or not alone or len(types) > 1:
        return None
    formula = _renumbered(trees[0], halves)
    if isinstance(node, FusedMatmul):
        if node.kind != "all_gather_matmul" or node.mixes or node.borrows:
            return None
        return replace(node, out=result, mixes=str(formula))
    mixed = _mixed_linear(node.op, result, formula, buffers)
    return None if mixed is None else LibraryOp(op=mixed)


def _half(view: Op, product: str, buffers: Mapping[str, Tensor]) -> int:
    """Which half of a product's columns a view shows, as they are; -1 for anything else."""
    read, write = view.reads[0], view.writes[0]
    shape = buffers[product].shape
    if read.tensor != product or len(shape) < 2 or buffers[write.tensor].shape[:-1] != shape[:-1]:
        return -1
    if 2 * buffers[write.tensor].shape[-1] != shape[-1]:
        return -1
    for mine, its in zip(read.dims, write.dims, strict=True):
        if mine.axes != its.axes or len(mine.axes) != 1 or mine.stride != 1 or its.offset:
            return -1
    offsets = [index.offset for index in read.dims]
    return -1 if any(offsets[:-1]) else {0: 0, shape[-1] // 2: 1}.get(offsets[-1], -1)


def _renumbered(tree: expr.Expr, numbers: Sequence[int]) -> expr.Expr:
    """With argument numbers[n] in place of argument n."""
    match tree:
        case expr.Arg(index):
            return expr.Arg(numbers[index])
        case expr.Call(fn, parts):
            return expr.Call(fn, tuple(_renumbered(part, numbers) for part in parts))
    return tree


def _mixed_linear(
    op: Op, result: str, formula: expr.Expr, buffers: Mapping[str, Tensor]
) -> Op | None:
    """The op of kind fused_linear for a plain product x [rows, sums] times w [columns, sums]."""
    if not _is_plain_product(op, buffers, is_grouped=False):
        return None
    (x, w), (out,) = op.reads, op.writes
    column = out.dims[-1].axes[0]
    half = buffers[result].shape[-1]
    axes = [replace(a, extent=half) if a.name == column else a for a in op.axes]
    upper = Access(tensor=w.tensor, dims=w.dims)
    lower = Access(tensor=w.tensor, dims=(replace(w.dims[0], offset=half), *w.dims[1:]))
    made = Access(tensor=result, dims=out.dims)
    return make_op(result, "fused_linear", axes, [x, upper, lower], [made], expr=str(formula))
