"""Tokens and first tokens of prompts as a server would give them, to stand beside other engines.

    python -m bench.serve_like llama-3.2-1b|qwen3-8b TP [BATCH,PROMPT ...]

A token: the time of 129 tokens of all prompts less the time of 1, divided by 128. First token: the
time of 1 token of all prompts. On the host's clock, medians, weights and prompts are random. Prints
a line a case as they come, {case: {tpot_us, ttft_us}}; each has an engine of its own, with a batch
as large.
"""

import argparse
import gc
import json
import random
import statistics
import time

import torch

from bench.options import at_least, read_options
from bench.ranks import run_on_ranks
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator
from distmega.sources.load import open_model

CASES = ("1,448", "16,448", "1,2048", "16,4032")
NUM_TOKENS = 129
ROUNDS = 5


def parse_case(text: str) -> tuple[int, int]:
    """Reads "BATCH,PROMPT"; ends the program where it is no such thing."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise SystemExit(f"case {text!r}; expected 'BATCH,PROMPT', such as 16,448; correct it")
    return int(parts[0]), int(parts[1])


def serve(engine: Engine, comm: Communicator, prompts: list[list[int]], num_tokens: int) -> float:
    """Microseconds until all prompts have num_tokens tokens."""
    comm.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in engine.generate_all(prompts, num_tokens, ignore_eos=True):
        pass
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


def measure(comm: Communicator, model: str, batch: int, length: int) -> dict[str, int]:
    """One case on this rank; every rank takes part."""
    options = EngineOptions(max_context=length + NUM_TOKENS + 1, batch=batch)
    device = f"cuda:{torch.cuda.current_device()}"
    engine = Engine(open_model(model), comm.mesh, comm, options, device=device)
    numbers = random.Random(0)
    prompts = [[numbers.randrange(100, 100_000) for _ in range(length)] for _ in range(batch)]
    for num_tokens in (8, 8, 1):
        serve(engine, comm, prompts, num_tokens)
    first = statistics.median(serve(engine, comm, prompts, 1) for _ in range(ROUNDS))
    all_us = statistics.median(serve(engine, comm, prompts, NUM_TOKENS) for _ in range(3))
    return {"tpot_us": round((all_us - first) / (NUM_TOKENS - 1)), "ttft_us": round(first)}


def run(comm: Communicator, model: str, cases: list[tuple[int, int]]) -> None:
    """All cases; the first rank prints."""
    for batch, length in cases:
        found = {f"batch={batch} prompt={length}": measure(comm, model, batch, length)}
        if comm.rank == 0:
            print("distmega", model, "tp", comm.mesh.num_ranks, json.dumps(found), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("tp", type=at_least(1))
    parser.add_argument("cases", nargs="*", default=CASES)
    arguments = read_options(parser, lambda given: given.tp)
    cases = [parse_case(case) for case in arguments.cases]
    run_on_ranks(run, arguments.tp, arguments.model, cases)


if __name__ == "__main__":
    main()
