"""What a persistent kernel offers its callers, whichever kernel it is.

In: ids and positions. Out: the ids that the steps chose. ../runners.py opens one; next on the
walk: hopper/one_row/runner.py.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from distmega.hostir.run.evaluator import KernelRunner
from distmega.trace_file import Span

NO_SAMPLE_INPUTS: Mapping[str, Tensor] = MappingProxyType({})
"""For a segment that takes the most likely id."""


class BoundedRunner(KernelRunner, Protocol):
    """A runner whose waits on the GPU are bounded."""

    def raise_hang(self) -> None:
        """HangError if a wait of an earlier launch has expired, which makes what it gave void; ask
        once that has come.
        """
        ...


class TracedRunner(BoundedRunner, Protocol):
    """One of a persistent kernel, whose tasks take stamps where that is asked."""

    def trace_launch(self, tensors: Mapping[str, Tensor]) -> list[Span]:
        """As launch, but gives its timeline, on the GPU's clock, once it has ended."""
        ...


class SteppingRunner(BoundedRunner, Protocol):
    """A runner that also takes several steps in one launch. logits: f32 of the last step, of
    this rank, [n], or [sequences at least, n] of a batch.
    """

    logits: Tensor

    def start(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        sample_inputs: Mapping[str, Tensor] = NO_SAMPLE_INPUTS,
    ) -> None:
        """The next step appends an id to each sequence, at its position. sample_inputs: the
        segment's inputs that say how ids are sampled, if it samples.
        """
        ...

    def prepare(self) -> None:
        """Begins to compile what the first step launches, beside what the host does next."""
        ...

    def run_steps(self, num_steps: int) -> Tensor:
        """Runs steps after those before; the ids they chose, [num_steps, sequences]."""
        ...

    def await_launch(self, done: torch.cuda.Event) -> None:
        """Returns once an event behind a launch is reached. HangError if a wait of it has expired,
        which makes what the launch gave void.
        """
        ...

    def trace(self, num_steps: int) -> list[Span]:
        """As run_steps, but gives the steps' timeline on the GPU's clock; RequestError for a kernel
        that keeps none.
        """
        ...


class StepKernelRunner(SteppingRunner, TracedRunner, Protocol):
    """A runner of a persistent kernel of steps."""
