"""What runs Gluon kernels without a GPU finds faults of those that share memory with what is under
way: each fault of a small kernel is named.
"""

# Kernels' arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from collections.abc import Collection

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from distmega.kernels.gluon_compat import cta_barrier, tma_load
from distmega.kernels.runtime.mbarriers import make_barriers
from tests.kernels.gluon_threads import run_kernel

SHARED = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def add_products(x, w, out, steps, fault: gl.constexpr):
    """out [64, 16] in f32, of x [64, 64 * steps] and w [16, 64 * steps], through two slots, with a
    fault.
    """
    xs = gl.allocate_shared_memory(x.dtype, [2, 64, 64], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [2, 16, 64], w.layout)
    ready = make_barriers(2)
    acc = gl.zeros([64, 16], gl.float32, layout=None)
    if fault != "front":
        gdc_wait()
    for step in range(steps + 1):
        if step < steps:
            slot = 0 if fault == "one slot" else step % 2
            bar = ready.index(slot)
            num_bytes: gl.constexpr = 2 * 64 * (64 + 16)
            mbarrier.expect(bar, num_bytes + (2 if fault == "many bytes" else 0))
            if fault != "few bytes":
                tma_load(x, [0, step * 64], bar, xs.index(slot))
            tma_load(w, [0, step * 64], bar, ws.index(slot))
        if step > 0:
            at = (step - 1) % 2
            if fault == "wrong parity":
                mbarrier.wait(ready.index(at), (((step - 1) // 2) & 1) ^ 1)
            elif fault != "no wait":
                mbarrier.wait(ready.index(at), ((step - 1) // 2) & 1)
            if fault == "early store":
                acc = warpgroup_mma(xs.index(at), ws.index(at).permute((1, 0)), acc, is_async=True)
                xs.index(at).store(gl.zeros([64, 64], gl.bfloat16, layout=None))
            acc = warpgroup_mma(xs.index(at), ws.index(at).permute((1, 0)), acc, is_async=True)
            if fault == "early use":
                acc = acc * 1.0
            acc = warpgroup_mma_wait(num_outstanding=fault == "early load", deps=(acc,))
            if fault != "no barrier":
                cta_barrier()
    if fault == "last load":
        mbarrier.expect(ready.index(0), 2 * 64 * 64)
        tma_load(x, [0, 0], ready.index(0), xs.index(0))
    if fault == "last product":
        warpgroup_mma(xs.index(0), ws.index(0).permute((1, 0)), acc, is_async=True)
    row = gl.expand_dims(gl.arange(0, 64, layout=None), 1)
    column = gl.expand_dims(gl.arange(0, 16, layout=None), 0)
    gl.store(out + row * 16 + column, acc + 0.0, mask=(row < 64) & (column < 16))


def error_of(fault: str, early: Collection[str] | None = None) -> float:
    torch.manual_seed(0)
    x, w = torch.randn(64, 320).bfloat16(), torch.randn(16, 320).bfloat16()
    out = torch.full((64, 16), torch.nan)
    given = {
        "x": TensorDescriptor.from_tensor(x, [64, 64], SHARED),
        "w": TensorDescriptor.from_tensor(w, [16, 64], SHARED),
        "out": out,
        "steps": 5,
        "fault": fault,
    }
    run_kernel(add_products, (1,), given, early)
    return float((out - x.float() @ w.float().T).abs().max())


def test_products_of_a_ring_are_torchs() -> None:
    assert error_of("") < 1e-4
    assert error_of("front") < 1e-4
    assert error_of("", early=()) < 1e-4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("one slot", "two loads, and no wait for the first"),
        ("few bytes", "a wait that nobody ends"),
        ("many bytes", "a wait that nobody ends"),
        ("wrong parity", "a wait that nobody ends"),
        ("no wait", "read before its load has come"),
        ("early store", "a product still reads what is written"),
        ("early load", "a product still reads where a load goes"),
        ("no barrier", "a product still reads where a load goes"),
        ("last load", "a load that nobody waited for"),
        ("last product", "products that nobody waited for"),
    ],
)
def test_faults_are_found(fault: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        error_of(fault)


def test_results_are_nothing_before_the_wait_for_them() -> None:
    with pytest.raises(TypeError, match="Product"):
        error_of("early use")


def test_what_is_in_front_is_waited_for_but_by_what_is_known() -> None:
    with pytest.raises(AssertionError, match="what is in front of the kernel may write"):
        error_of("front", early=("w",))
