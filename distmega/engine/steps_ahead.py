"""Decode steps of a GPU, launched ahead of what the host does with their tokens.

In: a runner that was told where to start. Out: the tokens of one step after another. While those of
a launch are given out the next launch runs, so the GPU does not wait for the host. Next on the
walk: kernels/runners.py.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.errors import HangError, ModelError
from distmega.kernels.runtime.stepping import SteppingRunner

MAX_STEPS = 16
"""Decode steps of one launch, at most, before their tokens are given out."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """rows: tokens in the host's memory, [steps, sequences]; total: the sum of the last step's
    logits on this rank, which is NaN or infinite where one of them is. There once `done` has come.
    """

    rows: Tensor
    total: Tensor
    done: torch.cuda.Event


def decode_ahead(
    stepping: SteppingRunner,
    num_steps: int,
    note: Callable[[int], None],
    explain: Callable[[], ModelError],
) -> Iterator[tuple[int, ...]]:
    """Tokens of the next `num_steps` steps, on the current stream. note: called with the steps of
    each launch. HangError if a wait for another rank has expired, also of a launch that a caller
    who stops early has no use for; what `explain` gives if a launch ends with logits that are not
    finite.
    """
    launches = (_launch(stepping, size, note) for size in launch_sizes(num_steps))
    running = next(launches, None)
    try:
        while running:
            latest = running
            following = next(launches, None)
            latest = following or running
            stepping.await_launch(running.done)
            if not math.isfinite(running.total):
                raise explain()
            yield from map(tuple, running.rows.tolist())
            running = following
    except HangError:
        with suppress(HangError):
            stepping.await_launch(latest.done)
        raise
    except BaseException:
        # a caller may stop early, and other ranks wait for what this one's last launch sends
        stepping.await_launch(latest.done)
        raise


def launch_sizes(num_steps: int) -> Iterator[int]:
    """Steps of each launch for so many: few at first, so that the first tokens are out soon."""
    size = 1
    while num_steps > 0:
        size = min(2 * size, MAX_STEPS, num_steps)
        num_steps -= size
        yield size


def _launch(stepping: SteppingRunner, num_steps: int, note: Callable[[int], None]) -> _Launch:
    tokens = stepping.run_steps(num_steps)
    rows = tokens.to("cpu", non_blocking=True)
    total = last_logits(stepping, tokens.shape[1]).sum().to("cpu", non_blocking=True)
    note(num_steps)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return _Launch(rows, total, done)


def last_logits(stepping: SteppingRunner, num_sequences: int) -> Tensor:
    """Logits of the last step on this rank, [sequences, its tokens], on the GPU."""
    logits = stepping.logits
    return logits[:num_sequences] if logits.dim() > 1 else logits[None]
