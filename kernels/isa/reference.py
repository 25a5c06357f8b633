"""Reference of the opcodes: one function each, on the torch memory of one rank.

In: an instruction and the rank's memory. Out: a function without arguments that executes it. Views
are made once, when an instruction is bound; what runs a task is the bound function alone. The maths
is that of the kinds' references and of hostir/library, on tiles. GPU kernels are compared with
these. Next on the walk: interpreter.py.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from distmega.hostir.comm.collectives import combine_parts
from distmega.hostir.library import norms, pointwise
from distmega.hostir.library import ops as library
from distmega.hostir.library.experts import grouped_linear as multiply_groups
from distmega.kernels.isa import opcodes
from distmega.kernels.isa.encoding import unpack_expression
from distmega.kernels.isa.memory import RankMemory, peer_view
from distmega.kernels.isa.opcodes import (
    ATTENDED,
    COMBINES,
    SCANS,
    TAKES_EXTRA,
    WEIGHINGS,
    ExtraOperand,
    Instruction,
    Ref,
)
from distmega.program.kinds import widen
from distmega.program.ops import experts, sampling
from distmega.program.ops.attention import append_values, attention_values, rope_values
from distmega.program.ops.compute import reduce_values
from distmega.program.ops.lookups import embedding_values, require_ids
from distmega.program.ops.norms import NORMS, SCAN_VALUES

Run = Callable[[], None]

_SPEC = library.LinearSpec(x=("m", "k"), w=("n", "k"), bias=(), out=("m", "n"))
_BIASED = library.LinearSpec(x=("m", "k"), w=("n", "k"), bias=("n",), out=("m", "n"))


def bind(
    instruction: Instruction, memory: RankMemory, operands: Sequence[ExtraOperand] = ()
) -> Run:
    """The function that executes an instruction on this memory, any number of times; operands:
    those that stand before it.
    """
    binder = _BINDERS[type(instruction)]
    if type(instruction) in TAKES_EXTRA:
        return binder(instruction, memory, operands)
    assert not operands, f"{type(instruction).__name__} takes no operands besides its own"
    return binder(instruction, memory)


def _nop(i: opcodes.Nop | opcodes.ExtraOperand, memory: RankMemory) -> Run:
    return lambda: None


def _linear(i: opcodes.Linear, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.m, i.k), i.x_strides)
    w = memory.view(i.w, (i.n, i.k), i.w_strides)
    bias = memory.view(i.bias, (i.n,), (i.bias_stride,)) if i.bias else None
    out = memory.view(i.out, (i.m, i.n), i.out_strides)
    spec = _BIASED if i.bias else _SPEC

    def run() -> None:
        out.copy_(library.linear(x, w, bias, spec, 1))

    return run


def _contract(i: opcodes.Contract, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.m, *i.sums), i.x_strides)
    w = memory.view(i.w, (i.n, *i.sums), i.w_strides)
    bias = memory.view(i.bias, (i.m, i.n), i.bias_strides) if i.bias else None
    out = memory.view(i.out, (i.m, i.n), i.out_strides)
    sums = ("a", "b", "c")
    kept = ("m", "n") if i.bias else ()
    spec = library.LinearSpec(x=("m", *sums), w=("n", *sums), bias=kept, out=("m", "n"))

    def run() -> None:
        out.copy_(library.linear(x, w, bias, spec, spec.num_rows))

    return run


def _pointwise(i: opcodes.Pointwise, memory: RankMemory, operands: Sequence[ExtraOperand]) -> Run:
    refs = (i.a0, i.a1, i.a2, i.a3)
    strides = (i.a0_strides, i.a1_strides, i.a2_strides, i.a3_strides)
    pairs = zip(refs, strides, strict=True)
    args = [memory.view(ref, i.extents, steps) for ref, steps in pairs if ref is not None]
    args += [memory.view(other.x, i.extents, other.strides[:2]) for other in operands]
    out = memory.view(i.out, i.extents, i.out_strides)
    tree = unpack_expression(memory.constants, i.expr)

    def run() -> None:
        out.copy_(pointwise.pointwise(tree, args, out.dtype))

    return run


def _reduce(i: opcodes.Reduce, memory: RankMemory) -> Run:
    x = memory.view(i.x, i.extents, i.x_strides)
    out = memory.view(i.out, i.extents[::2], i.out_strides)
    combine = COMBINES[i.combine]

    def run() -> None:
        out.copy_(reduce_values(x, (1,), combine))

    return run


def _norm(i: opcodes.Norm, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.dim), i.x_strides)
    weight, bias = (
        memory.view(ref, (i.dim,), (step,)) if ref is not None else None
        for ref, step in zip((i.weight, i.bias), i.vector_strides, strict=True)
    )
    out = memory.view(i.out, (i.rows, i.count), i.out_strides)
    columns = slice(i.start, i.start + i.count)

    def run() -> None:
        found, _ = norms.normalise(NORMS[i.kind], x, None, weight, bias, i.eps)
        out.copy_(found[:, columns])

    return run


def _scan(i: opcodes.Scan, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.start + i.count), i.x_strides)
    out = memory.view(i.out, (i.rows, i.count), i.out_strides)
    scan = SCAN_VALUES[SCANS[i.kind]]

    def run() -> None:
        out.copy_(scan(widen(x))[:, i.start :])

    return run


def _rope(i: opcodes.Rope, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.heads, i.dim), i.x_strides)
    positions = memory.view(i.positions, (i.rows,), (i.position_stride,))
    table = memory.view(i.table, (i.table_rows, i.dim), i.table_strides)
    out = memory.view(i.out, (i.rows, i.heads, i.count), i.out_strides)
    columns = slice(i.start, i.start + i.count)

    def run() -> None:
        out.copy_(rope_values(x, positions, table)[:, :, columns])

    return run


def _kv_append(i: opcodes.KvAppend, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.heads, i.dim), i.x_strides)
    vectors = (i.positions, i.sequences)
    positions, sequences = (
        None if ref is None else memory.view(ref, (i.rows,), (step,))
        for ref, step in zip(vectors, i.vector_strides, strict=True)
    )
    own = i.cache_strides[0] > 0
    shape, strides = (i.num_caches, i.heads, i.slots, i.dim), i.cache_strides
    cache = memory.view(i.cache, shape if own else shape[1:], strides if own else strides[1:])

    def run() -> None:
        append_values(cache, x, positions, sequences if own else None)

    return run


def _attention(i: opcodes.Attention, memory: RankMemory) -> Run:
    q = memory.view(i.q, (i.m, i.h, i.g, i.d), (*i.q_strides, 1))
    k, v = _caches(i, i.k, i.d, memory), _caches(i, i.v, i.e, memory)
    positions = memory.view(i.positions, (i.m,), (1,))
    out = memory.view(i.out, (i.m, i.h, i.g, i.e), (*i.out_strides, 1))

    def run() -> None:
        out.copy_(library.attention(q, k, v, positions, i.scale, i.window, i.softcap))

    return run


def _caches(i: opcodes.Attention, ref: Ref, dim: int, memory: RankMemory) -> Tensor:
    """Keys or values, [h, t, dim], or [m, h, t, dim] where each row has its own."""
    shape, strides = (i.h, i.t, dim), (i.t * dim, dim, 1)
    if not i.heads:
        return memory.view(ref, shape, strides)
    return memory.view(ref, (i.m, *shape), (i.heads * i.t * dim, *strides))


def _attend(i: opcodes.Attend, memory: RankMemory, operands: Sequence[ExtraOperand]) -> Run:
    rows, heads = (i.m,), (i.m, i.h, i.g)
    q = memory.view(i.q, (*heads, i.d), i.q_strides)
    out = memory.view(i.out, (*heads, i.e), i.out_strides)
    names = [name for bit, name in enumerate(ATTENDED) if i.others >> bit & 1]
    given = dict(zip(("keys", "values", *names), operands, strict=True))
    first = i.num_caches if "sequences" in given else i.m

    def seen(name: str, *shape: int) -> Tensor:
        return memory.view(given[name].x, shape, given[name].strides[: len(shape)])

    k, v = seen("keys", first, i.h, i.t, i.d), seen("values", first, i.h, i.t, i.e)
    if "positions" not in given:
        bias = seen("bias", *heads, i.t) if "bias" in given else None
        return _attend_all(i, q, k[0], v[0], bias, out)
    if not given["keys"].strides[0]:
        k, v = k[0], v[0]
    positions = seen("positions", *rows)
    sequences = seen("sequences", *rows) if "sequences" in given else None
    if "bias" in given:
        # one of all rows, [t, h, g]
        bias = seen("bias", *heads, i.t)[0].permute(2, 0, 1)

        def run_biased() -> None:
            out.copy_(attention_values(q, k, v, positions, i.scale, i.window, i.softcap, bias=bias))

        return run_biased

    def run() -> None:
        how = i.scale, i.window, i.softcap
        if sequences is None:
            out.copy_(library.attention(q, k, v, positions, *how))
        else:
            out.copy_(library.packed_attention(q, k, v, positions, sequences, *how))

    return run


def _attend_all(
    i: opcodes.Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor
) -> Run:
    """q [m, h, g, d] over all of k [h, t, d] and v [h, t, e] under a mask [m, h, g, t]."""

    def heads_first(x: Tensor) -> Tensor:
        return x.permute(1, 2, 0, 3).reshape(1, i.h * i.g, i.m, -1)

    def run() -> None:
        seen = None if mask is None else heads_first(mask)
        found = library.attend(heads_first(q), k[None], v[None], seen, i.scale, i.softcap)
        out.copy_(found.view(i.h, i.g, i.m, i.e).permute(2, 0, 1, 3))

    return run


def _embedding(i: opcodes.Embedding, memory: RankMemory) -> Run:
    ids = memory.view(i.ids, (i.rows,), (i.id_stride,))
    table = memory.view(i.table, (i.table_rows, i.dim), i.table_strides)
    out = memory.view(i.out, (i.rows, i.dim), i.out_strides)
    base = _base(i.axis, i.stride, memory)

    def run() -> None:
        whole = i.axis < 0
        rows = embedding_values(ids, table, None if whole else base, i.extent)
        out.copy_(rows)

    return run


def _gather(i: opcodes.Gather, memory: RankMemory) -> Run:
    x = memory.view(i.x, (*i.extents, i.num), (*i.x_strides, i.stride))
    ids = memory.view(i.ids, i.extents, i.ids_strides)
    out = memory.view(i.out, i.extents, i.out_strides)

    def run() -> None:
        require_ids(ids, i.num)
        out.copy_(x.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1))

    return run


def _choose_columns(i: opcodes.ChooseColumns, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.extent), i.x_strides)
    weights = memory.view(i.weights, (i.rows, i.num), i.weight_strides)
    chosen = memory.view(i.chosen, (i.rows, i.num), i.chosen_strides)

    def run() -> None:
        found, columns = experts.top_k_values(x, i.num, WEIGHINGS[i.weighing])
        weights.copy_(found)
        chosen.copy_(columns)

    return run


def _route(i: opcodes.Route, memory: RankMemory) -> Run:
    shape = (i.rows, i.num)
    ids = memory.view(i.ids, shape, i.id_strides)
    used = None if i.used is None else memory.view(i.used, (1,), (1,))
    made = [
        memory.view(ref, (extent,), (1,))
        for ref, extent in (
            (i.counts, i.num_groups), (i.offsets, i.num_groups + 1), (i.order, i.rows * i.num)
        )
    ]  # fmt: skip
    made.append(memory.view(i.slots, shape, i.slot_strides))

    def run() -> None:
        for out, found in zip(made, experts.route_values(ids, i.num_groups, used), strict=True):
            out.copy_(found)

    return run


_Grouped = opcodes.GatherRows | opcodes.GroupedLinear | opcodes.KeepRows | opcodes.ScatterAdd


def _group_range(i: _Grouped, memory: RankMemory) -> experts.GroupRange:
    """The groups of this rank."""
    first = min(_base(i.group_axis, i.groups, memory), i.num_groups)
    stop = min(first + i.groups, i.num_groups)
    return experts.GroupRange(first=first, stop=stop, num=i.num_groups)


def _offsets(i: _Grouped, memory: RankMemory) -> Tensor:
    return memory.view(i.offsets, (i.num_groups + 1,), (1,))


def _gather_rows(i: opcodes.GatherRows, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.x_rows, i.dim), i.x_strides)
    order = memory.view(i.order, (i.rows,), (1,))
    offsets, groups = _offsets(i, memory), _group_range(i, memory)
    out = memory.view(i.out, (i.rows, i.dim), i.out_strides)
    base = _base(i.axis, i.stride, memory)

    def run() -> None:
        rows = order.long() // i.num_choices - base
        mine = (rows >= 0) & (rows < i.x_rows)
        found = x.index_select(0, rows.clamp(0, i.x_rows - 1)).masked_fill(~mine.unsqueeze(1), 0)
        out.copy_(experts.keep_groups(found, offsets - i.start, groups))

    return run


def _grouped_linear(i: opcodes.GroupedLinear, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.k), i.x_strides)
    w = memory.view(i.w, (i.groups, i.n, i.k), i.w_strides)
    offsets, groups = _offsets(i, memory), _group_range(i, memory)
    out = memory.view(i.out, (i.rows, i.n), i.out_strides)

    def run() -> None:
        here = (offsets - i.start).clamp(0, i.rows)
        out.copy_(multiply_groups(x, w, here, groups))

    return run


def _keep_rows(i: opcodes.KeepRows, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.dim), i.x_strides)
    offsets, groups = _offsets(i, memory), _group_range(i, memory)
    out = memory.view(i.out, (i.rows, i.dim), i.out_strides)

    def run() -> None:
        out.copy_(experts.keep_groups(x, offsets - i.start, groups))

    return run


def _scatter_add(i: opcodes.ScatterAdd, memory: RankMemory) -> Run:
    y = memory.view(i.y, (i.y_rows, i.dim), i.y_strides)
    weights = memory.view(i.weights, (i.rows, i.num), i.weight_strides)
    slots = memory.view(i.slots, (i.rows, i.num), i.slot_strides)
    offsets, groups = _offsets(i, memory), _group_range(i, memory)
    out = memory.view(i.out, (i.rows, i.dim), i.out_strides)

    def run() -> None:
        out.copy_(experts.scatter_values(y, weights, slots, offsets, groups))

    return run


def _copy(i: opcodes.Copy, memory: RankMemory) -> Run:
    src = memory.view(i.src, i.extents, i.src_strides).squeeze()
    dst = memory.view(i.dst, i.extents, i.dst_strides).squeeze()

    def run() -> None:
        dst.copy_(src)

    return run


def _take_shard(i: opcodes.TakeShard, memory: RankMemory) -> Run:
    num_valid, src = _part_of(i.src, i, memory.coordinate[i.axis], memory)
    dst = memory.view(i.dst, i.extents, i.dst_strides)

    def run() -> None:
        dst[:num_valid].copy_(src)
        dst[num_valid:].zero_()

    return run


def _argmax(i: opcodes.Argmax, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.columns), (i.row_strides[0], i.step))
    value = memory.view(i.value, (i.rows,), i.row_strides[1:2])
    index = memory.view(i.index, (i.rows,), i.row_strides[2:])
    base = _base(i.axis, i.stride, memory)

    def run() -> None:
        best, index_found = sampling.argmax_values(x, base, i.extent)
        value.copy_(best)
        index.copy_(index_found)

    return run


def _top(i: opcodes.Top, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.extent), i.x_strides)
    shape = (i.rows, i.num_top)
    values = memory.view(i.values, shape, i.value_strides)
    index = None if i.index is None else memory.view(i.index, shape, i.index_strides)

    def run() -> None:
        found, where = x.topk(i.num_top, -1)
        values.copy_(found)
        if index is not None:
            index.copy_(where)

    return run


def _cutoff(i: opcodes.Cutoff, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.extent), i.x_strides)
    settings = memory.view(i.settings, (i.rows, 3), i.setting_strides)
    limits = memory.view(i.limits, (i.rows, 2), i.limit_strides)

    def run() -> None:
        limits.copy_(sampling.cutoff_values(x, settings))

    return run


def _sample(i: opcodes.Sample, memory: RankMemory) -> Run:
    x = memory.view(i.x, (i.rows, i.columns), (i.strides[0], i.steps[0]))
    limits = memory.view(i.limits, (i.rows, 2), (i.strides[1], i.steps[1]))
    seeds, positions, value, index = (
        memory.view(ref, (i.rows,), (stride,))
        for ref, stride in zip((i.seeds, i.positions, i.value, i.index), i.strides[2:], strict=True)
    )
    base = _base(i.axis, i.stride, memory)

    def run() -> None:
        best, index_found = sampling.sample_values(x, limits, seeds, positions, base, i.extent)
        value.copy_(best)
        index.copy_(index_found)

    return run


def _push(i: opcodes.Push, memory: RankMemory) -> Run:
    x = memory.view(i.x, i.extents, i.x_strides)
    slot = memory.coordinate[i.axis] * i.slot_stride
    slots = [
        peer_view(arena, i.recv, i.extents, i.recv_strides, slot) for arena in memory.teams[i.axis]
    ]

    def run() -> None:
        for received in slots:
            received.copy_(x)

    return run


def _push_parts(i: opcodes.PushParts, memory: RankMemory) -> Run:
    slot = memory.coordinate[i.axis] * i.slot_stride
    parts = []
    for rank, arena in enumerate(memory.teams[i.axis]):
        received = peer_view(arena, i.recv, i.extents, i.recv_strides, slot)
        parts.append((received, *_part_of(i.x, i, rank, memory)))

    def run() -> None:
        for received, num_valid, own in parts:
            received[:num_valid].copy_(own)
            received[num_valid:].zero_()

    return run


def _part_of(
    x: Ref, i: opcodes.TakeShard | opcodes.PushParts, rank: int, memory: RankMemory
) -> tuple[int, Tensor]:
    """How many rows a rank's part of x has, and these."""
    strides = i.src_strides if isinstance(i, opcodes.TakeShard) else i.x_strides
    start = rank * i.shard
    num_valid = max(0, min(i.extents[0], i.bound - start))
    shape = (num_valid, *i.extents[1:])
    return num_valid, memory.view(x, shape, strides, start * strides[0] if num_valid else 0)


def _sum_ranks(i: opcodes.SumRanks, memory: RankMemory) -> Run:
    slots = [
        memory.view(i.recv, i.extents, i.recv_strides, slot * i.slot_stride)
        for slot in range(i.num_ranks)
    ]
    out = memory.view(i.out, i.extents, i.out_strides)
    parts, combine = [(slot,) for slot in slots], COMBINES[i.combine]

    def run() -> None:
        out.copy_(combine_parts(parts, combine)[0])

    return run


def _argmax_ranks(i: opcodes.ArgmaxRanks, memory: RankMemory) -> Run:
    shape, rows, slots = (i.rows, i.num_ranks), i.row_strides, i.slot_strides
    values = memory.view(i.values, shape, (rows[0], slots[0]))
    indices = memory.view(i.indices, shape, (rows[1], slots[1]))
    value = memory.view(i.value, (i.rows,), rows[2:3])
    index = memory.view(i.index, (i.rows,), rows[3:])

    def run() -> None:
        best, slot = sampling.argmax_values(values)
        value.copy_(best)
        index.copy_(indices.gather(1, slot.unsqueeze(1)).squeeze(1))

    return run


def _base(axis: int, stride: int, memory: RankMemory) -> int:
    """First global index of this rank's part of a sharded index space."""
    return memory.coordinate[axis] * stride if axis >= 0 else 0


_BINDERS: Mapping[type, Callable[..., Run]] = {
    opcodes.Nop: _nop,
    opcodes.Linear: _linear,
    opcodes.Pointwise: _pointwise,
    opcodes.Reduce: _reduce,
    opcodes.Norm: _norm,
    opcodes.Rope: _rope,
    opcodes.KvAppend: _kv_append,
    opcodes.Attention: _attention,
    opcodes.Embedding: _embedding,
    opcodes.Copy: _copy,
    opcodes.TakeShard: _take_shard,
    opcodes.Argmax: _argmax,
    opcodes.Top: _top,
    opcodes.Cutoff: _cutoff,
    opcodes.Sample: _sample,
    opcodes.Push: _push,
    opcodes.SumRanks: _sum_ranks,
    opcodes.ArgmaxRanks: _argmax_ranks,
    opcodes.ExtraOperand: _nop,
    opcodes.Contract: _contract,
    opcodes.Scan: _scan,
    opcodes.Attend: _attend,
    opcodes.Gather: _gather,
    opcodes.PushParts: _push_parts,
    opcodes.ChooseColumns: _choose_columns,
    opcodes.Route: _route,
    opcodes.GatherRows: _gather_rows,
    opcodes.GroupedLinear: _grouped_linear,
    opcodes.KeepRows: _keep_rows,
    opcodes.ScatterAdd: _scatter_add,
}
assert set(_BINDERS) == set(opcodes.OPCODES)
