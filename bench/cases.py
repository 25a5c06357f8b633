"""The command of a benchmark that measures cases by name, each on as many GPUs as it says.

In: what a name says, how a case is measured. Out: records as they come. decode.py and prefill.py
use it. With --at-once cases are set up at the same time, a process each, since torch compiles for a
minute a case; then one after the other is timed alone.
"""

import argparse
import gc
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from unittest.mock import patch

import torch

from bench.options import at_least
from bench.ranks import run_on_ranks
from bench.records import Book, Record, add_book_options, open_book
from bench.turns import Turns, tune_alone
from distmega.hostir.comm.communicator import Communicator


class Case(Protocol):
    """What a name says."""

    @property
    def num_ranks(self) -> int:
        """GPUs that share the model."""
        ...


@dataclass(frozen=True, slots=True)
class StepCase:
    """What the name of a decode step says."""

    text: str
    model: str
    batch: int
    context: int
    num_ranks: int


def read_case(text: str, *numbers: str) -> tuple[Any, ...]:
    """The model, the numbers and the GPUs that "MODEL NUMBER=N ... tp=N" names, one GPU unless
    said; ends the program where it does not name all numbers, in this order.
    """
    pattern = (
        r"(\S+)" + "".join(rf" {name}=([1-9]\d*)" for name in numbers) + r"(?: tp=([1-9]\d*))?"
    )
    match = re.fullmatch(pattern, text)
    if not match:
        form = " ".join(f"{name}=N" for name in (*numbers, "tp"))
        raise SystemExit(f"case {text!r}; expected 'MODEL {form}', each N at least 1; correct it")
    model, *found = match.groups("1")
    return model, *map(int, found)


C = TypeVar("C", bound=Case)
Ready = Callable[[], object]
Measure = Callable[[C, Communicator, int, bool, Ready], Record]
"""Called with a case, the communicator, the number of rounds, whether peers are measured, and what
to call before the first time is taken, on every rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[C]):
    """A case to measure. turns, device: where several are set up at the same time, and the GPU of a
    case of one rank then.
    """

    benchmark: str
    case: C
    measure: Measure[C]
    rounds: int
    with_peer: bool
    book: Book
    turns: Turns | None = None
    device: int = 0


def make_parser(doc: str | None, cases: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """Options that such commands share. cases, rounds: where none are named."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("cases", nargs="*", default=cases)
    parser.add_argument("--rounds", type=at_least(1), default=rounds)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--at-once", action="store_true", help="set up all cases at the same time")
    add_book_options(parser)
    return parser


def measure_cases(
    benchmark: str,
    arguments: argparse.Namespace,
    parse: Callable[[str], C],
    measure: Measure[C],
) -> None:
    """Measures the cases that the command line names and writes their records as they come.
    arguments: as make_parser reads it; benchmark: which results it writes.
    """
    book = open_book(arguments.results, arguments.commit)
    jobs = [
        Job(
            benchmark=benchmark,
            case=case,
            measure=measure,
            rounds=arguments.rounds,
            with_peer=not arguments.no_peer,
            book=book,
        )
        for case in map(parse, arguments.cases)
    ]
    if arguments.at_once:
        run_at_once(jobs)
    else:
        for job in jobs:
            run_on_ranks(measure_in_turn, job.case.num_ranks, job)


def measure_in_turn(comm: Communicator, job: Job[Any]) -> None:
    """On one rank; the record is written before the next one's turn."""
    with ExitStack() as stack:
        turns = job.turns

        def ready() -> None:
            if turns:
                stack.enter_context(turns.take(0, comm))

        record = job.measure(job.case, comm, job.rounds, job.with_peer, ready)
        if comm.rank == 0:
            job.book.write(job.benchmark, record)
            print(record, flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def run_at_once(jobs: Sequence[Job[Any]]) -> None:
    """A process a case; the first that fails ends the others, which would wait for it."""
    spawn = multiprocessing.get_context("spawn")
    share = max(1, (os.cpu_count() or 1) // len(jobs))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": str(share)}),
    ):
        processes = []
        for number, job in enumerate(jobs):
            turns = Turns(store=f"{folder}/turns", number=number, num=len(jobs))
            device = number % torch.cuda.device_count()
            given = replace(job, turns=turns, device=device)
            processes.append(spawn.Process(target=_run_job, args=(given,)))
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        while running:
            for sentinel in wait([*running]):
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    for other in running.values():
                        other.terminate()
    if any(process.exitcode for process in processes):
        sys.exit("a case failed, as said above; those before it were measured")


def _run_job(job: Job[Any]) -> None:
    """A process's work."""
    assert job.turns
    torch.cuda.set_device(job.device)
    if job.with_peer:
        tune_alone(Path(f"{job.turns.store}.tuning"))
    run_on_ranks(measure_in_turn, job.case.num_ranks, job)
