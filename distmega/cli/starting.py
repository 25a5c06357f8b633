"""Ranks that a command starts: who they are, what they say while they run.

Comes in: the flags of flags.py and a request. Goes out: what the ranks emit. Next:
launch/launchers.py.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from distmega.arguments import require_whole
from distmega.cli.flags import Ranks
from distmega.cli.loading_bar import show_loading
from distmega.cli.streams import STDIN, open_console, read_text
from distmega.engine.requests import MAX_DEGREE
from distmega.env import read_settings
from distmega.errors import RequestError, counted
from distmega.generation import reserve_ranks
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import (
    choose_device,
    choose_launcher,
    choose_num_ranks,
    is_under_torchrun,
    launch,
)


def launcher_options(ranks: Ranks) -> tuple[LauncherOptions, int]:
    """What the launcher is asked, and the ranks of each stage; the ranks of a stage go together."""
    require_whole("tp", ranks.tp, 0, MAX_DEGREE)
    require_whole("pp", ranks.pp, 1, MAX_DEGREE)
    launcher = choose_launcher(ranks.launcher)
    least = 0 if launcher == "torchrun" else ranks.pp
    num_ranks = choose_num_ranks(launcher, ranks.tp * ranks.pp or least)
    if num_ranks % ranks.pp:
        raise RequestError(
            f"{counted(num_ranks, 'rank')} in {counted(ranks.pp, 'stage')}",
            expected="as many ranks in each stage",
            remedy="correct --pp or the number of ranks",
        )
    tp = num_ranks // ranks.pp
    options = LauncherOptions(
        launcher=launcher,
        device=choose_device(ranks.device, launcher),
        max_restarts=ranks.max_restarts,
    )
    return reserve_ranks(options, tp, ranks.pp), tp


def run_ranks(target: str, request: object, options: LauncherOptions) -> Iterator[object]:
    """What ranks emit, and their result; a bar on stderr shows how they load meanwhile."""
    if not is_under_torchrun():  # whose ranks log for themselves
        level = read_settings().log.upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    console = open_console(stderr=True)
    num = options.num_ranks
    values = (event.value for event in launch(target, request, options))
    first = f"starting {counted(num, 'rank')}"
    yield from show_loading(values, console, first)


def read_shared_text(path: Path) -> str:
    """As read_text, of a file that all ranks of torchrun can read."""
    if path == STDIN and is_under_torchrun():
        raise RequestError(
            "standard input of ranks that torchrun started",
            expected="a file, which all of them can read",
            remedy="write the text to a file, or start without torchrun",
        )
    return read_text(path)


def announce_random_weights(what: str, console: Console) -> None:
    """Says that a model had no weights to load. what: that then means nothing."""
    console.print(f"[random weights: the {what} means nothing]", markup=False)
