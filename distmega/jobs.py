"""What runs on every rank for each command; launchers call these by name, "distmega.jobs:generate".

Comes in: a RankContext and a request. Goes out: emitted tokens and a result from rank 0.
Next on the walk: engine.py.
"""

import itertools
import math
import time

import torch
import torch.nn.functional as F

from distmega.blueprint import context_limit
from distmega.engine import Engine
from distmega.errors import RequestError
from distmega.hostir.comm import Communicator, GlooCommunicator, SingleCommunicator
from distmega.hostir.nccl import NcclCommunicator
from distmega.models.decoder import Logits
from distmega.models.load import ModelSource, open_model
from distmega.models.tokenizer import Tokenizer
from distmega.ranks import Emit, RankContext
from distmega.requests import (
    EngineOptions,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    Token,
)
from distmega.sharding.mesh import DeviceMesh


def generate(context: RankContext, request: GenerateRequest, emit: Emit) -> GenerateResult:
    """Emits a Token as soon as it is known, up to max_new_tokens or an end token."""
    start = time.perf_counter()
    source = open_model(request.model)
    tokenizer = source.tokenizer()
    prompt = encode_prompt(source, tokenizer, request)
    engine = open_engine(context, source, request.tp, request.options)
    loaded = first = time.perf_counter()
    stream, ids, text = tokenizer.stream(prompt), list[int](), ""
    for token in itertools.islice(engine.generate(prompt), request.max_new_tokens):
        if not ids:
            first = time.perf_counter()
        ids.append(token)
        if token in tokenizer.eos_ids:
            break
        piece = stream.push(token)
        text += piece
        emit(Token(id=token, text=piece))
    tail = stream.finish()
    return GenerateResult(
        ids=tuple(ids),
        text=text + tail,
        tail=tail,
        num_prompt_tokens=len(prompt),
        load_s=loaded - start,
        first_token_s=first - loaded,
        decode_s=time.perf_counter() - first,
    )


def score(context: RankContext, request: ScoreRequest, emit: Emit) -> ScoreResult:
    """Perplexity of a text that fits the context."""
    source = open_model(request.model)
    ids = source.tokenizer().encode(request.text)
    if len(ids) < 2:
        raise RequestError(
            f"a text of {len(ids)} tokens", expected="at least 2", remedy="give a longer text"
        )
    engine = open_engine(context, source, request.tp, request.options)
    losses = F.cross_entropy(engine.logits(ids)[:-1].float().cpu(), torch.tensor(ids[1:]))
    return ScoreResult(perplexity=math.exp(losses.item()), num_tokens=len(ids) - 1)


def open_engine(
    context: RankContext,
    source: ModelSource,
    tp: int,
    options: EngineOptions,
    logits: Logits = "none",
) -> Engine:
    """This rank's engine on a mesh of `tp` ranks, which must be all there are."""
    if tp != context.world_size:
        raise RequestError(
            f"{tp} tensor-parallel ranks in a job of {context.world_size}",
            expected="as many as ranks",
            remedy=f"use --tp {context.world_size}",
        )
    mesh = DeviceMesh(tp=tp)
    comm = open_communicator(context, mesh)
    return Engine(
        source, mesh, comm, options, node=context.node, device=context.device, logits=logits
    )


def open_communicator(context: RankContext, mesh: DeviceMesh) -> Communicator:
    """How this rank reaches the others of the mesh: NCCL between GPUs, gloo between CPUs."""
    if mesh.num_ranks == 1:
        return SingleCommunicator(mesh)
    kind = NcclCommunicator if context.backend == "nccl" else GlooCommunicator
    return kind(mesh, context.rank)


def encode_prompt(source: ModelSource, tokenizer: Tokenizer, request: GenerateRequest) -> list[int]:
    """Token ids of the prompt; RequestError when it and the answer do not fit the context."""
    if request.chat:
        text = tokenizer.chat_prompt([{"role": "user", "content": request.prompt}])
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(request.prompt)
    limit = context_limit(source.config, request.options)
    if len(ids) + request.max_new_tokens > limit:
        raise RequestError(
            f"a prompt of {len(ids)} tokens and {request.max_new_tokens} new ones",
            expected=f"at most {limit} positions together",
            remedy="shorten the prompt, lower --max-new-tokens or raise --max-context "
            f"(the model allows {source.config.max_positions})",
        )
    return ids
