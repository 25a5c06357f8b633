"""Runs a uGraph block by block and iteration by iteration, over any arithmetic.

Comes in: a UGraph, planes for its inputs and weights. Goes out: planes of its outputs, as
reference.py gives them for a program. A rescaling sees the whole loop's maximum, as the rescaled
accumulator does in the end. Next: equivalence.py.
"""

from collections.abc import Mapping
from itertools import product

import numpy as np

from distmega.program import expr
from distmega.superopt.graph.arithmetic import Arithmetic, Planes
from distmega.superopt.graph.named import (
    Named,
    contract,
    fold,
    join,
    ordered,
    reduce,
    unfold,
    union,
)
from distmega.superopt.graph.ugraph import (
    BlockOp,
    Kernel,
    UGraph,
    is_accumulator,
    joint_extents,
    rescalings,
)

Parts = Mapping[str, tuple[int, int]]
"""Axis -> (which part, of how many)."""


def run_graph(
    graph: UGraph, inputs: Mapping[str, Planes], arithmetic: Arithmetic
) -> dict[str, Planes]:
    """Outputs by name, of shape [samples, *tensor shape]."""
    memory, tensors, extents = dict(inputs), graph.tensor_map(), joint_extents(graph)
    for kernel in graph.kernels:
        loads = {
            load.name: unfold(memory[load.tensor], load.dims, extents) for load in kernel.loads
        }
        results: dict[str, dict[tuple[int, ...], Named]] = {s.name: {} for s in kernel.stores}
        for block in product(*(range(parts) for _, parts in kernel.grid)):
            where = {a: (i, n) for i, (a, n) in zip(block, kernel.grid, strict=True)}
            for name, value in _run_block(kernel, where, loads, arithmetic).items():
                results[name][block] = value
        for name, blocks in results.items():
            tensor = tensors[name]
            sizes = {axis: extents[axis] for axis in tensor.axes}
            planes = fold(_assemble(kernel, blocks, sizes), tensor.dims, sizes)
            memory[name] = arithmetic.store(planes, tensor.dtype)
    return {name: memory[name] for name in graph.outputs}


def _assemble(
    kernel: Kernel, blocks: Mapping[tuple[int, ...], Named], sizes: Mapping[str, int]
) -> Named:
    """All blocks' parts, each at its place in the whole."""
    first = next(iter(blocks.values()))
    wanted = tuple(sizes)
    num_tests = max(part.planes[0].shape[0] for part in blocks.values())
    whole = tuple(
        np.empty((num_tests, *sizes.values()), dtype=plane.dtype) for plane in first.planes
    )
    for block, part in blocks.items():
        where: list[slice] = [slice(None)]
        position = dict(zip((axis for axis, _ in kernel.grid), block, strict=True))
        counts = dict(kernel.grid)
        for axis, size in sizes.items():
            length = size // counts.get(axis, 1)
            start = position.get(axis, 0) * length
            where.append(slice(start, start + length))
        for into, plane in zip(whole, ordered(part, wanted).planes, strict=True):
            into[tuple(where)] = plane
    return Named(wanted, whole)


def _run_block(
    kernel: Kernel, where: Parts, loads: Mapping[str, Named], arithmetic: Arithmetic
) -> dict[str, Named]:
    """What one block stores."""
    values = {name: value.take(where) for name, value in loads.items()}
    for op in kernel.ops:
        if op.stage == "before":
            values[op.name] = _run_op(op, [values[arg] for arg in op.args], arithmetic)
    if kernel.loop:
        _run_loop(kernel, values, arithmetic)
    for op in kernel.ops:
        if op.stage == "after":
            values[op.name] = _run_op(op, [values[arg] for arg in op.args], arithmetic)
    return {store.name: values[store.name] for store in kernel.stores}


def _run_loop(kernel: Kernel, values: dict[str, Named], arithmetic: Arithmetic) -> None:
    """Runs the body for every iteration; adds what accumulators hold, and what is stored."""
    assert kernel.loop, "called for loops"
    axis, count = kernel.loop
    late = _depending_on(kernel, rescalings(kernel))
    rounds: list[dict[str, Named]] = []
    for index in range(count):
        part = {axis: (index, count)}
        mine = {n: v.take(part) if axis in v.axes else v for n, v in values.items()}
        rounds.append(mine)
    for ops in ([o for o in kernel.ops if o.name not in late],
                [o for o in kernel.ops if o.name in late]):  # fmt: skip
        for op in ops:
            if op.stage == "body":
                for mine in rounds:
                    mine[op.name] = _run_op(
                        op, [_known(a, mine, values) for a in op.args], arithmetic
                    )
                if is_accumulator(kernel, op):
                    parts = [mine.pop(op.name) for mine in rounds]
                    values[op.name] = _accumulate(op, parts, arithmetic)
    for store in kernel.stores:
        if store.fmap >= 0:
            values[store.name] = join([mine[store.name] for mine in rounds], axis, axis)


def _known(name: str, mine: Mapping[str, Named], values: Mapping[str, Named]) -> Named:
    return mine[name] if name in mine else values[name]


def _depending_on(kernel: Kernel, names: set[str]) -> set[str]:
    """Ops that need the named ones, and these."""
    found = set(names)
    for op in kernel.ops:
        if found & set(op.args):
            found.add(op.name)
    return found


def _accumulate(op: BlockOp, parts: list[Named], arithmetic: Arithmetic) -> Named:
    total = parts[0]
    for part in parts[1:]:
        part = ordered(part, total.axes)
        if op.kind in ("max", "min"):
            both = tuple(
                np.stack(pair, axis=1) for pair in zip(total.planes, part.planes, strict=True)
            )
            planes = arithmetic.extreme(both, (1,), op.kind)
        else:
            planes = arithmetic.add(total.planes, part.planes)
        total = Named(total.axes, planes)
    return total


def _run_op(op: BlockOp, args: list[Named], arithmetic: Arithmetic) -> Named:
    match op.kind:
        case "map":
            axes = union(*(arg.axes for arg in args))
            operands = [ordered(arg, axes).planes for arg in args]
            return Named(axes, arithmetic.evaluate(expr.parse(op.expr), operands))
        case "contract":
            return contract(arithmetic, args[0], args[1], op.reduced)
        case "cat":
            other = Named(
                tuple(op.reduced[0] if a == op.reduced[1] else a for a in args[1].axes),
                args[1].planes,
            )
            return join([args[0], other], op.reduced[0], op.joined)
    return reduce(arithmetic, args[0], op.reduced, op.kind)
