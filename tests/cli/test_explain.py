"""What explain tells: the summary first, layers once, reasons, JSON, and the page."""

import json
import math
import random
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from distmega.cli.explain import (
    ExplainReport,
    collect,
    collect_decode,
    usual_machine,
    write_page,
    write_report,
)
from distmega.cli.explain.diagram import AXIS_COLOURS
from distmega.cli.explain.facts import PredictedSpan
from distmega.cli.explain.fold import fold_lines, folded_text
from distmega.cli.explain.page import KIND_COLOURS
from distmega.cli.explain.timeline import predict_timeline
from distmega.cli.main import main
from distmega.engine.decode_plan import model_mesh
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.queues import Queues
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import CPU, H200
from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.models.presets import PRESETS
from distmega.program.types import Program
from distmega.torch_import.huggingface.decoders import open_decoder
from tests.hostir.programs import streamed
from tests.repo.source import ROOT
from tests.torch_import.recurrent_families import RECURRENT

FALLBACK = "the search prices whole plans"


def report_of(model: str, tp: int = 1, pp: int = 1, **options: str) -> ExplainReport:
    config = PRESETS[model]
    mesh, engine = model_mesh(tp, pp), EngineOptions(**options)  # type: ignore[arg-type]
    return collect_decode(model, config, mesh, usual_machine(config), engine, full=True)


@pytest.fixture(scope="module")
def llama() -> ExplainReport:
    return report_of("llama-3.2-1b", tp=2)


@pytest.fixture(scope="module")
def staged() -> ExplainReport:
    return report_of("tiny-llama", tp=2, pp=2, collectives="host")


def test_the_machine_is_that_which_the_model_is_for():
    assert {name for name, config in PRESETS.items() if usual_machine(config) == CPU} == {
        name for name in PRESETS if name.startswith(("tiny-", "smollm2"))
    }
    assert usual_machine(PRESETS["llama-3.2-1b"]) == H200


def test_the_summary_comes_first_and_says_what_bounds(llama: ExplainReport):
    title, text = next(write_report(llama))
    assert title == "summary"
    for part in ("planned for h200", "us a token", "bound by: ", "a rank holds: ", "a rank sends"):
        assert part in text
    assert "one kernel of " in text


def test_the_front_page_shows_this_summary(llama: ExplainReport):
    """But for figures, which change with the cost model and the kernel."""
    blocks = re.findall(r"```text\n(llama-.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    _, text = next(write_report(llama))
    (shown,) = (re.sub(r"[\d.]+", "#", block) for block in blocks)
    assert shown == re.sub(r"[\d.]+", "#", text) + "\n"


def test_figures_add_up_to_those_of_the_plan(llama: ExplainReport):
    plan = plan_decode(PRESETS["llama-3.2-1b"], model_mesh(2, 1), H200, EngineOptions()).plan
    (stage,) = llama.stages
    assert stage.time.total_us == pytest.approx(plan.time_us)
    assert stage.memory.total_bytes == plan.memory.total_bytes
    assert stage.sent_bytes == plan.num_sent_bytes
    assert stage.time.least_us <= stage.time.bytes_us + stage.time.flops_us + 1e-6
    assert plan.num_collectives == 34
    _, text = next(write_report(llama))
    assert f"in {plan.num_collectives} collectives a token" in text
    held = sum(t.rank_bytes for t in stage.tensors if t.role == "weight")
    assert held == stage.memory.weight_bytes


def test_equal_layers_are_told_once(llama: ExplainReport):
    texts = [dict(write_report(report)) for report in (llama, report_of("smollm2-135m", tp=2))]
    for text in texts:
        assert sum(part.count("\n") for part in text.values()) < 90
    assert "layers.{0-15}.wq" in texts[0]["one rank"]
    assert "bf16[8/tp, 4, 64, 2048]" in texts[0]["one rank"]
    host = dict(write_report(report_of("llama-3.2-1b", tp=2, collectives="host")))["host program"]
    assert "15 times" in host
    assert "free layers.{0-14}.attn_out" in host
    assert host.count("\n") < 120


def test_full_has_every_choice_and_every_op(llama: ExplainReport):
    texts = dict(write_report(llama, full=True))
    assert "not whole: +" in texts["plan"]
    assert "tensors\n" in texts["plan"]
    assert "program decoder_1.0" in texts["host program"]
    assert "layers.7.wq" in texts["host program"]


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3.2-1b", 8), ("qwen3-30b-a3b", 2), ("smollm2-135m", 2)]
)
def test_a_choice_that_looks_cheaper_says_why_it_lost(model: str, tp: int):
    (stage,) = report_of(model, tp=tp).stages
    cheaper = [one for op in stage.ops for one in op.rejected if (one.change_us or 0) < 0]
    assert cheaper
    assert not [one for one in cheaper if one.why.startswith(FALLBACK) or not one.why]
    lines = stage.plan_text.splitlines()
    told = [i for i, line in enumerate(lines) if re.match(r" +not [^:]*: -", line)]
    assert told
    assert all(lines[i + 1].lstrip().startswith("but ") for i in told)


def test_repeated_lines_are_folded():
    lines = ["start"]
    for n in range(5):
        lines += [f"use b.{n}.x as c.{n + 1}", f"  free b.{n}.x", "always"]
    lines += ["end"]
    folded = fold_lines(lines)
    assert [(part.times, len(part.lines)) for part in folded] == [(1, 1), (5, 3), (1, 1)]
    assert folded[1].lines[0] == "use b.{0-4}.x as c.{1-5}"
    assert folded_text(lines)[1] == "5 times"
    assert len(folded_text(lines)) == 6
    assert sum(part.times * len(part.lines) for part in folded) == len(lines)


def test_numbers_that_do_not_rise_evenly_are_not_folded():
    lines = [f"a.{n}.x of b.{n * n}" for n in range(4)]
    assert all(part.times <= 2 for part in fold_lines(lines))
    assert "a.{0-3}" not in "\n".join(folded_text(lines))


def of_track(spans: tuple[PredictedSpan, ...], track: str) -> list[PredictedSpan]:
    return sorted((s for s in spans if s.track == track), key=lambda s: s.start_us)


def test_a_track_does_one_thing_at_a_time(llama: ExplainReport, staged: ExplainReport):
    for stage in (*llama.stages, *staged.stages):
        assert {span.track for span in stage.timeline} >= {"stream 0", "collectives tp"}
        for track in {span.track for span in stage.timeline}:
            spans = of_track(stage.timeline, track)
            for one, other in pairwise(spans):
                assert other.start_us >= one.end_us - 1e-9
    (stage,) = llama.stages
    end = max(span.end_us for span in stage.timeline)
    assert end == pytest.approx(stage.time.total_us, rel=0.05)


def test_streams_of_a_host_loop_overlap():
    spans = predict_timeline(streamed(), CPU, {})
    tracks = {span.track for span in spans if span.track.startswith("stream")}
    assert len(tracks) > 1
    whole = sum(span.end_us - span.start_us for span in spans)
    assert max(span.end_us for span in spans) < whole


class Page(HTMLParser):
    """Elements with their attributes, and whether every one of them is closed."""

    VOID = {"meta", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [attrs for _, attrs in self.found if attrs.get("class") == name]


def test_the_page_opens_offline_and_is_well_formed(llama: ExplainReport, staged: ExplainReport):
    for report in (llama, staged):
        text = write_page(report)
        page = Page(text)
        assert not re.findall(r"https?:|@import|url\(", text)
        assert all(attrs.get("href", "#").startswith("#") for _, attrs in page.found)
        assert not [attrs for _, attrs in page.found if "src" in attrs]
        ids = [attrs["id"] for _, attrs in page.found if "id" in attrs]
        assert len(ids) == len(set(ids))
        uses = {attrs["href"] for tag, attrs in page.found if tag == "use"}
        assert uses <= {f"#{name}" for name in ids}
        numbers = [float(attrs[key]) for tag, attrs in page.found if tag == "rect"
                   for key in ("x", "y", "width", "height")]  # fmt: skip
        assert all(math.isfinite(number) for number in numbers)


def test_the_page_shows_a_layer_with_its_collectives_and_rejected_choices(llama: ExplainReport):
    page = Page(write_page(llama))
    (stage,) = llama.stages
    names = [op.name for op in stage.ops if op.name.startswith("layers.8.")]
    boxes = page.of_class("op")
    assert len(boxes) == len(names)
    assert all("divided: " in box["data-tip"] for box in boxes)
    assert sum("\nnot " in box["data-tip"] for box in boxes) == len(names)
    assert len(page.of_class("collective")) == 2
    text = write_page(llama)
    assert "Layer 8 on one rank" in text
    assert "w_gate bf16[8192/tp, 2048]" in text
    assert "stroke-dasharray" in text


def test_the_page_shows_ranks_streams_memory_and_time(llama: ExplainReport, staged: ExplainReport):
    text = write_page(llama)
    for words in ("rank 0 stream 0", "rank 1 collectives tp", "KV cache", "1079 us"):
        assert words in text
    page = Page(write_page(staged))
    assert len(page.of_class("layer")) == 2
    assert len(page.of_class("timeline")) == 4
    assert "rank 3" in write_page(staged)
    bars = [attrs for tag, attrs in page.found if tag == "rect" and "memory" not in attrs]
    assert all(float(bar["width"]) >= 0 for bar in bars)


def test_json_has_all_facts(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "tiny-llama", "--tp", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["model"], facts["machine"], facts["num_layers"]) == ("tiny-llama", "cpu", 2)
    (stage,) = facts["stages"]
    assert {op["kind"] for op in stage["ops"]} >= {"linear", "attention", "rms_norm"}
    assert stage["timeline"]
    assert stage["ops"][1]["rejected"]


def test_a_page_is_written_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "a.html"
    assert main(["explain", "tiny-llama", "--html", str(path)]) == 0
    assert path.read_text().startswith("<!doctype html>")


def test_a_page_that_can_not_be_written_is_told_before_the_model_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "distmega.cli.explain.collect_decode", lambda *_given, **_kw: pytest.fail("it plans")
    )
    for path in tmp_path, tmp_path / "no" / "a.html":
        assert main(["explain", "tiny-llama", "--html", str(path)]) == 2
        said = capsys.readouterr().err
        assert "can't be written (" in said
        assert "expected a path in a folder that is there" in said
        assert said.rstrip().endswith("make the folder, or give another --html")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("num_sms", [2, 5])
def test_tasks_and_events_are_those_that_the_interpreter_runs(num_sms: int):
    """Waits that others imply are left out of queues, and so are their events."""
    config, mesh = PRESETS["tiny-qwen3-moe"], model_mesh(2, 1)
    options = EngineOptions(num_sms=num_sms)
    (stage,) = collect_decode("tiny", config, mesh, CPU, options).stages
    staged = plan_decode(config, mesh, CPU, options)
    decode = lower_decode(config, staged, options, peer_memory=True)
    (segment,), (facts,) = decode.host.segments, stage.host.segments
    kernel = compile_megakernel(segment, decode.mesh, num_sms=num_sms)
    assert facts.num_tasks == sum(map(len, kernel.schedule.queues))
    assert facts.num_events == kernel.schedule.num_events
    assert facts.num_sms == num_sms


def test_tasks_and_events_are_those_that_a_gpu_runs():
    """The instructions of its one kernel, where there is one."""
    config, options = PRESETS["qwen3-0.6b"], EngineOptions()
    report = collect_decode("small", config, model_mesh(1, 1), H200, options)
    staged = plan_decode(config, model_mesh(1, 1), H200, options)
    decode = lower_decode(config, staged, options, peer_memory=True)
    queues = build_queues(
        decode.host.segments[0], decode.weights, decode.states, decode.machine.num_sms
    )
    (facts,) = report.stages[0].host.segments
    assert facts.num_tasks == sum(map(len, queues.queues))
    assert facts.num_events == len(queues.buffers)
    many = collect_decode("small", config, model_mesh(1, 1), H200, EngineOptions(batch=100))
    assert not many.stages[0].host.segments
    text = dict(write_report(many))["task graph, as each launch runs it"]
    assert text == "none: library ops, since the persistent kernel can't do 100 rows"


@pytest.mark.parametrize(
    ("batch", "kernel_rows", "means"),
    [(32, 64, "one kernel of "), (32, 16, "library ops, "), (2, 1, "library ops, ")],
)
def test_as_many_rows_as_asked_for_are_one_kernel(batch, kernel_rows, means):
    config = replace(PRESETS["qwen3-0.6b"], num_layers=1)
    options = EngineOptions(batch=batch, kernel_rows=kernel_rows, max_context=256)
    report = collect_decode("small", config, model_mesh(1, 1), H200, options)
    assert report.stages[0].runs_as.startswith(means)


def test_recurrent_states_have_no_kernel():
    """No step of theirs runs ahead, as those of a kernel do."""
    config = open_decoder(RECURRENT["lfm2"](random.Random(0)))
    report = collect_decode("lfm2", config, model_mesh(1, 1), H200, EngineOptions(max_context=32))
    assert config.recurrent_states
    assert report.stages[0].runs_as == (
        "library ops, since no step with recurrent states runs ahead"
    )


def test_no_stage_has_a_kernel_where_one_has_none(monkeypatch):
    """Stages open their kernels together, or none does."""
    config, options = replace(PRESETS["qwen3-0.6b"], num_layers=2), EngineOptions(max_context=256)
    plan = collect.plan_queues

    def plan_first(segment: Program, *layouts: ArenaLayout | int, **options: object) -> Queues:
        if segment.outputs == ("next",):
            raise UnsupportedError("the last stage", expected="another", remedy="none")
        return plan(segment, *layouts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "plan_queues", plan_first)
    report = collect_decode("small", config, model_mesh(1, 2), H200, options)
    assert [stage.runs_as for stage in report.stages] == ["library ops, since the last stage"] * 2
    assert not any(stage.one_kernel for stage in report.stages)


def test_figures_of_a_batch_are_of_a_step():
    config = PRESETS["tiny-llama"]
    options = EngineOptions(batch=8)
    report = collect_decode("tiny-llama", config, model_mesh(1, 1), CPU, options)
    _, text = next(write_report(report))
    assert "8 sequences" in text
    assert "us a step of 8 tokens, if" in text
    assert " us a step of 8 tokens, bound by" in write_page(report)


def test_rules_that_make_ops_are_named():
    """Of a step of library ops, as no kernel has heads of 36, with sizes and times; a kernel that
    none helps has none.
    """
    notes = {}
    for batch, head_dim in ((1, 64), (12, 36)):
        config = replace(PRESETS["smollm2-135m"], num_layers=2, head_dim=head_dim)
        options = EngineOptions(batch=batch, max_context=64)
        report = collect_decode("two layers", config, model_mesh(1, 1), H200, options)
        notes[batch] = "\n".join(report.stages[0].notes)
    assert "made by rule gated_mlp.k4096.n11008.rows16 at m0=12 k=576 n=1536: " in notes[12]
    assert ", 1 more alike" in notes[12]
    assert "made by rule" not in notes[1]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="no chromium to draw the page")
def test_a_browser_draws_the_page(llama: ExplainReport, tmp_path: Path):
    """The layer's divided boxes, and below them the bars of time, in their colours."""
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    page.write_text(write_page(llama))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2600")
    command = [str(BROWSER), *options, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    rows = picture_rows(picture.read_bytes())
    divided, bar = bytes.fromhex(AXIS_COLOURS[0][1:]), bytes.fromhex(KIND_COLOURS["linear"][1:])
    at = {colour: [y for y, row in enumerate(rows) if colour in row] for colour in (divided, bar)}
    assert len(at[divided]) > 500
    assert max(at[bar]) > max(at[divided])


def picture_rows(png: bytes) -> list[bytes]:
    """The rows of a PNG of 8 bits a colour, three colours a pixel."""
    width, height, depth, colours = struct.unpack(">IIBB", png[16:26])
    assert (depth, colours) == (8, 2)
    data, at = b"", 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    raw, above, rows = zlib.decompress(data), bytes(3 * width), []
    for y in range(height):
        kind, row = raw[y * (3 * width + 1)], bytearray(raw[y * (3 * width + 1) + 1 :][: 3 * width])
        for x in range(3 * width) if kind else ():
            left, up = row[x - 3] if x >= 3 else 0, above[x]
            corner = above[x - 3] if x >= 3 else 0
            near = min((left, up, corner), key=lambda one: abs(left + up - corner - one))
            row[x] = (row[x] + (0, left, up, (left + up) // 2, near)[kind]) % 256
        above = bytes(row)
        rows.append(above)
    return rows
