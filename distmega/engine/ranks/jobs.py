"""What runs on every rank for each command; launchers call these by name,
"distmega.engine.ranks.jobs:generate".

Comes in: a RankContext and a request. Goes out: emitted tokens and a result from rank 0.
Next on the walk: engine.py.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.arguments import require_whole
from distmega.engine import late
from distmega.engine.decode_plan import model_mesh
from distmega.engine.engine import Engine, require_choices, require_opened
from distmega.engine.ranks.answers import GrowingAnswer
from distmega.engine.ranks.communicators import left_on_failure, open_communicator
from distmega.engine.ranks.context import Emit, RankContext, require_context
from distmega.engine.requests import (
    MAX_DEGREE,
    Doing,
    EngineOptions,
    GenerateRequest,
    GenerateResult,
    Loaded,
    Logprob,
    Opened,
    ScoreRequest,
    ScoreResult,
    Token,
    TraceRequest,
    TraceResult,
)
from distmega.engine.texts import encode_prompts, encode_text
from distmega.engine.weight_loading import Progress, Tell, no_progress, tell_nobody
from distmega.errors import RequestError, argument, counted
from distmega.models.decoder import Logits
from distmega.models.sampling import MOST_LIKELY, Samplings
from distmega.sources.load import ModelSource, open_model
from distmega.trace_file import Span, write_trace
from distmega.whole_file import naming_unwritable, require_writable

LOADED_S = 0.25


def generate(context: RankContext, request: GenerateRequest, emit: Emit) -> GenerateResult:
    """Emits a Token as soon as it is known."""
    start = time.perf_counter()
    source = open_model(request.model)
    emit(Opened(random_weights=source.random))
    tokenizer = source.tokenizer()
    prompts = encode_prompts(request, source.config, tokenizer)
    engine = open_engine(
        context,
        source,
        request.tp,
        request.options,
        "none" if request.logprobs is None else "last",
        sampling=request.sampling,
        pp=request.pp,
        progress=report_loading(emit),
        tell=report_doing(emit),
    )
    several = f"{len(prompts)} prompts" if len(prompts) > 1 else "the prompt"
    emit(Doing(what=f"reading {several}"))
    times = [time.perf_counter()]
    eos_ids = () if request.ignore_eos else tokenizer.eos_ids
    answers = [GrowingAnswer(tokenizer, prompt, eos_ids, request.stop) for prompt in prompts]
    with closing(_steps(engine, prompts, request)) as steps:
        for tokens, logprobs in steps:
            times = [*times[:3], time.perf_counter()]
            for index, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
                if not answer.finish_reason:
                    found = logprobs[index] if logprobs else None
                    piece = answer.push(token, found)
                    emit(Token(id=token, text=piece, prompt=index, logprob=found))
            if all(answer.finish_reason for answer in answers):
                break
    loaded, first, second, last = (*times, *[times[-1]] * (4 - len(times)))
    return GenerateResult(
        answers=tuple(answer.finish() for answer in answers),
        load_s=loaded - start,
        first_token_s=first - loaded,
        second_token_s=second - first,
        decode_s=last - second,
        random_weights=source.random,
    )


def _steps(
    engine: Engine, prompts: list[list[int]], request: GenerateRequest
) -> Generator[tuple[tuple[int, ...], list[Logprob]]]:
    """Tokens of each step and, if asked for, their probabilities."""
    limit, sampling = request.max_new_tokens, request.sampling
    if request.logprobs is None:
        for tokens in engine.generate_all(prompts, limit, sampling, ignore_eos=True):
            yield tokens, []
        return
    for tokens, logits in engine.generate_with_logits(prompts, limit, sampling):
        yield tokens, logprobs_of(logits, tokens, request.logprobs)


def logprobs_of(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Of each row of logits, [rows, vocab], that of its token and the num_top largest."""
    found = logits.float().log_softmax(-1)
    chosen = found.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    values, ids = found.topk(min(num_top, found.shape[1]), -1)
    return [
        Logprob(logprob=one, top=tuple(zip(top_ids, top_values, strict=True)))
        for one, top_ids, top_values in zip(
            chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]


def score(context: RankContext, request: ScoreRequest, emit: Emit) -> ScoreResult:
    """Perplexity of a text, in windows where it is longer than the context."""
    source = open_model(request.model)
    emit(Opened(random_weights=source.random))
    ids = encode_text(request, source.config, source.tokenizer())
    engine = open_engine(
        context,
        source,
        request.tp,
        request.options,
        pp=request.pp,
        progress=report_loading(emit),
        tell=report_doing(emit),
    )
    emit(Doing(what=f"reading {counted(len(ids), 'token')}"))
    total = 0.0
    for window in text_windows(len(ids), engine.decode_plan.max_context):
        logits = engine.logits(ids[window.start : window.stop])
        rows = logits[window.first - window.start - 1 : -1].float().cpu()
        wanted = torch.tensor(ids[window.first : window.stop], device="cpu")
        total += F.cross_entropy(rows, wanted, reduction="sum").item()
    mean = torch.tensor(total / (len(ids) - 1), dtype=torch.float64, device="cpu")
    return ScoreResult(
        perplexity=mean.exp().item(),
        num_tokens=len(ids) - 1,
        random_weights=source.random,
    )


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens start to stop of a text are read together; those from `first` on are predicted."""

    start: int
    first: int
    stop: int


def text_windows(num_tokens: int, size: int) -> Iterator[Window]:
    """Windows of at most `size` tokens that predict each token but the first once, after at least
    half a window where there are as many before it.
    """
    first = 1
    while first < num_tokens:
        start = max(0, min(first - size // 2, num_tokens - size)) if num_tokens > size else 0
        start = min(start, first - 1)
        stop = min(start + size, num_tokens)
        yield Window(start, first, stop)
        first = stop


def trace(context: RankContext, request: TraceRequest, emit: Emit) -> TraceResult:
    """Rank 0 writes the timeline of all ranks, from the first span on. RequestError, before the
    model is read, where it can't write the file.
    """
    path = Path(request.path)
    if context.rank == 0:
        with naming_unwritable(path, "path"):
            require_writable(path)
    engine = open_engine(context, open_model(request.model), request.tp, request.options)
    mine = engine.trace(request.num_steps, request.position)
    everyone = engine.comm.all_gather_object([asdict(span) for span in mine])
    spans = [Span(**fields) for found in everyone for fields in found]
    start_us = min(span.start_us for span in spans)
    spans = [replace(span, start_us=span.start_us - start_us) for span in spans]
    if context.rank == 0:
        with naming_unwritable(path, "path"):
            write_trace(path, spans)
    return TraceResult(num_spans=len(spans), summary=late.summarise(spans))


def open_engine(
    context: RankContext,
    source: ModelSource,
    tp: int,
    options: EngineOptions,
    logits: Logits = "none",
    sampling: Samplings = MOST_LIKELY,
    *,
    pp: int = 1,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> Engine:
    """This rank's engine on a mesh of `pp` stages of `tp` ranks, which must be all there are; they
    call this together. logits, sampling, progress, tell: as of Engine.

    RequestError for another number of ranks and for a source that isn't open; else as Engine.
    """
    require_opened(source, options)
    require_context(context)
    require_whole("tp", tp, 1, MAX_DEGREE)
    require_whole("pp", pp, 1, MAX_DEGREE)
    if tp * pp != context.world_size:
        raise RequestError(
            f"{counted(pp, 'stage')} of {counted(tp, 'tensor-parallel rank')} in a job of"
            f" {context.world_size}",
            expected="as many as ranks",
            remedy=f"use {argument('tp')} {context.world_size}",
        )
    mesh = model_mesh(tp, pp)
    require_choices(logits, sampling)
    with left_on_failure(open_communicator(context, mesh, options.timeout_s)) as comm:
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
            tell=tell,
            closes_comm=True,
        )


def report_doing(emit: Emit) -> Tell:
    """Emits a Doing for what is done next."""
    return lambda what: emit(Doing(what=what))


def report_loading(emit: Emit) -> Progress:
    """Emits a Loaded every LOADED_S seconds, so none for a model that loads at once."""
    last = time.monotonic()

    def report(done_bytes: int, all_bytes: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOADED_S:
            last = now
            emit(Loaded(done_bytes=done_bytes, all_bytes=all_bytes))

    return report
