"""What the end-to-end tests run on every rank; launchers call it "tests.e2e.targets:measure"."""

import itertools
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distmega.engine.ranks.context import Emit, RankContext
from distmega.engine.ranks.jobs import open_engine
from distmega.engine.requests import EngineOptions
from distmega.sources.load import open_model

Logits = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Prefill all of `ids`; then, for each seed, prefill the first `num_prefilled` and decode the
    next `num_decoded` one by one; then continue `prompt` greedily by `num_greedy` tokens.
    """

    model: str
    ids: Sequence[int]
    num_prefilled: int = 1
    num_decoded: int
    seeds: Sequence[int] = (0,)
    prompt: Sequence[int] = ()
    num_greedy: int = 0
    pp: int = 1
    options: EngineOptions = EngineOptions(max_context=512)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Logits [len(ids), vocab] of prefill; for each seed, [num_decoded, vocab] of decode.

    peak_bytes: the most memory that rank 0 ever held.
    """

    prefill: Logits
    decode: list[Logits]
    greedy: list[int]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class MeasureBatch:
    """Prefill all but the last `num_decoded` of each sequence, then decode these together."""

    model: str
    sequences: Sequence[Sequence[int]]
    num_decoded: int
    options: EngineOptions


@dataclass(frozen=True, kw_only=True)
class MeasurePacked:
    """Prefill all but the last `num_decoded` of each sequence in one call, then decode these
    together.
    """

    model: str
    sequences: Sequence[Sequence[int]]
    num_decoded: int
    options: EngineOptions


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The token after each prompt; logits [num_decoded, vocab] of each sequence; and of a prefill
    of the first sequence [its tokens, vocab].
    """

    tokens: list[int]
    decode: list[Logits]
    prefill: Logits


def measure_packed(context: RankContext, request: MeasurePacked, emit: Emit) -> Packed:
    """Does what the request says with one engine."""
    source = open_model(request.model)
    engine = open_engine(context, source, context.world_size, request.options, logits="last")
    tokens = engine.prefill_all([ids[: -request.num_decoded] for ids in request.sequences])
    steps = zip(*(ids[-request.num_decoded :] for ids in request.sequences), strict=True)
    rows = [engine.decode_step(step)["logits"].clone() for step in steps]
    together = torch.stack(rows, 1)[: len(request.sequences)]
    decode = [rows.float().numpy() for rows in together]
    prefill = engine.logits(request.sequences[0]).float().numpy()
    return Packed(tokens=tokens, decode=decode, prefill=prefill)


def measure_batch(context: RankContext, request: MeasureBatch, emit: Emit) -> list[Logits]:
    """Logits [num_decoded, vocab] of each sequence."""
    source = open_model(request.model)
    engine = open_engine(context, source, context.world_size, request.options, logits="last")
    for slot, ids in enumerate(request.sequences):
        engine.prefill(ids[: -request.num_decoded], slot)
    steps = zip(*(ids[-request.num_decoded :] for ids in request.sequences), strict=True)
    rows = [engine.decode_step(tokens)["logits"].clone() for tokens in steps]
    together = torch.stack(rows, 1)[: len(request.sequences)]
    return [rows.float().numpy() for rows in together]


def measure(context: RankContext, request: Measure, emit: Emit) -> Measured:
    """Does what the request says with one engine."""
    source = open_model(request.model)
    tp = context.world_size // request.pp
    engine = open_engine(context, source, tp, request.options, logits="last", pp=request.pp)
    prefill = engine.logits(request.ids).numpy()
    decode = []
    start, stop = request.num_prefilled, request.num_prefilled + request.num_decoded
    for seed in request.seeds:
        engine.reseed(seed)
        engine.prefill(request.ids[:start])
        rows = [engine.decode_step([token])["logits"] for token in request.ids[start:stop]]
        decode.append(np.concatenate([row.numpy() for row in rows]))
    greedy = list(
        itertools.islice(engine.generate(request.prompt, ignore_eos=True), request.num_greedy)
    )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measured(prefill=prefill, decode=decode, greedy=greedy, peak_bytes=peak_bytes)
