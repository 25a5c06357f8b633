"""What the runners of both kernels have alike: launches of steps, with stamps or without.

In: what queues a launch, and says which wait was given up. Out: the calls of a StepKernelRunner
(../runtime/stepping.py) that follow from these. Used by one_row/runner.py and batch/runner.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from distmega.errors import RequestError
from distmega.kernels.hopper.plan.types import Stamps
from distmega.kernels.runtime.symmetric import Team
from distmega.trace_file import Span

MAX_STEPS = 4096


class HopperSteps(ABC):
    """Steps of a kernel on one GPU. num_stamps: of a traced instruction."""

    replays = True
    num_stamps: int
    _words: Tensor
    """Of all instructions, [num_sms, instructions, words]."""
    _team: Team | None

    @abstractmethod
    def _launch(self, tensors: Mapping[str, Tensor], stamps: Tensor | None) -> None:
        """One step of these inputs, whose outputs are written; stamps: where it leaves its own."""

    @abstractmethod
    def _run(self, num_steps: int, stamps: Tensor | None = None) -> None:
        """Queues a launch."""

    @abstractmethod
    def _spans(self, stamps: Stamps) -> Iterable[Span]:
        """The timeline that stamps tell, nested lists as _stamps has them."""

    @abstractmethod
    def raise_hang(self) -> None:
        """HangError if a wait of an earlier launch has expired: what that launch gave is void. To
        be asked once its results have come; costs nothing.
        """

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """One step; `tensors` are segment_args of the segment by name, outputs are written."""
        self._launch(tensors, None)

    def trace_launch(self, tensors: Mapping[str, Tensor]) -> list[Span]:
        """As launch, but gives its timeline, on the GPU's clock, once it has ended."""
        stamps = self._stamps(1)
        self._launch(tensors, stamps)
        return self._timeline(stamps)

    def trace(self, num_steps: int) -> list[Span]:
        """As run_steps, but gives the timeline of the steps, on the GPU's clock."""
        require_steps(num_steps)
        stamps = self._stamps(num_steps)
        self._run(num_steps, stamps)
        return self._timeline(stamps)

    def _stamps(self, num_steps: int) -> Tensor:
        """Memory for those of steps."""
        shape = num_steps, *self._words.shape[:2], self.num_stamps
        return torch.zeros(shape, dtype=torch.int64, device=self._words.device)

    def _timeline(self, stamps: Tensor) -> list[Span]:
        found = stamps.tolist()
        self.raise_hang()
        return list(self._spans(found))

    def await_launch(self, done: torch.cuda.Event) -> None:
        """See SteppingRunner; waits within the kernel are bounded."""
        done.synchronize()
        self.raise_hang()

    @property
    def _team_rank(self) -> int:
        return self._team.team_rank if self._team else 0


def require_steps(num_steps: int) -> None:
    """RequestError for more steps than a launch takes."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise RequestError(
            f"{num_steps} steps in one launch",
            expected=f"1 to {MAX_STEPS}",
            remedy="launch more often",
        )
