"""The options of a benchmark's command, and the GPUs that it can't do without.

In: a parser, and how many GPUs its options ask for. Out: the options. A number that is too small
and a GPU that is missing end the program in one line, before anything is made. Every command of
this folder that measures reads its options here.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from distmega.whole_file import require_writable

Need = Callable[[argparse.Namespace], int]
"""How many GPUs a command needs, by its options."""


def at_least(least: int) -> Callable[[str], int]:
    """How argparse reads a whole number that is at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"{text!r}; expected a whole number of at least {least}; correct it"
            )
        return number

    return read


def seconds(text: str) -> float:
    """How argparse reads a time: finite, above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, more than 0; correct it")
    return number


def one_gpu(given: argparse.Namespace) -> int:
    """The need of a command that measures on one GPU."""
    return 1


def gpus_of_cases(num_ranks: Callable[[str], int]) -> Need:
    """The need of a command whose cases name their ranks. num_ranks: of a case, by its name."""
    return lambda given: max(map(num_ranks, given.cases))


def read_options(parser: argparse.ArgumentParser, need: Need = one_gpu) -> argparse.Namespace:
    """What the command line says. Ends the program where this machine has fewer GPUs than that
    needs.
    """
    given = parser.parse_args()
    needed, found = need(given), torch.cuda.device_count()
    if found < needed:
        sys.exit(
            f"{parser.prog}: {found} GPUs that torch can use; expected at least {needed}; run it "
            "on a machine with as many NVIDIA GPUs and a torch built for CUDA"
        )
    return given


def writable_file(text: str) -> Path:
    """How argparse reads the name of a file to be written, before what is measured for it."""
    path = Path(text)
    try:
        require_writable(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be written ({error}); expected a path in a folder that is there; "
            "make the folder, or give another path"
        ) from error
    return path
