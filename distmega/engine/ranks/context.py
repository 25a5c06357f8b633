"""What a function that runs on every rank is given: its place in the job, and a way to send values
to the caller.

Such a function is named "module:function" and called as `function(context, payload, emit)` by
launch/worker.py. It may use torch.distributed at once. Its return value on rank 0 is the result.
Next: launch/worker.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from distmega.arguments import require_number, shown
from distmega.env import MAX_SECONDS
from distmega.errors import ProgramError, RequestError

Backend = Literal["gloo", "nccl"]
DeviceKind = Literal["cpu", "cuda"]
DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")
"""A rank's device, whether the machine has it or not."""

Emit = Callable[[object], None]
"""Sends one value to the caller at once when called on rank 0; does nothing on the other ranks."""


class ProgressReport:
    """Base class of emitted values that say how far the work is. One run may emit more of them than
    another, as the clock decides; after a restart they come again, and no other value does.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's place in a job.

    Attributes:
        rank: Its number, from 0.
        world_size: Ranks of the job.
        local_rank: Its number among the ranks of its node.
        local_world_size: Ranks of its node.
        node: The node's name.
        backend: What torch.distributed communicates by.
        device: "cpu" or "cuda:i".
        timeout_s: How long it waits for other ranks outside of programs, as while they load.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    backend: Backend
    device: str
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """RequestError for a place that there can't be."""
        for name, number, size in (
            ("rank", self.rank, self.world_size),
            ("local_rank", self.local_rank, self.local_world_size),
        ):
            if type(number) is not int or type(size) is not int or not 0 <= number < size:
                found = f"{name} {shown(number)} of {shown(size)}"
                raise _bad(found, "whole numbers, ranks from 0")
        if not isinstance(self.node, str):
            raise _bad(f"node {shown(self.node)}", "its name as text")
        if not isinstance(self.backend, str) or self.backend not in get_args(Backend):
            raise _bad(f"backend {shown(self.backend)}", f"one of {', '.join(get_args(Backend))}")
        if not isinstance(self.device, str) or not DEVICE_NAME.fullmatch(self.device):
            raise _bad(f"device {shown(self.device)}", "cpu or cuda:i")
        require_number("timeout_s", self.timeout_s, MAX_SECONDS)


def require_context(context: object) -> None:
    """ProgramError for what is no RankContext."""
    if not isinstance(context, RankContext):
        raise ProgramError(
            f"{type(context).__name__} in place of a RankContext",
            expected="the place of this rank in its job",
            remedy="pass on the context that launch gives to each rank",
        )


def _bad(found: str, expected: str) -> RequestError:
    return RequestError(
        f"a rank's context with {found}",
        expected=expected,
        remedy="take the one that launch gives to each rank",
    )
