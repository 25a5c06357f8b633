"""Time of one decode step: distmega, torch.compile and the floor, alternating in one run.

    python -m bench.decode "llama-3.2-1b batch=1 ctx=512 tp=2" ... [--rounds 20] [--no-peer]
        [--by-layer] [--at-once]

A case names a preset, a batch, a position of the KV cache, the same for all sequences, and how
many GPUs share the model, 1 unless said; weights and the cache are random, bf16, and both sides
use one cache. The floor is the bytes of all weights, cached keys and values that a GPU reads in a
step over the rate of a device copy, measured in the same run; of experts those that the steps' rows
have chosen, as the kernel counts them. Experts of the peer are written in the form that a trial of
one layer finds faster. With --by-layer the peer is not compiled as a whole, which takes minutes
where a model has many layers, but a layer of each kind once, and a step is captured as one CUDA
graph: as many kernels, for only the norm in front of a layer could join what ends the one before.
Writes bench/results/decode-<device>.json; `make tables` writes
the table of docs/performance.md from it.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases import Ready, StepCase, make_parser, measure_cases, read_case
from bench.options import gpus_of_cases, read_options
from bench.records import Record
from bench.timing import Call, captured, copy_bytes_per_us, elapsed_us
from bench.torch_decoder import ExpertForm, TorchDecoder, make_experts, make_peer
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.runtime.gpus import AHEAD_CYCLES
from distmega.models.config import ModelConfig
from distmega.models.weights.tensors import weight_specs
from distmega.sources.load import open_model

CASES = (
    *(f"{n} batch=1 ctx=512" for n in ("llama-3.2-1b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")),
    *(
        f"{name} batch={batch} ctx={context}"
        for name in ("llama-3.2-1b", "qwen3-8b")
        for batch in (1, 16)
        for context in (4096, 32768)
    ),
    *(
        f"{name} batch={batch} ctx=512"
        for name in ("llama-3.2-1b", "qwen3-8b")
        for batch in (32, 64)
    ),
    *(f"qwen3-30b-a3b batch={batch} ctx=512" for batch in (1, 8, 16)),
)
STEPS = 16
"""Decode steps between two events: a launch of ours, so many calls of the peer."""
TRIALS = 32
"""Rows that a trial of experts has, one behind the other: more than caches keep experts of."""


def parse_case(text: str) -> StepCase:
    """Reads "MODEL batch=N ctx=N", with " tp=N" behind it for several GPUs."""
    return StepCase(text, *read_case(text, "batch", "ctx"))


def step_bytes(config: ModelConfig, case: StepCase, num_hits: float) -> float:
    """Bytes that a step reads: all weights but the embedding, unless it is also the head, and the
    cached keys and values. num_hits: experts of all layers that some row chooses.
    """
    skipped = set() if config.tied else {"embed"}
    specs = weight_specs(config)
    sizes = {name: 2 * math.prod(specs[name].shape) for name in specs if name not in skipped}
    experts = [name for name in sizes if name.rpartition(".")[2].startswith("expert_")]
    of_experts = sum(sizes.pop(name) for name in experts)
    num_experts = config.num_experts * len(layers_of_experts(config))
    hit = of_experts * num_hits / num_experts if experts else 0.0
    position = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return sum(sizes.values()) + hit + case.batch * (case.context - 1) * position


def layers_of_experts(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.num_layers) if config.has_experts(layer)]


def hits_of(case: StepCase, config: ModelConfig, engine: Engine, run: Call) -> float:
    """Experts of all layers that rows of a step choose, in the mean over the steps of a run."""
    if case.batch == 1 or not layers_of_experts(config):
        return config.experts_per_token * len(layers_of_experts(config))
    stepping = engine.stepping
    assert isinstance(stepping, BatchRunner)
    before = stepping.num_hits
    run()
    return (stepping.num_hits - before) / STEPS


def open_engine(case: StepCase, comm: Communicator) -> Engine:
    """Our side of a case, its cache random."""
    options = EngineOptions(max_context=case.context + STEPS, batch=case.batch)
    device = f"cuda:{torch.cuda.current_device()}"
    engine = Engine(open_model(case.model), comm.mesh, comm, options, device=device)
    for cache in engine.decode_plan.states.tensors:
        engine.tensor(cache).normal_()
    return engine


def our_step(case: StepCase, engine: Engine) -> Call:
    """STEPS steps in one launch, or one graph each, always from the same position."""
    stepping = engine.stepping
    if stepping is None:
        raise SystemExit(
            f"{case.model} does not choose its tokens on the GPU; expected triton, and states that "
            "a step which runs again leaves as they are"
        )

    def run() -> None:
        # other tokens, since rows that are alike go to the same experts
        stepping.start(range(1, case.batch + 1), [case.context - 1] * case.batch)
        stepping.run_steps(STEPS)

    return run


def peer_step(case: StepCase, config: ModelConfig, engine: Engine, by_layer: bool) -> Call:
    """STEPS calls of the compiled peer at the same position, on the engine's caches."""
    form = faster_form(case, config) if layers_of_experts(config) else "grouped"
    torch._dynamo.reset()
    caches = [
        tuple(
            engine.tensor(f"layers.{layer}.{letter}_cache").view(
                case.batch, config.num_kv_heads // case.num_ranks, -1, config.head_dim
            )
            for letter in "kv"
        )
        for layer in range(config.num_layers)
    ]
    model = make_peer(config, caches, case.num_ranks, form)
    # other tokens, as in our_step
    tokens = torch.arange(1, case.batch + 1, device="cuda")[:, None]
    position = torch.tensor([case.context - 1], device="cuda")
    step = compiled_peer(case, model, tokens, position, by_layer)

    def run() -> None:
        with torch.inference_mode(), backends(case):
            for _ in range(STEPS):
                step()

    return run


def compiled_peer(
    case: StepCase, model: TorchDecoder, tokens: Tensor, position: Tensor, by_layer: bool
) -> Callable[[], object]:
    """A step of the compiled peer, as CUDA graph."""
    if not by_layer:
        whole = torch.compile(model, mode="max-autotune", fullgraph=True)
        return lambda: whole(tokens, position)
    model.compile_by_layer("max-autotune-no-cudagraphs")
    with torch.inference_mode(), backends(case):
        return captured(lambda: model(tokens, position))[0].replay


def faster_form(case: StepCase, config: ModelConfig) -> ExpertForm:
    """The form in which one layer of experts, compiled, takes rows of this many sequences in less
    time. The layer's own inputs are random, so that rows choose as the model's do.
    """
    x = torch.randn(TRIALS, case.batch, 1, config.hidden, device="cuda", dtype=torch.bfloat16)
    times: dict[ExpertForm, float] = {}
    for form in get_args(ExpertForm):
        torch._dynamo.reset()
        layer = make_experts(config, case.num_ranks, form)
        layer.compile(mode="max-autotune-no-cudagraphs", fullgraph=True)
        with torch.inference_mode():
            replay = captured(partial(apply_each, layer, x))[0].replay
        times[form] = min(elapsed_us(replay, TRIALS) for _ in range(3))
    return min(times, key=lambda form: times[form])


def apply_each(layer: Callable[[Tensor], object], several: Sequence[Tensor]) -> None:
    """Calls the layer with each of several inputs."""
    for x in several:
        layer(x)


def backends(case: StepCase) -> AbstractContextManager[None]:
    """The peer's attention: of several sequences by cuDNN where it can, which of all that torch has
    for a mask reads cached positions fastest (docs/notes/batch.md); else torch's own choice.
    """
    if case.batch == 1:
        return nullcontext()
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def meet(comm: Communicator) -> None:
    """All GPUs begin what follows at the same time, and have it in their queues by then, as where
    each launch is made while the one before runs.
    """
    comm.barrier()
    torch.cuda._sleep(AHEAD_CYCLES)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cuda"))


def measure(
    case: StepCase,
    comm: Communicator,
    rounds: int,
    with_peer: bool,
    ready: Ready,
    *,
    by_layer: bool = False,
) -> Record:
    """Medians over `rounds` rounds in which each is timed once, all ranks at the same time. ready:
    called before them.
    """
    config = open_model(case.model).config
    engine = open_engine(case, comm)
    runs = {"ours": our_step(case, engine)}
    if with_peer:
        runs["torch.compile"] = peer_step(case, config, engine, by_layer)
    for run in runs.values():
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    ready()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            meet(comm)
            times[name].append(elapsed_us(run, STEPS))
    medians = {name: round(statistics.median(found), 1) for name, found in times.items()}
    ours_us = medians.pop("ours")
    num_hits = hits_of(case, config, engine, runs["ours"])
    floor_us = step_bytes(config, case, num_hits) / case.num_ranks / copy_bytes_per_us()
    return Record(
        case=case.text,
        device=torch.cuda.get_device_name(),
        num_gpus=case.num_ranks,
        ours_us=ours_us,
        peers=medians,
        floor_us=round(floor_us, 1),
    )


def main() -> None:
    """Measures the cases that the command line names, all if none."""
    parser = make_parser(__doc__, CASES, 20)
    parser.add_argument("--by-layer", action="store_true")
    arguments = read_options(parser, gpus_of_cases(lambda text: parse_case(text).num_ranks))
    with_options = partial(measure, by_layer=arguments.by_layer)
    measure_cases("decode", arguments, parse_case, with_options)


if __name__ == "__main__":
    main()
