"""Where the span of a communication ends: on a CUDA stream, of which none is needed here."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.ir.nodes import Collective
from distmega.hostir.run.evaluator import Frame
from distmega.hostir.run.timeline import Timeline


class Streams:
    """The current one, by name, and on which each event was recorded."""

    def __init__(self) -> None:
        self.current = "main"
        self.recorded: list[str] = []

    @contextmanager
    def use(self, stream: object) -> Iterator[None]:
        self.current = "beside"
        yield
        self.current = "main"

    def make_event(self, *, enable_timing: bool) -> SimpleNamespace:
        return SimpleNamespace(record=lambda: self.recorded.append(self.current))


@pytest.mark.parametrize("arrives", [True, False])
def test_a_transfer_ends_beside_what_runs_or_with_it(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
):
    """What the current stream does itself has no stream that would tell its end."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Event", streams.make_event)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    followed: list[str] = []
    arrive = (lambda: followed.append(streams.current)) if arrives else None
    node = Collective(kind="all_reduce", mesh_axis="tp", ins=("x",), outs=("y",), handle="sum")

    def start(frame: Frame) -> None:
        frame.handles["sum"] = CommHandle(lambda: None, arrive)

    Timeline("rank 0").watch(node, start)(Frame({}))
    assert streams.recorded == ["main", "beside" if arrives else "main"]
    assert followed == (["beside"] if arrives else [])
