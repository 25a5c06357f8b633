"""A kernel in which two GPUs hand each other a datum and an event, round after round."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["place", "first", "limit"])
def exchange_rounds(
    mine, theirs, my_count, their_count, faults, place, first, num_rounds, limit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each round stores BLOCK words in the peer's buffer of that parity, adds one to the peer's
    counter, waits for its own and checks what the peer stored. mine, theirs: int32 [2, BLOCK],
    local and peer. Counters int32, zeroed before the first launch. faults: int32 [2], wrong words,
    and waits that took more than `limit` polls.
    """
    at = tl.arange(0, BLOCK)
    wrong = 0
    late = 0
    for i in range(num_rounds):
        number = first + i
        parity = (number % 2) * BLOCK
        tl.store(theirs + parity + at, number * 8 + place + at)
        tl.debug_barrier()
        tl.atomic_add(their_count, 1, sem="release", scope="sys")
        polls = 0
        count = tl.atomic_add(my_count, 0, sem="acquire", scope="sys")
        while (count < number + 1) & (polls < limit):
            count = tl.atomic_add(my_count, 0, sem="acquire", scope="sys")
            polls += 1
        tl.debug_barrier()
        late += (polls >= limit).to(tl.int32)
        found = tl.load(mine + parity + at, volatile=True)
        wrong += tl.sum((found != number * 8 + 1 - place + at).to(tl.int32), axis=0)
    tl.store(faults, wrong)
    tl.store(faults + 1, late)
