"""Watches a team of ranks from outside: reports in, Emitted values and the Result out, or the one
error that explains.

Used by launch/local.py and launch/on_ray/actors.py, which differ only in how RunningRanks start,
are polled and are killed. The error raised is the root cause: when a rank dies, its peers'
collectives fail too, often before the death is seen.
"""

import logging
import pickle
import time
from collections.abc import Generator, Sequence
from typing import Protocol

from distmega.errors import DistmegaError, HangError, LaunchError, RankFailure, counted
from distmega.launch.contract import Emitted, Event, Job, Result
from distmega.launch.host.reports import Died, Done, Failed, Position, Ready, Report, Value

logger = logging.getLogger(__name__)

ROOT_CAUSE_S = 3.0
"""How long to wait for a better explanation when a rank reports that it lost a peer."""

LOOK_S = 0.2
"""How often to look meanwhile whether a rank is stopped."""

QUIET_S = 0.5
"""After a failure, reports are awaited until none came for this long: news of a death can overtake
a value that another rank emitted before it.
"""


class RunningRanks(Protocol):
    """Ranks under a launcher. `kill` may be called at any time, also twice, and leaves no process
    behind.
    """

    def start(self) -> float:
        """Starts them; gives since when they start, of time.monotonic()."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Reports that arrived, waiting at most `timeout_s` for the first one."""
        ...

    def ask_positions(self) -> Sequence[Report]:
        """A Position of each rank that still answers, and what else was reported meanwhile."""
        ...

    def find_stopped(self) -> Sequence[int]:
        """Ranks whose process is stopped by a signal, as far as that can be seen from here."""
        ...

    def finish(self) -> None:
        """Every rank is done: let all of them leave in good order."""
        ...

    def kill(self) -> None: ...


def supervise(team: RunningRanks, job: Job) -> Generator[Event]:
    """Start the team, yield its values and result; whatever ends this generator ends every rank."""
    try:
        yield from _follow(team, job, team.start() + job.start_timeout_s)
    finally:
        team.kill()


def _follow(team: RunningRanks, job: Job, start_deadline_s: float) -> Generator[Event]:
    states = dict.fromkeys(range(job.num_ranks), "starting")  # then "running", then "done"
    result = b""
    while set(states.values()) != {"done"}:
        is_starting = "starting" in states.values()
        left_s = start_deadline_s - time.monotonic() if is_starting else job.timeout_s
        # this process may itself have stood still until the limit had passed, hence the second look
        reports = team.poll(max(0.0, left_s)) or team.poll(0.0)
        if not reports:
            raise (yield from _explain_silence(team, states, job))
        yield from _emit_values(reports)
        failures: list[Failed | Died] = []
        for report in reports:
            match report:
                case Ready(rank=rank):
                    states[rank] = "running"
                case Done(rank=rank, data=data):
                    states[rank] = "done"
                    result = data or result
                case Died(rank=rank) if states[rank] == "done":
                    logger.warning("rank %d %s after it was done", rank, report.how)
                case Failed() | Died():
                    failures.append(report)
                case _:
                    pass
        if failures:
            raise (yield from _find_root_cause(team, failures, states))
    team.finish()
    yield Result(value=read_value(result, "a result"))


def _emit_values(reports: Sequence[Report]) -> Generator[Event]:
    for report in reports:
        if isinstance(report, Value):
            yield Emitted(value=read_value(report.data, "a value"))


def read_value(data: bytes, what: str) -> object:
    """What rank 0 pickled; LaunchError where it can't be read here, as where its class is not."""
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever the classes of its parts raise
        raise LaunchError(
            f"rank 0 gave {what} that can't be read here ({type(error).__name__}: {error})",
            expected="what can be unpickled where the ranks are started from",
            remedy="give plain values, arrays, or tensors of a CPU",
        ) from error


def _failures(reports: Sequence[Report]) -> list[Failed | Died]:
    return [report for report in reports if isinstance(report, Failed | Died)]


def _find_root_cause(
    team: RunningRanks, first: Sequence[Failed | Died], states: dict[int, str]
) -> Generator[Event, None, DistmegaError]:
    """Yield what was emitted before the failures; return the error for the one that caused the
    others: a death before an own mistake, that before a stopped rank, then one that had returned,
    then a rank that waits in vain, then a lost peer. Of ranks that wait for each other, all are
    told of.
    """
    num_ranks = len(states)
    failures = list(first)
    stopped: Sequence[int] = ()
    heard_s = time.monotonic()
    deadline_s = heard_s + ROOT_CAUSE_S
    # what a rank emitted comes before its own failure
    while len({f.rank for f in failures}) < num_ranks and (now_s := time.monotonic()) < deadline_s:
        if now_s - heard_s >= QUIET_S:
            is_explained = min(map(_distance, failures)) <= OWN
            stopped = () if is_explained else team.find_stopped()
            if is_explained or stopped:
                break
        if reports := team.poll(min(deadline_s - now_s, LOOK_S)):
            heard_s = time.monotonic()
        yield from _emit_values(reports)
        failures += _failures(reports)
        states |= {report.rank: "done" for report in reports if isinstance(report, Done)}
    cause = min(failures, key=_distance)
    error = describe_failure(cause, num_ranks)
    if _distance(cause) <= OWN or not isinstance(error, HangError | RankFailure):
        return error
    same = [f.error for f in failures if isinstance(f, Failed) and _distance(f) == _distance(cause)]
    found = "; ".join(dict.fromkeys((error.found, *(e.found for e in same if e))))
    if stopped:
        names = ", ".join(map(str, stopped))
        return type(error)(
            f"rank {names} of {num_ranks} is stopped by a signal: {found}",
            expected="every rank to run until its target returns",
            remedy="look for what stopped its process, and start the job again",
        )
    if returned := [str(rank) for rank, state in states.items() if state == "done"]:
        found = f"rank {', '.join(returned)} of {num_ranks} had returned: {found}"
    return type(error)(found, expected=error.expected, remedy=error.remedy)


OWN = 1
"""Distance up to which a failure explains itself."""


def _distance(report: Failed | Died) -> int:
    """How far a report is from the cause. A failed rank stays until it is killed, so a death never
    follows from another failure: 0. An own mistake is 1, a wait in vain 2, a lost peer 3.
    """
    if isinstance(report, Died):
        return 0
    if report.lost_peer:
        return 3
    return 2 if isinstance(report.error, HangError) else OWN


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
    error = report.error or RankFailure(
        f"{name} raised {report.summary}",
        expected="every rank to run until its target returns",
        remedy="set DISTMEGA_LOG=debug to see its traceback",
    )
    error.add_note(f"{name}:\n{report.traceback}")
    return error


def _explain_silence(
    team: RunningRanks, states: dict[int, str], job: Job
) -> Generator[Event, None, DistmegaError]:
    """Return the error for ranks that have not all started in time, or of which nothing is heard; a
    failure that comes while they are asked where they stand explains it better, and a value that
    comes then is yielded.
    """
    reports = team.ask_positions()
    yield from _emit_values(reports)
    if failures := _failures(reports):
        return (yield from _find_root_cause(team, failures, states))
    positions = {report.rank: report.where for report in reports if isinstance(report, Position)}
    stopped = team.find_stopped()
    unknown = "an unknown place: it does not answer"
    owing = {"starting"} if "starting" in states.values() else {"running"}
    late = ", ".join(
        f"rank {rank} ({state}, at {positions.get(rank, unknown)}"
        f"{', stopped by a signal' * (rank in stopped)})"
        for rank, state in states.items()
        if state in owing
    )
    if "starting" in owing:
        return RankFailure(
            f"of {counted(job.num_ranks, 'rank')} not all run {job.start_timeout_s:g} s after their"
            f" start: {late}",
            expected="all of them to run within that time",
            remedy="see where the ranks stand; if they are only slow, raise start_timeout_s",
        )
    return RankFailure(
        f"no news for {job.timeout_s:g} s from {late}",
        expected="a value, or the end, from every rank within that time",
        remedy="see where the ranks stand; if they are only slow, raise DISTMEGA_TIMEOUT_S, or"
        " timeout_s where that was given",
    )
