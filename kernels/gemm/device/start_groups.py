"""Starts the matmul kernel over groups of rows on a CUDA device: descriptors, extents in tiles.

In: bf16 rows sorted by group, the matrices of all groups, where groups start, a MatmulSpec. Out:
the result where the caller says. Next: groups.py.
"""

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from distmega.kernels.gemm.device.groups import grouped_kernel
from distmega.kernels.gemm.device.spec import HALF_M, TILE_K, MatmulSpec
from distmega.kernels.gemm.device.start import blocks_of, is_aligned
from distmega.kernels.runtime.gpus import num_sms
from distmega.kernels.runtime.relaunch import Launcher


def launch_groups(
    x: Tensor,
    matrices: Sequence[Tensor],
    out: Tensor,
    starts: Tensor,
    num_groups: int,
    spec: MatmulSpec,
) -> None:
    """Starts the kernel on the current stream.

    x [p, k]; matrices: those [n, k] of all groups, one below the other, and, if columns are mixed,
    as many others; out [p, n]; all bf16 and contiguous, k and n multiples of 8. starts: i32, of
    num_groups groups and where the last ends. There may be matrices of further groups, which nobody
    reads.
    """
    n, k = out.shape[1], x.shape[1]
    first, *others = [blocks_of(each, spec.columns) for each in matrices]
    _launcher(x.device.index, spec, is_aligned(starts))(
        blocks_of(x, HALF_M.value),
        first,
        others[0] if others else None,
        blocks_of(out, HALF_M.value),
        out,
        starts,
        -(-k // TILE_K.value),
        num_groups,
        x.shape[0],
        n // 8,
        -(-n // spec.columns),
    )


@cache
def _launcher(index: int, spec: MatmulSpec, aligned: bool) -> Launcher:
    """Of a kernel on one device. aligned: where groups start, since Triton compiles for it."""
    constants = {"spec": spec}
    return Launcher(grouped_kernel, num_sms(index), constants, num_warps=4, enable_fp_fusion=True)
