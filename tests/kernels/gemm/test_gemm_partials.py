"""Where a kernel's loader looks for partial results of a tile, and which events it waits for."""

from types import SimpleNamespace
from unittest.mock import MagicMock, call, patch

import pytest

from distmega.kernels.gemm.device.arguments import SliceRing, TileGrid
from distmega.kernels.gemm.times.tile_times import NUM_WORDS

pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")
from distmega.kernels.gemm.device import (
    kernel,
    order,
    spec,
)

CHUNK_ROWS, COLUMNS, STAGES = 6, 5, 4


class Number(int):
    """An int that compares as numbers of a kernel do."""

    def __ge__(self, other: int) -> "Number":
        return Number(int(self) >= int(other))

    def __le__(self, other: int) -> "Number":
        return Number(int(self) <= int(other))

    def to(self, _dtype: object) -> "Number":
        return self


def load(
    found: spec.MatmulSpec, rank: int, row: int, left: int, helped: int
) -> tuple[MagicMock, int]:
    """What the loader does for a tile, in order, and how many slots it fills."""
    does = MagicMock()
    fakes = {
        "locate_word": order.locate_word.fn,
        "wait_event": lambda _words, index, *_: does.wait(int(index)),
        "clear_event": lambda _words, index: does.clear(int(index)),
        "before_tma_reads": lambda: None,
        "mbarrier": MagicMock(),
        "tma_load": lambda _from, at, *_: does.load(int(at[0]), int(at[1])),
        "gl": SimpleNamespace(int32=None, static_range=range, constexpr=object),
    }
    ring = SliceRing(None, None, MagicMock(), MagicMock(), MagicMock())
    grid = TileGrid(CHUNK_ROWS, COLUMNS, Number(rank), 2, 3, 2)
    located = patch.object(order, "locate_part", order.locate_part.fn)
    with patch.multiple(kernel, **fakes), located:
        slots = kernel.load_partials.fn(
            None, 0, row, left, grid, Number(helped), MagicMock(), ring, found
        )
    return does, slots


@pytest.mark.parametrize("sends", ["scatter", "push", "all"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("helped", [-1, 7])
def test_sums_begin_in_the_slots_of_other_ranks_and_end_in_the_own_one(sends, num_ranks, helped):
    found = spec.MatmulSpec(tile_n=128, stages=STAGES, num_ranks=num_ranks, sends=sends)
    row, left = 3, 256
    place, _ = order.locate_part.fn(row, left // 128, TileGrid(CHUNK_ROWS, COLUMNS, 0, 2, 3, 2))
    if sends == "push":
        place = row * COLUMNS + left // 128
    for rank in range(num_ranks):
        expected = []
        sources = [source for source in range(num_ranks) if source != rank]
        for source in sources + [rank] * (helped >= 0):
            top = (source * CHUNK_ROWS + row) * 128
            word = source * NUM_WORDS + (helped if source == rank else place)
            expected.append(call.wait(word))
            expected += [call.clear(word)] * (source == rank or sends == "push")
            expected += [call.load(top, left), call.load(top + 64, left)]
        does, slots = load(found, rank, row, left, helped)
        assert does.mock_calls == expected
        assert slots == 2 * (num_ranks - 1 + (helped >= 0))


@pytest.mark.parametrize("helped", [-1, 7])
def test_a_gather_adds_what_a_helper_computed_and_what_rounding_left_of_it(helped):
    found = spec.MatmulSpec(tile_n=128, stages=STAGES, num_ranks=2, gathers=True)
    does, slots = load(found, 1, 3, 256, helped)
    word, top = NUM_WORDS + helped, 2 * helped * 128
    expected = [call.wait(word), call.load(top, 0), call.load(top + 64, 0)]
    expected += [
        call.wait(word),
        call.clear(word),
        call.load(top + 128, 0),
        call.load(top + 192, 0),
    ]
    assert does.mock_calls == (expected if helped >= 0 else [])
    assert slots == (4 if helped >= 0 else 0)
