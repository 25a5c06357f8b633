"""Decode steps by library ops, replayed as a CUDA graph: what runs where no decode kernel does.

Comes in: an evaluator of a decode step's host program and the tensors that it works on. Goes out: a
SteppingRunner. Tokens, positions and which rows count are in the memory of the device, so that the
host is asked for nothing between steps. All ranks of the mesh take the same steps. Made by
opening.py; next on the walk: steps_ahead.py.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distmega.collecting import gc_paused
from distmega.errors import HangError, RequestError, argument, counted
from distmega.hostir.run.cuda_graph import CapturedHost, capture_on_ranks, one_run
from distmega.hostir.run.deadline import await_event
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library import late as kernels
from distmega.kernels.runtime import late
from distmega.kernels.runtime.compilations import has_triton
from distmega.kernels.runtime.stepping import NO_SAMPLE_INPUTS
from distmega.models.decoder import PEAKS
from distmega.trace_file import Span

logger = logging.getLogger(__name__)

NEXT = "next"
MOST_KEPT = 256
"""Steps whose tokens stay on the device until they are copied."""


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
        self._kept = torch.zeros(MOST_KEPT, batch, dtype=torch.int64, device=evaluator.device)
        self._num_kept = torch.zeros(1, dtype=torch.int64, device=evaluator.device)
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
        found = []
        for first in range(0, num_steps, MOST_KEPT):
            num = min(MOST_KEPT, num_steps - first)
            self._num_kept.zero_()
            for _ in range(num):
                self._step()
            found.append(self._kept[:num, : self._num].clone())
        return torch.cat(found) if len(found) > 1 else found[0]

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
        """Outputs of a step from the tokens and positions that are there, which go on."""
        if self._captures and self._graph is None:
            self._graph = self._capture()
        if self._graph is not None:
            outputs: Mapping[str, Tensor] = self._graph.run({})
        else:
            outputs = self._evaluator.run(self._given)
            self._end_step(outputs)
        if PEAKS in outputs:
            self.logits = outputs[PEAKS][:, None]
        return outputs

    def _end_step(self, outputs: Mapping[str, Tensor]) -> None:
        """What a step ends with."""
        found, kept, number = outputs[NEXT], self._kept, self._num_kept
        if self._tokens.is_cuda and has_triton():
            kernels.end_step(found, self._tokens, self._positions, self._counted, kept, number)
            return
        kept[number.clamp(max=len(kept) - 1)] = found
        number += 1
        self._tokens.copy_(found)
        self._positions.add_(self._counted)

    @gc_paused  # compilers make a million objects
    def _capture(self) -> CapturedHost | None:
        """The step as a graph; None, from then on, where that can't be."""
        if has_triton() and not self._copies_states:
            # kernels as the capture launches them
            with late.launching_nothing(self._evaluator.device), one_run(self.host):
                self._evaluator.rehearse(self._given)
        captured, problem = capture_on_ranks(
            self._evaluator.comm,
            next(iter(self._evaluator.graph_breaks), ""),
            lambda: CapturedHost(
                self._evaluator,
                self._given,
                copy_states=self._copies_states,
                after=self._end_step,
            ),
        )
        if problem:
            self._captures = False
            logger.warning("decode steps run op by op, not as a CUDA graph: %s", problem)
        return captured
