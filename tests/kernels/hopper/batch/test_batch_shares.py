"""Which blocks of the cache SMs attend to, and whose partials are summed: the functions of the
kernel, called with numbers.
"""

import random
from types import FunctionType, SimpleNamespace

import pytest

from distmega.kernels.hopper.batch.bodies import attention
from distmega.kernels.hopper.batch_plan.words import BATCH_STATE_POSITIONS

BLOCK = 128


def called(function: object, positions: list[int]) -> FunctionType:
    """A function of attention.py that takes numbers, its loads from the words of a state."""

    def load(at: int) -> int:
        return positions[at - BATCH_STATE_POSITIONS]

    gl = SimpleNamespace(
        load=load, minimum=min, maximum=max, where=lambda chosen, a, b: a if chosen else b
    )
    known = dict(vars(attention)) | {"gl": gl, "TILE_ROWS": BLOCK, "SPARE_BLOCKS": 2}
    known |= {
        "BATCH_STATE_POSITIONS": BATCH_STATE_POSITIONS,
        "first_seen": lambda position, window: max(position + 1 - window, 0),
    }
    if function not in (attention.blocks_of, attention.part_of):
        known |= {n: called(getattr(attention, n), positions) for n in ("blocks_of", "part_of")}
    return FunctionType(function.fn.__code__, known)


def shares(positions: list[int], heads: int, num_sms: int, window: int) -> dict[int, list]:
    """The pieces of each SM, (sequence, head, first block, blocks, blocks of all), and where in the
    line it begins.
    """
    batch = len(positions)
    blocks = called(attention.blocks_of, positions)
    total = called(attention.count_blocks, positions)(0, batch, 0, window, heads)
    first = called(attention.first_piece, positions)
    found = {}
    for sm in range(num_sms):
        sequence, head, block, left, start = first(0, batch, 0, window, total, sm, num_sms, heads)
        pieces = []
        while left > 0:
            _, num_blocks = blocks(0, sequence, 0, window)
            num = min(left, num_blocks - block)
            pieces.append((sequence, head, block, num, num_blocks, start))
            start, left, block = start + num, left - num, 0
            sequence, head = (sequence + 1, 0) if head + 1 == heads else (sequence, head + 1)
        found[sm] = pieces
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_one_sms_and_its_partials_are_summed(seed: int):
    rng = random.Random(seed)
    for _ in range(25):
        heads, num_sms = rng.choice([1, 2, 4, 8]), rng.choice([5, 17, 132])
        longest = rng.choice([1, 130, 700, 5000])
        positions = [rng.randint(0, longest) for _ in range(rng.randint(1, 16))]
        if rng.random() < 0.5:
            positions = [longest] * len(positions)
        window = rng.choice([2**30, 200])
        found = shares(positions, heads, num_sms, window)
        sms_of = called(attention.sms_of_piece, positions)
        total = called(attention.count_blocks, positions)(0, len(positions), 0, window, heads)
        sharing = min(total, num_sms)
        seen: dict[tuple[int, int, int], int] = {}
        parts: dict[tuple[int, int], list[int]] = {}
        named: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for sm, pieces in found.items():
            for sequence, head, block, num, num_blocks, start in pieces:
                for each in range(block, block + num):
                    assert seen.setdefault((sequence, head, each), sm) == sm
                parts.setdefault((sequence, head), []).append(sm)
                sms = sms_of(start, block, num_blocks, sm, sharing, total)
                named.setdefault((sequence, head), set()).add(sms)
        assert len(seen) == total
        for pair, sms in parts.items():
            assert named[pair] == {(min(sms), max(sms))}
            assert sorted(sms) == list(range(min(sms), max(sms) + 1))


def test_no_sm_has_two_pieces_where_equal_parts_are_hardly_longer():
    found = shares([515] * 8, 4, 132, 2**30)
    assert max(len(pieces) for pieces in found.values()) == 1
    assert max(pieces[0][3] for pieces in found.values() if pieces) == 2
    long = shares([5000, *[100] * 7], 4, 132, 2**30)
    assert max(len(pieces) for pieces in long.values()) > 1
