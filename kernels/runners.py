"""The runner of a segment on a GPU, for code that also runs where there is no triton.

In: a segment and the arenas on a GPU. Out: its queues, which a rank makes alone, then a runner,
which the ranks of a team open together. The runner's module is loaded when it is asked for, so that
the CPU path needs no triton. Next on the walk: hopper/one_row/runner.py.
"""

from collections.abc import Callable, Container

import torch
from torch import Tensor

from distmega.errors import UnsupportedError
from distmega.kernels import late
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import BATCH
from distmega.kernels.hopper.plan.encoded import EncodedQueues, fold_queues, unfold_queues
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.queues import Queues, plan_queues
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.kernels.runtime.gpus import is_hopper, num_sms
from distmega.kernels.runtime.stepping import StepKernelRunner
from distmega.kernels.runtime.symmetric import Team
from distmega.kernels.tasks.mode import Mode
from distmega.program.types import Program

FoldedQueues = tuple[RowQueues, EncodedQueues] | BatchQueues
"""Queues as they are kept; see hopper/plan/encoded.py."""


def fold(queues: Queues) -> FoldedQueues:
    """Queues without what a launch does not take."""
    return fold_queues(queues) if isinstance(queues, RowQueues) else queues


def unfold(folded: FoldedQueues, plan: Callable[[], Queues]) -> Queues:
    """The queues that `fold` was given. plan: makes them anew, when instructions are asked for."""
    if isinstance(folded, BatchQueues):
        return folded

    def plan_rows() -> RowQueues:
        made = plan()
        assert isinstance(made, RowQueues), "the same kernel as before"
        return made

    return unfold_queues(folded, plan_rows)


def plan_hopper(
    segment: Program,
    *,
    weights: ArenaLayout,
    states: ArenaLayout,
    device: torch.device,
    team: Team | None = None,
    mode: Mode = "overlap",
    divided: Container[str] = (),
    most_rows: int = BATCH,
) -> Queues:
    """plan_queues for a GPU; UnsupportedError for one that the kernels don't run on, too. team: the
    ranks that share the segment; nothing is asked of them.
    """
    team_rank, num_ranks = (team.team_rank, team.size) if team else (0, 1)
    return plan_queues(
        segment,
        weights,
        states,
        require_hopper(device),
        team_rank=team_rank,
        num_ranks=num_ranks,
        mode=mode,
        divided=divided,
        most_rows=most_rows,
    )


def require_hopper(device: torch.device) -> int:
    """Number of SMs of a GPU that the kernels run on; UnsupportedError for another one."""
    if not is_hopper(device.index):
        major, minor = torch.cuda.get_device_capability(device)
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}",
            expected="a Hopper GPU, 9.0",
            remedy="run the segment by library ops",
        )
    return num_sms(device.index)


def open_hopper(
    segment: Program,
    queues: Queues,
    *,
    weights: ArenaLayout,
    weights_arena: Tensor,
    state_arena: Tensor,
    team: Team | None = None,
    timeout_s: float = 60.0,
) -> StepKernelRunner:
    """The kernel that does what plan_hopper gave. team: as there; all of its ranks, and all
    other teams, make this call; LaunchError, on all, where some share no memory. timeout_s: bound
    on a wait for another rank.
    """
    if isinstance(queues, BatchQueues):
        return late.BatchRunner(
            segment,
            queues,
            weights=weights,
            weights_arena=weights_arena,
            state_arena=state_arena,
            team=team,
            timeout_s=timeout_s,
        )
    return late.RowRunner(
        segment,
        queues,
        weights=weights,
        weights_arena=weights_arena,
        state_arena=state_arena,
        team=team,
        timeout_s=timeout_s,
    )
