"""Matmuls outside a megakernel: the order of tiles, and what the functions give without a GPU."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import ProgramError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels import all_gather_matmul, matmul, matmul_all_reduce, matmul_reduce_scatter
from distmega.kernels.gemm.device.arguments import TileGrid
from distmega.kernels.gemm.times.tile_times import order_turns
from distmega.sharding.layout.mesh import DeviceMesh

pytest.importorskip("triton")
from distmega.kernels.gemm.device import order

SIZES = st.integers(1, 20)


@given(rows=SIZES, columns=SIZES, ranks=st.sampled_from([1, 2, 3, 4, 8]), data=st.data())
def test_every_tile_has_its_turn_once(rows, columns, ranks, data):
    first = data.draw(st.integers(0, ranks))
    group = data.draw(st.sampled_from([1, 4, 8]))
    tiles = [
        order.locate_gathered.fn(number, rows, columns, first, group, ranks)
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
    with patch.object(order, "locate_band", order.locate_band.fn):
        tiles = [
            order.locate_sent.fn(number, rows, columns, rank, lag, group, ranks)
            for number in range(rows * columns * ranks)
        ]
    assert sorted(tiles) == [
        (c, r, n) for c in range(ranks) for r in range(rows) for n in range(columns)
    ]
    turns = list(dict.fromkeys((chunk, row // group) for chunk, row, _ in tiles))
    assert len(turns) == bands * ranks, "a band's tiles follow each other"
    assert turns == [order.locate_band.fn(i, bands, rank, lag, ranks) for i in range(len(turns))]
    assert turns == list(order_turns(bands, rank, lag, ranks))
    part = data.draw(st.integers(1, columns))
    grid = TileGrid(rows, columns, rank, group, lag, part)
    places = [order.locate_part.fn(row, column, grid) for _, row, column in tiles]
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
    tiles = [order.locate_gathered.fn(number, 64, 56, 0, 8, 1) for number in range(132)]
    assert len({row for _, row, _ in tiles}) == 8
    assert len({column for _, _, column in tiles}) == 17


def test_a_product_on_the_cpu():
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    assert torch.equal(matmul(a, b), a @ b.T)
    out = torch.empty(5, 3)
    assert matmul(a, b, out=out) is out
    assert torch.equal(out, a @ b.T)


def test_two_columns_become_one_on_the_cpu():
    a, b = torch.randn(5, 7), torch.randn(6, 7)
    left, right = (a @ b.T).chunk(2, 1)
    torch.testing.assert_close(matmul(a, b, mixes="a0 - 2 * a1"), left - 2 * right)
    out = torch.empty(5, 3)
    assert matmul(a, b, out=out, mixes="a1") is out
    assert torch.equal(out, right)
    with pytest.raises(ProgramError, match=r"a0 \+ a2 of 6 columns; expected an even number"):
        matmul(a, b, mixes="a0 + a2")
    with pytest.raises(ProgramError, match=r"put one weight .* above the other"):
        matmul(a, b[:5], mixes="a0 + a1")
    with pytest.raises(ProgramError, match=r"out of shape \[5, 6\].*expected \[5, 3\]"):
        matmul(a, b, out=torch.empty(5, 6), mixes="a0 + a1")


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


A, B = torch.ones(4, 8), torch.ones(6, 8)
COMM = SingleCommunicator(DeviceMesh(tp=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matmul([[1.0]], B), "^a: list, no tensor; expected a torch.Tensor; convert it"),
        (lambda: matmul(A, None), "^b: NoneType, no tensor"),
        (lambda: matmul(A, B.to_sparse()), "^b: a sparse_coo tensor; expected a dense one"),
        (lambda: matmul(A, B, out=[]), "^out: list, no tensor"),
        (lambda: matmul(A, B, out=torch.empty(4, 6, device="meta")), "on meta; .*float32 on cpu"),
        (lambda: matmul(A, B, mixes="a0 * a1", other=3), "^other: int, no tensor"),
        (lambda: matmul(A, B, mixes=3), r"^expressions \[3\]; expected an expression of a0"),
        (lambda: matmul(A.bool(), B.bool()), "^matmul of torch.bool on cpu; expected floating-poi"),
        (lambda: all_gather_matmul(3, B, COMM), "^own: int, no tensor"),
        (lambda: all_gather_matmul(A, B, None), "^comm None; expected a communicator .* mesh"),
        (lambda: matmul_all_reduce(A, "b", COMM), "^b: str, no tensor"),
        (lambda: matmul_all_reduce(A, B, "tp"), "^comm 'tp'; expected a communicator"),
        (lambda: matmul_reduce_scatter(A, B, DeviceMesh(tp=1)), r"^comm .*; expected a communic"),
    ],
)
def test_what_is_no_operand_is_named(call, message):
    with pytest.raises(ProgramError, match=message):
        call()
