"""Opcodes that depend on the rank or reach other ranks, on all ranks in one process."""

import numpy as np
import pytest
import torch

from distmega.errors import RequestError
from distmega.kernels.tasks.expand import expand_collectives
from distmega.kernels.tasks.tile import tile_segment
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Access, Axis, Index, Op, Program, Tensor
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.running import Rank, Tensors, launch_all, make_ranks, tiled_kernel

TEAM = [2, 3, 4]


def index(*axes: str) -> Index:
    return Index(axes=axes)


def one_op(op: Op, inputs: list[Tensor], outputs: list[Tensor]) -> Program:
    """A program of one collective, as sharding leaves it."""
    names = tuple(tensor.name for tensor in outputs)
    return Program(name="one", tensors=(*inputs, *outputs), ops=(op,), outputs=names)


def attrs(tp: int, **others: int | str) -> tuple[tuple[str, int | str], ...]:
    return tuple(sorted({"mesh_axis": "tp", "num_ranks": tp, **others}.items()))


def run_team(program: Program, tp: int, values: list[Tensors], seed: int = 0) -> list[Rank]:
    """One launch on all ranks, tiled finely."""
    expanded = expand_collectives(program, DeviceMesh(tp=tp))
    groups = tile_segment(expanded, 3, min_task_bytes=16, row_multiple=1)
    ranks = make_ranks(tiled_kernel(expanded, groups, tp=tp), seed)
    for rank, own in zip(ranks, values, strict=True):
        rank.fill(own)
    launch_all(ranks, seed)
    return ranks


@pytest.mark.parametrize("tp", TEAM)
@pytest.mark.parametrize("combine", ["sum", "max", "min"])
def test_all_reduce(tp, combine):
    axes = (Axis(name="i0", extent=3), Axis(name="i1", extent=10))
    x = Tensor(name="x", shape=(3, 10), dtype="f32", role="input")
    y = Tensor(name="y", shape=(3, 10), dtype="f32")
    op = Op(
        name="y",
        kind="all_reduce",
        axes=axes,
        reads=(Access(tensor="x", dims=(index("i0"), index("i1"))),),
        writes=(Access(tensor="y", dims=(index("i0"), index("i1"))),),
        attrs=attrs(tp, combine=combine),
    )
    values = [{"x": torch.randint(-9, 9, (3, 10)).float()} for _ in range(tp)]
    expected = getattr(np, combine)(np.stack([v["x"].numpy() for v in values]), axis=0)
    for seed in range(5):
        for rank in run_team(one_op(op, [x], [y]), tp, values, seed):
            np.testing.assert_array_equal(rank.tensors["y"].numpy(), expected)


@pytest.mark.parametrize("tp", TEAM)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_all_gather(tp, padding):
    """`padding`: elements of the last shard that are no part of the whole."""
    x = Tensor(name="x", shape=(2, 6), dtype="f32", role="input")
    y = Tensor(name="y", shape=(2, 6 * tp - padding), dtype="f32")
    op = Op(
        name="y",
        kind="all_gather",
        axes=(Axis(name="r", extent=tp), Axis(name="i0", extent=2), Axis(name="i1", extent=6)),
        reads=(Access(tensor="x", dims=(index("i0"), index("i1"))),),
        writes=(Access(tensor="y", dims=(index("i0"), index("r", "i1"))),),
        attrs=attrs(tp, dim=1, extent=6 * tp - padding),
    )
    values = [{"x": torch.randn(2, 6)} for _ in range(tp)]
    expected = np.concatenate([v["x"].numpy() for v in values], axis=1)[:, : 6 * tp - padding]
    for rank in run_team(one_op(op, [x], [y]), tp, values):
        np.testing.assert_array_equal(rank.tensors["y"].numpy(), expected)


@pytest.mark.parametrize("tp", TEAM)
@pytest.mark.parametrize("whole", [12, 11, 5, 2])
def test_take_shard(tp, whole):
    """Coordinate r keeps its part of dim 1; positions past the end are zero."""
    shard = -(-whole // tp)
    x = Tensor(name="x", shape=(2, whole), dtype="f32", role="input")
    y = Tensor(name="y", shape=(2, shard), dtype="f32")
    rank_axis = Axis(name="r", extent=tp, role="reduce", lookup=True)
    op = Op(
        name="y",
        kind="take_shard",
        axes=(Axis(name="i0", extent=2), Axis(name="i1", extent=shard), rank_axis),
        reads=(Access(tensor="x", dims=(index("i0"), index("r", "i1"))),),
        writes=(Access(tensor="y", dims=(index("i0"), index("i1"))),),
        attrs=attrs(tp, dim=1, extent=whole),
    )
    values = [{"x": torch.randn(2, whole)}] * tp
    padded = np.pad(values[0]["x"].numpy(), ((0, 0), (0, shard * tp - whole)))
    for place, rank in enumerate(run_team(one_op(op, [x], [y]), tp, values)):
        own = padded[:, place * shard : (place + 1) * shard]
        np.testing.assert_array_equal(rank.tensors["y"].numpy(), own)


def shared_out(tp: int, whole: int, kind: str, **more: int | str) -> tuple[Program, int]:
    """One op over ranks of x [2, whole] (a rank has 3 rows of 3 * tp in all_to_all), whose dim 1 is
    shared out, and the extent of a part.
    """
    shard = -(-whole // tp)
    swaps = kind == "all_to_all"
    rows = Index(axes=("r", "i0")) if swaps else index("i0")
    x = Tensor(name="x", shape=(3, whole), dtype="f32", role="input")
    y = Tensor(name="y", shape=(3 * tp - 1 if swaps else 3, shard), dtype="f32")
    rank_axis = (
        Axis(name="r", extent=tp)
        if swaps
        else Axis(name="r", extent=tp, role="reduce", combine=str(more["combine"]))
    )
    op = Op(
        name="y",
        kind=kind,
        axes=(rank_axis, Axis(name="i0", extent=3), Axis(name="i1", extent=shard)),
        reads=(Access(tensor="x", dims=(index("i0"), index("r", "i1"))),),
        writes=(Access(tensor="y", dims=(rows, index("i1"))),),
        attrs=attrs(tp, **more),
    )
    return one_op(op, [x], [y]), shard


@pytest.mark.parametrize("tp", TEAM)
@pytest.mark.parametrize("whole", [12, 11, 5, 2])
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_reduce_scatter(tp, whole, combine):
    """Each rank gets its part of dim 1, combined; zeros past the end."""
    program, shard = shared_out(tp, whole, "reduce_scatter", dim=1, extent=whole, combine=combine)
    values = [{"x": torch.randint(-9, 9, (3, whole)).float()} for _ in range(tp)]
    total = getattr(np, combine)(np.stack([v["x"].numpy() for v in values]), axis=0)
    padded = np.pad(total, ((0, 0), (0, shard * tp - whole)))
    for seed in range(3):
        for place, rank in enumerate(run_team(program, tp, values, seed)):
            own = padded[:, place * shard : (place + 1) * shard]
            np.testing.assert_array_equal(rank.tensors["y"].numpy(), own)


@pytest.mark.parametrize("tp", TEAM)
@pytest.mark.parametrize("whole", [12, 11, 5, 2])
def test_all_to_all(tp, whole):
    """From rows of each rank to columns; the last rank's last row is padding."""
    more = {"dim": 0, "extent": 3 * tp - 1, "dst_dim": 1, "dst_extent": whole}
    program, shard = shared_out(tp, whole, "all_to_all", **more)
    values = [{"x": torch.randn(3, whole)} for _ in range(tp)]
    rows = np.concatenate([v["x"].numpy() for v in values])[:-1]
    padded = np.pad(rows, ((0, 0), (0, shard * tp - whole)))
    for seed in range(3):
        for place, rank in enumerate(run_team(program, tp, values, seed)):
            own = padded[:, place * shard : (place + 1) * shard]
            np.testing.assert_array_equal(rank.tensors["y"].numpy(), own)


def sharded(program: Program, **more: int | str) -> Program:
    """The one op gets the attributes that localize gives where its index space is per rank."""
    (op,) = program.ops
    extended = tuple(sorted({**dict(op.attrs), **more}.items()))
    op = Op(
        name=op.name, kind=op.kind, axes=op.axes, reads=op.reads, writes=op.writes, attrs=extended
    )
    return Program(name=program.name, tensors=program.tensors, ops=(op,), outputs=program.outputs)


@pytest.mark.parametrize("tp", TEAM)
def test_embedding_of_a_sharded_table(tp):
    vocab, ids = 10, torch.tensor([0, 9, 4, 5])
    shard = -(-vocab // tp)
    p = ProgramBuilder("embedding")
    out = p.embedding(p.input("ids", (4,), "i64"), p.weight("table", (shard, 3)), name="out")
    program = sharded(p.build(out), base_axis="tp", base_stride=shard, extent=vocab)
    table = torch.randn(vocab, 3)
    padded = torch.cat([table, torch.zeros(shard * tp - vocab, 3)])
    values = [{"ids": ids, "table": part} for part in padded.split(shard)]
    ranks = run_team(program, tp, values)
    total = sum(rank.tensors["out"] for rank in ranks)
    assert torch.equal(total, table[ids])
    wrong = [{**each, "ids": ids + 1} for each in values]
    with pytest.raises(RequestError, match="an id of 10 in a table of 10 rows; expected ids from"):
        run_team(program, tp, wrong)


@pytest.mark.parametrize("tp", TEAM)
@pytest.mark.parametrize("best", [0, 4, 9])
def test_argmax_over_ranks(tp, best):
    """Each rank's argmax counts from its own base; padding never wins; ties go to the lowest
    index.
    """
    vocab, rows = 10, 2
    shard = -(-vocab // tp)
    x = torch.full((rows, shard * tp), -5.0)
    x[:, vocab:] = 99
    x[0, best] = x[1, best] = 3
    x[1, 9] = 3
    p = ProgramBuilder("argmax")
    local = p.build(p.argmax(p.input("x", (rows, shard)), name="best"))
    first = sharded(local, base_axis="tp", base_stride=shard, extent=vocab).ops[0]
    reads = tuple(Access(tensor=n, dims=(index("m0"),)) for n in ("best.value", "best"))
    writes = tuple(Access(tensor=n, dims=(index("m0"),)) for n in ("all.value", "all"))
    second = Op(
        name="all",
        kind="all_reduce",
        axes=(Axis(name="m0", extent=rows),),
        reads=reads,
        writes=writes,
        attrs=attrs(tp, combine="argmax"),
    )
    more = (
        Tensor(name="all.value", shape=(rows,), dtype="f32"),
        Tensor(name="all", shape=(rows,), dtype="i64"),
    )
    program = Program(
        name="argmax", tensors=(*local.tensors, *more), ops=(first, second), outputs=("all",)
    )
    for rank in run_team(program, tp, [{"x": part} for part in x.split(shard, 1)]):
        assert rank.tensors["all"].tolist() == [best, best]
