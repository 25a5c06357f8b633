"""Process groups that live no longer than their communicator.

Comes in: a communicator and its groups; later, what ranks that meet tell each other. Goes out:
groups closed, with their threads and sockets. `close_groups` is for ranks that close a communicator
together. A communicator may also just be gone, on one rank sooner than on another: its groups are
closed where ranks meet next, as they open another one, once all ranks of the group say that they
have left it. What peers write into, of a communicator that a rank leaves, is kept as long: to free
memory of a GPU waits for its work, which may wait for a peer that failed. Used by communicator.py.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from distmega.hostir.comm.waits import await_gpu

_left: list[dist.ProcessGroup] = []
"""Groups whose communicator is gone on this rank; peers may use them still."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """What lives until all of these groups are closed."""

    groups: Sequence[dist.ProcessGroup]
    things: Sequence[object]


_kept: list[_Kept] = []
"""What peers of groups in _left may write into."""


def close_with(owner: object, groups: Sequence[dist.ProcessGroup]) -> None:
    """Lets the groups that are in the list then be closed once `owner` is gone."""
    weakref.finalize(owner, _left.extend, groups).atexit = False


def leave_groups(groups: list[dist.ProcessGroup], things: Sequence[object]) -> None:
    """Takes groups out of the list of one who is done with them, and keeps with them what their
    ranks may still write into; see close_left. Waits for nobody.
    """
    if groups and things:
        _kept.append(_Kept(groups=tuple(groups), things=tuple(things)))
    _left.extend(groups)
    groups.clear()


def close_left(
    gather: Callable[[list[str]], Sequence[list[str]]],
    ranks: Sequence[int],
    limit_s: float,
) -> None:
    """Closes groups that all of their ranks have left, on all of them in the same order, once what
    was kept with them is let go of. gather: gives what each of `ranks` tells, in their order; all
    of them call this together. A rank tells of a group when its GPU is through with it, so that
    nobody writes into what is kept once all have told. limit_s: the longest that this may take, of
    HangError behind it.
    """
    seen = [*_left]
    mine = {group.group_name: group for group in seen if _is_open(group)}
    if any(dist.get_backend(group) == "nccl" for group in mine.values()):
        await_gpu(limit_s)  # it may be behind the host that dropped them
    left_by = dict(zip(ranks, gather(sorted(mine)), strict=True))
    done = [
        group
        for name, group in sorted(mine.items())
        if _have_left(name, dist.get_process_group_ranks(group), left_by)
    ]
    waiting = [group for group in mine.values() if group not in done]
    for group in seen:  # one by one: more may be left meanwhile, wherever garbage is collected
        if group not in waiting:
            _left.remove(group)
    _kept[:] = [each for each in _kept if any(group in _left for group in each.groups)]
    close_groups(done)


def close_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Closes groups, but those that torch.distributed closed when it ended. All their ranks do so
    together, in the same order.
    """
    for group in groups:
        if _is_open(group):
            dist.destroy_process_group(group)


def _have_left(name: str, members: Sequence[int], left_by: Mapping[int, Sequence[str]]) -> bool:
    """Ranks that make the same groups in the same order know each by the same name."""
    return all(name in left_by.get(rank, ()) for rank in members)


def _is_open(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True
