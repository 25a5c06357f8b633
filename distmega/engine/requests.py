"""What a user can ask for, as frozen values that travel to every rank.

Comes in: command-line options. Goes out: to jobs.py on each rank, and to engine.py as
EngineOptions. What can be judged from the values alone is checked on construction.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from distmega.arguments import (
    require_number,
    require_one_of,
    require_switch,
    require_texts,
    require_type,
    require_whole,
    shown,
)
from distmega.engine.ranks.context import ProgressReport
from distmega.env import MAX_SECONDS
from distmega.errors import RequestError, argument
from distmega.models.sampling import Sampling, Samplings, sampling_of_each

DEFAULT_CONTEXT = 2048
"""Positions of the KV cache unless asked otherwise, where the model allows as many."""


MAX_NUM_SMS = 1024
"""Task queues that are scheduled against each other in a few seconds."""
MAX_DEGREE = 1024
"""Ranks of a stage, and stages."""
MAX_BATCH = 4096
"""Sequences that are decoded together."""
MAX_KERNEL_ROWS = 64
"""Sequences that a decode kernel takes, however slow (kernels/hopper/batch)."""
MAX_MEMORY_GB = 1e9

MAX_LOGPROBS = 100
"""Alternatives to a token whose probabilities are reported."""

Collectives = Literal["auto", "kernel", "host"]
Events = Literal["overlap", "op"]
Experts = Literal["auto", "tensor", "expert"]
ExpertTiles = Literal["torch", "auto", "static", "drained"]
FinishReason = Literal["length", "eos", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is run. RequestError for a value that is out of range or of another type.

    Attributes:
        max_context: Positions of the KV cache; 0 is the model's limit, at most 2048.
        batch: Sequences that are decoded together, each with a cache of its own.
        micro_batches: Parts of a prompt that pipeline stages prefill at a time; 0 is 4, or 1
            without stages.
        max_batched_tokens: Tokens of all prompts that one pass takes at most; longer prompts are
            taken in parts.
        num_sms: Task queues of the CPU interpreter; a GPU has one for each SM.
        interleave_seed: The order in which these queues take turns; any gives the same result.
        timeout_s: Bound on a wait for another rank, in seconds.
        collectives: Done by the megakernel ("kernel") or the host program ("host"); "auto": the
            kernel where ranks can share memory.
        events: A task waits for the tasks it overlaps ("overlap"), or for all of the op before
            ("op", a slow baseline).
        experts: How ranks share experts out: a part of each ("tensor"), whole ones ("expert"), or
            whichever costs less ("auto").
        expert_tiles: How a GPU multiplies experts of prompts: one by one ("torch"), or all of a
            matrix by one kernel, whose SMs take tiles by fixed queues ("static") or as they get
            free ("drained"); "auto": as costs say.
        kernel_rows: Sequences that the decode kernel of a GPU takes, at most 64; steps of more are
            library ops.
    """

    max_context: int = 0
    batch: int = 1
    micro_batches: int = 0
    max_batched_tokens: int = 8192
    num_sms: int = 2
    interleave_seed: int = 0
    timeout_s: float = 60.0
    collectives: Collectives = "auto"
    events: Events = "overlap"
    experts: Experts = "auto"
    expert_tiles: ExpertTiles = "auto"
    kernel_rows: int = 16

    def __post_init__(self) -> None:
        require_whole("max_context", self.max_context, 0)
        require_whole("batch", self.batch, 1, MAX_BATCH)
        require_whole("micro_batches", self.micro_batches, 0)
        require_whole("max_batched_tokens", self.max_batched_tokens, 1)
        require_whole("num_sms", self.num_sms, 1, MAX_NUM_SMS)
        require_whole("interleave_seed", self.interleave_seed, 0)
        require_whole("kernel_rows", self.kernel_rows, 1, MAX_KERNEL_ROWS)
        require_one_of("collectives", self.collectives, get_args(Collectives))
        require_one_of("events", self.events, get_args(Events))
        require_one_of("experts", self.experts, get_args(Experts))
        require_one_of("expert_tiles", self.expert_tiles, get_args(ExpertTiles))
        require_number("timeout_s", self.timeout_s, MAX_SECONDS)


def _require_model(model: object, options: object) -> None:
    require_type("model", model, str, "a name or path as text")
    require_type("options", options, EngineOptions, "EngineOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Continue each of several prompts. options.batch is raised to their number. RequestError for a
    value that is out of range or of another type, and for no prompt.

    Attributes:
        model: A preset, a path, or an id of the Hugging Face Hub.
        prompts: Texts to continue.
        tp: Tensor-parallel ranks of each stage.
        pp: Pipeline stages.
        max_new_tokens: Tokens after which an answer ends, unless it has ended before.
        chat: Put each prompt into the model's chat template first.
        sampling: How tokens are chosen: one for all prompts, or a tuple with one for each.
        stop: Texts before which an answer ends: that which is complete first, no part of it.
        ignore_eos: Go on after tokens with which the model ends answers.
        logprobs: Each token comes with the probability that the model gave it, and with so many of
            the most likely ones; tokens then come a step at a time. None for neither.
        options: How the model is run.
    """

    model: str
    prompts: tuple[str, ...]
    tp: int = 1
    pp: int = 1
    max_new_tokens: int = 64
    chat: bool = False
    sampling: Samplings = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    options: EngineOptions = EngineOptions()

    def __post_init__(self) -> None:
        require_whole("tp", self.tp, 1, MAX_DEGREE)
        require_whole("pp", self.pp, 1, MAX_DEGREE)
        require_whole("max_new_tokens", self.max_new_tokens, 1)
        _require_model(self.model, self.options)
        require_switch("chat", self.chat)
        require_switch("ignore_eos", self.ignore_eos)
        require_texts("prompts", self.prompts)
        for prompt in self.prompts:
            if not prompt.strip():
                raise RequestError(
                    f"prompt {shown(prompt)} is empty", expected="some text", remedy="give a prompt"
                )
        if not self.prompts:
            raise RequestError("no prompt", expected="at least one", remedy="give a prompt")
        if (num_prompts := len(self.prompts)) > MAX_BATCH:
            raise RequestError(
                f"{num_prompts} prompts, so batch {num_prompts}",
                expected=f"at most {MAX_BATCH}",
                remedy="divide them over several calls",
            )
        if num_prompts > self.options.batch:
            object.__setattr__(self, "options", replace(self.options, batch=num_prompts))
        self._check_answers()

    def _check_answers(self) -> None:
        sampling_of_each(self.sampling, len(self.prompts))
        require_texts("stop", self.stop)
        if not all(self.stop):
            raise RequestError(
                f"an empty text in {argument('stop')}",
                expected="texts of at least one character",
                remedy="leave it out",
            )
        if self.logprobs is not None:
            require_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Perplexity of `text`: every token but the first predicted from those before it; in a text
    longer than the context, from at least half a context of them.
    """

    model: str
    text: str
    tp: int = 1
    pp: int = 1
    options: EngineOptions = EngineOptions()

    def __post_init__(self) -> None:
        require_whole("tp", self.tp, 1, MAX_DEGREE)
        require_whole("pp", self.pp, 1, MAX_DEGREE)
        require_type("text", self.text, str, "a text")
        _require_model(self.model, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest:
    """Plan for tp * pp ranks that hold at most memory_limit_gb each, in 10^9 bytes; 0: no limit."""

    tp: int = 1
    pp: int = 1
    memory_limit_gb: float = 0.0

    def __post_init__(self) -> None:
        require_whole("tp", self.tp, 1, MAX_DEGREE)
        require_whole("pp", self.pp, 1, MAX_DEGREE)
        require_number("memory_limit_gb", self.memory_limit_gb, MAX_MEMORY_GB, zero=True)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit as plan_program takes it."""
        return math.ceil(self.memory_limit_gb * 1e9) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Write the timeline of `num_steps` decode steps after `position` cached tokens to `path`."""

    model: str
    path: str
    num_steps: int = 2
    position: int = 512
    tp: int = 1
    options: EngineOptions = EngineOptions()

    def __post_init__(self) -> None:
        require_whole("tp", self.tp, 1, MAX_DEGREE)
        require_whole("num_steps", self.num_steps, 1)
        require_whole("position", self.position, 1)
        require_type("path", self.path, str, "a path as text")
        _require_model(self.model, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What was written: spans of the file, and what they say (trace_summary.py)."""

    num_spans: int
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Rank 0 has found the model. random_weights: it has none of its own, so that what comes of
    random ones means nothing.
    """

    random_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing(ProgressReport):
    """What rank 0 does from now on, in words."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(ProgressReport):
    """How much of rank 0's part of the weights is loaded."""

    done_bytes: int
    all_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The logarithm of the probability that the model gave a token, before temperature and limits;
    top: ids and logarithms of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A generated token.

    Attributes:
        id: Its number in the vocabulary.
        text: What it adds to the answer: empty within a character, and where what follows may make
            it the beginning of a stop text, which a later token then brings.
        prompt: Number of the prompt that it answers.
        logprob: Its probability, if asked for.
    """

    id: int
    text: str
    prompt: int = 0
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What continues a prompt.

    tail: the end of `text` that no Token carried, of a character that was never completed or that
    a stop text might have begun with. finish_reason: why it ended; "eos" is an end token, the last
    of `ids`. logprobs: of each of `ids`, if asked for.
    """

    ids: tuple[int, ...]
    text: str
    tail: str
    num_prompt_tokens: int
    finish_reason: FinishReason
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """Answers to prompts, and the seconds that they took.

    Attributes:
        answers: In the order of the prompts.
        load_s: To load the model.
        first_token_s: From there to the first token; all prompts are read.
        second_token_s: From there to the second one: the first decode step, for which kernels may
            be compiled.
        decode_s: From there to the last.
        random_weights: The model had no weights: random ones, whose text means nothing, stood in
            for them.
    """

    answers: tuple[Answer, ...]
    load_s: float
    first_token_s: float
    second_token_s: float
    decode_s: float
    random_weights: bool = False

    @property
    def tokens_per_s(self) -> float:
        """The steady rate: of the tokens after the second of each answer; 0 when there are none."""
        later = sum(max(len(answer.ids) - 2, 0) for answer in self.answers)
        return later / self.decode_s if later else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Perplexity over the predicted tokens: exp of their mean negative log-likelihood, infinite
    where no float holds it.
    """

    perplexity: float
    num_tokens: int
    random_weights: bool = False
    """The model had no weights: random ones, which predict nothing, stood in for them."""
