"""What the cost model of overlap knows of a machine: built-in, or measured once on it.

Comes in: constants below, or the file that `distmega doctor --calibrate` writes. Goes out:
OverlapRates. Next: tile_times.py.
"""

from dataclasses import dataclass, replace

Table = tuple[tuple[float, float], ...]
"""Points of a function that is linear between them and beyond the last: (x, y), x ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRates:
    """Microseconds, and bytes and flops a microsecond, of a device and its links.

    launch_us: of a kernel. library_flops_per_us: the library's matmul at its best; library_uneven:
    how much longer it takes where tiles do not fill waves. memory_bytes_per_us: of reading
    operands; cache_bytes: of a weight that the L2 keeps.
    nccl_us, nccl_reduce_us: NCCL's gathers and scatters, and its all-reduce, by bytes that a rank
    sends. beside_factor: 1 where chunks of matmul and collective don't slow each other down, 2
    where one waits for the other. peer: sends of a ring; ring_factor: as beside_factor.
    kernel_multiples: what the kernel with a collective beside it needs of rows a rank, columns and
    depth. slice_us: its time of 64 elements of depth, by columns of a tile, all SMs busy, nothing
    where the two run one after the other; tile_us: of a tile's start and end; add_us: of adding
    partial results, help_us: until those of a program of the same GPU are there; peers_us: what its
    launch takes longer. copy_us, copy_bytes_per_us: of a copy to a peer, from the last store to the
    event word; copy_gap_us: from a copy to the next. push_us, push_bytes_per_us: where the kernel
    stores to the peers itself, push_program_bytes_per_us: one program of it.
    peer_copies_us, peer_copy_us: of copies around a library matmul, and for each peer.
    two_shot_us, two_shot_bytes_per_us: of torch's all-reduce.
    host_us: of the host, for one small op; replay_us: where it is captured.
    """

    num_sms: int
    launch_us: float
    library_flops_per_us: float
    library_uneven: float = 1.0
    memory_bytes_per_us: float
    cache_bytes: int = 2**25
    nccl_us: Table
    nccl_reduce_us: Table
    beside_factor: float
    peer_us: float
    peer_bytes_per_us: float
    ring_factor: float
    kernel_multiples: tuple[int, int, int]
    kernel_dtypes: tuple[str, ...]
    kernel_ranks: int
    slice_us: tuple[tuple[int, float], ...] = ()
    tile_us: float = 0.0
    add_us: float = 0.0
    help_us: float = 0.0
    peers_us: float = 0.0
    copy_us: float = 0.0
    copy_bytes_per_us: float = 1.0
    copy_gap_us: float = 0.0
    push_us: float = 0.0
    push_bytes_per_us: float = 1.0
    push_program_bytes_per_us: float = 1.0
    peer_copies_us: float = 0.0
    peer_copy_us: float = 0.0
    two_shot_us: float = 0.0
    two_shot_bytes_per_us: float = 1.0
    host_us: float = 20.0
    replay_us: float = 1.0


CPU_RATES = OverlapRates(
    num_sms=1,
    launch_us=10.0,
    library_flops_per_us=5.0e4,
    memory_bytes_per_us=1.0e4,
    nccl_us=((0.0, 150.0), (1.0e6, 1150.0)),
    nccl_reduce_us=((0.0, 150.0), (1.0e6, 1150.0)),
    beside_factor=2.0,
    peer_us=150.0,
    peer_bytes_per_us=1.0e3,
    ring_factor=2.0,
    kernel_multiples=(1, 1, 1),
    kernel_dtypes=("f64", "f32", "bf16", "f16"),
    kernel_ranks=64,
)
"""Ranks that share cores: nothing is gained side by side."""

H200_RATES = OverlapRates(
    num_sms=132,
    launch_us=4.0,
    library_flops_per_us=8.1e8,
    library_uneven=1.09,
    memory_bytes_per_us=4.1e6,
    nccl_us=((0.0, 10.0), (5e5, 13.0), (1e6, 20.0), (2e6, 27.0), (4.2e6, 37.0), (8.4e6, 54.0),
             (1.68e7, 92.0), (3.36e7, 158.0), (1.34e8, 590.0)),
    nccl_reduce_us=((0.0, 12.0), (1e6, 18.0), (2e6, 34.0), (4.2e6, 38.0), (8.4e6, 50.0),
                    (1.68e7, 77.0), (3.36e7, 140.0), (6.7e7, 252.0), (2.7e8, 972.0)),
    beside_factor=1.9,
    peer_us=25.0,
    peer_bytes_per_us=3.0e5,
    ring_factor=1.6,
    kernel_multiples=(128, 128, 8),
    kernel_dtypes=("bf16",),
    kernel_ranks=8,
    slice_us=((256, 0.656), (128, 0.352)),
    tile_us=1.0,
    add_us=1.0,
    help_us=3.0,
    peers_us=10.0,
    copy_us=15.0,
    copy_bytes_per_us=3.6e5,
    copy_gap_us=4.0,
    push_us=4.0,
    push_bytes_per_us=3.8e5,
    push_program_bytes_per_us=7.5e3,
    peer_copies_us=8.0,
    peer_copy_us=9.7,
    two_shot_us=9.5,
    two_shot_bytes_per_us=3.2e5,
)  # fmt: skip
"""H200s of a node joined by NVLink: bench/overlap.py, docs/notes/overlap.md, host_overlap.md."""

H100_RATES = replace(H200_RATES, memory_bytes_per_us=2.96e6)
"""H100s joined alike: the same but for their memory; nothing else was measured there."""
