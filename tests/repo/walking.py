"""What examples/mlp.py calls, followed: a function that the ranks of a launch call.

Calls are a path in the repository and a qualified name, joined by a colon, each once, in the order
of first calls.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch

from distmega import CPU, DeviceMesh, Emit, RankContext, compile_plan, plan_program
from examples import mlp
from tests.repo.source import ROOT

PREFIX = f"{ROOT}/"


def name_of(code: CodeType) -> str:
    """The place of a function in the repository; empty for one of elsewhere."""
    file = code.co_filename
    if not file.startswith(PREFIX) or file.startswith(f"{PREFIX}.venv"):
        return ""
    return f"{file.removeprefix(PREFIX)}:{code.co_qualname}"


@contextmanager
def following() -> Iterator[dict[str, None]]:
    """The functions that are called inside, first calls in order."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := name_of(frame.f_code)):
            seen.setdefault(name)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def callers() -> list[str]:
    """The functions that have led here, outermost first."""
    found, frame = [], sys._getframe()
    while frame is not None:
        found.append(name_of(frame.f_code))
        frame = frame.f_back
    return [name for name in reversed(found) if name]


def run_followed(context: RankContext, values: mlp.Values, emit: Emit) -> list[list[str]]:
    """The example's function on this rank, then the same program as one megakernel: who called, and
    what each of the two calls.
    """
    stack = callers()
    with following() as by_ops:
        first = mlp.run_rank(context, values, lambda _: None)
    with following() as by_kernel:
        second = _run_as_kernel(context, values)
    torch.testing.assert_close(first, second)
    return [stack, [*by_ops], [*by_kernel]]


def _run_as_kernel(context: RankContext, values: mlp.Values) -> torch.Tensor:
    plan = plan_program(mlp.build_mlp(), DeviceMesh(tp=context.world_size), CPU)
    step = compile_plan(plan, context, megakernel=True)
    return step(step.parts(values))["y"]
