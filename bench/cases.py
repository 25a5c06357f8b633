"""The command of a benchmark that measures cases by name, each on as many GPUs as it says.

In: what a name says, how a case is measured. Out: records as they come. decode.py and prefill.py
use it.
"""

import argparse
import gc
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from bench.ranks import run_on_ranks
from bench.records import Book, Record, add_book_options, open_book
from distmega.hostir.comm.communicator import Communicator


class Case(Protocol):
    """What a name says."""

    @property
    def num_ranks(self) -> int:
        """GPUs that share the model."""
        ...


def read_case(text: str, *numbers: str) -> tuple[Any, ...]:
    """The model, the numbers and the GPUs that "MODEL NUMBER=N ... tp=N" names, one GPU unless
    said; ends the program where it does not name all numbers, in this order.
    """
    pattern = r"(\S+)" + "".join(rf" {name}=(\d+)" for name in numbers) + r"(?: tp=(\d+))?"
    match = re.fullmatch(pattern, text)
    if not match:
        form = " ".join(f"{name}=N" for name in (*numbers, "tp"))
        raise SystemExit(f"case {text!r}; expected 'MODEL {form}'; correct it")
    model, *found = match.groups("1")
    return model, *map(int, found)


C = TypeVar("C", bound=Case)
Measure = Callable[[C, Communicator, int, bool], Record]
"""Called with a case, the communicator, the number of rounds and whether peers are measured, on
every rank.
"""


def make_parser(doc: str | None, cases: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """Options that such commands share. cases, rounds: where none are named."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("cases", nargs="*", default=cases)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--no-peer", action="store_true")
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
    for case in map(parse, arguments.cases):
        given = arguments.rounds, not arguments.no_peer, benchmark, book
        run_on_ranks(_run_case, case.num_ranks, measure, case, *given)


def _run_case(
    comm: Communicator,
    measure: Measure[C],
    case: C,
    rounds: int,
    with_peer: bool,
    benchmark: str,
    book: Book,
) -> None:
    """Measures one case on this rank; the first writes the record."""
    record = measure(case, comm, rounds, with_peer)
    if comm.rank == 0:
        book.write(benchmark, record)
        print(record, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
