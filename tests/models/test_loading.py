"""Loading weights tells how far it is, and the command shows it."""

import io
from itertools import pairwise

import torch
from rich.console import Console

from distmega.cli import loading_bar
from distmega.cli.loading_bar import LoadingBar, show_loading
from distmega.engine.engine import Engine
from distmega.engine.ranks import jobs
from distmega.engine.ranks.context import RankContext
from distmega.engine.requests import (
    Doing,
    EngineOptions,
    GenerateRequest,
    Loaded,
    Opened,
    Token,
)
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model

CPU_RANK = RankContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", backend="gloo",
    device="cpu",
)  # fmt: skip


def test_progress_counts_every_weight_once():
    seen, mesh = [], DeviceMesh(tp=1)
    engine = Engine(
        open_model("tiny-llama"), mesh, SingleCommunicator(mesh), EngineOptions(max_context=32),
        progress=lambda done, whole: seen.append((done, whole)),
    )  # fmt: skip
    weights = [engine.tensor(name) for name in engine.decode_plan.weights.tensors]
    whole = sum(weight.nbytes for weight in weights)
    assert [total for _, total in seen] == [whole] * len(weights)
    steps = [after[0] - before[0] for before, after in pairwise(seen)]
    assert [seen[0][0], *steps] == [weight.nbytes for weight in weights]
    assert seen[-1][0] == whole
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_reports_come_now_and_then(monkeypatch):
    times, emitted = iter([0.0, 0.1, 0.3, 0.4, 0.6]), []
    monkeypatch.setattr(jobs.time, "monotonic", lambda: next(times))
    report = jobs.report_loading(emitted.append)
    for done in range(1, 5):
        report(done, 4)
    assert emitted == [Loaded(done_bytes=2, all_bytes=4), Loaded(done_bytes=4, all_bytes=4)]


def test_a_terminal_gets_a_bar_that_goes_away():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    values = [Loaded(done_bytes=done * 10**9, all_bytes=16 * 10**9) for done in (1, 8)]
    assert list(show_loading(iter([*values, "token"]), console)) == ["token"]
    assert "8.0/16.0 GB" in text.getvalue()
    assert text.getvalue().endswith("\x1b[2K")


def test_elsewhere_a_line_every_ten_seconds_of_loading(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loading_bar.time, "monotonic", lambda: now[0])
    text = io.StringIO()
    bar = LoadingBar(Console(file=text))
    bar.say("starting 2 ranks")  # which takes long, and is no loading
    for second in (0, 9, 11, 14, 22):
        now[0] = 100.0 + second
        bar.show(Loaded(done_bytes=second * 10**9, all_bytes=32 * 10**9))
    bar.close()
    assert text.getvalue().splitlines() == [
        "loading weights: 11.0 of 32.0 GB",
        "loading weights: 22.0 of 32.0 GB",
    ]


def test_a_terminal_is_told_what_is_done():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    values = [Doing(what="planning"), Loaded(done_bytes=1, all_bytes=2), Doing(what="reading"), "a"]
    assert list(show_loading(iter(values), console, "starting")) == ["a"]
    told = text.getvalue()
    places = [told.index(part) for part in ("starting", "planning", "loading weights", "reading")]
    assert places == sorted(places)
    assert told.endswith("\x1b[2K")


def test_elsewhere_what_is_done_is_logged(caplog):
    text = io.StringIO()
    with caplog.at_level("INFO", logger=loading_bar.__name__):
        assert list(show_loading(iter([Doing(what="planning")]), Console(file=text), "go")) == []
    assert (caplog.messages, text.getvalue()) == (["go", "planning"], "")


def test_a_job_tells_what_it_does():
    request = GenerateRequest(model="tiny-llama", prompts=("ab",), max_new_tokens=3)
    emitted = []
    jobs.generate(CPU_RANK, request, emitted.append)
    assert emitted[0] == Opened(random_weights=True)
    assert [value.what for value in emitted if isinstance(value, Doing)] == [
        "planning a decode step", "preparing the decode step", "loading weights",
        "reading the prompt",
    ]  # fmt: skip
    assert len([value for value in emitted if isinstance(value, Token)]) == 3
