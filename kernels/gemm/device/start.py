"""Starts the matmul kernel on a CUDA device: descriptors, extents in tiles, the launch.

In: bf16 tensors that TMA can address, a MatmulSpec; for peers a `Peering`. Out: the result where
the spec says. Next: api.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from distmega.kernels.gemm.device.arguments import MatmulMemory
from distmega.kernels.gemm.device.kernel import matmul_kernel
from distmega.kernels.gemm.device.spec import HALF_M, TILE_K, TILE_M, MatmulSpec
from distmega.kernels.gemm.times.tile_times import MOST_PEERS, Tiles
from distmega.kernels.runtime.gpus import num_sms
from distmega.kernels.runtime.relaunch import Launcher
from distmega.program.expr import Expr

POINTER_ALIGNMENT = 16
"""Bytes to which Triton looks whether a pointer is aligned."""
SHARED = gl.NVMMASharedLayout(128, 16, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peering:
    """What a launch with peers needs beside the operands; see matmul_kernel for each.

    home: bf16, this rank's symmetric buffer [2 M, N] if it sends, else for what helpers compute;
    aways: those of the other ranks, in their order, if partial results are pushed;
    late: number of the first tile that is pushed, if it sends to all.
    """

    rank: int
    lag: int = 1
    part: int = 1
    own: Tensor | None = None
    arrivals: Tensor
    arrival_rows: int = TILE_M.value
    home: Tensor | None = None
    aways: Sequence[Tensor] = ()
    counts: Tensor
    late: int = 0
    buffers: Tensor
    words: Tensor
    helpers: int = 0
    given: int = 0
    fewer: int = 0


def plain_spec(tiles: Tiles, mixes: Expr | None = None, *, apart: bool = False) -> MatmulSpec:
    """The kernel without peers."""
    return MatmulSpec(tile_n=tiles.tile_n, stages=tiles.stages, mixes=mixes, apart=apart)


@cache
def _unused_words(index: int) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=f"cuda:{index}")


def _without_peers(index: int) -> Peering:
    words = _unused_words(index)
    addresses = words.view(torch.int64)
    return Peering(rank=0, arrivals=words, counts=words, buffers=addresses, words=addresses)


def blocks_of(x: Tensor, rows: int, columns: int = HALF_M.value) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns], SHARED)


def launch_matmul(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    spec: MatmulSpec,
    group: int,
    peering: Peering | None = None,
    stuck: Tensor | None = None,
    other: Tensor | None = None,
) -> None:
    """Starts the kernel on the current stream.

    a [M, K], b [N, K], out [M, N] or this rank's rows of it, [M, N / 2] if columns are mixed; with
    spec.apart b and other [N / 2, K]; group: rows of tiles crossed together; stuck: int32 [1],
    zero, in a debug build. With peers M / num_ranks is a multiple of 128 and, where it sends, group
    a divisor of a rank's rows of tiles.
    """
    index = a.device.index
    with_peers = peering or _without_peers(index)
    home = out if with_peers.home is None else with_peers.home
    a_blocks = blocks_of(a, HALF_M.value)
    own = a_blocks if with_peers.own is None else blocks_of(with_peers.own, HALF_M.value)
    rows, columns = a.shape[0], b.shape[0] * (1 if other is None else 2)
    chunk_rows = -(-rows // (spec.num_ranks * TILE_M.value))
    tile_columns = -(-columns // spec.tile_n)
    num_programs = min(num_sms(index), chunk_rows * tile_columns * spec.num_ranks)
    memory = MatmulMemory(
        arrivals=with_peers.arrivals,
        counts=with_peers.counts,
        buffers=with_peers.buffers,
        words=with_peers.words,
        stuck=_unused_words(index) if stuck is None else stuck,
    )
    launcher = _launcher(index, spec, num_programs, tuple(map(is_aligned, memory)))
    aways = [blocks_of(away, HALF_M.value) for away in with_peers.aways]
    launcher(
        a_blocks,
        own,
        blocks_of(b, spec.columns),
        None if other is None else blocks_of(other, spec.columns),
        blocks_of(out, HALF_M.value),
        blocks_of(home, HALF_M.value),
        *aways,
        *[None] * (MOST_PEERS - len(aways)),
        blocks_of(home, HALF_M.value, spec.tile_n),
        -(-a.shape[1] // TILE_K.value),
        chunk_rows,
        tile_columns,
        with_peers.rank,
        group,
        with_peers.lag,
        with_peers.part,
        with_peers.arrival_rows,
        with_peers.late,
        columns // HALF_M.value,
        with_peers.helpers,
        with_peers.given,
        with_peers.fewer,
        memory,
    )


@cache
def _launcher(
    index: int, spec: MatmulSpec, num_programs: int, aligned: tuple[bool, ...]
) -> Launcher:
    """Of a kernel on one device. aligned: of each pointer, since Triton compiles for it."""
    constants = {"spec": spec}
    return Launcher(matmul_kernel, num_programs, constants, num_warps=4, enable_fp_fusion=True)


def is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % POINTER_ALIGNMENT == 0
