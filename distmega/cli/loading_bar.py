"""Shows what the ranks do until there is something to print: words, and how far the weights are.

Comes in: Doing and Loaded values of rank 0. Goes out: on a terminal a line on stderr that is gone
afterwards; elsewhere a line now and then while weights are loaded, and what is done is logged.
Next on the walk: jobs.py, which sends the values.
"""

import logging
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from distmega.engine.requests import Doing, Loaded

logger = logging.getLogger(__name__)

LINE_S = 10.0
"""Seconds of loading before the first line and between two, where there is no terminal."""
WORDS = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
BAR = TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn()


def show_loading(values: Iterator[object], console: Console, first: str = "") -> Iterator[object]:
    """The values but those that say what is done, which the console shows. first: what is done
    until the first value comes.
    """
    bar = LoadingBar(console)
    try:
        if first:
            bar.say(first)
        for value in values:
            if isinstance(value, Loaded):
                bar.show(value)
            elif isinstance(value, Doing):
                bar.say(value.what)
            else:
                bar.close()
                yield value
    finally:
        bar.close()


class LoadingBar:
    """One line on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._last_line: float | None = None
        """When the last line came, or weights began to be loaded."""

    def say(self, what: str) -> None:
        """What is done from now on."""
        logger.info("%s", what)
        if self._console.is_terminal:
            self.close()
            self._bar = self._open(WORDS, what, None)

    def show(self, loaded: Loaded) -> None:
        """How far the weights are."""
        if self._console.is_terminal:
            if self._bar is None or self._bar.tasks[0].total is None:
                self.close()
                self._bar = self._open(BAR, "weights", loaded.all_bytes)
            self._bar.update(self._bar.task_ids[0], completed=loaded.done_bytes)
        elif self._last_line is None:
            self._last_line = time.monotonic()
        elif time.monotonic() - self._last_line >= LINE_S:
            self._last_line = time.monotonic()
            done, whole = loaded.done_bytes / 1e9, loaded.all_bytes / 1e9
            self._console.print(f"loading weights: {done:.1f} of {whole:.1f} GB", markup=False)

    def close(self) -> None:
        """There is something to print, or never will be."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _open(self, columns: tuple[ProgressColumn, ...], what: str, whole: int | None) -> Progress:
        bar = Progress(*columns, console=self._console, transient=True)
        bar.add_task(what, total=whole)
        bar.start()
        return bar
