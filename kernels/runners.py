"""The runner of a segment on a GPU, for code that also runs where there is no triton.

In: a segment and the arenas on a GPU. Out: a runner. Its module is loaded when it is asked for, so
that the CPU path needs no triton. Next on the walk: hopper/runner.py.
"""

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from distmega.hostir.evaluator import KernelRunner
from distmega.kernels.arena import ArenaLayout
from distmega.kernels.symmetric import Team
from distmega.kernels.task_graph import Mode
from distmega.program import Program
from distmega.trace_file import Span

HOPPER = "distmega.kernels.hopper.runner", "DecodeRunner"
HOPPER_BATCH = "distmega.kernels.hopper.batch_runner", "BatchRunner"
NO_DRAWS: Mapping[str, Tensor] = MappingProxyType({})
"""For a segment that takes the likeliest token."""


class SteppingRunner(KernelRunner, Protocol):
    """A runner that also takes several decode steps in one launch."""

    def start(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        draws: Mapping[str, Tensor] = NO_DRAWS,
    ) -> None:
        """The next step appends a token to each sequence, at its position. draws: the segment's
        inputs that say how tokens are drawn, if it draws.
        """
        ...

    def decode(self, num_steps: int) -> Tensor:
        """Runs steps after those before; the tokens they chose, [num_steps, sequences]."""
        ...

    def trace(self, num_steps: int) -> list[Span]:
        """As decode, but gives the steps' timeline on the GPU's clock; RequestError for a kernel
        that keeps none.
        """
        ...

    def raise_hang(self) -> None:
        """HangError if a wait of an earlier launch has expired, which makes its tokens void; ask
        once they have come.
        """
        ...


def open_hopper(
    segment: Program,
    *,
    weights: ArenaLayout,
    weights_arena: Tensor,
    states: ArenaLayout,
    state_arena: Tensor,
    team: Team | None = None,
    batch: int = 1,
    mode: Mode = "overlap",
    timeout_s: float = 60.0,
) -> SteppingRunner:
    """The decode kernel for Hopper GPUs, of one sequence or of a batch; VerifyError for a segment
    that it can't do. team: the ranks that share it, all of which make this call; LaunchError where
    they share no memory. mode: see build_task_graph. timeout_s: bound on a wait for another rank.
    """
    module, name = HOPPER_BATCH if batch > 1 else HOPPER
    runner: SteppingRunner = getattr(importlib.import_module(module), name)(
        segment,
        weights=weights,
        weights_arena=weights_arena,
        states=states,
        state_arena=state_arena,
        team=team,
        mode=mode,
        timeout_s=timeout_s,
    )
    return runner
