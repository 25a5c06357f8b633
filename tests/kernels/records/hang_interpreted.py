"""Waits of the kernel of records that never end, under Triton's interpreter, in a process of its
own. Prints for each of two launches the events whose waits were given up, in order, and the error;
then what is left to say.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

from triton import language as tl

from distmega.errors import HangError
from distmega.kernels.records import waits
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.kernels.records.records_interpreted import clock, interpreted, runner_of

LIMIT_S = 0.05
given_up: list[int] = []
ACCUSE = waits.accuse


def chain() -> Program:
    """Products one behind the other, each by both SMs."""
    p = ProgramBuilder("chain")
    x = p.input("x", (3, 192))
    for n in range(3):
        x = p.linear(x, p.weight(f"w{n}", (192, 192)))
    return p.build(x)


def accuse(report: tl.tensor, epoch: tl.tensor, at: tl.tensor) -> None:
    """The kernel's, which tells which event it was."""
    given_up.append(int(at.handle.data.item()))
    ACCUSE(report, epoch, at)


def main() -> None:
    """The first of two SMs runs before the second, for whose work it waits."""
    runner, tensors = runner_of(chain(), num_sms=2, timeout_s=LIMIT_S)
    for _ in range(2):
        runner.launch(tensors)
        try:
            runner.raise_hang()
        except HangError as error:
            print(given_up, error)
            given_up.clear()
    print("nothing" if runner.raise_hang() is None else "more")


if __name__ == "__main__":
    with interpreted(), patch.multiple(waits, clock=clock, accuse=accuse):
        main()
