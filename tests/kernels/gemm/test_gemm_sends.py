"""What copy engines do behind a sending matmul: every byte arrives where the kernel looks for it,
and each copy waits for just the tiles that the kernel counts.
"""

from collections import Counter
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distmega.kernels.gemm.device.arguments import Helpers, TileGrid
from distmega.kernels.gemm.times.tile_times import NUM_WORDS, SendPlan, Tiles, plan_sending
from distmega.sharding.overlap.products import Extents

pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")
from distmega.kernels.gemm import overlap
from distmega.kernels.gemm.device import order

SMS = 12
ROOM, WORD = 1 << 40, 1 << 30
"""Addresses of the first rank's room and words; the next rank's are as far behind."""


@dataclass(slots=True)
class Recorder:
    """A Workspace of one rank, and the stream operations that are queued with it."""

    rank: int
    num_ranks: int
    waits: Counter[int] = field(default_factory=Counter)
    copies: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    words: list[int] = field(default_factory=list)

    def symmetric_address(self, rank: int) -> int:
        return (1 + rank) * ROOM

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def arrival_address(self, rank: int, source: int, word: int) -> int:
        return (1 + rank) * WORD + source * NUM_WORDS + word

    def await_count(self, index: int, value: int) -> None:
        assert index not in self.waits, "one copy, or one to each peer, for a word"
        self.waits[index] = value

    def send_columns(self, target: int, source: int, width: int, pitch: int, rows: int) -> None:
        self.copies.append((target, source, width, pitch, rows))

    def tell(self, peer: int, word: int) -> None:
        self.words.append(self.arrival_address(peer, self.rank, word))


def record(plan: SendPlan, home: torch.Tensor, rank: int, num_ranks: int) -> Recorder:
    found = Recorder(rank, num_ranks)
    assert overlap.send_rows(plan, home, found) == list(found.waits)
    return found


@given(
    ranks=st.sampled_from([2, 3, 4]), chunk_rows=st.integers(1, 6), blocks=st.integers(1, 7),
    tile_n=st.sampled_from([128, 256]), group=st.sampled_from([1, 2, 8]), lag=st.integers(0, 3),
    parts=st.integers(1, 4), shares=st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_all_arrives_once(ranks, chunk_rows, blocks, tile_n, group, lag, parts, shares):
    rows, columns = 128 * chunk_rows * ranks, 128 * blocks
    extents = Extents(rows=rows, columns=columns, depth=64, num_ranks=ranks)
    tiles = Tiles(tile_n=tile_n, stages=4, group=group)
    bands = plan_sending(extents, tiles, SMS, shares=shares).num_bands
    plan = plan_sending(extents, tiles, SMS, lag=min(lag, bands), parts=parts, shares=shares)
    home = torch.empty(2 * rows, columns, dtype=torch.bfloat16, device="meta")
    chunk = rows // ranks
    for rank in range(ranks):
        found = record(plan, home, rank, ranks)
        arrived = torch.zeros(ranks, 2 * rows, columns, dtype=torch.int32)
        for target, source, width, pitch, height in found.copies:
            peer, at = divmod(target, ROOM)
            assert pitch == 2 * columns
            (top, left), (from_top, from_left) = (
                divmod(place // 2, columns) for place in (at, source % ROOM)
            )
            assert left == from_left
            own = from_top - rows >= rank * chunk and from_top - rows < (rank + 1) * chunk
            wanted = from_top if own else rank * chunk + (from_top - rows) % chunk
            assert top == wanted, "sums keep their place, partial results go to the sender's slot"
            arrived[peer - 1, top : top + height, left : left + width // 2] += 1
        _push(arrived, plan, rank, ranks, chunk_rows)
        expected = torch.zeros_like(arrived)
        for peer in range(ranks):
            if peer != rank:
                expected[peer, rank * chunk : (rank + 1) * chunk] = 1
                expected[peer, rows + rank * chunk : rows + (rank + 1) * chunk] = int(shares)
        assert torch.equal(arrived, expected)
        _check_words(found, plan, rank, ranks, chunk_rows)


@given(
    programs=st.integers(1, 12), num_tiles=st.integers(1, 60), k_tiles=st.integers(2, 30),
    given_slices=st.integers(1, 29), fewer=st.integers(0, 4),
)  # fmt: skip
def test_slices_that_tiles_give_away_are_computed_once_by_programs_that_were_idle(
    programs, num_tiles, k_tiles, given_slices, fewer
):
    programs = min(programs, num_tiles)
    wave = num_tiles % programs
    helpers = programs - wave if wave else 0
    turns = -(-wave // max(helpers, 1))
    assume(given_slices < k_tiles)
    assume(given_slices > (turns - 1) * fewer)
    split = Helpers(helpers, given_slices, fewer)
    computed: Counter[tuple[int, int]] = Counter()
    words: dict[int, list[tuple[int, int, bool]]] = {}
    for program in range(programs):
        end = order.end_pieces.fn(num_tiles, program, programs, split)
        for item in range(program, end, programs):
            number, first, slices, word = order.locate_piece.fn(
                item, num_tiles, k_tiles, programs, split
            )
            computed.update((number, k) for k in range(first, first + slices))
            if word >= 0:
                words.setdefault(word, []).append((program, number, first > 0))
            else:
                assert (first, slices) == (0, k_tiles)
    assert computed == Counter({(n, k): 1 for n in range(num_tiles) for k in range(k_tiles)})
    assert sorted(words) == list(range(wave if helpers else 0))
    for owner, helper in words.values():
        assert owner[1] == helper[1]
        assert (owner[2], helper[2]) == (False, True)
        assert owner[0] < wave <= helper[0]


def _push(arrived: torch.Tensor, plan: SendPlan, rank: int, ranks: int, chunk_rows: int) -> None:
    """What the kernel itself stores into the peers' rooms."""
    rows, wide = ranks * chunk_rows * 128, plan.tiles.tile_n
    with patch.object(order, "locate_band", order.locate_band.fn):
        for number in range(plan.num_tiles - plan.num_late, plan.num_tiles):
            chunk, row, column = order.locate_sent.fn(
                number, chunk_rows, plan.columns, rank, plan.lag, plan.tiles.group, ranks
            )
            assert chunk == rank
            top, left = rows + (rank * chunk_rows + row) * 128, column * wide
            for peer in range(ranks):
                if peer != rank:
                    arrived[peer, top : top + 128, left : left + wide] += 1


def _check_words(found: Recorder, plan: SendPlan, rank: int, ranks: int, chunk_rows: int) -> None:
    """Against what the kernel counts, and the words that peers' loaders look at."""
    grid = TileGrid(chunk_rows, plan.columns, rank, plan.tiles.group, plan.lag, plan.part)
    counted: Counter[int] = Counter()
    looked_at = set()
    with patch.object(order, "locate_band", order.locate_band.fn):
        for number in range(plan.num_tiles):
            chunk, row, column = order.locate_sent.fn(
                number, chunk_rows, plan.columns, rank, plan.lag, plan.tiles.group, ranks
            )
            place, parts = order.locate_part.fn(row, column, grid)
            if chunk != rank or (plan.shares and number < plan.num_tiles - plan.num_late):
                counted[chunk * parts + place] += 1
            if chunk == rank:
                looked_at.add(place)
    assert found.waits == counted
    here = {word % WORD - rank * NUM_WORDS for word in found.words}
    last = plan.num_bands * plan.num_parts
    assert here == looked_at | ({last} if plan.shares else set())
