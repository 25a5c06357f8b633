"""Processes that begin with torch and our packages loaded, which takes a fresh one seconds: they
are forked by a server that has loaded them.

`run_module` runs a module as a command. `forked_ranks` lets local launchers start their ranks so;
tests/launch/test_local.py and the commands of tests/e2e start them as users do.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerContext, ForkServerProcess

import pytest

from distmega.launch import local, local_rank
from distmega.launch.contract import rank_environment
from tests.repo.source import ROOT

LOADED = (
    "distmega.launch.local_rank",
    "tests.e2e.targets",
    "tests.e2e.unsound",
    "tests.hostir.ranks",
    "tests.launch.faults",
    "tests.launch.targets",
)


@cache
def forking() -> tuple[ForkServerContext, int]:
    """The server's context and its process, which ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    mine, theirs = Pipe()
    with chdir(ROOT), mine, theirs:  # where the server finds `tests`
        process = context.Process(target=_tell_parent, args=(theirs,))
        process.start()
        parent: int = mine.recv()
        process.join()
    return context, parent


def _tell_parent(connection: Connection) -> None:
    connection.send(os.getppid())


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `python -m module arguments` says and how it ends. The module must bear that torch and
    what LOADED names are there; Triton is not.
    """
    context, _ = forking()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        streams = [Connection(os.dup(file.fileno())) for file in (stdout, stderr)]
        process = context.Process(target=_be_module, args=(module, arguments, *streams))
        process.start()
        process.join()
        for stream in streams:
            stream.close()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(
            (module, *arguments), process.exitcode or 0, stdout.read(), stderr.read()
        )


def _be_module(
    module: str, arguments: Sequence[str], stdout: Connection, stderr: Connection
) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Rank:
    """What a launcher asks of a subprocess.Popen."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None, "it has started"
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode


def _start_rank() -> local._Rank:
    """See local._start_process."""
    ours, theirs = Pipe()
    begun, begins = Pipe(duplex=False)
    stderr = Connection(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2), readable=False)
    with theirs, stderr, begun:
        with begins:
            environment = os.environ | rank_environment(dict(os.environ))
            process = forking()[0].Process(
                target=_be_rank,
                args=(theirs, stderr, begins, os.getcwd(), environment),
                daemon=True,
            )
            process.start()
        begun.poll(None)  # it has a session of its own, by which it may be killed
    return local._Rank(process=_Rank(process), connection=ours)  # type: ignore[arg-type]


def _be_rank(
    ours: Connection,
    stderr: Connection,
    begins: Connection,
    folder: str,
    environment: Mapping[str, str],
) -> None:
    os.setsid()
    begins.close()
    for output in (1, 2):
        os.dup2(stderr.fileno(), output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = [str(os.dup(ours.fileno()))]
    ours.close()
    local_rank.main()


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Local launchers fork their ranks."""
    forking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_start_process", _start_rank)
        yield
