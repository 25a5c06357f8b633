"""Kernels of one warp that signal another GPU, and that wait for its signal; see signals.py."""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

# An acquire of Triton's is an atomic, which would take turns with the peer's; this is a load. The
# difference is compared, not the counts, which wrap around. The poll ends by the clock, since a
# dead peer never writes.
_POLL = tl.constexpr("""{
.reg .pred again;
.reg .b32 count;
.reg .b64 start, now;
mov.u64 start, %globaltimer;
POLL:
ld.acquire.sys.global.b32 count, [$1];
sub.s32 $0, $2, count;
setp.le.s32 again, $0, 0;
@again bra DONE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
setp.lt.s64 again, now, $3;
@again bra POLL;
DONE:
}""")


@triton.jit
def raise_signal(count):
    """Adds one to a peer's counter. count: int32 [1], peer, zeroed when allocated; release/sys, so
    that whoever sees it also sees what this stream wrote before.
    """
    tl.atomic_add(count, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["limit_ns"])
def await_signal(count, num_taken, late, limit_ns):
    """Waits until the counter is above the number of signals taken, which then grows by one.

    count: int32 [1], local, where a peer adds; acquire/sys. num_taken: int32 [1], local, zeroed
    when allocated, written by this kernel alone. late: int32 [1], in the host's memory, becomes 1
    where that took longer than limit_ns.
    """
    number = tl.load(num_taken) + 1
    limit = limit_ns.to(tl.int64)
    missing = tl.inline_asm_elementwise(
        _POLL, "=&r,l,r,l", [count, number, limit], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(num_taken, number)
    if missing > 0:
        tl.store(late, 1)
