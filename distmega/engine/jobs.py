"""What runs on every rank for each command; launchers call these by name,
"distmega.engine.jobs:generate".

Comes in: a RankContext and a request. Goes out: emitted tokens and a result from rank 0.
Next on the walk: engine.py.
"""

import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from distmega.engine.communicators import open_communicator
from distmega.engine.decode_plan import context_limit, model_mesh
from distmega.engine.engine import Engine
from distmega.engine.ranks import Emit, RankContext
from distmega.engine.requests import (
    Answer,
    EngineOptions,
    GenerateRequest,
    GenerateResult,
    Loaded,
    Opened,
    ScoreRequest,
    ScoreResult,
    Token,
    TraceRequest,
    TraceResult,
)
from distmega.engine.trace_summary import summarise
from distmega.engine.weight_loading import Progress, no_progress
from distmega.errors import RequestError
from distmega.models.decoder import Logits
from distmega.models.load import ModelSource, open_model
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.models.tokenizer import Tokenizer
from distmega.trace_file import Span, write_trace

LOADED_S = 0.25


def generate(context: RankContext, request: GenerateRequest, emit: Emit) -> GenerateResult:
    """Emits a Token as soon as it is known; each answer has up to max_new_tokens tokens or ends
    with an end token.
    """
    start = time.perf_counter()
    source = open_model(request.model)
    emit(Opened(random_weights=source.random))
    tokenizer = source.tokenizer()
    prompts = [encode_prompt(source, tokenizer, prompt, request) for prompt in request.prompts]
    engine = open_engine(
        context,
        source,
        request.tp,
        request.options,
        sampling=request.sampling,
        pp=request.pp,
        progress=report_loading(emit),
    )
    loaded = first = time.perf_counter()
    answers = [_GrowingAnswer(tokenizer, prompt) for prompt in prompts]
    for number, tokens in enumerate(engine.generate_all(prompts, request.max_new_tokens)):
        if number == 0:
            first = time.perf_counter()
        for place, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            if not answer.ended:
                piece = answer.push(token)
                emit(Token(id=token, text=piece, prompt=place))
        if all(answer.ended for answer in answers):
            break
    return GenerateResult(
        answers=tuple(answer.finish() for answer in answers),
        load_s=loaded - start,
        first_token_s=first - loaded,
        decode_s=time.perf_counter() - first,
        random_weights=source.random,
    )


class _GrowingAnswer:
    """The tokens that continue a prompt so far. ended: an end token came."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.ended = False
        self._stream, self._eos_ids = tokenizer.stream(prompt), tokenizer.eos_ids
        self._ids, self._text, self._num_prompt_tokens = list[int](), "", len(prompt)

    def push(self, token: int) -> str:
        """Adds a token; the text that it adds."""
        self._ids.append(token)
        self.ended = token in self._eos_ids
        piece = "" if self.ended else self._stream.push(token)
        self._text += piece
        return piece

    def finish(self) -> Answer:
        """The whole answer."""
        tail = self._stream.finish()
        return Answer(
            ids=tuple(self._ids),
            text=self._text + tail,
            tail=tail,
            num_prompt_tokens=self._num_prompt_tokens,
        )


def score(context: RankContext, request: ScoreRequest, emit: Emit) -> ScoreResult:
    """Perplexity of a text that fits the context."""
    source = open_model(request.model)
    emit(Opened(random_weights=source.random))
    ids = source.tokenizer().encode(request.text)
    if len(ids) < 2:
        raise RequestError(
            f"a text of {len(ids)} tokens", expected="at least 2", remedy="give a longer text"
        )
    engine = open_engine(
        context,
        source,
        request.tp,
        request.options,
        pp=request.pp,
        progress=report_loading(emit),
    )
    losses = F.cross_entropy(engine.logits(ids)[:-1].float().cpu(), torch.tensor(ids[1:]))
    return ScoreResult(
        perplexity=math.exp(losses.item()),
        num_tokens=len(ids) - 1,
        random_weights=source.random,
    )


def trace(context: RankContext, request: TraceRequest, emit: Emit) -> TraceResult:
    """Rank 0 writes the timeline of all ranks, from the first span on."""
    engine = open_engine(context, open_model(request.model), request.tp, request.options)
    mine = engine.trace(request.num_steps, request.position)
    everyone = engine.comm.all_gather_object([asdict(span) for span in mine])
    spans = [Span(**fields) for found in everyone for fields in found]
    start_us = min(span.start_us for span in spans)
    spans = [replace(span, start_us=span.start_us - start_us) for span in spans]
    if context.rank == 0:
        try:
            write_trace(Path(request.path), spans)
        except OSError as error:
            raise RequestError(
                f"trace file {request.path!r} can't be written ({error})",
                expected="a path that can be made",
                remedy="give another --out",
            ) from error
    return TraceResult(num_spans=len(spans), summary=summarise(spans))


def open_engine(
    context: RankContext,
    source: ModelSource,
    tp: int,
    options: EngineOptions,
    logits: Logits = "none",
    sampling: Sampling = MOST_LIKELY,
    *,
    pp: int = 1,
    progress: Progress = no_progress,
) -> Engine:
    """This rank's engine on a mesh of `pp` stages of `tp` ranks, which must be all there are."""
    if tp * pp != context.world_size:
        raise RequestError(
            f"{pp} stages of {tp} tensor-parallel ranks in a job of {context.world_size}",
            expected="as many as ranks",
            remedy=f"use --tp {context.world_size}",
        )
    mesh = model_mesh(tp, pp)
    comm = open_communicator(context, mesh)
    return Engine(
        source,
        mesh,
        comm,
        options,
        node=context.node,
        device=context.device,
        logits=logits,
        sampling=sampling,
        progress=progress,
    )


def report_loading(emit: Emit) -> Progress:
    """Emits a Loaded every LOADED_S seconds, so none for a model that loads at once."""
    last = time.monotonic()

    def report(done_bytes: int, all_bytes: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOADED_S:
            last = now
            emit(Loaded(done_bytes=done_bytes, all_bytes=all_bytes))

    return report


def encode_prompt(
    source: ModelSource, tokenizer: Tokenizer, prompt: str, request: GenerateRequest
) -> list[int]:
    """Token ids of a prompt; RequestError when it and the answer do not fit the context."""
    if request.chat:
        text = tokenizer.chat_prompt([{"role": "user", "content": prompt}])
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    limit = context_limit(source.config, request.options)
    if len(ids) + request.max_new_tokens > limit:
        raise RequestError(
            f"a prompt of {len(ids)} tokens and {request.max_new_tokens} new ones",
            expected=f"at most {limit} positions together",
            remedy="shorten the prompt" + _wider(limit, source.config.max_positions),
        )
    return ids


def _wider(limit: int, max_positions: int) -> str:
    """What else helps where `limit` positions are too few."""
    if limit == max_positions:
        return " or lower --max-new-tokens; the model allows no more"
    return f", lower --max-new-tokens or raise --max-context (the model allows {max_positions})"
