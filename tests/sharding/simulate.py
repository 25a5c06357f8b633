"""A numpy interpreter of programs, with all ranks of a mesh in lockstep.

It works from access maps, apart from the library that hostir runs, so that a plan is checked by an
independent reading of what ops mean. Floats are f64 throughout: small integers stay exact.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Access, Index, Op, Program, Tensor
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.planner import Plan

Arrays = dict[str, np.ndarray]

FUNCTIONS = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs, "neg": np.negative, "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)), "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "add": np.add, "sub": np.subtract,
    "mul": np.multiply, "div": np.divide, "maximum": np.maximum, "minimum": np.minimum,
    "pow": np.power,
}  # fmt: skip


def numpy_dtype(tensor: Tensor) -> type:
    return np.int64 if tensor.dtype in ("i32", "i64") else np.float64


def positions(op: Op, index: Index, order: Sequence[str]) -> np.ndarray:
    """Positions in a dim over the axes `order`, each a dim of the result (1 where unused)."""
    extents = op.extents
    place = np.zeros([1] * len(order), dtype=np.int64)
    for name in index.axes:
        shape = [extents[name] if axis == name else 1 for axis in order]
        place = place * extents[name] + np.arange(extents[name]).reshape(shape)
    return place * index.stride + index.offset


def load(op: Op, access: Access, x: np.ndarray, order: Sequence[str]) -> np.ndarray:
    """An operand at every point of the axes `order`; zero where it is not accessed."""
    places = [positions(op, index, order) for index in access.dims]
    valid = np.ones([1] * len(order), dtype=bool)
    for place, extent in zip(places, x.shape, strict=True):
        valid = valid & (place >= 0) & (place < extent)
    if not places:
        return x.reshape([1] * len(order))
    clipped = [np.clip(p, 0, extent - 1) for p, extent in zip(places, x.shape, strict=True)]
    return np.where(valid, x[tuple(np.broadcast_arrays(*clipped))], 0)


def store(op: Op, access: Access, values: np.ndarray, order: Sequence[str], out: np.ndarray):
    """Writes values given at every point of the axes `order`."""
    extents = op.extents
    values = np.broadcast_to(values, [extents[name] for name in order])
    places = np.broadcast_arrays(*(positions(op, index, order) for index in access.dims), values)
    out[tuple(places[:-1])] = places[-1]


def share(op: Op, x: np.ndarray) -> np.ndarray:
    """The result of a view, on x's storage."""
    extents = op.extents
    strides: dict[str, int] = {}
    offset = 0
    for index, stride in zip(op.reads[0].dims, x.strides, strict=True):
        offset += index.offset * stride
        step = index.stride * stride
        for name in reversed(index.axes):
            strides[name] = step
            step *= extents[name]
    shape, steps = [], []
    for index in op.writes[0].dims:
        shape.append(math.prod(extents[name] for name in index.axes))
        steps.append(strides[index.axes[-1]] if index.axes else 0)
    starts = tuple(slice(index.offset, None) for index in op.reads[0].dims)
    base = x[starts] if offset else x
    return np.lib.stride_tricks.as_strided(base, shape, steps)


def run_op(op: Op, tensors: Mapping[str, Tensor], here: Arrays, at: Mapping[str, int]) -> None:
    """One op on one rank's arrays."""
    if op.is_view:
        here[op.writes[0].tensor] = share(op, here[op.reads[0].tensor])
        return
    for access in op.writes:
        if access.tensor not in here:
            tensor = tensors[access.tensor]
            here[tensor.name] = np.zeros(tensor.shape, numpy_dtype(tensor))
    xs = [here[access.tensor] for access in op.reads]
    base = at[op.attr("base_axis")] * op.attr("base_stride") if op.get("base_axis", "") else 0
    if op.kind == "kv_append":
        cache = here[op.writes[0].tensor]
        if cache.ndim == 4:
            cache[np.arange(len(xs[0])), :, xs[1]] = xs[0]
        else:
            cache[:, xs[1]] = xs[0].swapaxes(0, 1)
        return
    if op.kind == "argmax":
        extent = op.get("extent", base + xs[0].shape[-1])
        valid = np.arange(xs[0].shape[-1]) + base < extent
        masked = np.where(valid, xs[0], -np.inf)
        here[op.writes[0].tensor][...] = masked.max(-1)
        here[op.writes[1].tensor][...] = masked.argmax(-1) + base
        return
    if op.kind in ("rope", "attention", "embedding"):
        result = {"rope": rope, "attention": attention, "embedding": embedding}[op.kind](
            op, xs, base
        )
        here[op.writes[0].tensor][...] = result
        return
    order = [axis.name for axis in op.axes]
    values = point_values(op, [load(op, a, x, order) for a, x in zip(op.reads, xs, strict=True)])
    kept = [axis.name for axis in op.axes if axis.role != "reduce"]
    for place, axis in reversed(list(enumerate(op.axes))):
        if axis.role == "reduce":
            assert values.shape[place] == 1
            values = values.squeeze(place)
    store(op, op.writes[0], values, kept, here[op.writes[0].tensor])


def point_values(op: Op, xs: Sequence[np.ndarray]) -> np.ndarray:
    """Result at every point of the op's axes; reduced ones have extent 1."""
    reduced = tuple(i for i, axis in enumerate(op.axes) if axis.role == "reduce")
    if op.kind == "linear":
        full = [axis.extent for axis in op.axes]
        total = np.broadcast_to(xs[0] * xs[1], full).sum(reduced, keepdims=True)
        return total + xs[2] if len(xs) == 3 else total
    if op.kind == "pointwise":
        tree = expr.parse(op.attr("expr"))
        with np.errstate(all="ignore"):
            return np.asarray(expr.evaluate(tree, xs, FUNCTIONS, np.float64))
    if op.kind == "reduce":
        combine = {"sum": np.sum, "max": np.max, "min": np.min}[op.attr("combine")]
        return combine(xs[0], reduced, keepdims=True)
    if op.kind == "softmax":
        top = np.max(xs[1], reduced, keepdims=True)
        return np.exp(xs[0] - top) / np.exp(xs[1] - top).sum(reduced, keepdims=True)
    if op.kind == "layer_norm":
        mean, spread = np.mean(xs[1], reduced, keepdims=True), np.var(xs[1], reduced, keepdims=True)
        return (xs[0] - mean) / np.sqrt(spread + op.attr("eps")) * xs[2] + xs[3]
    if op.kind == "rms_norm":
        mean = np.mean(xs[1] ** 2, reduced, keepdims=True)
        return xs[0] / np.sqrt(mean + op.attr("eps")) * xs[2]
    return sum(xs)


def rope(op: Op, xs: Sequence[np.ndarray], base: int) -> np.ndarray:
    x, _, ids, table = xs
    half = x.shape[-1] // 2
    rows = table[ids].reshape(x.shape[0], *[1] * (x.ndim - 2), 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    left, right = x[..., :half], x[..., half:]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


def attention(op: Op, xs: Sequence[np.ndarray], base: int) -> np.ndarray:
    q, k, v, ids = xs
    own = "m" * (k.ndim == 4)
    scores = np.einsum(f"mhgd,{own}htd->mhgt", q, k) * op.attr("scale")
    keys = np.arange(k.shape[-2])
    mask = keys[None] <= ids[:, None]
    if op.attr("window"):
        mask &= keys[None] > ids[:, None] - op.attr("window")
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum(f"mhgt,{own}hte->mhge", weights, v)


def embedding(op: Op, xs: Sequence[np.ndarray], base: int) -> np.ndarray:
    ids, table = xs
    mine = (ids >= base) & (ids < base + table.shape[0])
    rows = table[np.where(mine, ids - base, 0)]
    return np.where(mine.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def padded(x: np.ndarray, dim: int, extent: int) -> np.ndarray:
    widths = [(0, extent - e if i == dim else 0) for i, e in enumerate(x.shape)]
    return np.pad(x, widths)


def run_collective(op: Op, tensors: Mapping[str, Tensor], team: Sequence[Arrays]) -> None:
    """One collective over the arrays of a team's ranks, in team order."""
    size, names = len(team), [access.tensor for access in op.reads]
    assert op.attr("num_ranks") == size
    xs = [rank[names[0]] for rank in team]
    out = tensors[op.writes[0].tensor]
    if op.kind == "all_reduce" and op.attr("combine") == "argmax":
        values, indices = np.stack(xs), np.stack([rank[names[1]] for rank in team])
        best = values.max(0)
        index = np.where(values == best, indices, np.iinfo(np.int64).max).min(0)
        results = [(best, index)] * size
    elif op.kind == "all_reduce":
        combine = {"sum": np.sum, "max": np.max, "min": np.min}[op.attr("combine")]
        results = [(combine(np.stack(xs), 0),)] * size
    elif op.kind == "all_gather":
        whole = np.concatenate(xs, op.attr("dim"))
        results = [(whole.take(range(op.attr("extent")), op.attr("dim")),)] * size
    else:
        results = [(part,) for part in scattered(op, xs, out, size)]
    for rank, parts in zip(team, results, strict=True):
        for access, part in zip(op.writes, parts, strict=True):
            assert part.shape == tensors[access.tensor].shape, (op, part.shape)
            rank[access.tensor] = part.copy()


def scattered(op: Op, xs: Sequence[np.ndarray], out: Tensor, size: int) -> list[np.ndarray]:
    dim = op.attr("dst_dim") if op.kind == "all_to_all" else op.attr("dim")
    chunk = out.shape[dim]

    def part(x: np.ndarray, i: int) -> np.ndarray:
        return padded(x, dim, chunk * size).take(range(i * chunk, (i + 1) * chunk), dim)

    if op.kind == "take_shard":
        return [part(x, i) for i, x in enumerate(xs)]
    if op.kind == "reduce_scatter":
        assert op.attr("combine") == "sum"
        return [part(np.sum(np.stack(xs), 0), i) for i in range(size)]
    gathered = [np.concatenate([part(x, i) for x in xs], op.attr("dim")) for i in range(size)]
    return [x.take(range(op.attr("extent")), op.attr("dim")) for x in gathered]


def shard_array(x: np.ndarray, domain: AllocationDomain, at: Mapping[str, int]) -> np.ndarray:
    """What a loader gives one rank: its range of every dim, then zeros."""
    part = np.zeros(domain.local_shape, x.dtype)
    found = x[domain.local_slices(at)]
    part[tuple(map(slice, found.shape))] = found
    return part


def join_arrays(
    parts: Sequence[np.ndarray], domain: AllocationDomain, mesh: DeviceMesh
) -> np.ndarray:
    """The whole tensor from all ranks' parts; asserts that ranks agree where they overlap."""
    whole = np.zeros(domain.shape, parts[0].dtype)
    written = np.zeros(domain.shape, dtype=bool)
    for part, at in zip(parts, mesh.coordinates(), strict=True):
        here = domain.local_slices(at)
        found = part[tuple(map(slice, whole[here].shape))]
        assert np.array_equal(np.where(written[here], whole[here], found), found, equal_nan=True)
        whole[here], written[here] = found, True
    assert written.all()
    return whole


def run_local(local: LocalProgram, arrays: Mapping[str, np.ndarray]) -> list[Arrays]:
    """Runs all ranks; gives the arrays each ends with."""
    mesh, tensors = local.mesh, local.program.tensor_map()
    places = list(mesh.coordinates())
    ranks: list[Arrays] = [
        {n: shard_array(arrays[n], local.allocations[n], at) for n in arrays} for at in places
    ]
    for op in local.program.ops:
        if kind_of(op).origin != "sharding":
            for here, at in zip(ranks, places, strict=True):
                run_op(op, tensors, here, at)
                for access in op.writes:
                    assert here[access.tensor].shape == tensors[access.tensor].shape, op
            continue
        axis = op.attr("mesh_axis")
        for team in {mesh.team(axis, rank) for rank in mesh.ranks}:
            run_collective(op, tensors, [ranks[mesh.ranks.index(rank)] for rank in team])
    return ranks


def run_whole(program: Program, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The unsharded result: outputs and states."""
    here = {name: x.copy() for name, x in arrays.items()}
    for op in program.ops:
        run_op(op, program.tensor_map(), here, {})
    return here


def check_plan(plan: Plan, arrays: Mapping[str, np.ndarray], exact: bool = True) -> LocalProgram:
    """Asserts that all ranks together compute what the whole program does."""
    local = localize(plan)
    ranks = run_local(local, arrays)
    expected = run_whole(plan.program, arrays)
    states = [tensor.name for tensor in plan.program.with_role("state")]
    for name in (*plan.program.outputs, *states):
        joined = join_arrays([rank[name] for rank in ranks], local.allocations[name], plan.mesh)
        if exact:
            np.testing.assert_array_equal(joined, expected[name], err_msg=name)
        else:
            np.testing.assert_allclose(joined, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)
    for name in states:
        for rank, at in zip(ranks, plan.mesh.coordinates(), strict=True):
            part = shard_array(expected[name], local.allocations[name], at)
            np.testing.assert_allclose(rank[name], part, rtol=1e-9, atol=1e-9)
    return local


def random_arrays(program: Program, seed: int) -> dict[str, np.ndarray]:
    """Small integers for everything given; index operands count up from 0."""
    random = np.random.default_rng(seed)
    arrays = {}
    for tensor in program.tensors:
        if tensor.role != "temp" and tensor.dtype == "i64":
            arrays[tensor.name] = np.arange(tensor.num_elements).reshape(tensor.shape)
        elif tensor.role != "temp":
            arrays[tensor.name] = random.integers(-3, 4, tensor.shape).astype(np.float64)
    return arrays
