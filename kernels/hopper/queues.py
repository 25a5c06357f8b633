"""The queues of a segment: of the kernel of one row, or of that of several.

In: a segment, the layouts of its arenas, how many SMs there are. Out: its queues, or why neither
kernel does it; and why a whole step can be no kernel. Torch-free, so that a plan for GPUs says the
same where there are none. Next on the walk: row_plan/queues.py.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial

from distmega.collecting import gc_paused
from distmega.errors import UnsupportedError, counted
from distmega.kernels import late
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BATCH
from distmega.kernels.hopper.plan.extents import count_rows
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.tasks.mode import Mode
from distmega.program.types import Program

Queues = RowQueues | BatchQueues


def why_not_one_kernel(segments: Sequence[Program], *, recurrent: bool) -> str:
    """Why a step of these segments is not one kernel, whatever their ops are; empty if it may be.
    recurrent: whether a step changes states that the one before it must have left.
    """
    if recurrent:
        return "no step with recurrent states runs ahead"
    if len(segments) != 1:
        return f"a step is {counted(len(segments), 'segment')}"
    return ""


@gc_paused
def plan_queues(
    segment: Program,
    weights: ArenaLayout,
    states: ArenaLayout,
    num_sms: int,
    *,
    team_rank: int = 0,
    num_ranks: int = 1,
    mode: Mode = "overlap",
    divided: Container[str] = (),
    most_rows: int = BATCH,
) -> Queues:
    """What a kernel for Hopper GPUs is to do on rank `team_rank` of a team of num_ranks: that of
    one row, or that of several, which does one row where the first can't. UnsupportedError for a
    segment that they can't do. mode: see build_queues; several rows have one event an op in either.
    divided: tensors of which each rank has another part. most_rows: see build_batch_queues.
    """
    several = partial(
        late.build_batch_queues, segment, weights, states, num_sms, team_rank, divided, most_rows
    )
    one = partial(
        late.build_queues, segment, weights, states, num_sms, team_rank, mode, divided=divided
    )
    queues: Queues = several() if count_rows(segment) > 1 else first_that_can(one, several)
    if queues.num_ranks != num_ranks:
        raise UnsupportedError(
            f"a segment of {counted(queues.num_ranks, 'rank')} on {num_ranks}",
            expected="as many ranks as the segment was planned for",
            remedy="plan and run with the same mesh",
        )
    return queues


def first_that_can(one: Callable[[], RowQueues], several: Callable[[], BatchQueues]) -> Queues:
    """The queues of the first kernel that does a segment; the UnsupportedError of the first where
    neither does.
    """
    try:
        return one()
    except UnsupportedError as refused:
        with suppress(UnsupportedError):
            return several()
        raise refused from None
