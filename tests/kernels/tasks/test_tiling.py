"""Tilings: legal for any op, balanced for linears, and few tasks where there is little to do."""

from dataclasses import replace

import numpy as np
import pytest

from distmega.errors import VerifyError
from distmega.kernels.tasks.tile import accessed_bytes, task_bytes, tile_segment, verify_groups
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.kernels.programs import decoder, even, tile_ops


def groups_by_name(program: Program, num_sms: int, **options: int) -> dict[str, TaskGroup]:
    groups = tile_segment(program, num_sms, **options)
    verify_groups(program, groups)
    return {group.op.name: group for group in groups}


def linear(rows: int, k: int) -> Program:
    p = ProgramBuilder("linear")
    return p.build(p.linear(p.input("x", (1, k)), p.weight("w", (rows, k)), name="y"))


@pytest.mark.parametrize(("rows", "num_sms"), [(14336, 132), (4096, 132), (100, 8), (1536, 7)])
def test_linears_are_balanced_and_aligned(rows: int, num_sms: int):
    (group,) = groups_by_name(linear(rows, 1024), num_sms).values()
    (split,) = group.splits
    sizes = np.diff(split.bounds)
    assert group.num_tasks == num_sms
    assert all(bound % 8 == 0 for bound in split.bounds[:-1])
    assert sizes.max() - sizes.min() <= 8
    assert (
        task_bytes(group, linear(rows, 1024).tensor_map()).max() < 1.2 * rows * 4096 / num_sms + 1e4
    )


def test_row_axes_of_a_weight_are_cut_as_one():
    p = ProgramBuilder("query")
    x, w = p.input("x", (1, 512)), p.weight("wq", (3, 3, 64, 512))
    program = p.build(p.linear(x, w, spec="m k, h g d k -> m h g d", name="q"))
    (group,) = groups_by_name(program, 16).values()
    assert group.splits[0].axes == ("h", "g", "d")
    assert group.num_tasks == 16


@pytest.mark.parametrize(
    ("rows", "outputs", "num_tasks"), [(1000, 1, 4), (1000, 9, 4), (30, 24, 3)]
)
def test_rows_of_x_are_cut_where_those_of_the_weight_are_few(
    rows: int, outputs: int, num_tasks: int
):
    p = ProgramBuilder("few")
    x, w = p.input("x", (rows, 512)), p.weight("w", (outputs, 512))
    (group,) = groups_by_name(p.build(p.linear(x, w, name="y")), 4).values()
    assert group.num_tasks == num_tasks


def test_small_work_stays_in_few_tasks():
    p = ProgramBuilder("small")
    x = p.input("x", (1, 8192))
    n = p.rms_norm(x, p.weight("norm", (8192,)), 1e-5, name="n")
    y = n.map("silu(a0)", name="y")
    groups = groups_by_name(p.build(y), 132)
    assert groups["n"].num_tasks == 1
    assert groups["y"].num_tasks == 4
    assert groups_by_name(p.build(y), 132, min_task_bytes=1024)["y"].num_tasks == 64


def test_attention_takes_a_task_a_kv_head():
    p = ProgramBuilder("attention")
    q, positions = p.input("q", (1, 8, 4, 64)), p.input("positions", (1,), "i64")
    k, v = (p.state(name, (8, 512, 64)) for name in ("k", "v"))
    program = p.build(p.attention(q, k, v, positions, 0.125, name="a"))
    (group,) = groups_by_name(program, 132).values()
    assert (group.num_tasks, group.splits[0].axes) == (8, ("h",))


@pytest.mark.parametrize(
    ("rows", "dtype", "expected"),
    [
        (32, "bf16", {"h": 12, "m": 7}),  # of 5 rows of 3 heads
        (2048, "bf16", {"h": 12, "m": 49}),  # of 42
        (128, "f32", {"h": 12, "m": 11}),  # as many as there are SMs
    ],
)
def test_attention_of_many_rows_is_cut_by_heads_and_rows(rows, dtype, expected):
    p = ProgramBuilder("attention")
    q = p.input("q", (1, 36, rows, 64), dtype)
    k, v = (p.input(name, (1, 12, rows, 64), dtype) for name in "kv")
    (group,) = groups_by_name(p.build(p.attend(q, k, v, None, 0.125, name="a")), 132).values()
    assert {split.axes[0]: split.num_tiles for split in group.splits} == expected


def test_one_axis_is_cut_if_it_is_long_enough_else_a_grid():
    for shape, expected in (((4, 65536), {"i1": 16}), ((3, 5, 4096), {"i0": 3, "i1": 5, "i2": 2})):
        p = ProgramBuilder("grid")
        program = p.build(p.input("x", shape).map("a0", name="y"))
        (group,) = groups_by_name(program, 16, row_multiple=2048).values()
        assert {split.axes[0]: split.num_tiles for split in group.splits} == expected


def test_decoder_tilings_are_legal():
    for tp in (1, 2):
        for num_sms in (1, 2, 7, 132):
            groups = groups_by_name(decoder(1, tp), num_sms, min_task_bytes=64)
            assert all(group.num_tasks <= 2 * num_sms for group in groups.values())
            assert {g.op.kind for g in groups.values() if g.all_ranks} <= {"push"}


def test_views_have_no_tasks():
    p = ProgramBuilder("view")
    x = p.reshape(p.input("x", (4, 6)), (24,), view=True, name="v")
    assert list(groups_by_name(p.build(x.map("a0", name="y")), 4)) == ["y"]


def test_an_op_that_reads_what_it_writes_is_one_task():
    p = ProgramBuilder("inplace")
    x = p.state("x", (64, 64))
    p.set(p.transpose(x, (1, 0), view=True), into=x, name="flip")
    program = p.build(x)
    assert groups_by_name(program, 8, min_task_bytes=64)["flip"].num_tasks == 1
    cut = tile_ops(program, flip=(even("i0", 64, 4),))
    with pytest.raises(VerifyError, match="tasks that read"):
        verify_groups(program, cut)


def test_reduced_and_looked_up_axes_stay_whole():
    p = ProgramBuilder("illegal")
    program = p.build(p.argmax(p.input("x", (2, 64)), name="y"))
    group = tile_segment(program, 4)[0]
    with pytest.raises(VerifyError, match=r"a split of axis 'v' \(reduce\)"):
        verify_groups(program, [replace(group, splits=(even("v", 64, 2),))])


def test_bounds_must_cover_the_axes():
    program = linear(64, 8)
    group = tile_segment(program, 1)[0]
    for bounds in ((0, 32), (0, 40, 32, 64), (8, 64)):
        with pytest.raises(VerifyError, match="expected rising bounds from 0 to 64"):
            verify_groups(
                program, [replace(group, splits=(RangeSplit(axes=("n",), bounds=bounds),))]
            )


def test_writes_of_two_tasks_must_not_meet():
    p = ProgramBuilder("broadcast")
    program = p.build(p.input("x", (4, 8)).map("a0", name="y"))
    op = program.ops[0]
    column = replace(op.writes[0].dims[0], axes=())
    write = replace(op.writes[0], dims=(column, op.writes[0].dims[1]))
    group = TaskGroup(op=replace(op, writes=(write,)), splits=(even("i0", 4, 2),))
    with pytest.raises(VerifyError, match="unevenly"):
        verify_groups(program, [group])


def test_bytes_count_looked_up_rows_once():
    p = ProgramBuilder("embedding")
    table = p.weight("table", (1000, 64))
    program = p.build(p.embedding(p.input("ids", (2,), "i64"), table))
    assert accessed_bytes(program.ops[0], program.tensor_map()) == 2 * 8 + 64 * 4 + 2 * 64 * 4


def test_task_bytes_add_up_over_what_is_cut():
    program = linear(64, 32)
    (group,) = tile_ops(program, y=(even("n", 64, 4),))
    tensors = program.tensor_map()
    assert task_bytes(group, tensors, ("weight",)).tolist() == [16 * 32 * 4] * 4
    assert task_bytes(group, tensors).tolist() == [16 * 32 * 4 + 32 * 4 + 16 * 4] * 4
