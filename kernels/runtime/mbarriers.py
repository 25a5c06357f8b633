"""mbarriers that Gluon kernels make once, when they begin. Next on the walk:
gemm/device/kernel.py.
"""

# A kernel's arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr = 1):
    """`number` mbarriers that complete a phase after so many arrivals, seen by TMA."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    init_barriers(bars, number, arrivals)
    return bars


@gluon.jit
def init_barriers(bars, number: gl.constexpr, arrivals: gl.constexpr):
    """The same in memory that was allocated for them."""
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    fence_async_shared()
