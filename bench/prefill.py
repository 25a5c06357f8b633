"""Time to the first tokens of prompts: distmega and torch.compile with CUDA graphs, in one run.

    python -m bench.prefill "llama-3.2-1b prompt=512 batch=1" "qwen3-8b prompt=448 batch=16 tp=2"

On the host's clock, from the prompts' tokens on the host to the first token of each there, by
turns. Before each call GPUs and host have nothing to do for --pause-ms, as those of a server that
waits for a prompt; back to back, both sides run at the GPU's power limit and take longer. Weights
are random, bf16; both sides know the sizes from before, ours its programs, the peer its graph. With
--at-once cases are set up at the same time, a process each, which takes torch long; then one after
the other is timed alone. The floor is each product of a pass at cuBLAS's rate for its own shape,
measured in the same run, and attention at ATTENTION_FLOPS, of a GPU's part of the model; experts
take the longer of their products and the bytes of those that random routings hit.

Writes bench/results/prefill-<device>.json; `make tables` writes the table of docs/performance.md
from it.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.cases import Ready, make_parser, measure_cases, read_case
from bench.options import at_least, gpus_of_cases, read_options
from bench.records import Record
from bench.timing import captured, copy_bytes_per_us, elapsed_us
from bench.torch_decoder import make_peer
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator
from distmega.models.config import ModelConfig
from distmega.sources.load import open_model

SIZES = (128, 1), (448, 1), (2048, 1), (448, 16), (4032, 16)
CASES = tuple(
    f"{model} prompt={length} batch={batch}"
    for model in ("llama-3.2-1b", "qwen3-8b")
    for length, batch in SIZES
)
ATTENTION_FLOPS_PER_US = 600e6
NARROW_FLOPS_PER_US = 400e6
"""At head dim 64 and below, where softmax takes more of the time."""
ROUNDS = 15
WARM_ROUNDS = 3
PAUSE_MS = 100
BUDGET = EngineOptions().max_batched_tokens
CACHED_BYTES = 2**28
"""Weights that are multiplied in turn, more than a GPU's cache holds."""
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """What a case's name says."""

    text: str
    model: str
    num_tokens: int
    batch: int
    num_ranks: int


def parse_case(text: str) -> Case:
    """Reads "MODEL prompt=N batch=N", with " tp=N" behind it for several GPUs."""
    return Case(text, *read_case(text, "prompt", "batch"))


def product_us(rows: int, columns: int, depth: int) -> float:
    """Time of x [rows, depth] times a weight [columns, depth] by cuBLAS, the weight not cached."""
    num = max(1, -(-CACHED_BYTES // (2 * columns * depth)))
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(num, columns, depth, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for weight in w:
            F.linear(x, weight)

    run()
    graph, _ = captured(run)  # without the host's time, which few rows take less than
    graph.replay()
    return statistics.median(elapsed_us(graph.replay, num) for _ in range(5))


def floor_us(config: ModelConfig, case: Case) -> float:
    """Products and attention of all prompts, in passes of at most BUDGET tokens."""
    ranks, tokens = case.num_ranks, case.num_tokens * case.batch
    heads, width = config.num_heads // ranks, config.head_dim
    kv_heads, hidden = max(config.num_kv_heads // ranks, 1), config.hidden
    rows = min(tokens, BUDGET)
    shapes = ((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width)
    layers = range(config.num_layers)
    num_routed = sum(config.has_experts(layer) for layer in layers)
    a_pass = len(layers) * products_us(rows, shapes)
    if num_routed < len(layers):
        dense = products_us(rows, feed_forward(hidden, config.ffn // ranks))
        a_pass += (len(layers) - num_routed) * dense
    if num_routed:
        a_pass += num_routed * experts_us(config, rows, ranks)
    rate = ATTENTION_FLOPS_PER_US if width > 64 else NARROW_FLOPS_PER_US
    attention = case.batch * 2.0 * case.num_tokens**2 * heads * width / rate
    head = product_us(case.batch, config.vocab // ranks, hidden)
    return a_pass * tokens / rows + len(layers) * attention + head


def experts_us(config: ModelConfig, rows: int, ranks: int) -> float:
    """A layer of experts: each product of all chosen rows as if they had one matrix, or if that
    takes longer the bytes of experts that random routings hit, at the rate of a device copy; and
    the router and the shared expert.
    """
    hidden, width = config.hidden, config.expert_ffn // ranks
    num, chosen = config.num_experts, config.experts_per_token
    products = products_us(rows * chosen, feed_forward(hidden, width))
    num_hit = num * (1.0 - (1.0 - chosen / num) ** rows)
    read_us = num_hit * 3 * hidden * width * BF16_BYTES / copy_bytes_per_us()
    shared = feed_forward(hidden, config.shared_ffn // ranks) if config.shared_ffn else ()
    return max(products, read_us) + products_us(rows, ((num, hidden), *shared))


def feed_forward(hidden: int, width: int) -> tuple[tuple[int, int], ...]:
    """Columns and depths of its products: gate and up in one, down."""
    return (2 * width, hidden), (hidden, width)


def products_us(rows: int, shapes: Iterable[tuple[int, int]]) -> float:
    """Of as many rows each with matrices of these columns and depths."""
    return sum(product_us(rows, *shape) for shape in shapes)


def prompts_of(case: Case) -> list[list[int]]:
    """Token ids."""
    return [list(range(1 + n, 1 + n + case.num_tokens)) for n in range(case.batch)]


def our_prefill(case: Case, comm: Communicator) -> tuple[Engine, Callable[[], object]]:
    """An engine, and how it starts the sequences."""
    options = EngineOptions(max_context=case.num_tokens + 64, batch=case.batch)
    device = f"cuda:{torch.cuda.current_device()}"
    engine = Engine(open_model(case.model), comm.mesh, comm, options, device=device)
    prompts = prompts_of(case)
    return engine, lambda: engine.prefill_all(prompts)


def peer_prefill(case: Case, config: ModelConfig) -> Callable[[], object]:
    """The compiled peer on caches of its own, as many prompts at a time as the budget lets it."""
    torch._dynamo.reset()
    together = max(1, min(case.batch, BUDGET // case.num_tokens))
    heads = config.num_kv_heads // case.num_ranks
    shape = (together, heads, case.num_tokens + 64, config.head_dim)
    caches = [
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for _ in range(config.num_layers)
    ]
    model = make_peer(config, [(keys, values) for keys, values in caches], case.num_ranks)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    prompts = prompts_of(case)
    positions = torch.arange(case.num_tokens, device="cuda")

    def run() -> list[list[int]]:
        found = []
        with torch.inference_mode():
            for first in range(0, case.batch, together):
                tokens = torch.tensor(prompts[first : first + together], device="cuda")
                found += step(tokens, positions).tolist()
        return found

    return run


def measure(
    case: Case,
    comm: Communicator,
    rounds: int,
    with_peer: bool,
    ready: Ready,
    pause_ms: int = PAUSE_MS,
) -> Record:
    """Medians over `rounds` rounds in which each is timed once, all ranks at the same time. ready:
    called before them. pause_ms: before each.
    """
    config = open_model(case.model).config
    engine, ours = our_prefill(case, comm)
    runs = {"ours": ours}
    if with_peer:
        runs["torch.compile"] = peer_prefill(case, config)
    times: dict[str, list[float]] = {name: [] for name in runs}

    def run_round() -> None:
        for name, run in runs.items():
            torch.cuda.synchronize()
            time.sleep(pause_ms / 1000)
            comm.barrier()
            start = time.perf_counter()
            run()
            times[name].append(1e6 * (time.perf_counter() - start))

    for _ in range(WARM_ROUNDS):
        run_round()
    ready()
    for _ in range(rounds):
        run_round()
    medians = {
        name: round(statistics.median(found[WARM_ROUNDS:]), 1) for name, found in times.items()
    }
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


def main() -> None:
    """Measures the cases that the command line names, all if none."""
    parser = make_parser(__doc__, CASES, ROUNDS)
    parser.add_argument("--pause-ms", type=at_least(0), default=PAUSE_MS, help="before each call")
    arguments = read_options(parser, gpus_of_cases(lambda text: parse_case(text).num_ranks))
    measure_cases("prefill", arguments, parse_case, partial(measure, pause_ms=arguments.pause_ms))


if __name__ == "__main__":
    main()
