"""Prefill of one rank: the programs that start a sequence, one for each size of prompt.

In: a prompt, the tensors of the slot it goes to. Out: the outputs of its program. Programs of
library ops are planned when first needed (blueprint.prefill_size says for which prompts). On GPUs
those of short prompts, whose kernels end before a host has launched the next, become CUDA graphs
when needed again. Used by engine.py; next on the walk: hostir/run/cuda_graph.py.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmega.engine.decode_plan import (
    DecodeBlueprint,
    lower_prefill,
    num_micro_batches,
    prefill_size,
)
from distmega.errors import ProgramError, RankFailure
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.models.decoder import Logits

logger = logging.getLogger(__name__)

MOST_CAPTURED = 4096
"""Tokens of the largest program that becomes a graph."""
MARGIN_S = 5.0
"""What a graph may take beside its waits for other ranks."""


class Prefills:
    """The programs of an engine's prompts. The ranks of its mesh run them together."""

    def __init__(
        self,
        blueprint: DecodeBlueprint,
        open_program: Callable[[HostProgram], Evaluator],
        comm: Communicator,
        device: torch.device,
    ) -> None:
        self._blueprint, self._open, self._comm = blueprint, open_program, comm
        self._device = device
        alone = blueprint.staged.stage.num_stages == num_micro_batches(blueprint) == 1
        self._captures = device.type == "cuda" and alone
        self._programs: dict[tuple[int, Logits], Evaluator] = {}
        self._graphs: dict[tuple[int, int], CapturedHost] = {}
        self._pool: Any = None

    def run(
        self, ids: Sequence[int], slot: int, logits: Logits, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Starts a sequence in a slot. tensors: weights, the slot's caches and, if tokens are
        drawn, how. Outputs may be overwritten by the next run; rows of `logits` behind those of the
        prompt mean nothing.
        """
        size = prefill_size(self._blueprint, len(ids))
        given = {
            **tensors,
            "tokens": torch.tensor([*ids, *[0] * (size - len(ids))], device=self._device),
            "positions": torch.arange(size, device=self._device),
            "last": torch.tensor([len(ids) - 1], device=self._device),
        }
        known = (size, logits) in self._programs
        if not known:
            host = lower_prefill(self._blueprint, size, logits)
            self._programs[size, logits] = self._open(host)
        program = self._programs[size, logits]
        if logits != "none":
            return program.run(given)
        if known and self._captures and size <= MOST_CAPTURED and (size, slot) not in self._graphs:
            self._capture(program, size, slot, given)
        if (size, slot) not in self._graphs:
            return program.run(given)
        outputs = self._graphs[size, slot].run(given)
        self._wait()
        return outputs

    def _capture(
        self, program: Evaluator, size: int, slot: int, given: Mapping[str, Tensor]
    ) -> None:
        """On all ranks or none: NCCL may prepare captured collectives unlike others."""
        captured, problem = None, ""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            captured = CapturedHost(program, given, self._pool)
        except (RuntimeError, ProgramError) as error:
            # where a capture has failed, ending it fails too
            problem = str(error.__context__ or error).partition("\n")[0]
        problems = [found for found in self._comm.all_gather_object(problem) if found]
        if problems:
            self._captures = False
            logger.warning("prompts run op by op, not as CUDA graphs: %s", problems[0])
        elif captured:
            self._graphs[size, slot] = captured

    def _wait(self) -> None:
        """Until what is queued has ended. Nobody else watches a collective inside a graph."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        limit_s = 2 * self._blueprint.options.timeout_s + MARGIN_S
        deadline = time.monotonic() + limit_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RankFailure(
                    f"a prompt of rank {self._comm.rank} still under way after {limit_s:g} s",
                    expected="every rank of the mesh to prefill it",
                    remedy="look for the rank that ended first, and start the job again",
                )
            time.sleep(0)
