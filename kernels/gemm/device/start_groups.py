"""Starts the matmul kernel over groups of rows on a CUDA device: descriptors, extents in tiles.

In: bf16 rows sorted by group, the matrices of all groups, where groups start, a MatmulSpec. Out:
the result where the caller says. Next: groups.py.
"""

from functools import cache

from torch import Tensor

from distmega.kernels.gemm.device.groups import grouped_kernel
from distmega.kernels.gemm.device.spec import HALF_M, TILE_K, MatmulSpec
from distmega.kernels.gemm.device.start import blocks_of, is_aligned
from distmega.kernels.runtime.gpus import num_sms
from distmega.kernels.runtime.relaunch import Launcher


def launch_groups(
    x: Tensor, w: Tensor, out: Tensor, starts: Tensor, spec: MatmulSpec, other: Tensor | None = None
) -> None:
    """Starts the kernel on the current stream.

    x [p, k], w [groups, n, k] and, if columns are mixed, other like it; out [p, n]; all bf16 and
    contiguous, k and n multiples of 8. starts: i32 [groups + 1].
    """
    num_groups, n, k = w.shape
    launcher = _launcher(x.device.index, spec, is_aligned(starts))
    launcher(
        blocks_of(x, HALF_M.value),
        blocks_of(w.view(-1, k), spec.columns),
        None if other is None else blocks_of(other.view(-1, k), spec.columns),
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
