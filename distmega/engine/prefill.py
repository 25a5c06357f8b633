"""Prefill of one rank: prompts packed into passes, and the programs that run those.

In: prompts by slot, the tensors of the rank. Out: the token after each prompt. A pass takes rows of
several prompts end to end; which rows are whose is data, so that a program serves every pass of its
size (prefill_plan.prefill_size). A program of library ops is planned once for a range of sizes and
given other extents for each size. On GPUs a size that is needed again becomes a CUDA graph. Used by
engine.py; next on the walk: packing.py, pass_memory.py, hostir/run/cuda_graph.py.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distmega.collecting import gc_paused
from distmega.engine import late
from distmega.engine.calls import Tokens
from distmega.engine.decode_plan import DecodePlan
from distmega.engine.kept_plans import NOTHING_KEPT, KeptPlans
from distmega.engine.packing import ROWS, PromptPart, pack_prompts
from distmega.engine.pass_memory import PassMemory, SentRows, SentTokens
from distmega.engine.prefill_plan import BY_ROWS, num_micro_batches, prefill_size
from distmega.engine.soundness import run_ops
from distmega.errors import UnsupportedError
from distmega.hostir import late as host_late
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.run.cuda_graph import CapturedHost, GraphMemory, capture_on_ranks
from distmega.hostir.run.deadline import await_event, await_queued, graph_limit_s
from distmega.hostir.run.early_reads import early_reads
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.runtime import late as runtime_late
from distmega.kernels.runtime.compilations import has_triton
from distmega.models.decoder import PEAKS, Logits
from distmega.program.types import KNOWN

logger = logging.getLogger(__name__)

LEAST_RANGE = 511
"""Ranks plan prompts of up to one more rows alike, those of each octave above apart."""
MOST_PROGRAMS = 128
"""Of an engine, those that ran last. A GPU has fewer sizes (prefill_size). On a CPU each number of
tokens is a size of its own, whose program takes some MB.
"""

Tensors = Mapping[str, Tensor]


@dataclass(slots=True)
class _Program:
    """A program of one size. memory: of one that packs prompts. given: its inputs, parts of that
    among them, and weights that it knows under other names. rehearses: its kernels may have to be
    compiled.
    """

    evaluator: Evaluator
    memory: PassMemory | None
    given: dict[str, Tensor]
    rehearses: bool
    used: bool = False
    graph: CapturedHost | None = None

    def release(self) -> None:
        """Frees the graph; nothing of it runs any longer."""
        if self.graph is not None:
            self.graph.release()


class Prefills:
    """The programs of an engine's prompts. The ranks of its mesh run them together."""

    def __init__(
        self,
        decode_plan: DecodePlan,
        open_program: Callable[[HostProgram, bool], tuple[Evaluator, dict[str, Tensor]]],
        comm: Communicator,
        device: torch.device,
        kept: KeptPlans = NOTHING_KEPT,
    ) -> None:
        """kept: programs on disk."""
        self._decode_plan, self._open, self._comm = decode_plan, open_program, comm
        self._kept = kept
        self._device = device
        self._max_context = decode_plan.max_context
        self._packs = num_micro_batches(decode_plan) == 1
        alone = decode_plan.num_stages == 1 and self._packs
        self._captures = device.type == "cuda" and alone
        self._recurrent = bool(decode_plan.config.recurrent_states)
        self._budget = 1 if self._recurrent else decode_plan.options.max_batched_tokens
        """Tokens of a pass, at most."""
        self._programs: dict[tuple[int, Logits], _Program] = {}
        """By rows and logits; those that ran last are the last."""
        self._planned: dict[tuple[int, Logits], HostProgram] = {}
        self._memory: GraphMemory | None = None
        self._plans_anew = False
        self._limit_s = graph_limit_s(decode_plan.options.timeout_s)
        self._name = f"a prompt of rank {comm.rank}"

    def run(
        self,
        prompts: Mapping[int, Tokens],
        logits: Logits,
        tensors: Tensors,
        slot_tensors: Callable[[int], Tensors],
    ) -> tuple[dict[int, tuple[int, bool]], list[Tensor]]:
        """Starts a sequence in each slot of `prompts`: the token after each, with whether the value
        for which it was chosen (decoder.PEAKS) is finite, and the logits if asked for: of all
        tokens, [tokens of a pass, vocab] a pass, or of the last one of each prompt, [1, vocab] a
        slot.

        tensors: weights, caches and, if tokens are sampled, how, a row a slot. slot_tensors: the
        same of one slot alone.
        """
        if not prompts:
            return {}, []
        if not self._packs:
            found, rows = dict[int, tuple[int, bool]](), list[Tensor]()
            for slot, ids in sorted(prompts.items()):
                outputs = self._run_parts(ids, logits, slot_tensors(slot))
                found[slot] = int(outputs["next"][-1]), math.isfinite(outputs[PEAKS][-1])
                rows += [outputs["logits"].clone()] if logits != "none" else []
            self._kept.write()
            self._release_oldest()
            return found, rows
        scores: list[Tensor] = []
        of_slots: dict[int, Tensor] = {}
        earlier: list[tuple[list[int], Tensor, Tensor]] = []
        passes = pack_prompts(prompts, self._budget)
        for parts in passes:
            program, outputs = self._run_pass(parts, logits, tensors)
            ending = [part.slot for part in parts if part.ends]
            if ending and parts is not passes[-1]:  # whose tokens the next pass may overwrite
                earlier.append((ending, *_chosen(outputs)))
            if logits == "all":
                scores.append(outputs["logits"][: sum(len(part.ids) for part in parts)].clone())
            if logits == "last":
                last = outputs["logits"].clone()
                of_slots |= {slot: last[slot : slot + 1] for slot in ending}
        self._kept.write()  # while the GPU runs
        following = self._await_tokens(program, outputs, ending)
        for ending, tokens, peaks in earlier:
            pairs = tokens.tolist(), peaks.isfinite().tolist()
            following |= {slot: (pairs[0][slot], pairs[1][slot]) for slot in ending}
        self._release_oldest()
        return following, scores + [of_slots[slot] for slot in sorted(of_slots)]

    def _await_tokens(
        self, program: _Program, outputs: Tensors, slots: Sequence[int]
    ) -> dict[int, tuple[int, bool]]:
        """By slot, the token behind the last pass, and whether its value is finite; HangError where
        the GPU takes too long: nobody else watches a collective inside a graph.
        """
        memory = program.memory
        assert memory is not None, "programs of packed prompts have it"
        if memory.tokens.reaches:
            answer = memory.tokens.answer(slots, memory.rows.num_laid)
            await_event(answer, self._limit_s, self._name)
            return answer.read()
        chosen, peaks = _chosen(outputs)
        await_queued(self._limit_s, self._name)
        return {slot: (int(chosen[slot]), math.isfinite(peaks[slot])) for slot in slots}

    def close(self) -> None:
        """Releases the programs and their graphs; nothing runs any longer."""
        for program in self._programs.values():
            program.release()
        self._programs.clear()
        self._memory = None

    def _release_oldest(self) -> None:
        """Releases the programs beyond MOST_PROGRAMS; all passes have ended."""
        if len(self._programs) > MOST_PROGRAMS:
            for key in [*self._programs][:-MOST_PROGRAMS]:
                self._programs.pop(key).release()

    def _run_parts(self, ids: Tokens, logits: Logits, tensors: Tensors) -> Tensors:
        """One prompt in micro-batches."""
        program = self._program(len(ids), logits)
        tokens = torch.frombuffer(ids, dtype=torch.int64).to(self._device)
        positions = torch.arange(len(ids), device=self._device)
        given = {"tokens": tokens, "positions": positions}
        return run_ops(program.evaluator.run, {**tensors, **program.given, **given})

    def _run_pass(
        self, parts: Sequence[PromptPart], logits: Logits, tensors: Tensors
    ) -> tuple[_Program, Tensors]:
        """The program of a pass, and its outputs, which the next one may overwrite; rows of
        `logits` behind those of the prompts mean nothing, nor does `next` of a slot whose prompt
        does not end.
        """
        num_tokens = 0
        for part in parts:
            num_tokens += len(part.ids)
        capacity = num_tokens + self._max_context - parts[-1].stop
        size = prefill_size(self._decode_plan, num_tokens, min(capacity, self._budget))
        program = self._program(size, logits)
        memory = program.memory
        assert memory is not None, "programs of packed prompts have it"
        rows = memory.rows
        await_event(rows, self._limit_s, self._name)
        rows.lay(parts)
        if program.graph is None:
            rows.queue_copy()
            rows.note_sent()
            if program.used and self._captures and logits == "none":
                program.graph = self._capture(program, tensors)
            if program.graph is None:
                if not program.used and program.rehearses:
                    self._compile_ahead(program, tensors)
                program.used = True
                with early_reads(states=False):  # the embedding starts in turn
                    outputs = run_ops(program.evaluator.run, {**tensors, **program.given})
                memory.tokens.queue(outputs, rows.number)
                return program, outputs
            await_event(rows, self._limit_s, self._name)
            rows.lay(parts)  # under a number that nobody has given back
        outputs = program.graph.run({})
        rows.note_sent()
        return program, outputs

    def _program(self, size: int, logits: Logits) -> _Program:
        key = size, logits
        found = self._programs.pop(key, None)
        if found is None:
            evaluator, joined = self._open(*self._host_program(size, logits))
            memory = None
            given = joined | self._known(evaluator.host)
            if self._packs:
                batch = self._decode_plan.options.batch
                rows = SentRows(size, batch, self._max_context, self._device)
                memory = PassMemory(rows, SentTokens(batch, self._device))
                given |= dict(zip(ROWS, rows.parts, strict=True))
            rehearses = self._plans_anew and self._device.type == "cuda"
            found = _Program(evaluator, memory, given, rehearses)
            self._plans_anew = False
        self._programs[key] = found
        return found

    def _known(self, host: HostProgram) -> dict[str, Tensor]:
        """Weights of a program that were known when it was built."""
        names = [b.name for b in host.buffers if b.name.startswith(KNOWN)]
        if not names:
            return {}
        constants: Mapping[str, Tensor] = getattr(self._decode_plan.config, "constants", {})
        return {name: constants[name].to(self._device) for name in names if name in constants}

    def _host_program(self, size: int, logits: Logits) -> tuple[HostProgram, bool]:
        """The program of a size: that of another size of its range with other extents, if one was
        planned and extents divide alike. And whether it is proven.
        """
        if not self._packs:
            return late.lower_prefill(self._decode_plan, size, logits), False
        proven, alone = self._decode_plan.num_stages == 1, self._decode_plan.ranks.num_ranks == 1
        key = 0 if alone else max(size - 1, LEAST_RANGE).bit_length(), logits
        known = self._planned.get(key)
        first = known is None
        if known is None:
            # files of ranks may differ, and they shall not run what was planned for other sizes
            asked = logits, self._decode_plan.peer_memory, 0 if alone else size
            known = self._kept.get("prompt", asked, lambda: self._lower(size, logits))
            self._planned[key] = known
        buffers = known.buffer_map()
        inputs = dict.fromkeys(BY_ROWS & buffers.keys(), (size,))
        if all(buffers[name].shape == shape for name, shape in inputs.items()):
            return known, proven or not first
        try:
            resized = host_late.resize_inputs(known, inputs, f"decoder_{size}")
            return resized, proven or not first
        except UnsupportedError as error:
            logger.debug("%d rows are planned anew: %s", size, error)
        self._planned[key] = host = self._lower(size, logits)
        return host, proven

    def _lower(self, size: int, logits: Logits) -> HostProgram:
        """The program of a size, proven where that takes no other stage, with symmetric buffers for
        all sizes.
        """
        self._plans_anew = True
        host = late.lower_prefill(self._decode_plan, size, logits)
        options, context = self._decode_plan.options, self._max_context
        most = max(size, min(options.max_batched_tokens, context * options.batch))
        symmetric_buffers = (
            replace(one, num_bytes=one.num_bytes * -(-most // size))
            for one in host.symmetric_buffers
        )
        host = replace(host, symmetric_buffers=tuple(symmetric_buffers))
        if self._decode_plan.num_stages == 1:
            host_late.prove_once(host)
        return host

    def _capture(self, program: _Program, tensors: Tensors) -> CapturedHost | None:
        """On all ranks or none: NCCL may prepare captured collectives unlike others."""
        given, handed = {**tensors, **program.given}, program.memory
        assert handed is not None, "programs that are captured pack prompts"
        self._memory = memory = self._memory or GraphMemory()
        captured, problem = capture_on_ranks(
            self._comm,
            next(iter(program.evaluator.graph_breaks), ""),
            lambda: CapturedHost(
                program.evaluator,
                given,
                memory,
                copy_states=self._recurrent,
                before=handed.rows.queue_copy,
                after=lambda outputs: handed.tokens.queue(outputs, handed.rows.number),
            ),
        )
        if problem:
            self._captures = False
            logger.warning("prompts run op by op, not as CUDA graphs: %s", problem)
        return captured

    @gc_paused  # compilers make a million objects
    def _compile_ahead(self, program: _Program, tensors: Tensors) -> None:
        """Compiles the kernels of a program side by side: one after the other, as they are first
        launched, those of a layer would take 3 s. Where the program is from an earlier process,
        Triton's cache has most of them.
        """
        if has_triton():
            with runtime_late.launching_nothing(self._device), early_reads(states=False):
                program.evaluator.rehearse({**tensors, **program.given})
                self._kept.write()  # while compilers run


def _chosen(outputs: Tensors) -> tuple[Tensor, Tensor]:
    """Copies of `next` and PEAKS on the host. Of a GPU's tensors they are there once the host has
    waited for what was queued so far: asked for with each pass, they hold up none.
    """
    tokens, peaks = outputs["next"], outputs[PEAKS]
    if tokens.is_cuda:
        return tokens.to("cpu", non_blocking=True), peaks.to("cpu", non_blocking=True)
    return tokens.clone(), peaks.clone()
