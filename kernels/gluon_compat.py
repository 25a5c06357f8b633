"""Names of Gluon that move between Triton releases, each under one name of ours; nothing else looks
them up. A newer name comes first: later releases keep the old one, and raise when it is called.

In: the installed Triton. Out: `cta_barrier`, `tma_load`, `tma_store`, `tma_store_wait`,
`reinterpret`, `keep_alive`. Next on the walk: pipelined/pointwise/pointwise_kernel.py.
"""

# A kernel's arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Barrier of all threads of a partition."""

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""(descriptor, coordinates, mbarrier, buffer): a block into shared memory, counted by the mbarrier.
"""

tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""(descriptor, coordinates, buffer): a block out of shared memory, one commit group a call."""

tma_store_wait = tma.store_wait
"""(pendings): until at most so many store groups still read shared memory."""

_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory seen with another type, shape and layout."""
    if _REINTERPRET:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def keep_alive(buffer):
    """Shared memory belongs to the buffer until here, whether or not Triton sees a use of it."""
    buffer._keep_alive()
