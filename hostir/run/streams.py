"""Streams and events of a host program on a GPU.

Comes in: the nodes that set streams, record and wait. Goes out: closures that do so with torch's
CUDA streams. Stream 0 is the caller's. Buffers stay safe across streams without further marks: what
a body allocates it frees on the same stream, after all streams that touched it have joined, which
check.py proves. Used by evaluator.py.
"""

from collections.abc import Callable, Mapping

import torch

from distmega.hostir.ir.nodes import RecordEvent, SetStream, Slot, WaitEvent

Indices = Mapping[str, int]


class CudaStreams:
    """The streams and events of one host program on one device."""

    def __init__(self, device: torch.device, num_streams: int, num_events: int) -> None:
        self.device = device
        self._main = torch.cuda.current_stream(device)
        self._ring = [torch.cuda.Stream(device) for _ in range(num_streams - 1)]  # type: ignore[no-untyped-call]
        self._events = [torch.cuda.Event() for _ in range(num_events)]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The stream that is current now is stream 0."""
        self._main = torch.cuda.current_stream(self.device)

    def end(self) -> None:
        """Makes stream 0 current again, after a fault too."""
        torch.cuda.set_stream(self._main)

    def stream(self, slot: Slot, indices: Indices) -> torch.cuda.Stream:
        """The stream that a slot names."""
        number = slot.at(indices)
        return self._ring[number - 1] if number else self._main

    def step(self, node: SetStream | RecordEvent | WaitEvent) -> Callable[[Indices], None]:
        """What a node does, given the values of the loop indices."""
        events = self._events
        match node:
            case SetStream(stream=slot):
                return lambda indices: torch.cuda.set_stream(self.stream(slot, indices))
            case RecordEvent(event=slot):
                return lambda indices: events[slot.at(indices)].record()
            case WaitEvent(event=slot):
                return lambda indices: events[slot.at(indices)].wait()
