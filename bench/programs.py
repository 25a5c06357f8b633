"""Programs that are no language model's decode step, through compile_plan: distmega, torch.compile
and torch's own CUDA graph of the same ops, alternating.

    python -m bench.programs "gated_mlp rows=1" "gated_mlp rows=64 tp=2" gpt2_step ...

Five processes time every case by GPU events, calls queued, in turns; records hold the medians of
the processes. They set up a case at the same time, then one after the other measures alone: see
Turns. Torch compiles before that, each case in a process of its own, and keeps what it compiles;
a single process (--processes 1) compiles for itself. The floor is what a GPU needs to read its
weights and states, or for its products if that is longer, at rates measured in the same process.
The host's time of a call, while the GPU is at rest, stands apart in its own file. Weights are
random, bf16. Over ranks the peers are torch with NCCL in a CUDA graph, compiled or not. Writes
bench/results/programs-<device>.json and programs-host-<device>.json.
"""

import argparse
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import read_case
from bench.decode import meet
from bench.llama import VARIANTS, llama_1b
from bench.models import Model, Region, encoder, gated_mlp, gpt2_step, mixer
from bench.options import at_least, gpus_of_cases, read_options, writable_file
from bench.ranks import TIMEOUT_S, run_on_ranks
from bench.records import Record, add_book_options, open_book
from bench.timing import (
    Call,
    captured,
    copy_bytes_per_us,
    elapsed_us,
    flops_per_us,
    in_turn,
)
from bench.turns import Turns, tune_alone
from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl_native import NativeNccl
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.machines import H200
from distmega.sharding.planner import plan_program

OURS, COMPILED, GRAPH = "ours", "torch.compile", "torch graph"
CASES = (
    *(f"gated_mlp rows={rows}" for rows in (1, 16, 64, 256, 1024)),
    *(f"gated_mlp rows={rows} tp=2" for rows in (1, 16, 64, 256, 1024)),
    "gpt2_step", "encoder rows=128", "mixer",
    *(f"llama-1b variant={name}{tp}" for tp in ("", " tp=2") for name in VARIANTS),
)  # fmt: skip
CALLS = 16
"""Calls between two events."""
HOST_CALLS = 50
"""Calls of which the host's time is the median."""
TOLERANCE = 0.06
"""Of the largest value, between distmega and torch, both in bf16 through many layers."""

Line = Mapping[str, Any]
"""What a process found of a case: `us` and `host_us` by name, `floor_us`, how `far` from torch."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a case's name says."""

    text: str
    name: str
    rows: int
    num_ranks: int
    variant: str = ""


def parse_case(text: str) -> Case:
    """Reads "gated_mlp rows=N tp=N", "encoder rows=N", "gpt2_step", "mixer" or "llama-1b
    variant=NAME tp=N".
    """
    variant = re.search(r" variant=(\S+)", text)
    numbers = ("rows",) if text.startswith(("gated_mlp", "encoder")) else ()
    name, *found, num_ranks = read_case(text.replace(variant[0], "") if variant else text, *numbers)
    chosen = variant[1] if variant else ""
    if name not in MODELS or (chosen in VARIANTS) != (name == "llama-1b"):
        expected = f"one of {', '.join(MODELS)}, llama-1b with variant={'|'.join(VARIANTS)}"
        raise SystemExit(f"case {text!r}; expected {expected}; correct it")
    return Case(text, name, found[0] if found else 0, num_ranks, chosen)


MODELS: dict[str, Callable[[Case], Model]] = {
    "gated_mlp": lambda case: gated_mlp(case.rows),
    "gpt2_step": lambda case: gpt2_step(),
    "encoder": lambda case: encoder(case.rows),
    "mixer": lambda case: mixer(),
    "llama-1b": lambda case: llama_1b(case.variant),
}


def own_tensors(step: CompiledProgram, rank: int, position: int) -> dict[str, Tensor]:
    """Random tensors of a rank, weights scaled to keep values around 1; inputs are all ranks'."""
    tensors: dict[str, Tensor] = {}
    for buffer in step.host.buffers:
        if buffer.role == "temp":
            continue
        shared = buffer.role == "input" or len(buffer.shape) < 2
        torch.manual_seed(len(tensors) if shared else 1000 * (1 + rank) + len(tensors))
        if buffer.dtype == "i64":
            tensors[buffer.name] = torch.tensor([position], device="cuda")
            continue
        x = torch.randn(buffer.shape, device="cuda")
        if buffer.role == "weight":
            x = x * buffer.shape[-1] ** -0.5 if len(buffer.shape) > 1 else 1 + 0.1 * x
        tensors[buffer.name] = x.to(torch_dtype(buffer.dtype))
    return tensors


def floor_us(step: CompiledProgram) -> float:
    """What a rank reads once, or its products, whichever takes longer."""
    num_bytes = sum(b.num_bytes for b in step.host.buffers if b.role in ("weight", "state"))
    tensors = step.host.buffer_map()
    rows = {b.shape[0] for b in step.host.buffers if b.role == "input" and len(b.shape) > 1} | {1}
    weights = sum(
        b.num_bytes // 2 for b in tensors.values() if b.role == "weight" and len(b.shape) > 1
    )
    return max(num_bytes / copy_bytes_per_us(), 2.0 * max(rows) * weights / flops_per_us())


def host_us(call: Call) -> float:
    """The host's time of a call while its GPU is at rest: a graph with NCCL's nodes is not taken
    while another is under way.
    """
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def measure(
    case: Case,
    comm: Communicator,
    rounds: int,
    with_compile: bool,
    turn: Callable[[], AbstractContextManager[None]],
) -> Line:
    """Medians over rounds in which each is timed once, all ranks at the same time. Without rounds
    all is compiled and run, and nothing timed. turn: around what is timed.
    """
    model = MODELS[case.name](case)
    plan = plan_program(model.program, comm.mesh, H200, model.marks)
    step = CompiledProgram(plan, comm, f"cuda:{torch.cuda.current_device()}", warm=True)
    own = own_tensors(step, comm.rank, model.position)
    for name, tensor in step.tensors.items():
        tensor.copy_(own[name])
    inputs = {b.name: own[b.name] for b in step.host.buffers if b.role == "input"}

    def total(x: Tensor) -> Tensor:
        if comm.mesh.num_ranks > 1:
            dist.all_reduce(x)
        return x

    def in_torch() -> Tensor:
        return model.in_torch(own, total)

    step.bind(inputs)  # read where they are, as the peers do
    with torch.inference_mode():
        expected = in_torch().float()
        far = distance(step(inputs), expected)
        assert far < TOLERANCE, f"{case.text}: {far} from torch"
        assert step.stats.replayed, step.stats.reason
        graph, _ = captured(in_torch)
        # outputs stay in the graph's memory on both sides
        runs: dict[str, Call] = {OURS: lambda: step(inputs, inplace=True), GRAPH: graph.replay}
        if with_compile:
            by_regions = model.by_regions if comm.mesh.num_ranks > 1 else None
            regions = by_regions and partial(by_regions, own, total)
            runs[COMPILED] = compiled_by_torch(in_torch, regions)
        for run in runs.values():
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        if not rounds:
            return {}
        with turn():
            times = timed(runs, rounds, comm)
            hosts = {name: host_us(run) for name, run in runs.items()}
            floor = floor_us(step)
            torch.cuda.empty_cache()  # other processes need it
    return {
        "case": case.text,
        "device": torch.cuda.get_device_name(),
        "us": {name: statistics.median(each) for name, each in times.items()},
        "host_us": hosts,
        "floor_us": floor,
        "far": far,
    }


def distance(outputs: Mapping[str, Tensor], expected: Tensor) -> float:
    """The largest difference of the one output, over the largest value; of a token, how far its
    logit is from the highest.
    """
    (found,) = outputs.values()
    if found.dtype == torch.int64:
        found = expected + (expected.max() - expected[:, found[0]])
    return float((found.float() - expected).abs().max() / expected.abs().max())


def compiled_by_torch(
    in_torch: Callable[[], Tensor], by_regions: Callable[[Region], Tensor] | None
) -> Call:
    """torch.compile's, in a CUDA graph. by_regions: of several ranks, compiles what lies between
    their sums.
    """
    torch._dynamo.reset()
    # in a graph of ours: its own would copy the weights, which are no parameters, each call
    tune = partial(torch.compile, mode="max-autotune-no-cudagraphs", fullgraph=True)
    return captured(partial(by_regions, tune) if by_regions else tune(in_torch))[0].replay


def timed(runs: Mapping[str, Call], rounds: int, comm: Communicator) -> dict[str, list[float]]:
    """us a call of each, once a round, `in_turn`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in in_turn(runs, rounds):
        meet(comm)
        times[name].append(elapsed_us(lambda run=run: [run() for _ in range(CALLS)], CALLS))
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process does: cases, one a step, all on as many ranks; "" where it has none. into: a
    file for a line each. rounds: 0 only to compile.
    """

    cases: tuple[str, ...]
    num_ranks: int
    rounds: int
    with_compile: bool
    into: Path
    turns: Turns


def run_rank(given: Communicator, job: Job) -> None:
    """Measures a job's cases on this rank; the first writes their lines."""
    many = given.mesh.num_ranks > 1
    comm = NativeNccl(given.mesh, given.rank, TIMEOUT_S) if many else given
    tune_alone(Path(f"{job.turns.store}.tuning"))
    for step, text in enumerate(job.cases):
        turn = partial(job.turns.take, step, comm)
        if not text:
            with turn():
                continue
        found = measure(parse_case(text), comm, job.rounds, job.with_compile, turn)
        if comm.rank == 0 and found:
            with job.into.open("a") as file:
                file.write(json.dumps(found) + "\n")
        torch.cuda.empty_cache()


def run_job(job: Job) -> None:
    """A process's work."""
    run_on_ranks(run_rank, job.num_ranks, job)


def run_jobs(
    jobs: Sequence[Job], *, all_or_none: bool, target: Callable[[Job], None] = run_job
) -> set[str]:
    """Does jobs at the same time, a process each; the cases of those that failed. all_or_none: the
    first that fails ends the others.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=target, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    running = {p.sentinel: (p, job) for p, job in zip(processes, jobs, strict=True)}
    failed: set[str] = set()
    while running:
        for sentinel in wait([*running]):
            process, job = running.pop(sentinel)
            process.join()
            if process.exitcode:
                failed |= {case for case in job.cases if case}
                for other, _ in running.values() if all_or_none else ():
                    other.terminate()
    return failed


def compiling(cases: Sequence[str], num_ranks: int, into: Path, store: str) -> list[Job]:
    """A process a case."""
    turns = Turns(store=store, number=0, num=1)
    return [
        Job(
            cases=(case,),
            num_ranks=num_ranks,
            rounds=0,
            with_compile=True,
            into=into,
            turns=turns,
        )
        for case in cases
    ]


def measuring(
    cases: Sequence[str], num_ranks: int, into: Path, store: str, options: argparse.Namespace
) -> list[Job]:
    """`processes` for each case, as many groups of cases as may run at once."""
    num_groups = min(len(cases), max(1, options.at_once // options.processes))
    steps = -(-len(cases) // num_groups)
    groups = [tuple(cases[group::num_groups]) for group in range(num_groups)]
    num = num_groups * options.processes
    return [
        Job(
            cases=group + ("",) * (steps - len(group)),
            num_ranks=num_ranks,
            rounds=options.rounds,
            with_compile=number < options.compiles,
            into=into,
            turns=Turns(store=store, number=number * num_groups + at, num=num),
        )
        for number in range(options.processes)
        for at, group in enumerate(groups)
    ]


def medians(lines: Sequence[Line], key: str) -> dict[str, float]:
    """By name, over processes; a name that not all have counts where it is."""
    names = dict.fromkeys(name for line in lines for name in line[key])
    return {
        name: round(statistics.median(line[key][name] for line in lines if name in line[key]), 1)
        for name in names
    }


def main() -> None:
    """Runs the processes and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--processes", type=at_least(0), default=5)
    parser.add_argument(
        "--compiles", type=at_least(0), default=5, help="processes with torch.compile too"
    )
    parser.add_argument(
        "--at-once", type=at_least(1), default=5, help="processes, where there are more"
    )
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument(
        "--keep", type=writable_file, help="file of lines to add to, of earlier runs too"
    )
    add_book_options(parser)
    options = read_options(parser, gpus_of_cases(lambda text: parse_case(text).num_ranks))
    cases = [*map(parse_case, options.cases)]
    book = open_book(options.results, options.commit)
    failed: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        lines = options.keep or Path(folder) / "lines"
        for ranks in sorted({case.num_ranks for case in cases}):
            some = [case.text for case in cases if case.num_ranks == ranks]
            failed |= run_cases(some, ranks, lines, f"{folder}/turns-{ranks}", options)
        texts = lines.read_text().splitlines() if lines.exists() else []
    read = [json.loads(text) for text in texts]
    for case in cases:
        mine = [line for line in read if line["case"] == case.text]
        if not mine:
            continue
        for benchmark, record in records(case, mine):
            book.write(benchmark, record)
            print(record, flush=True)
        ratios = " ".join(f"{line['us'][OURS] / line['us'][GRAPH]:.3f}" for line in mine)
        far = max(line["far"] for line in mine)
        print(f"  of {GRAPH}, a process each: {ratios}; furthest from torch {far:.4f}", flush=True)
    if failed:
        sys.exit(f"{len(failed)} cases failed, as said above: {', '.join(sorted(failed))}")


def run_cases(
    cases: Sequence[str], num_ranks: int, into: Path, store: str, options: argparse.Namespace
) -> set[str]:
    """Compiles and measures cases of as many ranks; those that failed. One process that measures
    finds nothing that another has compiled, so none does that before.
    """
    failed: set[str] = set()
    compiles_apart = options.compiles > 0 and options.processes != 1
    for start in range(0, len(cases) if compiles_apart else 0, options.at_once):
        jobs = compiling(cases[start : start + options.at_once], num_ranks, into, store)
        failed |= run_jobs(jobs, all_or_none=False)
    left = [case for case in cases if case not in failed]
    if left and options.processes:
        failed |= run_jobs(measuring(left, num_ranks, into, store, options), all_or_none=True)
    return failed


def records(case: Case, lines: Sequence[Line]) -> Iterator[tuple[str, Record]]:
    """Those of a case, with the benchmark that they belong to: time on the GPU, of the host."""
    floor = round(statistics.median(line["floor_us"] for line in lines), 1)
    for benchmark, key, text in (
        ("programs", "us", case.text),
        ("programs-host", "host_us", f"host time of {case.text}"),
    ):
        found = medians(lines, key)
        yield (
            benchmark,
            Record(
                case=text,
                device=lines[0]["device"],
                num_gpus=case.num_ranks,
                ours_us=found.pop(OURS),
                peers=found,
                floor_us=floor if key == "us" else found[GRAPH],
            ),
        )


if __name__ == "__main__":
    main()
