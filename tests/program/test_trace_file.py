"""Timelines as trace event files: names first, one thread a track."""

import json
from pathlib import Path

from distmega.trace_file import Span, write_trace


def test_tracks_of_processes_are_named_once_and_spans_keep_their_times(tmp_path: Path):
    spans = [
        Span(process="GPU 0", track="stream 1", name="y", start_us=2.0, duration_us=3.5),
        Span(process="GPU 0", track="stream 1", name="z", start_us=6.0, duration_us=1.0),
        Span(process="GPU 1", track="stream 1", name="y", start_us=2.5, duration_us=3.0),
    ]
    path = tmp_path / "run.json"
    write_trace(path, spans)
    events = json.loads(path.read_text())["traceEvents"]
    named = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert named == [
        ("process_name", "GPU 0"), ("thread_name", "stream 1"),
        ("process_name", "GPU 1"), ("thread_name", "stream 1"),
    ]  # fmt: skip
    drawn = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [(0, 0, "y", 2.0, 3.5), (0, 0, "z", 6.0, 1.0), (1, 1, "y", 2.5, 3.0)]
