"""Starts the ranks as processes of this machine: a Job in, Emitted values and the Result out.

Each rank is a fresh interpreter that runs launch/local_rank.py, with one socket pair to this
process and a session of its own. The socket carries orders down and reports up, and its end tells
either side at once that the other is gone. Rank 0 opens the rendezvous store on a port of the
system's choice and says which; nobody has to guess a free one.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait

from distmega.launch.contract import Event, Job, rank_environment
from distmega.launch.host.processes import process_state
from distmega.launch.host.reports import (
    AskPosition,
    Command,
    Died,
    Finish,
    Position,
    Report,
    StoreOpened,
    describe_exit,
)
from distmega.launch.supervise import supervise

logger = logging.getLogger(__name__)

EXIT_S = 5.0
"""How long a rank may take to leave in good order, and a killed process to disappear."""

POSITION_S = 1.0

LOOK_S = 0.01
"""How often to look whether a rank that is leaving has ended."""


def run_local(job: Job) -> Generator[Event]:
    """Run `job` on processes of this machine; see launchers.launch for what comes out."""
    return supervise(LocalTeam(job), job)


@dataclass(slots=True, kw_only=True)
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(slots=True)
class LocalTeam:
    """The processes of one job, and the connections on which they still may report."""

    job: Job
    ranks: list[_Rank] = field(default_factory=list)
    open: dict[Connection, int] = field(default_factory=dict)

    def start(self) -> float:
        started_s = time.monotonic()
        for rank in range(self.job.num_ranks):
            self.ranks.append(_start_process())
            self.open[self.ranks[rank].connection] = rank
        for rank in range(self.job.num_ranks):
            _send(self.ranks[rank].connection, (rank, self.job))
        return started_s

    def poll(self, timeout_s: float) -> Sequence[Report]:
        reports = []
        ready = set(wait(list(self.open), max(0.0, timeout_s)))
        for connection in [connection for connection in self.open if connection in ready]:
            report = self._receive(connection)
            if isinstance(report, StoreOpened):
                self._command(report, to=range(1, self.job.num_ranks))
            reports.append(report)
        return reports

    def ask_positions(self) -> Sequence[Report]:
        self._command(AskPosition(), to=range(self.job.num_ranks))
        reports: list[Report] = []
        deadline = time.monotonic() + POSITION_S
        while not self._have_answered(reports) and (left_s := deadline - time.monotonic()) > 0:
            reports += self.poll(left_s)
        return [*reports, *self.poll(0.0)]

    def find_stopped(self) -> Sequence[int]:
        states = {rank: process_state(each.process.pid) for rank, each in enumerate(self.ranks)}
        return [rank for rank, state in states.items() if state in ("T", "t")]

    def finish(self) -> None:
        self._command(Finish(), to=range(self.job.num_ranks))
        deadline = time.monotonic() + EXIT_S
        while self.open and (left_s := deadline - time.monotonic()) > 0:
            self.poll(left_s)

    def kill(self) -> None:
        for rank in self.ranks:
            _signal_session(rank.process, signal.SIGKILL)
        for number, rank in enumerate(self.ranks):
            try:
                rank.process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                logger.warning("rank %d is killed, and still there after %g s", number, EXIT_S)
            rank.connection.close()
        self.ranks.clear()
        self.open.clear()

    def _have_answered(self, reports: Sequence[Report]) -> bool:
        """Whether each rank that still may report is among those that said where they stand."""
        return {r.rank for r in reports if isinstance(r, Position)} >= set(self.open.values())

    def _receive(self, connection: Connection) -> Report:
        rank = self.open[connection]
        try:
            report: Report = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):  # at its end, or in the midst of a report
            del self.open[connection]
            return Died(rank=rank, how=_await_exit(self.ranks[rank].process))
        return report

    def _command(self, command: Command, *, to: range) -> None:
        for connection, rank in self.open.items():
            if rank in to:
                _send(connection, command)


def _start_process() -> _Rank:
    """Start an interpreter with this one's imports; -P keeps the working directory out of them."""
    ours, theirs = Pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "distmega.launch.local_rank", str(theirs.fileno())],
            env=os.environ | rank_environment(dict(os.environ)),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Rank(process=process, connection=ours)


def _send(connection: Connection, message: object) -> None:
    """Send to a rank; if it is gone, poll will report how it ended."""
    try:
        connection.send_bytes(pickle.dumps(message))
    except ConnectionError:
        return


def _await_exit(process: subprocess.Popen[bytes]) -> str:
    """How a rank ended. What it started and left is asked to end, while the rank is not reaped, so
    that nobody else has its number.
    """
    deadline = time.monotonic() + EXIT_S
    while (state := process_state(process.pid)) not in ("Z", "") and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if state == "Z":  # not by SIGKILL: the process that removes shared memory is among them
        _signal_session(process, signal.SIGTERM)
    try:
        return describe_exit(process.wait(max(0.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        return "closed its connection to the launcher"


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process and what it started; a reaped process has no session that could be
    mistaken for another's.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
