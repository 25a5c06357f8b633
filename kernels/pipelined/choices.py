"""Stages, tiles and programs of a pipelined kernel: a small model of an SM's memory traffic.

In: a shape class and the device's facts, the same on every rank. Out: candidates, best first; the
first is what runs unless tuning.py measured another one. Next: pointwise.py, norms.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

SHARED_BYTES = 232448
"""Largest shared memory of a CTA on sm_90; an SM has 1 KB more for each CTA's own use."""
RESERVED_BYTES = 1024
REGISTERS = 65536
MAX_ROW = 16384
"""Longest row, padded, that one tile holds."""
LATENCY_US = 1.0
"""From a load's start to its data, in a busy memory system."""
START_US = 4.0
TMA_LOSS = 0.02
TILE_US = 0.6
PROGRAM_US = 1.5
"""What barriers, reductions of a tile and the start of a CTA cost besides the traffic, and what the
way through shared memory loses against plain kernels.
"""
DRIFT = 0.05
DRIFT_TILES = 32
SERIAL = 0.03
PLAIN_START_US = 2.0
PLAIN_PROGRAM_US = 6.2e-4
PLAIN_THREAD_US = 0.04
PLAIN_ROWS = 0.01
"""Of plain kernels: start; time to start one more program; what each element of a thread takes when
all run at once; what norms lose, whose programs load nothing while they reduce.
"""
PLAIN_BYTES_PER_US = 7.5e4
"""At which a program of a plain norm moves what rows it has besides its first."""
PLAIN_PER_THREAD = (8, 16, 32)
FEW_BYTES = 16
FEW_LOSS, MORE_LOSS = 0.06, 0.004
"""Elements of a thread of a plain norm; what norms lose where a thread has at most FEW_BYTES on
their way, and for each time that it has twice the 32 that are best.
"""
LONG_START_US, SECOND_US = 0.3, 1.75
LONG_WAIT_US = 0.35
LONG_ELEMENTS_PER_US = 9e3
CACHE_GAIN = 1.3
SPARSE = 0.12
"""Of rows that take several tiles, replayed in a CUDA graph: start of one launch that begins early,
and of a second behind it; what a program waits for each tile, and how many elements of tiles it
takes; how much faster the second pass reads what is still in the cache; what is lost for each time
that an SM has half of ENOUGH_BYTES on their way.
"""
LONG_WARPS = (8, 16)
SHARED_WARPS = (8, 16, 4)
LONG_PER_THREAD = (32, 16)
"""Warps of a program that has such a row, and of one that shares it; elements of a thread that are
on their way.
"""
CROWDING = 0.005
Vectors = Literal["after", "before", "beside"]
EARLY_PER_THREAD = 16
EARLY: dict[Vectors, tuple[float, float]] = {
    "after": (0.3, 0.0),
    "before": (0.1, 0.002),
    "beside": (0.0, 0.004),
}
"""When weight and bias come -> us that a tile waits for them, and what they lose where many
programs run; elements of a thread up to which they may come beside x.
"""
CACHE_BYTES = 50e6
ONCE_GAIN, ONCE_LOSS = 0.03, 0.05
"""Of an H200's L2. Loads that leave it first gain where what goes fits there and all together does
not by far; elsewhere they lose.
"""
ENOUGH_BYTES = 65536
"""Loads in flight on an SM beyond which more only crowd the memory system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """What the model knows of a GPU."""

    num_sms: int
    bandwidth_bytes_per_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """How a kernel runs. tile: elements, (rows, columns) or, for norms, (rows, padded columns).

    stages: loads in flight, 1 for none ahead, 0 for the plain kernel without TMA, one tile a
    program. run: neighbouring tiles that a program takes; 0 for programs that stay and take every
    n-th tile. vectors: of plain norms, when weight and bias are loaded: after the reduction, before
    it, which takes registers and saves a wait, or beside x. once: of plain pointwise kernels,
    whether what comes leaves the cache before what goes. parts: programs that share a row of
    several tiles, each of which passes over it twice; 0 where tiles hold whole rows.
    """

    tile: tuple[int, ...]
    num_warps: int
    stages: int
    buffers: int
    programs_per_sm: int
    run: int
    vectors: Vectors = "after"
    once: bool = False
    parts: int = 0

    @property
    def per_thread(self) -> int:
        """Elements of a tile that each thread works on."""
        return math.prod(self.tile) // (32 * self.num_warps)

    @property
    def max_registers(self) -> int:
        """Registers of a thread with which all programs of an SM are resident; at most 255."""
        return min(255, REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one element that arrive and leave by TMA, and elements in all."""

    in_bytes: int
    out_bytes: int
    num_elements: int


def shared_bytes(choice: KernelChoice, traffic: Traffic) -> int:
    """Shared memory of one CTA; barriers and reductions take less than 2 KB."""
    elements = math.prod(choice.tile)
    return 2048 + elements * (choice.stages * traffic.in_bytes + choice.buffers * traffic.out_bytes)


def fits(choice: KernelChoice, traffic: Traffic) -> bool:
    """Whether all programs of an SM are resident at once."""
    if not choice.stages:
        return True
    per_program = shared_bytes(choice, traffic) + RESERVED_BYTES
    threads = 32 * choice.num_warps * choice.programs_per_sm
    return (
        per_program * choice.programs_per_sm <= SHARED_BYTES + RESERVED_BYTES
        and threads <= 1024
        and math.prod(choice.tile) <= 64 * 32 * choice.num_warps
    )


def time_us(choice: KernelChoice, num_tiles: int, traffic: Traffic, device: GpuModel) -> float:
    """Predicted duration: the traffic at the rate that the loads in flight allow, the last round,
    where some SMs idle, and what each tile and program costs besides.

    A program with one load at a time has it in flight half the time, and overlaps nothing itself.
    Programs that stay drift apart, and the memory's open rows with them: measured, a long run of
    them loses about 5% against short runs of neighbouring tiles, which start in order.
    """
    if choice.parts:
        return _long_time_us(choice, num_tiles, traffic, device)
    if not choice.stages:
        return _plain_time_us(choice, num_tiles, traffic, device)
    tile_in = math.prod(choice.tile) * traffic.in_bytes
    tile_bytes = math.prod(choice.tile) * (traffic.in_bytes + traffic.out_bytes)
    slots = device.num_sms * choice.programs_per_sm
    length = choice.run or -(-num_tiles // slots)
    num_programs = -(-num_tiles // length)
    rounds = -(-num_programs // slots)
    ahead = min(choice.stages, length)
    in_flight = choice.programs_per_sm * (ahead if ahead > 1 else 0.5) * tile_in
    full_rate = device.bandwidth_bytes_per_us / device.num_sms
    rate = min(full_rate, in_flight / LATENCY_US * tile_bytes / tile_in) if tile_in else full_rate
    streaming = num_tiles * tile_bytes / (rate * device.num_sms)
    drift = 0.0 if choice.run else DRIFT * min(1.0, length / DRIFT_TILES)
    serial = SERIAL if ahead == 1 else 0.0
    crowding = CROWDING * max(0.0, math.log2(max(1, in_flight) / ENOUGH_BYTES))
    last = tile_bytes * choice.programs_per_sm / full_rate
    idle = (rounds * slots - num_programs) / slots * last * min(length, choice.stages)
    alone = rounds * (PROGRAM_US + length * (TILE_US + last / 8))
    return START_US + max(streaming * (1 + TMA_LOSS + drift + crowding + serial) + idle / 2, alone)


def _plain_time_us(
    choice: KernelChoice, num_tiles: int, traffic: Traffic, device: GpuModel
) -> float:
    elements = math.prod(choice.tile)
    per_thread = choice.per_thread
    slots = device.num_sms * choice.programs_per_sm
    rounds = -(-num_tiles // slots)
    tile_us = elements * (traffic.in_bytes + traffic.out_bytes) / device.bandwidth_bytes_per_us
    idle = (rounds * slots - num_tiles) * tile_us
    wait = lost = 0.0
    if choice.once:
        leaving = traffic.num_elements * traffic.out_bytes
        moved = leaving + traffic.num_elements * traffic.in_bytes
        lost = -ONCE_GAIN if leaving < CACHE_BYTES < moved < 2 * CACHE_BYTES else ONCE_LOSS
    if len(choice.tile) == 2:
        wait, loss = EARLY[choice.vectors]
        lost = PLAIN_ROWS + loss
        arriving = per_thread * traffic.in_bytes
        lost += FEW_LOSS if arriving <= FEW_BYTES else MORE_LOSS * math.log2(arriving / 32)
        more = elements - choice.tile[1]
        wait += more * (traffic.in_bytes + traffic.out_bytes) / PLAIN_BYTES_PER_US
    alone = rounds * (LATENCY_US + PLAIN_THREAD_US * per_thread + wait)
    streaming = num_tiles * tile_us * (1 + lost) + idle / 4
    return PLAIN_START_US + max(streaming + alone / rounds, alone, num_tiles * PLAIN_PROGRAM_US)


def _long_time_us(
    choice: KernelChoice, num_programs: int, traffic: Traffic, device: GpuModel
) -> float:
    """Two passes over rows of several tiles, the second of which finds in the cache what has been
    read since. A program waits for a tile before the next; all wait for their first.
    """
    working = min(num_programs, device.num_sms)
    resident = min(num_programs, device.num_sms * choice.programs_per_sm)
    elements = math.prod(choice.tile)
    own = traffic.num_elements / num_programs
    read = traffic.num_elements * traffic.in_bytes
    since = read if choice.parts > 1 else resident * own * traffic.in_bytes
    again = read / (CACHE_GAIN if since < CACHE_BYTES else 1.0)
    in_flight = resident / working * elements * traffic.in_bytes
    sparse = SPARSE * max(0.0, math.log2(ENOUGH_BYTES / max(1, in_flight)))
    moved = read + again + traffic.num_elements * traffic.out_bytes
    moving = moved / device.bandwidth_bytes_per_us * (1 + sparse)
    tile_us = LONG_WAIT_US + elements / LONG_ELEMENTS_PER_US
    num_tiles = -(-num_programs // resident) * math.ceil(own / elements)
    start = LONG_START_US + (SECOND_US if choice.parts > 1 else 0.0)
    return start + tile_us + max(moving, (num_tiles - 1) * tile_us)


def rank(
    candidates: list[tuple[KernelChoice, int]], traffic: Traffic, device: GpuModel
) -> tuple[KernelChoice, ...]:
    """Those (choice, number of tiles) that fit, fastest by the model first; ties in given order."""
    fitting = [(choice, tiles) for choice, tiles in candidates if fits(choice, traffic)]
    fitting.sort(key=lambda pair: time_us(pair[0], pair[1], traffic, device))
    return tuple(choice for choice, _ in fitting)


def plain_choices(traffic: Traffic, device: GpuModel) -> tuple[KernelChoice, ...]:
    """Plain pointwise kernels, by elements in memory order."""
    return rank(_plain_blocks(traffic), traffic, device)


def _plain_blocks(traffic: Traffic) -> list[tuple[KernelChoice, int]]:
    return [
        (
            _plain((elements,), elements // (32 * per_thread), once=once),
            -(-traffic.num_elements // elements),
        )
        for once in (False, True)
        for elements in (2048, 1024, 4096, 512)
        for per_thread in (8, 16)
    ]


def plain_row_choices(
    rows: int, columns: int, traffic: Traffic, device: GpuModel
) -> tuple[KernelChoice, ...]:
    """Plain norm kernels: whole rows, padded to a power of two, or tiles of longer ones."""
    return rank(_plain_rows(rows, columns), traffic, device)


def _plain_rows(rows: int, columns: int) -> list[tuple[KernelChoice, int]]:
    padded = padded_row(columns)
    if padded > MAX_ROW:
        return _long_rows(rows, columns)
    return [
        (
            _plain((per_tile, padded), per_tile * padded // (32 * per_thread), vectors=vectors),
            -(-rows // per_tile),
        )
        for per_tile in (2, 1, 4, 8, 16)
        for per_thread in PLAIN_PER_THREAD
        for vectors in EARLY
        if vectors != "beside" or per_thread <= EARLY_PER_THREAD
        if 32 <= per_tile * padded // per_thread <= 1024
        and (per_tile == 1 or per_tile * padded <= MAX_ROW)
    ]


def _long_rows(rows: int, columns: int) -> list[tuple[KernelChoice, int]]:
    """Programs that have a row each, or share it so that each has a tile of it."""
    found = []
    for per_thread in LONG_PER_THREAD:
        for num_warps in SHARED_WARPS:
            plain = _plain((1, 32 * num_warps * per_thread), num_warps)
            parts = -(-columns // plain.tile[1])
            found.append((replace(plain, parts=parts), rows * parts))
            if num_warps in LONG_WARPS:
                found.append((replace(plain, parts=1), rows))
    return found


def padded_row(columns: int) -> int:
    """Columns of a tile of whole rows: a power of two, 128 at least."""
    return max(128, 1 << (columns - 1).bit_length())


def _plain(
    tile: tuple[int, ...], num_warps: int, *, vectors: Vectors = "after", once: bool = False
) -> KernelChoice:
    resident = min(32, 2048 // (32 * num_warps), REGISTERS // (32 * num_warps * 40))
    return KernelChoice(tile=tile, num_warps=num_warps, stages=0, buffers=0,
                  programs_per_sm=resident, run=1, vectors=vectors, once=once)  # fmt: skip


def flat_choices(traffic: Traffic, device: GpuModel, width: int) -> tuple[KernelChoice, ...]:
    """For operands that are one row: tiles [rows, width] of it, or [elements] if width is 0."""
    candidates = _plain_blocks(traffic)
    for elements in (2048, 4096, 1024, 8192):
        tile = (elements // width, width) if width else (elements,)
        num_tiles = -(-traffic.num_elements // elements)
        for per_warp in (1024, 512):
            candidates += _variants(tile, max(1, elements // per_warp), num_tiles)
    return rank(candidates, traffic, device)


def matrix_choices(
    rows: int, columns: int, traffic: Traffic, device: GpuModel
) -> tuple[KernelChoice, ...]:
    """For strided or broadcast operands: tiles of [rows, columns]."""
    candidates = _plain_blocks(traffic)
    for tile in ((16, 256), (32, 128), (8, 256), (64, 64), (8, 128), (128, 32)):
        num_tiles = -(-rows // tile[0]) * -(-columns // tile[1])
        candidates += _variants(tile, max(1, math.prod(tile) // 1024), num_tiles)
    return rank(candidates, traffic, device)


def row_choices(
    rows: int, columns: int, traffic: Traffic, device: GpuModel
) -> tuple[KernelChoice, ...]:
    """For norms over rows: whole rows, padded to a power of two, by either kernel, or longer ones
    by the plain kernels.
    """
    padded = padded_row(columns)
    candidates = []
    for per_tile in (1, 2, 4, 8, 16, 32):
        elements = per_tile * padded
        if not 1024 <= elements <= max(8192, padded) or padded > MAX_ROW:
            continue
        for per_thread in (32, 16, 64):
            num_warps = elements // (32 * per_thread)
            if num_warps in (1, 2, 4, 8, 16):
                candidates += _variants((per_tile, padded), num_warps, -(-rows // per_tile))
    return rank([*candidates, *_plain_rows(rows, columns)], traffic, device)


def _variants(
    tile: tuple[int, ...], num_warps: int, num_tiles: int
) -> list[tuple[KernelChoice, int]]:
    return [
        (
            KernelChoice(
                tile=tile,
                num_warps=num_warps,
                stages=stages,
                buffers=buffers,
                programs_per_sm=programs,
                run=run,
            ),
            num_tiles,
        )
        for stages, run in ((2, 2), (3, 3), (3, 0), (2, 0), (4, 0), (4, 4), (1, 1))
        for buffers in (1, 2)
        for programs in (4, 3, 2, 8, 6, 1)
    ]
