"""Where the time of prompts goes: kernels of one replay of their graph, by torch's profiler.

    python -m bench.prefill_kernels "qwen3-8b prompt=2048 batch=1 tp=2" [--layers 12] [--top 14]

Random weights, bf16. Kernels of one pass with their counts and times on the first rank, what the
GPU idles between them, and the time on the host's clock without the profiler. Nothing is written:
it says where to look, bench/prefill.py says how long it takes.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.options import at_least, gpus_of_cases, read_options
from bench.prefill import Case, parse_case, prompts_of
from bench.ranks import run_on_ranks
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator
from distmega.sources.load import ModelSource, open_model

Span = tuple[str, float, float]
"""Name, start and length of what ran on a GPU, us."""

ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
NAME = 72
"""Characters of a kernel's name that are printed."""
SETTLED = 4
"""Runs after which a size is a graph."""


def with_layers(source: ModelSource, num_layers: int) -> ModelSource:
    """The model cut to its first layers, whole for 0."""
    config = source.config
    if not num_layers:
        return source
    return replace(source, config=replace(config, num_layers=num_layers))  # type: ignore[type-var]


def spans_of(trace: Path) -> list[Span]:
    """What ran on the GPU, by its start."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [
        (event["name"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("cat") in ON_GPU and event.get("ph") == "X"
    ]
    return sorted(found, key=lambda span: span[1])


def busy_us(spans: Sequence[Span]) -> float:
    """Time in which at least one of them runs."""
    total, stop = 0.0, float("-inf")
    for _, start, length in spans:
        total += max(0.0, start + length - max(start, stop))
        stop = max(stop, start + length)
    return total


def print_spans(spans: Sequence[Span], top: int) -> None:
    """A line a kernel, by time; copies apart, since they run beside kernels."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for name, _, length in spans:
        lengths[name].append(length)
    kernels = [span for span in spans if not span[0].startswith("Mem")]
    first = spans[0][1]
    last = max(start + length for _, start, length in spans)
    whole, busy = last - first, busy_us(kernels)
    print(f"  {whole:9.0f} us from the first to the last, {len(kernels)} kernels")
    print(f"  {busy:9.0f} us some kernel runs, {whole - busy:.0f} us none does")
    ordered = sorted(lengths.items(), key=lambda item: -sum(item[1]))
    for name, each in ordered[:top]:
        print(f"  {sum(each):9.0f} us {len(each):5d} x {sum(each) / len(each):8.1f}  {name[:NAME]}")
    rest = [length for _, each in ordered[top:] for length in each]
    print(f"  {sum(rest):9.0f} us {len(rest):5d} x           others")


def profile_case(comm: Communicator, case: Case, num_layers: int, top: int) -> None:
    """Prints the table of one case on the first rank."""
    options = EngineOptions(max_context=case.num_tokens + 64, batch=case.batch)
    source = with_layers(open_model(case.model), num_layers)
    device = f"cuda:{torch.cuda.current_device()}"
    engine = Engine(source, comm.mesh, comm, options, device=device)
    prompts = prompts_of(case)
    times = []
    for number in range(SETTLED + 7):
        torch.cuda.synchronize()
        comm.barrier()
        start = time.perf_counter()
        engine.prefill_all(prompts)
        times += [1e6 * (time.perf_counter() - start)] if number >= SETTLED else []
    comm.barrier()
    if comm.rank:
        for _ in range(2):
            engine.prefill_all(prompts)
    else:
        engine.prefill_all(prompts)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            engine.prefill_all(prompts)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            found.export_chrome_trace(str(trace))
            spans = spans_of(trace)
        layers = f", {num_layers} layers" if num_layers else ""
        print(f"{case.text}{layers}: {statistics.median(times):.0f} us on the host's clock")
        print_spans(spans, top)
    comm.barrier()
    del engine
    torch.cuda.empty_cache()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--layers", type=at_least(0), default=0)
    parser.add_argument("--top", type=at_least(1), default=14)
    arguments = read_options(parser, gpus_of_cases(lambda text: parse_case(text).num_ranks))
    for case in map(parse_case, arguments.cases):
        run_on_ranks(profile_case, case.num_ranks, case, arguments.layers, arguments.top)


if __name__ == "__main__":
    main()
