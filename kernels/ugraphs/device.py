"""What emitted kernels call besides Triton's own functions."""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
from triton import language as tl


@triton.constexpr_function
def _prefetch(num_bytes: int) -> str:
    # A result is asked for, since an instruction on elements has one.
    return f"cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.b32 $0, 0;"


@triton.jit
def prefetch(pointers, num_bytes: tl.constexpr):
    """Brings so many bytes (a multiple of 16) from each of the pointers, a thread each, into the L2
    cache. A hint that no memory order concerns: what is written there later is written in L2.
    """
    # Triton has no prefetch into L2; a load would hold a register until it comes
    asm: tl.constexpr = _prefetch(num_bytes)
    tl.inline_asm_elementwise(asm, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)
