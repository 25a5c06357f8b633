"""Whether calls of a compiled program replay one CUDA graph: on all ranks or none.

Comes in: what runs the host program, and what a call gives it. Goes out: a captured host program,
or the reason why there is none. Next: hostir/run/cuda_graph.py.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.run.cuda_graph import CapturedHost, capture_on_ranks, shared_memory
from distmega.hostir.run.evaluator import Evaluator
from distmega.hostir.run.graph_breaks import tensor_breaks

logger = logging.getLogger(__name__)

NOT_ASKED_FOR = "replay=False"
MOST_REBOUND = 3
"""Calls that may bring other weights or states before a program is no longer captured anew."""


class Replay:
    """The graph of a program, once that is decided. captured: None while there is none; reason: why
    not, empty while nothing is known to stand in the way.
    """

    def __init__(
        self,
        program: str,
        host: HostProgram,
        comm: Communicator,
        device: torch.device,
        *,
        wanted: bool,
    ) -> None:
        self._program = program
        self._host, self._comm, self._device, self._wanted = host, comm, device, wanted
        self.captured: CapturedHost | None = None
        self.reason = "" if wanted else NOT_ASKED_FOR
        self.is_decided = False
        self._num_rebound = 0

    def count_rebound(self) -> None:
        """A call has brought others in place of what is bound."""
        self._num_rebound += 1

    def decide(
        self, evaluator: Evaluator, inputs: Mapping[str, Tensor], bound: dict[str, Tensor]
    ) -> None:
        """Captures, on all ranks or none."""
        self.is_decided = True
        if not self._wanted:
            return
        self.reason = next(iter(evaluator.graph_breaks), "")
        if self._num_rebound > MOST_REBOUND:
            self.reason = "calls bring weights or states of their own"
        if not self.reason:
            given = {name: x.detach().clone() for name, x in inputs.items()} | bound
            self.captured, self.reason = capture_on_ranks(
                self._comm,
                next(tensor_breaks(self._host, self._device, given), ""),
                lambda: CapturedHost(evaluator, given, shared_memory(self._device)),
            )
        if self.reason and self._device.type == "cuda":
            logger.warning("program %r runs node by node: %s", self._program, self.reason)

    def reset(self) -> None:
        """The next call decides anew, since what is bound is about to change."""
        if self.captured is not None:
            torch.cuda.synchronize(self._device)
            self.captured.release()
        self.captured, self.is_decided = None, False

    def close(self) -> None:
        """Releases the graph; all calls have ended."""
        if self.captured is not None:
            self.captured.release()
        self.captured = None
        self.reason = "it is closed"
