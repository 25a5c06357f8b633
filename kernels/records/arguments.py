"""What the kernel of records is given at a launch.

Next on the walk: kernel.py.
"""

from typing import NamedTuple

from torch import Tensor


class Tables(NamedTuple):
    """What the host encoded, int32, written by nobody afterwards.

    queues: [num_sms, longest, 32], records as isa/encoding.py lays them out. lengths: [num_sms].
    numbers: [num_sms, longest], the spec of each record, see specs.py. waits, signals: rows as
    there.
    """

    queues: Tensor
    lengths: Tensor
    numbers: Tensor
    waits: Tensor
    signals: Tensor


class ArenaMemory(NamedTuple):
    """The arenas of this rank, uint8. Weights are read; states and activations belong to the
    kernel while it runs.
    """

    weights: Tensor
    states: Tensor
    activations: Tensor


class Events(NamedTuple):
    """Counters. epoch: int32 [1], the number of this launch, from 1 on; written between launches.
    counters: int32 [events, lanes], a lane for each rank of the team, zero before the first launch;
    in the memory that peers write. others: int64 [lanes], the address of each rank's. lanes: ranks
    of the team; lane: this one's.
    """

    epoch: Tensor
    counters: Tensor
    others: Tensor
    lanes: int
    lane: int


class Member(NamedTuple):
    """This rank among the members of its team. coordinates: int32, along each mesh axis. arenas:
    int64 [copies, lanes], the addresses of the ranks' memory that peers write.
    """

    coordinates: Tensor
    arenas: Tensor
