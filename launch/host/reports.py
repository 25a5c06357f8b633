"""What a rank tells its launcher, and the launcher a rank: small pickled messages, the same for
every launcher.

A rank reports StoreOpened (rank 0 only), Ready, any number of Values, then Done or Failed. Died is
reported for it by whoever watches its process. Next: launch/worker.py writes them,
launch/supervise.py reads them.
"""

import signal
from dataclasses import dataclass

from distmega.errors import DistmegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """Rank 0 serves the rendezvous store at this address until the job ends."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The rank's process group is open and the target is about to be called."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A pickled value emitted on rank 0."""

    rank: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The target returned; `data` is its pickled value on rank 0, and empty on the other ranks."""

    rank: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Set-up or target raised. `error` is set if it was one of ours; `lost_peer` if another rank is
    the likely cause.
    """

    rank: int
    error: DistmegaError | None
    summary: str
    traceback: str
    lost_peer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The rank's process is gone, or as good as gone; `how` continues the sentence "rank 1 of 2
    ...".
    """

    rank: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the rank's target stands: innermost line outside of torch."""

    rank: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPosition:
    """The launcher asks a rank for its Position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Every rank is done: leave the process group and exit."""


Report = StoreOpened | Ready | Value | Done | Failed | Died | Position
Command = StoreOpened | AskPosition | Finish


def describe_exit(code: int) -> str:
    """How a process with this exit code (negative: signal, as in subprocess) ended, after "rank 1
    of 2 ".
    """
    if code < 0:
        names: dict[int, str] = {number: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, 'a signal without a name')} (signal {-code})"
    return f"exited with code {code}"
