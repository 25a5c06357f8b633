"""Prefill of one rank: the programs that start a sequence, one for each size of prompt.

In: a prompt, the tensors of the slot it goes to. Out: the outputs of its program. Programs of
library ops are planned when first needed (blueprint.prefill_size says for which prompts). On one
GPU those of short prompts, whose kernels end before a host has launched the next, become CUDA
graphs when needed again, unless tokens are drawn: library ops then ask the GPU how many there are
to choose from. Used by engine.py; next on the walk: hostir/evaluator.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmega.blueprint import DecodeBlueprint, draw_prefill, prefill_size
from distmega.hostir.capture import CapturedHost
from distmega.hostir.evaluator import Evaluator
from distmega.hostir.nodes import HostProgram
from distmega.models.decoder import Logits

MOST_CAPTURED = 4096
"""Tokens of the largest program that becomes a graph."""


class Prefills:
    """The programs of an engine's prompts."""

    def __init__(
        self,
        blueprint: DecodeBlueprint,
        open_program: Callable[[HostProgram], Evaluator],
        device: torch.device,
    ) -> None:
        self._blueprint, self._open, self._device = blueprint, open_program, device
        alone = device.type == "cuda" and blueprint.staged.mesh.num_ranks == 1
        self._captures = alone and not blueprint.method.draws
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
        inputs = {
            "tokens": torch.tensor([*ids, *[0] * (size - len(ids))], device=self._device),
            "positions": torch.arange(size, device=self._device),
            "last": torch.tensor([len(ids) - 1], device=self._device),
        }
        graph = self._graphs.get((size, slot))
        if graph and logits == "none":
            return graph.run({**inputs, **tensors})
        given = {**tensors, **inputs}
        known = (size, logits) in self._programs
        if not known:
            host = draw_prefill(self._blueprint, size, logits)
            self._programs[size, logits] = self._open(host)
        program = self._programs[size, logits]
        if known and self._captures and size <= MOST_CAPTURED and logits == "none":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[size, slot] = graph = CapturedHost(program, given, self._pool)
            return graph.run({})
        return program.run(given)
