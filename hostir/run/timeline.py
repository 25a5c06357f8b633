"""When each instruction of a host program was issued and when the GPU did it, for one run.

HostClock tells what instructions cost the host. Timeline gives Spans of one run, with streams and
the communication of each mesh axis as tracks, for distmega/trace_file.py. Both go around the nodes
of an Evaluator (its `watch`), and measure only while they are there.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    Collective,
    EndCoalescing,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Recv,
    Send,
    SetStream,
)
from distmega.hostir.run.evaluator import Frame, Step
from distmega.trace_file import Span


def node_word(node: Node) -> str:
    """What a node does, in a word: the kind of its op or collective, or of the node."""
    match node:
        case LibraryOp(op=op):
            return op.kind
        case Collective(kind=kind) | FusedMatmul(kind=kind):
            return kind
        case LaunchMegakernel(kernel=kernel):
            return kernel
    return type(node).__name__


class HostClock:
    """Adds up the host's time by instruction, in microseconds; pass `watch` to an Evaluator."""

    def __init__(self) -> None:
        self.times_us: dict[str, list[float]] = defaultdict(list)

    def watch(self, node: Node, step: Step) -> Step:
        """The step with a clock around it."""
        times = self.times_us[node_word(node)]

        def timed(frame: Frame) -> None:
            start = time.perf_counter()
            step(frame)
            times.append((time.perf_counter() - start) * 1e6)

        return timed

    def report(self) -> list[tuple[str, int, float]]:
        """(instruction, how often, median microseconds of the host), most time first."""
        rows = [(n, len(t), sorted(t)[len(t) // 2]) for n, t in self.times_us.items() if t]
        return sorted(rows, key=lambda row: -row[1] * row[2])


@dataclass(slots=True)
class _Mark:
    """One span under way; ended by an event on the stream, or on one that follows a transfer."""

    track: str
    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


class Timeline:
    """Spans of a run on a GPU. Make one, pass `watch` to an Evaluator, `start`, run, `spans`."""

    def __init__(self, process: str) -> None:
        self.process = process
        self._marks: list[_Mark] = []
        self._stream = 0
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._issued: list[tuple[str, float, float]] = []
        self._origin = 0.0

    def start(self) -> None:
        """Time zero, with the GPU at rest; what was seen before is forgotten."""
        torch.cuda.synchronize()
        self._marks.clear()
        self._issued.clear()
        self._stream = 0
        self._origin = time.perf_counter()
        self._base.record()

    def watch(self, node: Node, step: Step) -> Step:
        """The step with events around it, on whatever stream is current."""
        word = node_word(node)

        def marked(frame: Frame) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            issued = time.perf_counter()
            step(frame)
            self._issued.append((word, issued, time.perf_counter()))
            match node:
                case SetStream(stream=slot):
                    self._stream = slot.at(frame.indices)
                case LibraryOp(op=op) if not op.is_view:
                    end.record()
                    self._marks.append(_Mark(f"stream {self._stream}", op.name, begin, end))
                case LaunchMegakernel() | FusedMatmul():
                    end.record()
                    self._marks.append(_Mark(f"stream {self._stream}", word, begin, end))
                case Collective() | EndCoalescing() | Send() | Recv() if node.handle:
                    axis = node.mesh_axis if isinstance(node, Collective) else "transfers"
                    self._record_end(frame.handles[node.handle], end)
                    track = f"communication {axis}"
                    self._marks.append(_Mark(track, node.handle, begin, end))

        return marked

    def _record_end(self, handle: CommHandle, end: torch.cuda.Event) -> None:
        """Behind the transfer; or on the current stream, which does those that have no other."""
        if not handle.arrives:
            end.record()
            return
        with torch.cuda.stream(self._beside):
            handle.follow()
            end.record()

    def spans(self) -> Iterator[Span]:
        """All of the run, once it is over: the GPU's tracks, then the host's."""
        torch.cuda.synchronize()
        ends: dict[str, float] = {}
        for mark in sorted(self._marks, key=lambda mark: mark.track):
            start, stop = (1e3 * self._base.elapsed_time(each) for each in (mark.begin, mark.end))
            start = max(start, ends.get(mark.track, 0.0))
            ends[mark.track] = max(stop, start)
            yield self._span(mark.track, mark.name, start, max(stop - start, 0.0))
        for word, begin, end in self._issued:
            yield self._span("host", word, 1e6 * (begin - self._origin), 1e6 * (end - begin))

    def _span(self, track: str, name: str, start_us: float, duration_us: float) -> Span:
        return Span(
            process=self.process,
            track=track,
            name=name,
            start_us=start_us,
            duration_us=duration_us,
        )
