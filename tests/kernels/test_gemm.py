"""Matmuls outside a megakernel: the order of tiles, the choices, and what the functions give on a
machine without a GPU.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import ProgramError
from distmega.kernels import matmul
from distmega.kernels.gemm.choices import (
    H200,
    Extents,
    Tiles,
    best_tiles,
    can_overlap,
    choose_tiles,
    choose_way,
    event_rows,
    kernel_us,
    sent_bytes,
    tiles_choice,
)
from distmega.kernels.gemm.simulate import band_rows, place_turns, plan_sending, send_us

order = pytest.importorskip("distmega.kernels.gemm.order")

SIZES = st.integers(1, 20)


@given(rows=SIZES, columns=SIZES, ranks=st.sampled_from([1, 2, 3, 4, 8]), data=st.data())
def test_every_tile_has_its_turn_once(rows, columns, ranks, data):
    first = data.draw(st.integers(0, ranks))
    group = data.draw(st.sampled_from([1, 4, 8]))
    tiles = [
        order.place_gathered.fn(number, rows, columns, first, group, ranks)
        for number in range(rows * columns * ranks)
    ]
    assert len(set(tiles)) == len(tiles)
    assert all(0 <= row < rows and 0 <= column < columns for _, row, column in tiles)
    chunks = [chunk for chunk, _, _ in tiles][:: rows * columns]
    assert chunks == [(first + i) % ranks for i in range(ranks)]


@given(
    bands=st.integers(1, 8), columns=SIZES, group=st.sampled_from([1, 2, 4]), data=st.data(),
    ranks=st.sampled_from([2, 3, 4, 8]),
)  # fmt: skip
def test_what_is_sent_goes_first_and_own_bands_follow_in_step(bands, columns, group, ranks, data):
    rank = data.draw(st.integers(0, ranks - 1))
    lag = data.draw(st.integers(1, bands))
    rows = bands * group
    with patch.object(order, "place_band", order.place_band.fn):
        tiles = [
            order.place_sent.fn(number, rows, columns, rank, lag, group, ranks)
            for number in range(rows * columns * ranks)
        ]
    assert sorted(tiles) == [
        (c, r, n) for c in range(ranks) for r in range(rows) for n in range(columns)
    ]
    turns = list(dict.fromkeys((chunk, row // group) for chunk, row, _ in tiles))
    assert len(turns) == bands * ranks, "a band's tiles follow each other"
    assert turns == [order.place_band.fn(i, bands, rank, lag, ranks) for i in range(len(turns))]
    assert turns == list(place_turns(bands, rank, lag, ranks))
    part = data.draw(st.integers(1, columns))
    grid = rows, columns, rank, group, lag, part
    places = [order.place_part.fn(row, column, grid) for _, row, column in tiles]
    assert {parts for _, parts in places} == {bands * -(-columns // part)}
    for chunk in range(ranks):
        sent = [at for (at, _), tile in zip(places, tiles, strict=True) if tile[0] == chunk]
        assert sent == sorted(sent), "parts are done in turn"
    for chunk in range(ranks):
        assert [band for c, band in turns if c == chunk] == list(range(bands))
    for band in range(bands):
        others = [turns.index((c, band + lag - 1)) for c in range(ranks)
                  if c != rank and band + lag <= bands]  # fmt: skip
        assert all(turns.index((rank, band)) > other for other in others)
    assert [chunk for chunk, _ in turns[: ranks - 1]] == [
        (rank + step) % ranks for step in range(1, ranks)
    ]


def test_what_runs_at_one_time_reads_few_rows_and_columns():
    tiles = [order.place_gathered.fn(number, 64, 56, 0, 8, 1) for number in range(132)]
    assert len({row for _, row, _ in tiles}) == 8
    assert len({column for _, _, column in tiles}) == 17


def test_wide_tiles_where_they_fill_the_waves_and_narrow_ones_where_not():
    assert best_tiles(Extents(rows=4096, columns=5120, depth=8192), H200).tile_n == 256
    assert best_tiles(Extents(rows=1024, columns=14336, depth=8192), H200).tile_n == 128


def test_time_goes_by_whole_waves():
    full = Extents(rows=128 * 11, columns=256 * 12, depth=4096)
    more = replace(full, rows=128 * 12)
    assert kernel_us(more, 256, H200) > 1.9 * kernel_us(full, 256, H200)


def test_rows_that_tma_can_not_address_are_left_to_torch():
    fitting = Extents(rows=8192, columns=8192, depth=8192)
    assert choose_tiles(fitting, H200) is not None
    assert choose_tiles(replace(fitting, depth=8191), H200) is None
    assert choose_tiles(replace(fitting, columns=8190), H200) is None


def test_a_skinny_matmul_is_left_to_torch():
    assert choose_tiles(Extents(rows=16, columns=14336, depth=8192), H200) is None


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("rows", [4096, 8192, 16384])
def test_long_matmuls_overlap(kind, num_ranks, rows):
    extents = Extents(rows=rows, columns=8192, depth=4096, num_ranks=num_ranks)
    assert choose_way(kind, extents, H200).way == "tiles"


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
def test_rows_that_are_no_tiles_of_a_rank_do_not_overlap(kind):
    extents = Extents(rows=128, columns=8192, depth=8192, num_ranks=2)
    assert not can_overlap(kind, extents)
    assert choose_way(kind, extents, H200).way != "tiles"
    assert not can_overlap(kind, replace(extents, rows=4096, num_ranks=1))


def test_rows_that_ranks_do_not_divide_are_left_to_nccl():
    extents = Extents(rows=1001, columns=8192, depth=8192, num_ranks=2)
    assert choose_way("reduce", extents, H200).way == "nccl"
    assert choose_way("gather", extents, H200).way == "nccl"


@pytest.mark.parametrize("shares", [False, True])
def test_sending_beside_the_tiles_costs_little_of_sending_behind_them(shares):
    extents = Extents(rows=8192, columns=8192, depth=8192, num_ranks=2)
    choice = tiles_choice("reduce" if shares else "scatter", extents, H200)
    assert choice.tiles is not None
    least = kernel_us(extents, choice.tiles.tile_n, H200)
    behind = sent_bytes("reduce" if shares else "scatter", extents) / H200.copy_bytes_per_us
    assert least < choice.us < least + behind / 2
    slow = replace(H200, copy_bytes_per_us=H200.copy_bytes_per_us / 100)
    plan = plan_sending(extents, choice.tiles, shares=shares)
    assert send_us(extents, plan, slow) > 100 * behind


def test_bytes_of_a_collective():
    extents = Extents(rows=4096, columns=8192, depth=1024, num_ranks=4)
    assert sent_bytes("gather", extents) == 2 * 3072 * 1024
    assert sent_bytes("scatter", extents) == 2 * 3072 * 8192
    assert sent_bytes("reduce", extents) == 2 * 2 * 3072 * 8192


@given(tiles=st.integers(1, 256), num_ranks=st.sampled_from([2, 4, 8]))
def test_copies_are_whole_tiles_and_divide_a_ranks_rows(tiles, num_ranks):
    extents = Extents(rows=128 * tiles * num_ranks, columns=1024, depth=1024, num_ranks=num_ranks)
    rows = event_rows(extents)
    assert rows % 128 == 0
    assert 128 * tiles % rows == 0
    assert rows >= min(1024, 128 * tiles)


@given(
    chunk_rows=st.integers(1, 40), columns=st.integers(1, 60), ranks=st.sampled_from([2, 4, 8]),
    most=st.sampled_from([1, 2, 4, 8]), parts=st.integers(1, 5),
)  # fmt: skip
def test_parts_of_a_band_are_all_its_columns(chunk_rows, columns, ranks, most, parts):
    extents = Extents(rows=128 * chunk_rows * ranks, columns=256 * columns, depth=64,
                      num_ranks=ranks)  # fmt: skip
    tiles = Tiles(tile_n=256, stages=4, group=most)
    plan = plan_sending(extents, tiles, parts=parts, shares=True)
    assert plan.num_tiles == plan.num_bands * plan.tiles.group * columns * ranks
    assert plan.num_bands * plan.tiles.group == chunk_rows
    assert sum(plan.part_columns) == columns
    assert len(plan.part_columns) == plan.num_parts <= min(parts, columns)
    assert min(plan.part_columns) > 0


@given(chunk_rows=st.integers(1, 200), most=st.integers(1, 16))
def test_bands_divide_a_ranks_rows(chunk_rows, most):
    rows = band_rows(chunk_rows, most)
    assert 1 <= rows <= most
    assert chunk_rows % rows == 0
    assert all(chunk_rows % more for more in range(rows + 1, min(most, chunk_rows) + 1))


def test_a_product_on_the_cpu():
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    assert torch.equal(matmul(a, b), a @ b.T)
    out = torch.empty(5, 3)
    assert matmul(a, b, out=out) is out
    assert torch.equal(out, a @ b.T)


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (torch.ones(7, 3), r"matmul of shapes \[5, 7\] and \[7, 3\]; expected \[M, K\]"),
        (torch.ones(3, 7, 1), "flatten leading dims"),
        (torch.ones(3, 7, dtype=torch.bfloat16), "expected one type and device"),
    ],
)
def test_operands_that_do_not_fit(b, message):
    with pytest.raises(ProgramError, match=message):
        matmul(torch.ones(5, 7), b)


def test_a_result_that_does_not_fit():
    with pytest.raises(ProgramError, match=r"out of shape \[5, 4\].*expected \[5, 3\]"):
        matmul(torch.ones(5, 7), torch.ones(3, 7), out=torch.ones(5, 4))


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "depth", "way"),
    [
        ("gather", 128, 7168, 4096, "nccl"),
        ("gather", 256, 14336, 8192, "peer"),
        ("gather", 512, 14336, 8192, "tiles"),
        ("gather", 1024, 5120, 8192, "tiles"),
        ("scatter", 128, 4096, 7168, "nccl"),
        ("scatter", 256, 8192, 14336, "peer"),
        ("scatter", 512, 4096, 7168, "peer"),
        ("scatter", 1024, 4096, 7168, "tiles"),
        ("reduce", 128, 8192, 14336, "peer"),
        ("reduce", 512, 4096, 7168, "peer"),
        ("reduce", 1024, 8192, 5120, "tiles"),
    ],
)
def test_short_matmuls_go_the_way_that_was_fastest_on_two_h200(kind, rows, columns, depth, way):
    extents = Extents(rows=rows, columns=columns, depth=depth, num_ranks=2)
    assert choose_way(kind, extents, H200).way == way
