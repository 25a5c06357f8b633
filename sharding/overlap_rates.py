"""What the cost model of overlap knows of a machine: built-in, or measured once on it.

Comes in: constants below, or the file that `distmega doctor --calibrate` writes. Goes out:
OverlapRates. Next: overlap_cost.py.
"""

from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRates:
    """Microseconds, and bytes and flops a microsecond, of a device and its links.

    matmul_rates: (tiles of 128 x 128, flops a microsecond of the library's matmul), ascending.
    launch_us: fixed time of one. memory_bytes_per_us: of a copy. collective: of NCCL's.
    beside_factor: 1 where chunks of matmul and collective don't slow each other down, 2 where one
    waits for the other. peer: sends of a ring; ring_factor: as beside_factor. copy: peer copies by
    copy engine and their events. kernel_multiples: what the fused kernel needs of rows a rank,
    columns and depth. slice_us: its time of 64 elements of depth, by columns of a tile, nothing
    where the two run one after the other; tile_us: of a tile's start and end. send_us: what a wave
    takes longer when it sends. last_us: what remains after the last tile of a reduce-scatter, and
    of an all-reduce. host_us: of the host, for one small op; replay_us: where it is captured.
    """

    num_sms: int
    launch_us: float
    matmul_rates: tuple[tuple[int, float], ...]
    memory_bytes_per_us: float
    collective_us: float
    collective_bytes_per_us: float
    beside_factor: float
    peer_us: float
    peer_bytes_per_us: float
    ring_factor: float
    copy_us: float
    copy_bytes_per_us: float
    kernel_multiples: tuple[int, int, int]
    kernel_dtypes: tuple[str, ...]
    kernel_ranks: int
    slice_us: tuple[tuple[int, float], ...] = ()
    tile_us: float = 0.0
    send_us: float = 0.0
    last_us: tuple[float, float] = (0.0, 0.0)
    host_us: float = 20.0
    replay_us: float = 1.0

    def matmul_flops_per_us(self, tiles: int) -> float:
        """The library's rate with so many tiles; between measured numbers, in proportion."""
        known = self.matmul_rates
        if tiles <= known[0][0]:
            return known[0][1] * tiles / known[0][0]
        for (few, low), (many, high) in pairwise(known):
            if tiles <= many:
                return low + (high - low) * (tiles - few) / (many - few)
        return known[-1][1]


CPU_RATES = OverlapRates(
    num_sms=1,
    launch_us=10.0,
    matmul_rates=((1, 5.0e4),),
    memory_bytes_per_us=1.0e4,
    collective_us=150.0,
    collective_bytes_per_us=1.0e3,
    beside_factor=2.0,
    peer_us=150.0,
    peer_bytes_per_us=1.0e3,
    ring_factor=2.0,
    copy_us=150.0,
    copy_bytes_per_us=1.0e3,
    kernel_multiples=(1, 1, 1),
    kernel_dtypes=("f64", "f32", "bf16", "f16"),
    kernel_ranks=64,
)
"""Ranks that share cores: nothing is gained side by side."""

H200_RATES = OverlapRates(
    num_sms=132,
    launch_us=4.0,
    matmul_rates=((132, 6.7e8), (512, 7.6e8), (2048, 8.1e8)),
    memory_bytes_per_us=4.1e6,
    collective_us=24.0,
    collective_bytes_per_us=2.45e5,
    beside_factor=1.9,
    peer_us=25.0,
    peer_bytes_per_us=3.0e5,
    ring_factor=1.6,
    copy_us=15.0,
    copy_bytes_per_us=3.6e5,
    kernel_multiples=(128, 128, 8),
    kernel_dtypes=("bf16",),
    kernel_ranks=8,
    slice_us=((256, 0.656), (128, 0.345)),
    tile_us=1.0,
    send_us=6.0,
    last_us=(12.0, 30.0),
)
"""H200s of a node joined by NVLink: bench/notes/overlap.md and host_overlap.md."""

H100_RATES = replace(H200_RATES, memory_bytes_per_us=2.96e6)
"""H100s joined alike: the same but for their memory; nothing else was measured there."""
