"""The checks of PTX find what they are for."""

from tests.kernels.ptx import (
    bare_signals,
    loads,
    plain_spins,
    stores,
    unfenced_loads,
    vector_accesses,
)

SPIN = """
$L__1:
	{load} %r1, [ %rd1 + 0 ];
	setp.ne.s32 %p1, %r1, %r2;
	@%p1 bra $L__1;
"""


def test_a_loop_that_reads_one_address_plainly_spins():
    assert plain_spins(SPIN.replace("{load}", "ld.global.b32"))
    assert plain_spins(SPIN.replace("{load}", "ld.global.nc.b32"))
    for load in (
        "ld.relaxed.gpu.global.b32",
        "ld.acquire.sys.global.b32",
        "ld.volatile.global.b32",
    ):
        assert not plain_spins(SPIN.replace("{load}", load))


def test_a_loop_that_moves_on_does_not_spin():
    moving = SPIN.replace("{load}", "ld.global.b32")
    assert not plain_spins(moving.replace("setp", "add.s64 %rd1, %rd1, 4;\n\tsetp"))


def test_a_signal_needs_a_barrier_after_the_last_store():
    store = "\tst.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };\n"
    signal = "\t@%p1 red.global.sys.add.release.s32 [ %rd2 ], 1;\n"
    barrier = "\tbar.sync 0;\n"
    assert bare_signals(store + signal)
    assert bare_signals(barrier + store + signal)
    assert not bare_signals(store + barrier + signal)
    assert not bare_signals(store + barrier + "\tst.shared.b32 [ %r9 ], %r8;\n" + signal)


def test_a_tma_load_needs_a_fence_after_the_last_wait():
    wait = "\tmbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;\n"
    fence = "\tfence.proxy.async.shared::cta;\n"
    expect = "\t@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16384;\n"
    assert not unfenced_loads(wait + fence + expect)
    assert not unfenced_loads(wait + fence + expect + expect)
    assert len(unfenced_loads(wait + fence + expect + wait + expect)) == 1
    assert unfenced_loads(fence + wait + expect)
    assert unfenced_loads(fence + "$L__BB0_1:\n" + expect)


def test_accesses_are_counted():
    load = "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [a], [b], [c];"
    store = "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [a], [b];"
    assert (loads(load + "\n" + store), stores(load + "\n" + store)) == (1, 1)
    assert vector_accesses("ld.global.v4.b32 {a}, [b];")
    assert not vector_accesses("ld.global.v4.b32 {a}, [b];\nst.global.b16 [b], a;")
    assert not vector_accesses("")
