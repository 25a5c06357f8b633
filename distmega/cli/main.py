"""The `distmega` command: which there are, and how one ends; no other package prints.

Next on the walk: generate.py and launch/launchers.py for what runs, explain/ for what only plans.
"""

import errno
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import tyro
from rich.console import Console

from distmega import __version__
from distmega.cli.doctor import Doctor, run_doctor
from distmega.cli.explain.command import Explain, run_explain
from distmega.cli.generate import Generate, run_generate
from distmega.cli.perplexity import Perplexity, run_perplexity
from distmega.cli.streams import drop_output, open_console, open_streams, wrap_text
from distmega.cli.superopt import Superopt, run_superopt
from distmega.cli.trace import Trace, run_trace
from distmega.errors import DistmegaError, RequestError
from distmega.launch.launchers import is_under_torchrun, should_report

DESCRIPTION = (
    "LLM inference on 1 to 8 GPUs.\n\n"
    "Exit code 2: a wrong request, 1: a fault while running.\n\n"
    "distmega --version prints the version."
)
FLAGS = {"num_steps": "steps", "position": "context", "path": "out"}
"""Arguments of the library by the flags that set them, where these have names of their own."""

Command = Generate | Explain | Perplexity | Trace | Doctor | Superopt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. SystemExit, once all ranks have ended, after SIGTERM."""
    with _ending_in_order():
        return _run_reported(arguments)


def _run_reported(arguments: Sequence[str] | None) -> int:
    """Runs a command and says what was wrong; the exit code."""
    try:
        open_streams()
        if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
            open_console().print(f"distmega {__version__}", markup=False)
            return 0
        command = tyro.cli(Command, prog="distmega", args=arguments, description=DESCRIPTION)
        run_command(command, open_console())
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()  # nobody reads on
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        drop_output()
        _report(
            RequestError(
                f"the output can't be written ({error.strerror})",
                expected="room where it goes",
                remedy="free some, or write it elsewhere",
            )
        )
        return 1
    except DistmegaError as error:
        _report(error)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, with exit code 143. Under torchrun, whose agent ends
    its ranks so and tells how they ended, both end it at once: while a rank waits for a store or
    for its peers, Python would not heed Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if is_under_torchrun():
        number, before = signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        number, before = signal.SIGTERM, signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(number, before)


def _report(error: DistmegaError) -> None:
    if should_report():
        console = open_console(stderr=True)
        text = f"distmega: error: {error.with_flags(FLAGS)}"
        width = console.width if console.is_terminal else 0  # one line for programs that read it
        with suppress(OSError):  # nobody can be told; the exit code still says it
            console.file.write(wrap_text(text, width) + "\n")
            console.file.flush()


def run_command(command: Command, console: Console) -> None:
    """Does what the command says; raises DistmegaError."""
    match command:
        case Generate():
            run_generate(command, console)
        case Explain():
            run_explain(command, console)
        case Perplexity():
            run_perplexity(command, console)
        case Doctor():
            run_doctor(command, console)
        case Trace():
            run_trace(command, console)
        case Superopt():
            run_superopt(command, console)
