"""The choice of an id in the emulated kernel of one row: the most likely, or a sample.

In: this SM's logits. Out: its best candidate to every rank, and from those of all SMs the id.
Mirrors the last part of linear.py, team.py and sample.py. Next on the walk: kernel.py.
"""

from collections.abc import Generator

import numpy as np

from distmega.kernels.hopper.emulator.interleaving import RAN, Key
from distmega.kernels.hopper.emulator.numbers import Words, bits_of, floats_of
from distmega.kernels.hopper.emulator.sm import RowSm


def samples_alone(sm: RowSm) -> bool:
    """Whether each rank samples by itself, from the logits of all."""
    sampler = sm.gpu.queues.sampler
    return sampler is not None and sampler.limits != "given"


def push_best(sm: RowSm, value: float, row_id: int, flag: int) -> None:
    """This SM's best candidate and its id, to every rank."""
    queues = sm.gpu.queues
    is_alone = samples_alone(sm)
    rank = 0 if is_alone else sm.gpu.rank
    at = queues.best + 2 * (rank * sm.gpu.num_sms + sm.sm) + np.arange(2)
    bits = bits_of(np.array([value], dtype=np.float32))
    words: Words = np.concatenate((bits, np.array([row_id], dtype=np.uint32)))
    sm.publish(at, words, flag, () if is_alone else sm.gpu.peers)


def most_likely(sm: RowSm, flag: int) -> Generator[Key, None, int]:
    """Id with the highest value over all SMs of all ranks, the lowest among equals."""
    queues, num_sms = sm.gpu.queues, sm.gpu.num_sms
    ranks = 1 if samples_alone(sm) else queues.num_ranks
    at = queues.best + np.arange(2 * ranks * num_sms)
    found = yield from sm.poll(at, flag, "the choice of the next id")
    values, ids = floats_of(found[::2]), found[1::2].astype(np.int32)
    yield RAN
    return int(ids[values == values.max()].min())
