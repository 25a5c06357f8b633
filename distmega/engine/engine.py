"""One rank of a running model: reads its part of the weights, then runs prefill and decode.

Comes in: a ModelSource and a decode plan (decode_plan.py). Goes out: logits and tokens. Prefill
runs library ops, a program for each size of pass, which has rows of several prompts (prefill.py).
Decode runs a megakernel, of several steps a launch on a GPU, or library ops where none can do the
model (opening.py). Both share one weights arena and one KV cache. Next on the walk: opening.py.
"""

from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from distmega.arguments import (
    MAX_NUMBER,
    is_list,
    require_callable,
    require_switch,
    require_whole,
    shown,
)
from distmega.engine import late
from distmega.engine.calls import Calls, RanksInStep, Tokens, prompt_tokens, require_tokens
from distmega.engine.decode_plan import DecodePlan, require_traced, stage_mesh, untraced
from distmega.engine.kept_plans import NOTHING_KEPT, keep_triton_key, open_plans
from distmega.engine.opening import Opener, allocate_arenas
from distmega.engine.prefill import Prefills
from distmega.engine.ranks.agreement import require_agreement, share_memory
from distmega.engine.ranks.devices import find_device
from distmega.engine.ranks.own_process import OwnProcess
from distmega.engine.requests import EngineOptions
from distmega.engine.soundness import UnsoundRunError, explain_unsound, is_sound, run_ops
from distmega.engine.steps_ahead import decode_ahead, last_logits
from distmega.engine.texts import require_not_empty
from distmega.engine.weight_loading import (
    Progress,
    Tell,
    load_weights,
    no_progress,
    tell_nobody,
)
from distmega.errors import (
    ModelError,
    RequestError,
    argument,
    counted,
)
from distmega.hostir.comm.communicator import Communicator, require_communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import FREE
from distmega.hostir.library.torch_types import ordinary_tensors
from distmega.hostir.run.deadline import await_queued, graph_limit_s
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import CPU, H200
from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.gpus import facts_of
from distmega.kernels.runtime.stepping import SteppingRunner
from distmega.kernels.runtime.symmetric import reach_problem
from distmega.models.decoder import PEAKS, AnyDecoder, Logits
from distmega.models.sampling import (
    MOST_LIKELY,
    Method,
    Sampling,
    Samplings,
    joint_method,
    sampling_of_each,
)
from distmega.sharding.layout.mesh import STAGE_AXIS, DeviceMesh
from distmega.sources.copied_source import open_copies
from distmega.sources.load import ModelSource
from distmega.trace_file import Span


class Engine(OwnProcess):
    """A model on one rank. All ranks of the mesh must make the same calls in the same order.

    With several ranks a HangError, of a kernel or a graph, is the last thing that a call gives: a
    rank that gave up starts fewer launches than those that did not yet, and from then on they
    number their steps differently and would take each other's results for others. Later calls on it
    raise RequestError.
    """

    how_to_remake = "call open_engine in the other process"

    @ordinary_tensors()
    def __init__(
        self,
        source: ModelSource,
        mesh: DeviceMesh,
        comm: Communicator,
        options: EngineOptions,
        *,
        node: str = "",
        device: str = "cpu",
        logits: Logits = "none",
        sampling: Samplings = MOST_LIKELY,
        progress: Progress = no_progress,
        tell: Tell = tell_nobody,
        closes_comm: bool = False,
    ) -> None:
        """Plans, compiles and loads weights.

        Raises PlanError where the mesh can't be used, LaunchError where ranks disagree,
        RequestError for other `logits` and a device that this machine hasn't, MeshError for no mesh
        and a communicator of another, ProgramError for no communicator.

        Args:
            source: The model.
            mesh: All ranks; `pp` divides the layers into stages.
            comm: Of the mesh.
            options: How it is run.
            node: The host of this rank.
            device: Where it computes, "cpu" or "cuda:i".
            logits: What a decode step gives besides the token: "none", or those that it chose from:
                "last", and "all", which means the same here.
            sampling: How tokens are chosen where a call does not say; of several, each sequence of
                the batch takes its own, those behind them the most likely token, and a call may ask
                for all of them.
            progress: Called as weights are read.
            tell: Called with what is done next, in words.
            closes_comm: Whether `close` closes the communicator too.
        """
        require_opened(source, options)
        require_communicator(comm, mesh)
        require_choices(logits, sampling)
        require_callable("progress", progress)
        require_callable("tell", tell)
        self.mesh, self.comm, self.device = mesh, comm, find_device(device)
        self.eos_ids = frozenset(source.config.eos_ids)
        """Tokens that end a sequence."""
        self._closes_comm = closes_comm
        self._logits = logits
        self._method = joint_method(sampling)
        self._sampling = _fill_up(sampling, options.batch)
        self._num_cached = [0] * options.batch
        self._in_step = RanksInStep(mesh.num_ranks)
        self._calls = Calls()
        self._num_decoded = 1
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            warm_up.begin(self.device, keep_triton_key)
        index = mesh.coordinate(comm.rank).get(STAGE_AXIS, 0)
        asked = source.config, mesh, index, options, logits, self._method
        kept = open_plans(asked, facts_of(self.device)) if on_gpu else NOTHING_KEPT
        tell("planning a decode step")
        peer_memory = self._share_memory(stage_mesh(mesh, index), options, node)
        make_plan = partial(self._plan, source.config, options, logits, index, peer_memory)
        self.decode_plan = plan = kept.get("decode", peer_memory, make_plan)
        self._arenas = allocate_arenas(plan, device)
        self._slots = self._arenas.slots()
        self._sample_inputs = _sampling_inputs(self._method, options.batch, self.device)
        tell("preparing the decode step")
        opener = Opener(plan, self._arenas, comm, self.device, kept)
        self._decode = opener.open_decode(self._sample_inputs)
        self._persistent = {**self._arenas.tensors, **self._decode.joined}
        self._given = {**self._sample_inputs, **self._persistent}
        if self.stepping is not None:
            self.stepping.prepare()
        tell("loading weights")
        copies = open_copies(source, plan.kv_copies)
        coordinate, weights = mesh.coordinate(comm.rank), self._arenas.weight_views
        load_weights(copies, plan.allocations, coordinate, weights, progress)
        warm_up.finish()
        kernels = self._decode.cpu_kernels.values()
        fingerprints = [kernel.kernel.fingerprint() for kernel in kernels]
        require_agreement(comm, plan, [plan.fingerprint, *fingerprints])
        self._prefills = Prefills(plan, opener.open_prompts, comm, self.device, kept)
        if on_gpu and plan.num_stages > 1:
            assert isinstance(comm, NcclCommunicator), "GPUs communicate over NCCL"
            shared = options.collectives != "host"
            late.open_signals(comm, STAGE_AXIS, (FREE,), options.timeout_s, peer_memory=shared)

    def close(self) -> None:
        """Releases weights, caches, graphs and kernels, and the communicator if open_engine has
        opened it. All ranks call it together, behind their last call: later ones raise
        RequestError. HangError if what was queued on a GPU does not end; nothing is released then.
        """
        if self._calls.are_over:
            return
        with self._calls.alone():
            if self.device.type == "cuda":
                limit_s = graph_limit_s(self.decode_plan.options.timeout_s)
                await_queued(limit_s, f"the last calls of rank {self.comm.rank}")
                torch.cuda.synchronize(self.device)
            self.comm.barrier()  # peers may have written into this rank's memory until then
            self._calls.are_over = True
            self._prefills.close()
            if not isinstance(self._decode.runner, Evaluator):
                self._decode.runner.close()
            del self._prefills, self._decode, self._arenas, self._slots
            del self._persistent, self._given, self._sample_inputs
            if self._closes_comm:
                self.comm.close()

    def _plan(
        self,
        config: AnyDecoder,
        options: EngineOptions,
        logits: Logits,
        index: int,
        peer_memory: bool,
    ) -> DecodePlan:
        """The plan of a decode step of a stage."""
        machine = H200 if self.device.type == "cuda" else CPU
        mesh, method = self.mesh, self._method
        plan = late.plan_decode(config, mesh, machine, options, logits, method=method, index=index)
        return late.lower_decode(config, plan, options, peer_memory=peer_memory, method=method)

    def _share_memory(self, stage: DeviceMesh, options: EngineOptions, node: str) -> bool:
        """share_memory of this rank's stage; all ranks of the mesh ask together."""
        problem = ""
        if self.device.type != "cuda":
            problem = late.peer_memory_problem()
        elif stage.num_ranks > 1:
            assert self.device.index is not None, "find_device names one"
            problem = reach_problem(self.device.index)
        found = self.comm.all_gather_object((node, problem))
        mates = dict(zip(self.mesh.ranks, found, strict=True))
        return share_memory([mates[rank] for rank in stage.ranks], options)

    def generate(
        self,
        prompt: Sequence[int],
        limit: int = 0,
        sampling: Sampling | None = None,
        *,
        ignore_eos: bool = False,
    ) -> Iterator[int]:
        """As generate_all, of one prompt: its tokens one by one."""
        given = None if sampling is None else [sampling]
        for (token,) in self.generate_all([prompt], limit, given, ignore_eos=ignore_eos):
            yield token

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int = 0,
        sampling: Samplings | None = None,
        *,
        ignore_eos: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """Tokens after each prompt, a step at a time, until a cache is full, there are `limit`
        steps (0 sets no limit), or all sequences have ended, each with one of eos_ids; starts new
        sequences.

        A sequence that has ended repeats its end token while others go on. sampling: of these
        prompts, one for all or one for each, instead of the engine's own. ignore_eos: no token ends
        a sequence.

        On a GPU later tokens come several at a time, and the next ones are computed meanwhile, so
        a caller that stops before the limit has caused some steps too many. RequestError for no
        prompts, for more than the engine's batch, for a limit below 0, for a sampling that the
        engine was not opened for, and where the caller goes on after another call of the engine.
        """
        require_switch("ignore_eos", ignore_eos)
        steps = self._calls.uninterrupted(self._steps(prompts, limit, sampling))
        return steps if ignore_eos else _until_ended(steps, self.eos_ids)

    def generate_with_logits(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int = 0,
        sampling: Samplings | None = None,
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """As generate_all with ignore_eos, with the logits that each step chose from, [prompts,
        vocab]; one step at a time. RequestError for an engine opened without logits="last".
        """
        if self._logits == "none":
            raise RequestError(
                "logits of decode steps",
                expected='an engine that was opened with logits="last"',
                remedy='open it with logits="last"',
            )
        return self._calls.uninterrupted(self._steps_with_logits(prompts, limit, sampling))

    def _steps_with_logits(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Samplings | None
    ) -> Generator[tuple[tuple[int, ...], Tensor]]:
        """The steps of generate_with_logits."""
        tokens, scores = self._prefill_all(prompts, limit, sampling, "last")
        yield tokens, torch.cat(scores)
        for _ in range(self._num_further(limit)):
            outputs = self.decode_step(tokens)
            tokens = tuple(outputs["next"].tolist()[: len(prompts)])
            self._raise_hang()
            yield tokens, outputs["logits"][: len(prompts)]

    def _prefill_all(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int,
        sampling: Samplings | None,
        logits: Logits,
    ) -> tuple[tuple[int, ...], list[Tensor]]:
        """Starts a sequence for each prompt in the first slots: their tokens, and the logits as
        Prefills.run gives them.
        """
        _require_prompts(prompts)
        require_whole("limit", limit, 0, MAX_NUMBER)
        if not len(prompts):
            raise RequestError("no prompt", expected="at least one", remedy="give a prompt")
        own = self._sampling[: len(prompts)]
        each = own if sampling is None else sampling_of_each(sampling, len(prompts))
        each += [MOST_LIKELY] * (len(prompts) - len(each))
        given = dict(enumerate(zip(prompts, each, strict=True)))
        found, scores = self._run_prefill(given, logits)
        self._num_cached[len(prompts) :] = [0] * (self.batch - len(prompts))
        return tuple(found[slot] for slot in range(len(prompts))), scores

    def _num_further(self, limit: int) -> int:
        """Steps that caches and limit leave room for after the first tokens."""
        capacity = self.decode_plan.max_context - max(self._num_cached)
        return min(capacity, limit - 1) if limit else capacity

    def _steps(
        self, prompts: Sequence[Sequence[int]], limit: int, sampling: Samplings | None
    ) -> Generator[tuple[int, ...]]:
        """The steps of generate_all, whatever tokens they give."""
        tokens, _ = self._prefill_all(prompts, limit, sampling, "none")
        yield tokens
        capacity = self._num_further(limit)
        if self.stepping is None:
            for _ in range(capacity):
                tokens = tuple(self.decode_step(tokens)["next"].tolist()[: len(prompts)])
                yield tokens
            return
        with self._in_step:
            self.stepping.start(tokens, self._num_cached[: len(prompts)], self._sample_inputs)
            note = partial(self._grow, len(prompts))
            yield from decode_ahead(self.stepping, capacity, note, self._end_unsound)

    def trace(self, num_steps: int, position: int) -> list[Span]:
        """The timeline of decode steps from `position` on, whatever the caches hold there; the
        second launch of two, on the GPU's clock. RequestError where no decode kernel runs.
        """
        if self.stepping is None:
            raise untraced(str(self.device))
        require_traced(self.decode_plan.max_context, num_steps, position)
        with self._calls.alone(), self._in_step:
            for _ in range(2):
                self.stepping.start([0] * self.batch, [position] * self.batch, self._sample_inputs)
                self.comm.barrier()
                spans = self.stepping.trace(num_steps)
        return spans

    @property
    def stepping(self) -> SteppingRunner | None:
        """Steps of a GPU that choose the tokens of the next: the decode kernel's, several in one
        launch, or where it does not run a graph's; None for stages of a pipeline.
        """
        self._calls.require_open()
        return self._decode.stepping

    @property
    def batch(self) -> int:
        """Sequences that a decode step takes, at most."""
        return len(self._num_cached)

    @property
    def uses_megakernel(self) -> bool:
        """Whether decode steps run as megakernels rather than library ops."""
        self._calls.require_open()
        return bool(self._decode.runner.host.segments)

    def tensor(self, name: str) -> Tensor:
        """A weight or state as this rank holds it; KeyError is a bug of the caller."""
        self._calls.require_open()
        return self._persistent[name]

    def reseed(self, seed: int) -> None:
        """From now on, decode steps interleave tasks as `seed` says; 0 takes SMs in turn."""
        self._calls.require_open()
        require_whole("seed", seed, 0, MAX_NUMBER)
        for kernel in self._decode.cpu_kernels.values():
            kernel.interpreter.reseed(seed or None)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits of every position of a new sequence in slot 0, [len(ids), vocab], on this rank's
        device. RequestError as of prefill.
        """
        _, scores = self._run_prefill({0: (ids, None)}, "all")
        return torch.cat(scores) if len(scores) > 1 else scores[0]

    def prefill(self, ids: Sequence[int], slot: int = 0) -> int:
        """Starts a new sequence in one of the batch's slots; the next token.

        RequestError, before anything runs, for a slot that the batch hasn't, no tokens, more than
        the cache has positions, and ids outside of the vocabulary.
        """
        require_whole("slot", slot, 0)
        found, _ = self._run_prefill({slot: (ids, None)}, "none")
        return found[slot]

    def prefill_all(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Starts new sequences in the first slots, packed into passes of at most
        options.max_batched_tokens tokens; the next token of each.

        RequestError, before anything runs, for more prompts than slots, and for one that is empty
        or longer than its cache.
        """
        _require_prompts(prompts)
        given = {slot: (ids, None) for slot, ids in enumerate(prompts)}
        found, _ = self._run_prefill(given, "none")
        return [found[slot] for slot in range(len(prompts))]

    def decode(self, token: int) -> int:
        """Appends one token to the sequence in slot 0; the next one. RequestError as decode_step;
        HangError where a wait was given up, ModelError for logits that are not finite.
        """
        found = int(self.decode_step([token])["next"][0])
        self._raise_hang()
        return found

    def _raise_hang(self) -> None:
        """HangError if the decode kernel has given up a wait, ModelError if its logits are not
        finite; of steps that the host has waited for.
        """
        if self.stepping:
            with self._calls.alone(), self._in_step:
                self.stepping.raise_hang()
                if not is_sound(last_logits(self.stepping, self._num_decoded)):
                    raise self._end_unsound()

    def _end_unsound(self, *found: str) -> ModelError:
        """What to raise for logits that are not finite, or what an op has found. All sequences end
        here, and caches are emptied, since what is behind a sequence's end must be finite too.
        """
        error = explain_unsound(self._arenas.state_views, self.comm.rank, *found)
        self._arenas.states.zero_()
        self._num_cached = [0] * self.batch
        return error

    def _require_sound(self, outputs: Mapping[str, Tensor], num: int) -> None:
        """ModelError where the first `num` tokens of a decode step were chosen from logits that are
        not finite. A GPU's kernel is asked later, when the host has waited for it; where the
        program doesn't tell, the last layer's cache does for all layers before it.
        """
        if self.stepping is not None:
            return
        if PEAKS in outputs:
            watched = outputs[PEAKS][:num]
        else:
            watched = next(reversed(self._arenas.state_views.values()))
        if not is_sound(watched):
            raise self._end_unsound()

    def decode_step(self, tokens: Sequence[int]) -> Mapping[str, Tensor]:
        """Appends a token to each of the first sequences.

        Outputs: `next` [batch], i64, and `logits` [batch, vocab] if asked for; rows of slots that
        got no token mean nothing. RequestError, before it runs, for more tokens than sequences, a
        slot in which none has started or whose cache is full, and ids outside of the vocabulary.
        """
        with self._calls.alone():
            return self._append(require_tokens(tokens, self.decode_plan.config.vocab))

    def _append(self, tokens: list[int]) -> Mapping[str, Tensor]:
        """A decode step of the first sequences; RequestError, before it runs, if it can't be."""
        num = len(tokens)
        if not 1 <= num <= self.batch:
            raise RequestError(
                f"a decode step of {counted(num, 'token')}",
                expected=f"one for each of 1 to {counted(self.batch, 'sequence')}",
                remedy=f"give a token for each sequence, or raise {argument('batch')}",
            )
        for slot, num_cached in enumerate(self._num_cached[:num]):
            if not num_cached:
                raise RequestError(
                    f"a decode step of slot {slot}, in which no sequence has started",
                    expected="a prefill of it before",
                    remedy="call prefill with the tokens that the sequence starts with",
                )
            self._require_capacity(slot, 1, num_cached)
        last = self.decode_plan.max_context - 1
        positions = [min(num_cached, last) for num_cached in self._num_cached]
        given = {
            "tokens": torch.tensor([*tokens, *[0] * (self.batch - num)], device=self.device),
            "positions": torch.tensor(positions, device=self.device),
            **self._given,
        }
        with self._in_step, self._changing_first(num):
            try:
                outputs = run_ops(self._decode.runner.run, given)
            except UnsoundRunError as error:
                raise self._end_unsound(error.found) from error
            self._require_sound(outputs, num)
        self._grow(num, 1)
        self._num_decoded = num
        return {name: x for name, x in outputs.items() if name != PEAKS}

    @contextmanager
    def _changing_first(self, num: int) -> Iterator[None]:
        """Leaves states that each token changes as they are in sequences behind the first `num`.
        After an error nobody knows whether those of the first have changed: these have ended.
        """
        names = self.decode_plan.config.recurrent_states
        idle = [slot[name] for slot in self._slots[num:] for name in names if name in slot]
        before = [x.clone() for x in idle]
        try:
            yield
        except BaseException:
            if names:
                self._num_cached[:num] = [0] * num
            raise
        finally:
            for x, old in zip(idle, before, strict=True):
                x.copy_(old)

    def _grow(self, num: int, num_steps: int) -> None:
        """Notes num_steps more positions in the first `num` slots."""
        self._num_cached[:num] = [cached + num_steps for cached in self._num_cached[:num]]

    def _run_prefill(
        self, given: Mapping[int, tuple[Sequence[int], Sampling | None]], logits: Logits
    ) -> tuple[dict[int, int], list[Tensor]]:
        """As Prefills.run, of a prompt and its sampling for each slot, by default the engine's own;
        RequestError where one fits no slot, before anything runs.
        """
        vocab = self.decode_plan.config.vocab
        with self._calls.alone():
            known = {
                slot: (prompt_tokens(ids, vocab, self._where(slot)), sampling)
                for slot, (ids, sampling) in given.items()
            }
            return self._start(known, logits)

    def _start(
        self, given: Mapping[int, tuple[Tokens, Sampling | None]], logits: Logits
    ) -> tuple[dict[int, int], list[Tensor]]:
        """_run_prefill of tokens that the model knows."""
        prompts = dict[int, Tokens]()
        for slot, (ids, _) in given.items():
            self._require_prompt(slot, ids)
            prompts[slot] = ids
        for _, sampling in given.values():
            if sampling is not None:  # the engine's own are
                self._require_served(sampling)
        if self._sample_inputs:
            for slot, (_, sampling) in given.items():
                self._choose_by(sampling or self._sampling[slot], slot)

        def slot_tensors(slot: int) -> dict[str, Tensor]:
            sampled = {name: x[slot : slot + 1] for name, x in self._sample_inputs.items()}
            return {**self._given, **sampled, **self._slots[slot]}

        with self._in_step:
            for slot in prompts:  # whatever happens meanwhile, what it was has ended
                self._num_cached[slot] = 0
            try:
                found, scores = self._prefills.run(prompts, logits, self._given, slot_tensors)
            except UnsoundRunError as error:
                raise self._end_unsound(error.found) from error
            if self.decode_plan.num_stages > 1 and self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
                self.comm.check_signals()
            peaks_are_sound = all(is_finite for _, is_finite in found.values())
            if not peaks_are_sound or (logits == "all" and not all(map(is_sound, scores))):
                raise self._end_unsound()
        for slot, ids in prompts.items():
            self._num_cached[slot] = len(ids)
        return {slot: token for slot, (token, _) in found.items()}, scores

    def _require_served(self, sampling: Sampling) -> None:
        if not self._method.serves(sampling):
            raise RequestError(
                f"{sampling} in an engine for {self._method.describe()}",
                expected="a sampling that its programs were built for",
                remedy="open the engine with all samplings that it will be asked for",
            )

    def _choose_by(self, sampling: Sampling, slot: int) -> None:
        """In an engine that samples: tokens of the sequence in this slot are chosen so from now on;
        in place, for graphs hold these tensors.
        """
        row = self._method.settings_of(sampling)
        self._sample_inputs["sampling"][slot] = torch.tensor(row, dtype=torch.float32, device="cpu")
        self._sample_inputs["seeds"][slot] = sampling.seed

    def _require_prompt(self, slot: int, ids: Tokens) -> None:
        """RequestError unless a slot can take this prompt."""
        if not 0 <= slot < self.batch:
            raise RequestError(
                f"a sequence for slot {slot}",
                expected=f"slots below the batch of {self.batch}",
                remedy=f"raise {argument('batch')}",
            )
        require_not_empty(len(ids), f" in slot {slot}")
        self._require_capacity(slot, len(ids), 0)

    def _where(self, slot: int) -> str:
        """Says in a message which sequence of several it is."""
        return f" in slot {slot}" if self.batch > 1 else ""

    def _require_capacity(self, slot: int, num_tokens: int, num_cached: int) -> None:
        limit = self.decode_plan.max_context
        if num_cached + num_tokens > limit:
            raise RequestError(
                f"{counted(num_tokens, 'token')} after {num_cached}{self._where(slot)}",
                expected=f"at most {counted(limit, 'position')} together",
                remedy=f"shorten the text or raise {argument('max_context')}",
            )


def _fill_up(samplings: Samplings, batch: int) -> list[Sampling]:
    """The sampling of each slot; those of which nothing is said take the most likely token."""
    if isinstance(samplings, Sampling):
        return sampling_of_each(samplings, batch)
    return [*samplings, *[MOST_LIKELY] * (batch - len(samplings))]


def _sampling_inputs(method: Method, batch: int, device: torch.device) -> dict[str, Tensor]:
    """What a program takes that samples tokens, a row a sequence, as MOST_LIKELY has it; see
    decoder.py.
    """
    if not method.samples:
        return {}
    settings = torch.tensor(
        [method.settings_of(MOST_LIKELY)] * batch, dtype=torch.float32, device="cpu"
    )
    seeds = torch.zeros(batch, dtype=torch.int64, device="cpu")
    return {"sampling": settings.to(device), "seeds": seeds.to(device)}


def require_opened(source: object, options: object) -> None:
    """RequestError for a model by name, and for options of another type."""
    if not isinstance(source, ModelSource):
        raise RequestError(
            f"{shown(source)} in place of an open model",
            expected="a ModelSource",
            remedy="give what open_model returns",
        )
    if not isinstance(options, EngineOptions):
        raise RequestError(
            f"{argument('options')} {shown(options)}",
            expected="EngineOptions",
            remedy="write EngineOptions(max_context=...)",
        )


def _require_prompts(prompts: object) -> None:
    if is_list(prompts):
        return
    if not isinstance(prompts, Tensor | np.ndarray) or prompts.ndim != 2:
        raise RequestError(
            f"{argument('prompts')} {shown(prompts)}",
            expected="the tokens of each prompt in a list",
            remedy="give them in brackets",
        )


def require_choices(logits: str, sampling: Samplings) -> None:
    """RequestError for logits that no decode step gives, and for what is no sampling."""
    joint_method(sampling)
    if not isinstance(logits, str) or logits not in get_args(Logits):
        raise RequestError(
            f"logits={shown(logits)}",
            expected=f"one of {', '.join(get_args(Logits))}",
            remedy="leave it out for tokens alone",
        )


def _until_ended(
    steps: Generator[tuple[int, ...]], eos_ids: Container[int]
) -> Iterator[tuple[int, ...]]:
    """The steps until every sequence has had an end token, which it repeats from then on."""
    ended: dict[int, int] = {}
    with closing(steps):
        for tokens in steps:
            reported = tuple(ended.get(sequence, token) for sequence, token in enumerate(tokens))
            yield reported
            ended |= {
                sequence: token for sequence, token in enumerate(reported) if token in eos_ids
            }
            if len(ended) == len(reported):
                return
