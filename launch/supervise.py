"""Watches a team of ranks from outside: reports in, Emitted values and the Result out, or the one
error that explains.

Used by launch/local.py and launch/ray.py, which differ only in how a Team starts, is polled and is
killed. The error raised is the root cause: when a rank dies, its peers' collectives fail too, often
before the death is seen.
"""

import logging
import pickle
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from distmega.errors import DistmegaError, HangError, RankFailure
from distmega.launch.contract import Emitted, Event, Job, Result
from distmega.launch.reports import Died, Done, Failed, Ready, Report, Value

logger = logging.getLogger(__name__)

ROOT_CAUSE_S = 3.0
"""How long to wait for a better explanation when a rank reports that it lost a peer."""


class Team(Protocol):
    """Ranks under a launcher. `kill` may be called at any time, also twice, and leaves no process
    behind.
    """

    def start(self) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Reports that arrived, waiting at most `timeout_s` for the first one."""
        ...

    def ask_positions(self) -> Mapping[int, str]:
        """Where each rank that still answers stands."""
        ...

    def finish(self) -> None:
        """Every rank is done: let all of them leave in good order."""
        ...

    def kill(self) -> None: ...


def supervise(team: Team, job: Job) -> Generator[Event]:
    """Start the team, yield its values and result; whatever ends this generator ends every rank."""
    try:
        team.start()
        yield from _follow(team, job)
    finally:
        team.kill()


def _follow(team: Team, job: Job) -> Generator[Event]:
    states = dict.fromkeys(range(job.num_ranks), "starting")  # then "running", then "done"
    result = b""
    while set(states.values()) != {"done"}:
        is_starting = "starting" in states.values()
        limit_s = job.start_timeout_s if is_starting else job.timeout_s
        reports = team.poll(limit_s)
        if not reports:
            raise _describe_silence(states, team.ask_positions(), limit_s)
        for report in reports:
            match report:
                case Ready(rank=rank):
                    states[rank] = "running"
                case Value(data=data):
                    yield Emitted(value=pickle.loads(data))
                case Done(rank=rank, data=data):
                    states[rank] = "done"
                    result = data or result
                case Died(rank=rank) if states[rank] == "done":
                    logger.warning("rank %d %s after it was done", rank, report.how)
                case Failed() | Died():
                    raise _find_root_cause(team, report, job.num_ranks)
                case _:
                    pass
    team.finish()
    yield Result(value=pickle.loads(result))


def _find_root_cause(team: Team, first: Failed | Died, num_ranks: int) -> DistmegaError:
    """The error for the failure that caused the others: a death or an own mistake before a rank
    that waits in vain, and that before a lost peer. Of ranks that wait for each other, all are told
    of.
    """
    failures = [first]
    deadline = time.monotonic() + ROOT_CAUSE_S
    while min(map(_distance, failures)) and len({f.rank for f in failures}) < num_ranks:
        reports = team.poll(deadline - time.monotonic())
        if not reports:
            break
        failures += [report for report in reports if isinstance(report, Failed | Died)]
    cause = min(failures, key=_distance)
    error = describe_failure(cause, num_ranks)
    alike = [
        f.error for f in failures if isinstance(f, Failed) and _distance(f) == _distance(cause)
    ]
    if _distance(cause) and isinstance(error, HangError | RankFailure):
        found = "; ".join(dict.fromkeys((error.found, *(e.found for e in alike if e))))
        return type(error)(found, expected=error.expected, remedy=error.remedy)
    return error


def _distance(report: Failed | Died) -> int:
    """How far a report is from the cause: 0 is the cause."""
    if isinstance(report, Died):
        return 0
    return 2 if report.lost_peer else int(isinstance(report.error, HangError))


def describe_failure(report: Failed | Died, num_ranks: int) -> DistmegaError:
    """The error to raise for a failed rank: its own if it raised one of ours, otherwise a
    RankFailure naming it.
    """
    name = f"rank {report.rank} of {num_ranks}"
    if isinstance(report, Died):
        return RankFailure(
            f"{name} {report.how}",
            expected="every rank to run until its target returns",
            remedy="look at its output (under Ray: DISTMEGA_LOG=info), and whether memory ran out",
        )
    logger.debug("%s failed:\n%s", name, report.traceback)
    error = report.error or RankFailure(
        f"{name} raised {report.summary}",
        expected="every rank to run until its target returns",
        remedy="set DISTMEGA_LOG=debug to see its traceback",
    )
    error.add_note(f"{name}:\n{report.traceback}")
    return error


def _describe_silence(
    states: Mapping[int, str], positions: Mapping[int, str], timeout_s: float
) -> RankFailure:
    late = [
        f"rank {rank} ({state}, at {positions.get(rank, 'an unknown place: it does not answer')})"
        for rank, state in states.items()
        if state != "done"
    ]
    return RankFailure(
        f"no news for {timeout_s:g} s from {', '.join(late)}",
        expected="a value, or the end, from every rank within that time",
        remedy="see where the ranks stand; if they are only slow, raise DISTMEGA_TIMEOUT_S",
    )
