"""The same uGraph with other grids and loops: what a kernel computes does not depend on them.

Comes in: a UGraph. Goes out: one whose kernels have other numbers of blocks and iterations, with
the maps that follow from them, verified. A proof holds for it as well, since it speaks of axes
alike along their whole extents; equivalence.py proves it once more where a record of it is wanted.
Next: verify.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.ugraph import SHARED_BYTES, Kernel, UGraph
from distmega.superopt.graph.verify import verify_graph

Parts = tuple[tuple[str, int], ...]


def free_axes(graph: UGraph, kernel: Kernel) -> tuple[str, ...]:
    """Axes that the grid of a kernel may divide: those of all its results that nothing reduces."""
    tensors = graph.tensor_map()
    common = [set(tensors[store.name].axes) for store in kernel.stores]
    taken = {axis for op in kernel.ops for axis in (*op.reduced, op.joined)}
    order = [axis for axis, _ in graph.extents]
    return tuple(axis for axis in order if axis in set.intersection(*common) - taken)


def regrid_kernel(graph: UGraph, kernel: Kernel, grid: Parts, loops: int) -> Kernel:
    """A kernel with another grid, and so many iterations of its loop; of one iteration no loop."""
    tensors = graph.tensor_map()
    grid = tuple((axis, parts) for axis, parts in grid if parts > 1)
    loop = (kernel.loop[0], loops) if kernel.loop and loops > 1 else None
    kept = None if loop is None else loop[0]
    ops = kernel.ops if loop else tuple(replace(op, stage="before") for op in kernel.ops)
    return replace(
        kernel,
        grid=grid,
        loop=loop,
        ops=ops,
        loads=tuple(
            replace(x, imap=_imap(x.dims, grid), fmap=_dim_of(x.dims, kept)) for x in kernel.loads
        ),
        stores=tuple(
            replace(x, omap=_imap(dims, grid), fmap=_dim_of(dims, kept))
            for x in kernel.stores
            for dims in [tensors[x.name].dims]
        ),
    )


def with_kernels(
    graph: UGraph, kernels: Sequence[Kernel], limit_bytes: int = SHARED_BYTES
) -> UGraph:
    """The graph with these kernels, verified. VerifyError where a division is none."""
    return verify_graph(replace(graph, kernels=tuple(kernels)), limit_bytes)


def _imap(dims: Dims, grid: Parts) -> tuple[int, ...]:
    return tuple(_dim_of(dims, axis) for axis, _ in grid)


def _dim_of(dims: Dims, axis: str | None) -> int:
    return next((number for number, dim in enumerate(dims) if axis in dim), -1)


def split_pairs(graph: UGraph) -> tuple[tuple[str, str], ...]:
    """Axes (outer, inner) that are parts of one axis in every input and output, so that another
    number of parts is the same graph: an outer one that stands before its inner one, or alone in
    temporary tensors.
    """
    known = [t for t in graph.tensors if t.role != "temp" or t.name in graph.outputs]
    dims = [dim for tensor in known for dim in tensor.dims]
    dims += [dim for kernel in graph.kernels for load in kernel.loads for dim in load.dims
             if load.tensor in {t.name for t in known}]  # fmt: skip
    pairs = {pair for dim in dims for pair in pairwise(dim)}
    found = []
    for outer, inner in sorted(pairs):
        holds = [dim for dim in dims if outer in dim or inner in dim]
        if all((outer, inner) in pairwise(dim) for dim in holds):
            found.append((outer, inner))
    return tuple(found)


def resplit(graph: UGraph, outer: str, inner: str, parts: int) -> UGraph:
    """The graph with `parts` elements along `outer`, and the rest along `inner`; grids and loops
    over these are left as one block and one iteration each.
    """
    extents = dict(graph.extents)
    extents[inner] = extents[outer] * extents[inner] // parts
    extents[outer] = parts
    made = replace(graph, extents=tuple(extents.items()))
    kernels = []
    for kernel in graph.kernels:
        grid = tuple(pair for pair in kernel.grid if pair[0] not in (outer, inner))
        loop = kernel.loop
        if loop and loop[0] in (outer, inner):
            count = next((n for n in (loop[1], 2) if extents[loop[0]] % n == 0), 0)
            loop = (loop[0], count) if count else None
        loops = loop[1] if loop else 1
        kernels.append(regrid_kernel(made, kernel, grid, loops))
    return replace(made, kernels=tuple(kernels))
