"""Timelines as files that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Comes in: Spans, each on a track of a process (a rank, a GPU). Goes out: a file in the JSON trace
event format, tracks in the order given. Used by hostir/run/timeline.py and wherever else times are
drawn.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distmega.whole_file import replace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that went on from `start_us` for `duration_us` microseconds on one track.

    args: what a viewer shows beside it.
    """

    process: str
    track: str
    name: str
    start_us: float
    duration_us: float
    args: Mapping[str, str | int | float] = field(default_factory=dict)


def write_trace(path: Path, spans: Iterable[Span]) -> None:
    """Replaces the file at once; processes and tracks stand in the order of their first span."""
    replace_text(path, json.dumps({"traceEvents": list(trace_events(spans))}) + "\n")


def trace_events(spans: Iterable[Span]) -> Iterable[dict[str, object]]:
    """The events of a trace file: spans, and names of processes and tracks before their first."""
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    for span in spans:
        key = span.process, span.track
        if span.process not in processes:
            processes[span.process] = len(processes)
            yield _named("process", span.process, processes[span.process], 0)
        process = processes[span.process]
        if key not in tracks:
            tracks[key] = len(tracks)
            yield _named("thread", span.track, process, tracks[key])
        yield {
            "ph": "X",
            "name": span.name,
            "pid": process,
            "tid": tracks[key],
            "ts": span.start_us,
            "dur": span.duration_us,
            "args": dict(span.args),
        }


def _named(what: str, name: str, process: int, track: int) -> dict[str, object]:
    return {
        "ph": "M",
        "name": f"{what}_name",
        "pid": process,
        "tid": track,
        "args": {"name": name},
    }
