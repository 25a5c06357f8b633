"""Decode steps by library ops, replayed as a CUDA graph: what runs where no decode kernel does.

Comes in: an evaluator of a decode step's host program and the tensors that it works on. Goes out: a
SteppingRunner. Tokens, positions and which rows count are in the memory of the device, so that the
host is asked for nothing between steps. All ranks of the mesh take the same steps. Made by
opening.py; next on the walk: steps_ahead.py.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.collecting import gc_paused
from distmega.errors import HangError, RequestError, argument, counted
from distmega.hostir.run.cuda_graph import CapturedHost, capture_on_ranks, one_run
from distmega.hostir.run.deadline import await_event
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library import late as library_late
from distmega.kernels.runtime import late
from distmega.kernels.runtime.compilations import has_triton
from distmega.kernels.runtime.stepping import NO_SAMPLE_INPUTS
from distmega.models.decoder import PEAKS
from distmega.trace_file import Span

logger = logging.getLogger(__name__)

NEXT = "next"
MOST_KEPT = 256
"""Steps whose tokens stay on the device until they are copied."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What ends a step: the tokens that it chose are those of the next one, and are kept for the
    host. It has tensors alone, so that a graph which has it keeps nothing else.

    tokens, positions: i64 [batch], of the next step; counted: i64 [batch], how many positions each
    sequence goes on; kept: i64 [MOST_KEPT, batch]; number: i64 [1], of the steps since begin(). Of
    steps behind the last row of `kept` no tokens are.
    """

    tokens: Tensor
    positions: Tensor
    counted: Tensor
    kept: Tensor
    number: Tensor

    def begin(self) -> None:
        """The next step's tokens are the first that are kept."""
        self.number.zero_()

    def run(self, outputs: Mapping[str, Tensor]) -> None:
        """outputs: of a step, by name."""
        found, at = outputs[NEXT], self.number
        if found.is_cuda and has_triton():
            library_late.end_step(
                found, self.tokens, self.positions, self.counted, self.kept, self.number
            )
            return
        last = at.clamp(max=len(self.kept) - 1)
        self.kept[last] = torch.where((at < len(self.kept))[:, None], found, self.kept[last])
        at += 1
        self.tokens.copy_(found)
        self.positions.add_(self.counted)


class LibrarySteps:
    """The steps of one rank. replays: see KernelRunner."""

    replays = False

    def __init__(
        self,
        evaluator: Evaluator,
        given: Mapping[str, Tensor],
        batch: int,
        limit_s: float,
        *,
        copy_states: bool = False,
    ) -> None:
        """given: weights, caches and how tokens are sampled, by name; they stay where they are.
        batch: sequences of a step. limit_s: how long a launch of several ranks may take.
        copy_states: a step that is run again from one state does not write the same into it.
        """
        self.host, self._limit_s = evaluator.host, limit_s
        self._evaluator, self._copies_states = evaluator, copy_states
        tokens, positions, self._counted = torch.zeros(
            3, batch, dtype=torch.int64, device=evaluator.device
        )
        self._tokens, self._positions = tokens, positions
        kept = torch.zeros(MOST_KEPT, batch, dtype=torch.int64, device=evaluator.device)
        number = torch.zeros(1, dtype=torch.int64, device=evaluator.device)
        self._end = StepEnd(tokens, positions, self._counted, kept, number)
        self._given = {**given, "tokens": tokens, "positions": positions}
        self._num = batch
        self._captures = evaluator.device.type == "cuda"
        self._waits = self._captures and evaluator.comm.mesh.num_ranks > 1
        self._has_hung = False
        self._graph: CapturedHost | None = None
        self.logits = torch.zeros(batch, 1, device=evaluator.device)
        """See SteppingRunner; of a step here the values that its tokens were chosen for, which are
        finite where its logits are.
        """

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step; tensors: `tokens` and `positions`, i64 [batch], and what was given before.
        Outputs by name, the caller's. HangError as await_launch.
        """
        self._tokens.copy_(tensors["tokens"])
        self._positions.copy_(tensors["positions"])
        outputs = {name: x.clone() for name, x in self._step().items()}
        if self._waits:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self.await_launch(done)
        return outputs

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """See KernelRunner."""
        for name, x in self.run(tensors).items():
            if name in tensors:
                tensors[name].copy_(x)

    def start(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sample_inputs: Mapping[str, Tensor] = NO_SAMPLE_INPUTS,
    ) -> None:
        """See SteppingRunner. Sequences behind those given take a step at their position, too, and
        stay there; what they find means nothing.
        """
        self._num = num = len(tokens)
        for name, x in sample_inputs.items():
            if self._given[name] is not x:
                self._given[name].copy_(x)
        device = self._tokens.device
        self._tokens[:num].copy_(torch.tensor([*tokens], device=device))
        self._positions[:num].copy_(torch.tensor([*positions], device=device))
        self._positions[num:].zero_()
        self._counted.zero_()[:num].fill_(1)

    def prepare(self) -> None:
        """See SteppingRunner: the graph is captured when its first step runs."""

    def run_steps(self, num_steps: int) -> Tensor:
        """See SteppingRunner."""
        rows = torch.empty(num_steps, self._num, dtype=torch.int64, device=self._tokens.device)
        for first in range(0, num_steps, MOST_KEPT):
            part = rows[first : first + MOST_KEPT]
            self._end.begin()
            for _ in range(len(part)):
                self._step()
            part.copy_(self._end.kept[: len(part), : self._num])
        return rows

    def trace(self, num_steps: int) -> list[Span]:
        """RequestError: a graph takes no stamps."""
        raise RequestError(
            f"a trace of {counted(num_steps, 'step')} by library ops",
            expected="a decode kernel",
            remedy=f"trace a model and {argument('batch')} that a decode kernel takes",
        )

    def await_launch(self, done: torch.cuda.Event) -> None:
        """See SteppingRunner. Nobody else watches a collective inside a graph. After a HangError
        what is queued may never end, and later calls do not wait for it.
        """
        if not self._waits:
            done.synchronize()
            return
        what = f"decode steps of rank {self._evaluator.comm.rank}"
        try:
            await_event(done, 0.0 if self._has_hung else self._limit_s, what)
        except HangError:
            self._has_hung = True
            raise

    def close(self) -> None:
        """Releases the graph; no step runs any longer."""
        if self._graph is not None:
            self._graph.release()
        self._graph = None

    def raise_hang(self) -> None:
        """Waits for other ranks have no end of their own; see await_launch."""

    def _step(self) -> Mapping[str, Tensor]:
        """A step's outputs; its tokens and positions are the next one's."""
        if self._captures and self._graph is None:
            self._graph = self._capture()
        if self._graph is not None:
            outputs: Mapping[str, Tensor] = self._graph.run({})
        else:
            outputs = self._evaluator.run(self._given)
            self._end.run(outputs)
        if PEAKS in outputs:
            self.logits = outputs[PEAKS][:, None]
        return outputs

    @gc_paused  # compilers make a million objects
    def _capture(self) -> CapturedHost | None:
        """The step as a graph; None, from then on, where that can't be."""
        if has_triton():
            # kernels as the capture launches them
            with late.launching_nothing(self._evaluator.device), one_run(self.host):
                if self._tokens.is_cuda:
                    self._end.run({NEXT: self._tokens})
                if not self._copies_states:
                    self._evaluator.rehearse(self._given)
        captured, problem = capture_on_ranks(
            self._evaluator.comm,
            next(iter(self._evaluator.graph_breaks), ""),
            lambda: CapturedHost(
                self._evaluator,
                self._given,
                copy_states=self._copies_states,
                after=self._end.run,
            ),
        )
        if problem:
            self._captures = False
            logger.warning("decode steps run op by op, not as a CUDA graph: %s", problem)
        return captured
