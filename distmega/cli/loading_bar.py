"""Shows how far the weights are: a bar on a terminal, else a line now and then.

Comes in: Loaded values of rank 0. Goes out: text on stderr, gone from a terminal once weights are
loaded. Models that load at once show nothing. Next on the walk: jobs.py, which sends the values.
"""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from distmega.engine.requests import Loaded

LINE_S = 10.0
"""Seconds before the first line and between two, where there is no terminal."""


def show_loading(values: Iterator[object], console: Console) -> Iterator[object]:
    """The values but those that say how far the weights are, which the console shows."""
    bar = LoadingBar(console)
    try:
        for value in values:
            if isinstance(value, Loaded):
                bar.show(value)
            else:
                bar.close()
                yield value
    finally:
        bar.close()


class LoadingBar:
    """One line of progress on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def show(self, loaded: Loaded) -> None:
        """The newest state."""
        if self._console.is_terminal:
            self._draw(loaded)
        elif time.monotonic() - self._last_line >= LINE_S:
            self._last_line = time.monotonic()
            done, whole = loaded.done_bytes / 1e9, loaded.all_bytes / 1e9
            self._console.print(f"loading weights: {done:.1f} of {whole:.1f} GB", markup=False)

    def close(self) -> None:
        """Weights are loaded, or never will be."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _draw(self, loaded: Loaded) -> None:
        if self._bar is None:
            columns = TextColumn("loading weights"), BarColumn(), DownloadColumn()
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=self._console, transient=True
            )
            self._bar.add_task("weights", total=loaded.all_bytes)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=loaded.done_bytes)
