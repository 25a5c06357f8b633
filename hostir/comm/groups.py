"""Process groups that live no longer than their communicator.

Comes in: a communicator and its groups; later, that all ranks of a mesh have met. Goes out: groups
closed, with their threads and sockets. A group whose communicator is gone here may still be read by
a peer that is behind, so it is closed at the next point where all its ranks meet: once ranks that
make the same calls in the same order have opened their next communicator, all have left those
before it. Used by communicator.py.
"""

import weakref
from collections.abc import Sequence

import torch.distributed as dist

_left: list[dist.ProcessGroup] = []
"""Groups without a communicator, which may have peers."""


def close_with(owner: object, groups: Sequence[dist.ProcessGroup]) -> None:
    """Lets these groups be closed once `owner` is gone."""
    weakref.finalize(owner, _left.extend, groups).atexit = False


def left_groups() -> list[dist.ProcessGroup]:
    """Groups that could be closed now, if no peer used them."""
    return [*_left]


def close_left(groups: Sequence[dist.ProcessGroup], ranks: Sequence[int]) -> None:
    """Closes those of the groups that have no rank but these, which have met since the groups were
    left.
    """
    for group in groups:
        try:
            members = dist.get_process_group_ranks(group)
        except KeyError:  # torch.distributed itself was closed meanwhile
            _left.remove(group)
            continue
        if {*members} <= {*ranks}:
            _left.remove(group)
            dist.destroy_process_group(group)
