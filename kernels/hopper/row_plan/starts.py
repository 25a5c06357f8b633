"""Barrier words by which every SM says that it has begun, where nothing else tells SM 0.

In: queues after whose last instruction SM 0 may not know that all SMs have begun the launch. Out:
the same queues with an instruction more on each SM. SM 0 counts up the state, position and epoch,
when it ends; others read the state when they begin. Where SM 0 has no work, or none that waits for
all others, one that begins late would find the state of the next launch, wait for flags that nobody
writes, or take words of the launch before for its own. Used by queues.py; proof.py says when.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.kernels.hopper.plan.types import Buffer, RowQueues
from distmega.kernels.hopper.plan.words import Instruction, RowAttention, RowBarrier, RowLinear


def takes_tiles(one: Instruction) -> bool:
    """Whether the instruction takes tiles of the ring in every step: then the loader, too, has
    begun before anything that follows is written.
    """
    return isinstance(one, RowLinear) or (isinstance(one, RowAttention) and one.split == 0)


def add_starts(queues: RowQueues) -> RowQueues:
    """Queues in which each SM writes its barrier words behind its first work that takes tiles, or
    at its end, and waits for nobody; and SM 0 at its end waits for all of them.
    """
    size = 2 * len(queues.queues)
    buffer = Buffer(name="started", first=queues.num_words, num_words=size)
    return replace(
        queues,
        queues=tuple(
            (*queue, RowBarrier(name="started", generation=0, dst=buffer.first, num_words=size))
            if sm == 0
            else _with_start(queue, buffer.first)
            for sm, queue in enumerate(queues.queues)
        ),
        buffers=(*queues.buffers, buffer),
        num_words=queues.num_words + -(-size // 16) * 16,
    )


def _with_start(queue: Sequence[Instruction], dst: int) -> tuple[Instruction, ...]:
    first = next((i for i, one in enumerate(queue) if takes_tiles(one)), len(queue) - 1)
    before, after = queue[: first + 1], queue[first + 1 :]
    name = f"{before[-1].name} started" if before else "nothing started"
    return (*before, RowBarrier(name=name, generation=0, dst=dst, num_words=0), *after)
