"""Time to the first token of a prompt: distmega and torch.compile with CUDA graphs, in one run.

    python -m bench.prefill "llama-3.2-1b prompt=512" "llama-3.2-1b prompt=512 tp=2" ... [--no-peer]

On the host's clock, from the prompt's tokens on the host to the first token there, by turns.
Weights are random, bf16; both sides know the prompt's length from before, ours its program, the
peer its graph. The floor is what a GPU needs for its part of the products or, if that is longer, of
the weights' bytes, at the rates of a large matmul and of a copy measured in the same run.
Writes bench/results/prefill-<device>.json; `make tables` writes the README's table from it.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cases import read_case, run_cases
from bench.records import Record
from bench.timing import copy_bytes_per_us, elapsed_us
from bench.torch_decoder import make_peer
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator
from distmega.models.config import ModelConfig
from distmega.models.load import open_model
from distmega.models.weights import weight_specs

LENGTHS = 32, 128, 512, 2048
CASES = tuple(f"{n} prompt={length}" for n in ("llama-3.2-1b", "qwen3-8b") for length in LENGTHS)
MATMUL = 8192
"""Rows, columns and depth of the matmul that the rate is of."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a case's name says."""

    text: str
    model: str
    num_tokens: int
    num_ranks: int


def parse_case(text: str) -> Case:
    """Reads "MODEL prompt=N", with " tp=N" behind it for several GPUs."""
    return Case(text, *read_case(text, "prompt"))


def flops_per_us() -> float:
    """Rate of a bf16 matmul by cuBLAS."""
    x, w = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [elapsed_us(lambda: x @ w, 1) for _ in range(20)]
    return 2.0 * MATMUL**3 / statistics.median(times)


def floor_us(config: ModelConfig, case: Case) -> float:
    """Products of all tokens with the layers' weights, or all weights read once."""
    specs = weight_specs(config)
    sizes = {name: math.prod(spec.shape) for name, spec in specs.items()}
    flops = 2.0 * case.num_tokens * sum(n for name, n in sizes.items() if name.startswith("layers"))
    num_bytes = 2.0 * (sum(sizes.values()) - (0 if config.tied else sizes["embed"]))
    return max(flops / flops_per_us(), num_bytes / copy_bytes_per_us()) / case.num_ranks


def our_prefill(case: Case, comm: Communicator) -> tuple[Engine, Callable[[], int]]:
    """An engine, and how it starts a sequence."""
    options = EngineOptions(max_context=case.num_tokens + 64)
    device = f"cuda:{torch.cuda.current_device()}"
    engine = Engine(open_model(case.model), comm.mesh, comm, options, device=device)
    prompt = list(range(1, case.num_tokens + 1))
    return engine, lambda: engine.prefill(prompt)


def peer_prefill(case: Case, config: ModelConfig) -> Callable[[], int]:
    """The compiled peer on caches of its own."""
    torch._dynamo.reset()
    heads = config.num_kv_heads // case.num_ranks
    shape = (1, heads, case.num_tokens + 64, config.head_dim)
    caches = [
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for _ in range(config.num_layers)
    ]
    model = make_peer(config, [(keys, values) for keys, values in caches], case.num_ranks)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    prompt = list(range(1, case.num_tokens + 1))
    positions = torch.arange(case.num_tokens, device="cuda")

    def run() -> int:
        with torch.inference_mode():
            return int(step(torch.tensor([prompt], device="cuda"), positions))

    return run


def measure(case: Case, comm: Communicator, rounds: int, with_peer: bool) -> Record:
    """Medians over `rounds` rounds in which each is timed once, all ranks at the same time."""
    config = open_model(case.model).config
    engine, ours = our_prefill(case, comm)
    runs = {"ours": ours}
    if with_peer:
        runs["torch.compile"] = peer_prefill(case, config)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(3 + rounds):
        for name, run in runs.items():
            torch.cuda.synchronize()
            comm.barrier()
            start = time.perf_counter()
            run()
            if number >= 3:
                times[name].append(1e6 * (time.perf_counter() - start))
    medians = {name: round(statistics.median(found), 1) for name, found in times.items()}
    ours_us = medians.pop("ours")
    del engine
    return Record(
        case=case.text,
        device=torch.cuda.get_device_name(),
        num_gpus=case.num_ranks,
        ours_us=ours_us,
        peers=medians,
        floor_us=round(floor_us(config, case), 1),
    )


if __name__ == "__main__":
    run_cases("prefill", __doc__, CASES, 15, parse_case, measure)
