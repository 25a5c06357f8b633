"""The PTX of the decode kernel, run on the CPU, against numpy."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from distmega.kernels.hopper.plan.types import padded_tiles_k
from distmega.kernels.hopper.plan.words import TILE_BYTES
from distmega.kernels.hopper.ptx.blocks import (
    aim_asm,
    block_bytes,
    insert_asm,
    num_outputs,
    query_bytes,
    score_asm,
    stage_asm,
    value_asm,
)
from distmega.kernels.hopper.ptx.products import NUM_TAKEN, multiply_asm, store_asm, take_asm
from distmega.kernels.hopper.ptx.products import aim_asm as aim_tiles
from tests.kernels.ptx_warps import LANES, Warp, bf16_bits, bf16_floats

WARPS = 8


def rounded(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bf16 values as float32."""
    return bf16_floats(bf16_bits(rng.standard_normal(shape, np.float32)))


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Bytes of [n, 64] bf16 as the copy engine leaves them: 16-byte parts exchanged by row."""
    parts = bf16_bits(rows).astype(np.uint16).reshape(-1, 8, 8)
    out = np.empty_like(parts)
    for row in range(len(parts)):
        for part in range(8):
            out[row, part ^ row % 8] = parts[row, part]
    return out.reshape(-1).view(np.uint8)


def lanes(value: int) -> np.ndarray:
    return np.full(LANES, value & 0xFFFFFFFF, np.uint32)


STAGES = 4
XS = STAGES * TILE_BYTES
"""Where x lies in shared memory, behind the ring; then sums, their squares, barriers."""
RED, SQUARES, READY, FREE, END = (XS + more for more in (8192, 12288, 12352, 12416, 12480))


def run_tiles(warp: Warp, x: np.ndarray, num_tiles: int, first: int, ss: np.ndarray) -> None:
    """Stages x and multiplies the ring's tiles from slot `first` on."""
    num_tiles_k = len(x) // 1024
    aims = warp.run(
        aim_tiles(), dict(enumerate(map(lanes, (0, XS, RED, READY, first % STAGES)), 5))
    )
    place, part, tile, own_sums, bar = (aims[f"${i}"] for i in range(5))
    lane = np.arange(LANES)
    word = warp.number * 32 + lane // 16 * 256 + lane % 16 * 2
    pairs = bf16_bits(x).reshape(-1, 512, 2)
    pairs = pairs[..., 0] | pairs[..., 1] << 16
    for chunk in range(num_tiles_k):
        two = {2: pairs[chunk, word], 3: pairs[chunk, word + 1]}
        warp.run(store_asm(1), {1: place + 2048 * chunk, **two})
    ring = READY, READY + 8 * STAGES, FREE - READY
    given = {
        0: tile,
        1: bar,
        **dict(enumerate(map(lanes, (first // STAGES % 2, num_tiles, *ring)), 2)),
    }
    found = warp.run(take_asm(STAGES), {NUM_TAKEN + i: bits for i, bits in given.items()})
    taken = [found.get(f"${i}", lanes(0)) for i in range(NUM_TAKEN)]
    rest = map(lanes, (*ring, 0, 0, num_tiles, num_tiles_k, 0, SQUARES, 0))
    given = dict(enumerate((*taken, *rest), 1))
    given |= {NUM_TAKEN + 4: part, NUM_TAKEN + 5: own_sums, NUM_TAKEN + 8: ss.view(np.uint32)}
    warp.run(multiply_asm(STAGES), given)


@pytest.mark.parametrize(
    ("num_units", "num_tiles_k", "first"),
    [
        (1, 1, 0), (2, 1, 3), (4, 1, 1), (5, 1, 2), (8, 1, 3), (1, 2, 5), (1, 3, 2), (2, 2, 0),
        (3, 2, 1), (2, 3, 3),
    ],
)  # fmt: skip
def test_tiles_times_x(num_units, num_tiles_k, first):
    rng = np.random.default_rng(0)
    x = rounded(rng, 1024 * num_tiles_k)
    weights = rounded(rng, num_units, 8, 1024 * num_tiles_k)
    ss = rng.standard_normal((WARPS, LANES), np.float32)
    tiles = weights.reshape(num_units, 8, num_tiles_k, 16, 64).transpose(0, 2, 3, 1, 4)
    tiles = tiles.reshape(-1, 128, 64)
    found = np.zeros((num_units, 8), np.float32)
    arrivals: Counter[int] = Counter()
    for number in range(WARPS):
        shared = np.zeros(END, np.uint8)
        loads = iter(enumerate(tiles, first))

        def land(bar, phase, shared=shared, loads=loads):
            """The next tile, which overwrites the one that was in its slot."""
            it, tile = next(loads)
            assert (bar, phase) == (READY + it % STAGES * 8, it // STAGES % 2)
            shared[it % STAGES * TILE_BYTES :][:TILE_BYTES] = swizzled(tile)

        warp = Warp(number, shared, land=land)
        run_tiles(warp, x, len(tiles), first, ss[number])
        sums = shared[RED : RED + 2048].view(np.float32).reshape(WARPS, 8, 8)
        found += sums[number, :num_units]
        squares = shared[SQUARES : SQUARES + 32].view(np.float32)
        np.testing.assert_allclose(squares[number], ss[number].sum(), rtol=1e-4)
        arrivals.update(warp.arrivals)
    np.testing.assert_allclose(found, weights @ x, rtol=1e-3, atol=1e-3)
    slots = Counter((first + tile) % STAGES for tile in range(len(tiles)))
    assert arrivals == {FREE + 8 * slot: WARPS * num for slot, num in slots.items()}


@dataclass(slots=True)
class Attention:
    """Eight warps that attend to blocks of 128 positions, in a ring of 12 slots. What nobody wrote
    is not a number.
    """

    halves: int
    group: int
    first: int
    position: int
    it: int = 5
    turn: int = 0
    owed: tuple[int, ...] = ()
    softcap: float = 0.0
    biases: np.ndarray | None = None
    """[positions, group], added to scores."""
    shared: np.ndarray = field(default_factory=lambda: np.full(QUERIES + 16384, NAN, np.uint8))
    arrivals: Counter[int] = field(default_factory=Counter)
    outputs: np.ndarray = field(init=False)
    """What add_values gives: outputs, maxima, sums."""

    def __post_init__(self) -> None:
        self.outputs = np.zeros((num_outputs(self.halves) + 2, WARPS, LANES), np.float32)
        self.outputs[-2] = -np.inf

    def aim(self, warp: Warp) -> list[np.ndarray]:
        given = {8: lanes(0), 9: lanes(QUERIES), 10: lanes(self.group - 1)}
        out = warp.run(aim_asm(self.halves), given)
        return [out[f"${i}"] for i in range(8)]

    def stage(self, q: np.ndarray) -> None:
        """Queries [group, d] into shared memory, as stage_asm writes them."""
        for query, row in enumerate(bf16_bits(q).astype(np.uint16)):
            for pair, bits in enumerate(row.reshape(-1, 2)):
                at = QUERIES + query * query_bytes(self.halves) + pair // 32 * 128
                at += pair % 4 * 32 + pair % 32 // 4 * 4
                self.shared[at : at + 4] = bits.view(np.uint8)

    def load(self, rows: np.ndarray) -> None:
        """[128, d] into the ring."""
        for half in range(self.halves):
            slot = (self.it + half) % 12
            part = swizzled(rows[:, 64 * half : 64 * half + 64])
            self.shared[slot * TILE_BYTES : (slot + 1) * TILE_BYTES] = part

    def run(self, block: int, k: np.ndarray, v: np.ndarray, scale: np.float32) -> None:
        """A block: scores of all warps, then values. The last warp lags as far as barriers let it:
        it adds up values once the others have scored the next block.
        """
        self.load(k)
        place = self.turn, self.it % 12, self.it // 12 % 2
        numbers = (*place, block, self.first, self.position)
        for number in range(WARPS):
            if number == WARPS - 1:
                self.catch_up()
            self.score(number, numbers, scale)
        self.it += self.halves
        self.load(v)
        place = self.turn, self.it % 12, self.it // 12 % 2
        for number in range(WARPS - 1):
            self.add(number, place)
        self.owed = place
        self.it += self.halves
        self.turn ^= 1

    def catch_up(self) -> None:
        if self.owed:
            self.add(WARPS - 1, self.owed)
        self.owed = ()

    def score(self, number: int, numbers: tuple[int, ...], scale: np.float32) -> None:
        warp = Warp(number, self.shared, arrivals=self.arrivals)
        query, keys, _, weights, sums, _, _, at = self.aim(warp)
        given = dict(enumerate((query, keys, weights, sums, at, *map(lanes, numbers)), 3))
        given |= {1: lanes(BARS), 2: lanes(BARS + 96), 14: scale.view(np.uint32) + lanes(0)}
        if self.biases is not None:
            row, query = (128 * numbers[3] + at)[None], np.arange(LANES) % 4 * 2
            rows = np.concatenate([row, row, row + 8, row + 8])
            queries = np.minimum([query, query + 1] * 2, self.group - 1)
            given |= dict(enumerate(self.biases[rows, queries].view(np.uint32), 15))
        warp.run(score_asm(self.halves, 12, self.softcap, self.biases is not None), given)

    def add(self, number: int, place: tuple[int, ...]) -> None:
        warp = Warp(number, self.shared, arrivals=self.arrivals)
        _, _, weights, _, _, sums, values, _ = self.aim(warp)
        held = self.outputs[:, number].view(np.uint32)
        bars = lanes(BARS), lanes(BARS + 96)
        given = enumerate((*held, *bars, weights, sums, values, *map(lanes, place)), len(held))
        out = warp.run(value_asm(self.halves, 12), dict(given))
        self.outputs[:, number] = [out[f"${i}"].view(np.float32) for i in range(len(held))]

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each query: outputs [group, d], maximum and sum [group, 1], as write_partial finds
        them.
        """
        self.catch_up()
        row, column = np.arange(LANES) // 4, np.arange(LANES) % 4
        found = np.zeros((8, 64 * self.halves), np.float32)
        for number in range(4 * self.halves):
            for i in range(4):
                out = self.outputs[number // 8 * 4 + i, number % 8]
                found[2 * column + i % 2, 16 * number + row + i // 2 * 8] = out
        own = 4 * np.arange(self.group)
        return found[: self.group], self.outputs[-2, 0, own, None], self.outputs[-1, 0, own, None]


NAN = 0xFF
"""The bytes of a bf16 or float32 that is not a number."""
QUERIES = 12 * TILE_BYTES
BARS = QUERIES + 12000


@pytest.mark.parametrize(
    ("head_dim", "softcap", "biased"),
    [
        *((head_dim, softcap, False) for head_dim in (64, 128, 192, 256) for softcap in (0.0, 1.5)),
        (128, 0.0, True), (256, 1.5, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("group", "first", "position"), [(2, 0, 200), (5, 70, 255), (1, 0, 128)])
def test_two_blocks(head_dim, group, first, position, softcap, biased):
    """Two blocks of 128 positions, one after the other, against a softmax over both."""
    rng = np.random.default_rng(1)
    q = rounded(rng, group, head_dim)
    k, v = rounded(rng, 256, head_dim), rounded(rng, 256, head_dim)
    scale = np.float32(0.2)
    biases = rng.standard_normal((256, group), np.float32) if biased else None
    task = Attention(head_dim // 64, group, first, position, softcap=softcap, biases=biases)
    task.stage(q)
    for block in (0, 1):
        part = slice(128 * block, 128 * block + 128)
        task.run(block, k[part], v[part], scale)
    scores = q @ k.T * scale
    if softcap:
        scores = softcap / np.log(2) * np.tanh(scores * np.log(2) / softcap)
    if biases is not None:
        scores += biases.T / np.log(2)
    at = np.arange(256)
    scores[:, (at < first) | (at > position)] = -np.inf
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    expected = weights @ v / weights.sum(1, keepdims=True)
    found, highest, sums = task.result()
    np.testing.assert_allclose(found / sums, expected, atol=0.03)
    np.testing.assert_allclose(highest, scores.max(1, keepdims=True), rtol=1e-4)
    used = Counter((5 + i) % 12 for i in range(4 * task.halves))
    assert task.arrivals == {BARS + 96 + 8 * slot: WARPS * num for slot, num in used.items()}


def attend_split(q, k, v, *, window, active, split, scale):
    """What attention_task has one split do, the last of k and v being new: outputs, maxima, sums.

    Positions after the new one are stale: keys that are no numbers, values that are huge. So is the
    new one's row until it is placed.
    """
    position = len(k) - 1
    first, last = max(position + 1 - window, 0), position // 128
    task = Attention(k.shape[1] // 64, len(q), first, position)
    task.stage(q)
    for block in range(first // 128 + split, last + 1, active):
        keys, values = np.full((2, 128, k.shape[1]), [[[np.nan]], [[1e30]]], np.float32)
        rows = slice(128 * block, 128 * block + 128)
        keys[: len(k[rows])], values[: len(k[rows])] = k[rows], v[rows]
        task.run(block, keys, values, scale)
    return task.result()


FAR = 2**30
"""A window that leaves nothing out."""


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "position", "active"),
    [
        (64, 6, FAR, 0, 1), (128, 8, FAR, 1, 1), (64, 7, FAR, 127, 1), (128, 6, FAR, 128, 1),
        (64, 3, FAR, 128, 2), (128, 1, FAR, 129, 2), (64, 8, FAR, 383, 2), (128, 8, FAR, 900, 3),
        (64, 3, 40, 64, 1), (128, 8, 40, 129, 2), (64, 6, 40, 166, 2), (64, 7, 64, 700, 1),
        (128, 3, 300, 711, 3), (64, 7, 100, 227, 1), (128, 6, 128, 255, 1), (64, 8, 1, 128, 1),
        (256, 8, FAR, 130, 1), (192, 7, FAR, 383, 2), (256, 3, 300, 711, 3),
    ],
)  # fmt: skip
def test_splits_of_a_window(head_dim, group, window, position, active):
    """Some queries over all blocks that they see, shared out as attention_task does, then combined;
    windows begin within blocks, at them, and behind whole ones.
    """
    rng = np.random.default_rng(3)
    q = rounded(rng, group, head_dim)
    k, v = rounded(rng, 2, position + 1, head_dim)
    scale = np.float32(0.2)
    given = {"window": window, "active": active, "scale": scale}
    found = [attend_split(q, k, v, split=split, **given) for split in range(active)]
    outputs, highest, sums = (np.stack(each) for each in zip(*found, strict=True))
    factors = np.exp2(highest - highest.max(0))
    scores = q @ k.T * scale
    scores[:, : max(position + 1 - window, 0)] = -np.inf
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    expected = weights @ v / weights.sum(1, keepdims=True)
    merged = (factors * outputs).sum(0) / (factors * sums).sum(0)
    np.testing.assert_allclose(merged, expected, atol=0.03)
    np.testing.assert_allclose(highest.max(0), scores.max(1, keepdims=True), rtol=1e-4)


def test_attention_has_room_where_x_lies():
    assert padded_tiles_k(1) * 2048 >= block_bytes(4)


@pytest.mark.parametrize(("half", "size"), [(32, 2), (64, 2), (64, 4), (128, 4)])
def test_rows_are_staged_and_placed(half, size):
    """`size` columns a lane of both halves of a row: of a query, and of position 77 of a block."""
    task = Attention(half // 32, 1, 0, 0)
    row = rounded(np.random.default_rng(2), 1, 2 * half)
    task.stage(row)
    column = np.arange(LANES) * size
    used = column < half
    pair = column // 2
    pairs = bf16_bits(row).reshape(2, -1, 2)
    pairs = pairs[..., 0] | pairs[..., 1] << 16
    pairs = pairs[:, pair[:, None] % (half // 2) + np.arange(size // 2)]
    columns = np.concatenate([pairs[0].T, pairs[1].T])
    shared = np.full_like(task.shared, NAN)
    at = QUERIES + pair // 32 * 128 + pair % 4 * 32 + pair % 32 // 4 * 4
    at = np.where(used, at, -1).astype(np.uint32)
    Warp(0, shared).run(stage_asm(2 * half, size), {size: at, **dict(enumerate(columns, 2 * size))})
    assert (shared == task.shared).all()
    shared[:] = 0
    inside = 77 * 128 + (column % 64 // 8 ^ 77 % 8) * 16 + column % 8 * 2
    at = np.where(used, inside + column // 64 * TILE_BYTES, -1).astype(np.uint32)
    places = at, at + np.uint32(max(1, half // 64) * TILE_BYTES), *map(lanes, [0] * 4)
    given = {size * i: place for i, place in enumerate(places, 1)}
    given |= dict(enumerate(columns, 7 * size))
    Warp(0, shared).run(insert_asm(2 * half, size), given)
    block = np.zeros((128, 2 * half), np.float32)
    block[77] = row
    expected = np.concatenate([swizzled(block[:, i : i + 64]) for i in range(0, 2 * half, 64)])
    assert (shared[: len(expected)] == expected).all()


@pytest.mark.parametrize("size", [2, 4])
def test_halves_of_padded_heads_go_where_they_are_told(size):
    """Of heads of 96 the second half has addresses of its own."""
    pairs = np.arange(1, 1 + size * LANES, dtype=np.uint32).reshape(size, LANES)
    lane = np.arange(LANES)
    shared = np.zeros(32768, np.uint8)
    first, second = ((64 * lane + start).astype(np.uint32) for start in (0, 8192))
    first[5:] = second[5:] = 0xFFFFFFFF
    given = {size: first, 2 * size: second, **dict(enumerate(pairs, 3 * size))}
    Warp(0, shared).run(stage_asm(96, size), given)
    words = shared.view(np.uint32)
    for half in (0, 1):
        for i in range(size // 2):
            found = words[2048 * half + 8 * i :][: 16 * 5 : 16]
            assert (found == pairs[half * (size // 2) + i, :5]).all()
    assert np.count_nonzero(words) == 5 * size
