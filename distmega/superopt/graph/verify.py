"""The rules that a uGraph keeps, checked: after the search, after parsing, before it is run.

Comes in: a UGraph. Goes out: the same, or VerifyError with the kernel and the op.
"""

from collections.abc import Iterable
from keyword import iskeyword

from distmega.errors import ProgramError, VerifyError
from distmega.program import expr
from distmega.program.dtypes import ITEM_BYTES
from distmega.superopt.graph.named import dim_of
from distmega.superopt.graph.ugraph import (
    OP_KINDS,
    SHARED_BYTES,
    STAGES,
    BlockOp,
    Kernel,
    UGraph,
    is_accumulator,
    joint_extents,
    rescalings,
    shared_bytes,
)


def verify_graph(graph: UGraph, limit_bytes: int = SHARED_BYTES) -> UGraph:
    """Checks names, axes, maps, stages, and shared bytes up to limit_bytes; gives the graph."""
    extents = dict(graph.extents)
    if len(graph.tensor_map()) != len(graph.tensors) or len(extents) != len(graph.extents):
        raise _broken(graph, "two tensors or axes share a name", "names of their own")
    if any(extent < 2 for extent in extents.values()):
        raise _broken(graph, "an axis of less than 2 elements", "axes along which something varies")
    for tensor in graph.tensors:
        if tensor.dtype not in ITEM_BYTES:
            found = f"{tensor.name!r} of dtype {tensor.dtype!r}"
            raise _broken(graph, found, f"one of {', '.join(ITEM_BYTES)}")
        if not set(tensor.axes) <= {*joint_extents(graph)}:
            raise _broken(graph, f"{tensor.name!r} has unknown axes", "axes of the graph")
    stored = {tensor.name for tensor in graph.tensors if tensor.role != "temp"}
    for kernel in graph.kernels:
        if not kernel.name.isidentifier() or iskeyword(kernel.name):
            raise _broken(graph, f"kernel {kernel.name!r}", "a name that a function can have")
        _verify_kernel(graph, kernel, stored)
        if shared_bytes(graph, kernel) > limit_bytes:
            found = f"kernel {kernel.name!r} needs {shared_bytes(graph, kernel)} shared bytes"
            raise _broken(graph, found, f"at most {limit_bytes}", "divide it further")
        stored |= {store.name for store in kernel.stores}
    missing = {*graph.outputs, *graph.tensor_map()} - stored
    if missing or not graph.outputs:
        raise _broken(graph, f"{sorted(missing)} never stored", "tensors and outputs that are")
    return graph


def _broken(
    graph: UGraph, found: str, expected: str, remedy: str = "print the graph and correct it"
) -> VerifyError:
    return VerifyError(f"graph {graph.name!r}: {found}", expected=expected, remedy=remedy)


def _verify_kernel(graph: UGraph, kernel: Kernel, stored: set[str]) -> None:
    extents, parts = joint_extents(graph), kernel.parts
    where = f"kernel {kernel.name!r}"
    if len(parts) != len(kernel.grid) + (kernel.loop is not None):
        raise _broken(graph, f"{where} divides an axis twice", "grid and loop of different axes")
    for axis, count in parts.items():
        if axis not in extents or count < 2 or extents[axis] % count:
            found = f"{where} divides axis {axis!r} in {count}"
            raise _broken(graph, found, f"at least 2 equal parts of {extents.get(axis)}")
    _verify_loads(graph, kernel, stored)
    values = {load.name: tuple(n for dim in load.dims for n in dim) for load in kernel.loads}
    order = {
        load.name: STAGES.index("body" if load.fmap >= 0 else "before") for load in kernel.loads
    }
    if len(values) != len(kernel.loads):
        raise _broken(graph, f"{where} loads two parts by one name", "names of their own")
    late = rescalings(kernel)
    for op in kernel.ops:
        if op.name in values:
            raise _broken(graph, f"{where}: {op.name!r} is there twice", "names of their own")
        unknown = [arg for arg in op.args if arg not in values]
        if unknown or op.kind not in OP_KINDS or op.stage not in STAGES:
            found = f"{where}: {op.name!r} of kind {op.kind!r}, stage {op.stage!r} reads {unknown}"
            raise _broken(graph, found, f"one of {', '.join(OP_KINDS)} on values above")
        _verify_axes(graph, kernel, op, values)
        _verify_stage(graph, kernel, op, values, order, late)
        values[op.name] = op.axes
        order[op.name] = STAGES.index("after" if is_accumulator(kernel, op) else op.stage)
    _verify_stores(graph, kernel, values, order)


def _verify_loads(graph: UGraph, kernel: Kernel, stored: set[str]) -> None:
    tensors, extents = graph.tensor_map(), joint_extents(graph)
    for load in kernel.loads:
        if load.tensor not in stored:
            found = f"kernel {kernel.name!r} loads {load.tensor!r}"
            raise _broken(graph, found, "an input, or what a kernel above stores")
        mine, whole = load.dims, tensors[load.tensor].dims
        flat = [axis for dim in mine for axis in dim]
        same = len(mine) == len(whole) and len(set(flat)) == len(flat) and set(flat) <= {*extents}
        if not same or any(
            _size(a, extents) != _size(b, extents) for a, b in zip(mine, whole, strict=True)
        ):
            found = f"kernel {kernel.name!r} loads {load.tensor!r} as {mine}"
            raise _broken(graph, found, f"dims of {whole}, of the same extents")
        fmap = dim_of(mine, kernel.loop[0]) if kernel.loop else -1
        if (load.imap, load.fmap) != (tuple(dim_of(mine, a) for a, _ in kernel.grid), fmap):
            found = f"kernel {kernel.name!r}: imap {load.imap}, fmap {load.fmap} of {load.name!r}"
            raise _broken(graph, found, "the dims in which the grid's and the loop's axes lie")


def _size(axes: Iterable[str], extents: dict[str, int]) -> int:
    size = 1
    for axis in axes:
        size *= extents[axis]
    return size


def _verify_axes(
    graph: UGraph, kernel: Kernel, op: BlockOp, values: dict[str, tuple[str, ...]]
) -> None:
    have = {axis for arg in op.args for axis in values[arg]}
    left = have - set(op.reduced)
    counts = {"contract": 2, "sum": 1, "max": 1, "min": 1, "cat": 2}
    fits = set(op.reduced) <= have and len(op.args) == counts.get(op.kind, len(op.args))
    if op.kind == "map":
        fits = fits and not op.reduced and _num_operands(op) == len(op.args)
    elif op.kind == "cat":
        a, b = (set(values[arg]) for arg in op.args) if fits else (set(), set())
        fits = fits and len(op.reduced) == 2 and bool(op.joined) and op.joined not in have
        fits = fits and a - {op.reduced[0]} == b - {op.reduced[1]} != a
        left = left | {op.joined}
    else:
        fits = fits and bool(op.reduced)
    divided = set(op.reduced) & set(dict(kernel.grid))
    if kernel.loop and op.kind == "cat":
        divided |= set(op.reduced) & {kernel.loop[0]}
    if not fits or divided or set(op.axes) != left or len(set(op.axes)) != len(op.axes):
        found = f"kernel {kernel.name!r}: {op.name!r} reduces {op.reduced} of {sorted(have)}"
        expected = f"axes that blocks don't share, and a result along {sorted(left)}, not {op.axes}"
        raise _broken(graph, found, expected)


def _num_operands(op: BlockOp) -> int:
    try:
        return expr.num_args(expr.parse(op.expr))
    except ProgramError:
        return -1


def _verify_stage(
    graph: UGraph,
    kernel: Kernel,
    op: BlockOp,
    values: dict[str, tuple[str, ...]],
    order: dict[str, int],
    late: set[str],
) -> None:
    """Before the loop nothing of it, in its body nothing that is only known after it, but for
    rescalings; after it nothing that changes with it.
    """
    loop = kernel.loop[0] if kernel.loop else None
    stage = STAGES.index(op.stage)
    varies = any(loop in values[arg] for arg in op.args)
    early = all(order[arg] <= stage for arg in op.args)
    wanted = {
        "before": not varies and early and op.stage == "before",
        "body": loop is not None and varies and (early or op.name in late),
        "after": not varies,
    }
    if op.name in late and not _only_sums(kernel, op.name):
        wanted["body"] = False
    if not wanted[op.stage]:
        found = f"kernel {kernel.name!r}: {op.name!r} stands in {op.stage!r}"
        raise _broken(graph, found, "what it reads to be known there, and to be there once")


def _only_sums(kernel: Kernel, name: str) -> bool:
    """Whether a rescaling is used by accumulators alone that sum over nothing but the loop."""
    assert kernel.loop, "rescalings stand in loops"
    users = [op for op in kernel.ops if name in op.args]
    stored = any(store.name == name for store in kernel.stores)
    return not stored and all(
        op.kind in ("contract", "sum") and op.reduced == (kernel.loop[0],) for op in users
    )


def _verify_stores(
    graph: UGraph, kernel: Kernel, values: dict[str, tuple[str, ...]], order: dict[str, int]
) -> None:
    tensors = graph.tensor_map()
    names = {op.name for op in kernel.ops}
    for store in kernel.stores:
        where = f"kernel {kernel.name!r} stores {store.name!r}"
        tensor = tensors.get(store.name)
        if store.name not in names or tensor is None or tensor.role != "temp":
            raise _broken(graph, where, "values of its ops, as temporary tensors")
        dims = tensor.dims
        if sorted(values[store.name]) != sorted(tensor.axes):
            raise _broken(graph, f"{where} along {values[store.name]}", f"dims {dims}")
        omap = tuple(dim_of(dims, axis) for axis, _ in kernel.grid)
        fmap = dim_of(dims, kernel.loop[0]) if kernel.loop else -1
        if store.omap != omap or -1 in omap or store.fmap != fmap:
            found = f"{where} by omap {store.omap}, fmap {store.fmap}"
            raise _broken(graph, found, "blocks that each write a part of their own")
        if kernel.loop and fmap < 0 and order[store.name] == STAGES.index("body"):
            raise _broken(graph, f"{where} in the loop", "values that are known after it")
    if not kernel.stores:
        raise _broken(graph, f"kernel {kernel.name!r} stores nothing", "a result")
