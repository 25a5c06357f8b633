"""A Report as one HTML page that opens offline: a layer as a diagram, the predicted timeline of
ranks and streams, memory and time of a rank as bars.

Comes in: an ExplainReport. Goes out: text of a page with its own styles, script and SVG; nothing is
fetched. Colours stand for mesh axes: what an axis divides has its colour, what is whole is grey.
diagram.py draws the layer.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from distmega.cli.explain.diagram import (
    WHOLE,
    axis_colours,
    middle_layer,
    tip_of,
    write_layer,
)
from distmega.cli.explain.facts import ExplainReport, OpFacts, PredictedSpan, StageFacts
from distmega.cli.explain.fold import layer_of, without_layer
from distmega.sharding.explain import format_bytes, format_us

WIDTH, LABEL, ROW = 1100, 130, 22
"""Of a drawing, of what stands left of its rows, and a row's height, in pixels."""

PARTS = ("#4c78a8", "#f2a541", "#72b7b2", "#b279a2", "#9d9d9d")
"""Colours of the parts of a bar."""

KIND_COLOURS = {
    "linear": "#4c78a8",
    "grouped_linear": "#4c78a8",
    "attention": "#e0734c",
    "rms_norm": "#72b7b2",
    "pointwise": "#8bbf6a",
    "collective": "#b279a2",
}
OTHER = "#a9a9a9"

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1180px;
  margin: 24px auto; padding: 0 12px }
h1 { font-size: 22px } h2 { font-size: 17px; margin-top: 32px } h3 { font-size: 14px }
svg { display: block; max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif }
table { border-collapse: collapse }
td, th { padding: 2px 10px 2px 0; text-align: left; vertical-align: top }
.key span { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 14px;
  vertical-align: -1px }
.op { cursor: help } .op:hover rect, .op:focus rect { stroke-width: 3 }
svg .small { fill: #555; font-size: 11px; paint-order: stroke; stroke: #fff; stroke-width: 3px }
#tip { position: fixed; display: none; max-width: 520px; background: #fff; padding: 8px 10px;
  border: 1px solid #888; box-shadow: 0 2px 8px #0003; white-space: pre-wrap; font-size: 12px }
"""

SCRIPT = """
const tip = document.getElementById("tip");
function show(event) {
  const at = event.target.closest("[data-tip]");
  if (!at) { tip.style.display = "none"; return; }
  tip.textContent = at.dataset.tip;
  tip.style.display = "block";
  const box = at.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(box.right + 8, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(box.top, innerHeight - tip.offsetHeight - 8)) + "px";
}
document.addEventListener("mouseover", show);
document.addEventListener("focusin", show);
"""


def write_page(report: ExplainReport) -> str:
    """The whole page."""
    stages = f" in each of {len(report.stages)} stages" if len(report.stages) > 1 else ""
    where = f"{_ranks(report.stages[0])}{stages}"
    title = f"{report.model} on {where}, planned for {report.machine}"
    body = "\n".join(_body(report, title))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        f'{body}\n<div id="tip" role="tooltip"></div>\n'
        f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _ranks(stage: StageFacts) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in stage.ranks)


def _body(report: ExplainReport, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield "<p>One decode step as the cost model predicts it, if every op were a library call,"
    yield "one after another.</p>"
    for stage in report.stages:
        if len(report.stages) > 1:
            yield f"<h2>Stage {stage.index}</h2>"
        yield from _summary(stage, report.step)
        yield from _layer(stage)
        yield from _timelines(stage)
    yield "<h2>Memory and time of each rank</h2>"
    yield from _bars(report)


def _summary(stage: StageFacts, step: str) -> Iterator[str]:
    time = stage.time
    rows = (
        ("predicted", f"{format_us(time.total_us)} {step}, bound by {stage.bound}"),
        ("at least", f"{format_us(time.least_us)}, all bytes of ops at the rate of memory"),
        ("runs as", stage.runs_as),
        ("a rank holds", format_bytes(stage.memory.total_bytes)),
        ("a rank sends", f"{format_bytes(stage.sent_bytes)} {step}"),
        *(("note", note) for note in stage.notes),
    )
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    yield f"<table>{''.join(cells)}</table>"


def _layer(stage: StageFacts) -> Iterator[str]:
    layer = middle_layer(stage)
    name = "All ops" if layer is None else f"Layer {layer}"
    yield f"<h2>{name} on one rank</h2>"
    colours = axis_colours(stage)
    keys = (
        f'<span style="background:{colour}"></span>divided by {escape(axis)}'
        for axis, colour in colours.items()
    )
    yield f'<p class="key"><span style="background:{WHOLE}"></span>whole on every rank'
    yield f"{''.join(keys)} &nbsp; dashed: parts that are still to be summed up"
    yield "&nbsp; point at an op for the choices that were rejected</p>"
    yield write_layer(stage, layer)
    yield from _choices([op for op in stage.ops if layer_of(op.name) == layer or layer is None])


def _choices(ops: Sequence[OpFacts]) -> Iterator[str]:
    """The tips once more as a table, for who can't point."""
    yield "<details><summary>rejected choices as a table</summary><table>"
    for op in ops:
        text = escape(tip_of(op)).replace("\n", "<br>")
        yield f"<tr><th>{escape(without_layer(op.name))}</th><td>{text}</td></tr>"
    yield "</table></details>"


def _timelines(stage: StageFacts) -> Iterator[str]:
    layer = middle_layer(stage)
    yield "<h2>Predicted timeline</h2>"
    yield from _timeline(stage, stage.timeline, f"whole{stage.index}")
    inside = [span for span in stage.timeline if layer is not None and layer_of(span.name) == layer]
    if inside:
        yield f"<h3>Layer {layer} alone</h3>"
        yield from _timeline(stage, inside, f"layer{stage.index}")
    kinds = {_category(span) for span in stage.timeline}
    keys = (
        f'<span style="background:{KIND_COLOURS.get(kind, OTHER)}"></span>{escape(kind)}'
        for kind in (*KIND_COLOURS, "other")
        if kind in kinds
    )
    yield f'<p class="key">{"".join(keys)}</p>'


def _category(span: PredictedSpan) -> str:
    if span.track.startswith("collectives"):
        return "collective"
    return span.kind if span.kind in KIND_COLOURS else "other"


def _timeline(stage: StageFacts, spans: Sequence[PredictedSpan], name: str) -> Iterator[str]:
    """Tracks of all ranks; they run the same program, so that those of the first are used again."""
    start = min(span.start_us for span in spans)
    length = max(max(span.end_us for span in spans) - start, 1e-9)
    tracks = list(dict.fromkeys(span.track for span in spans))
    scale = (WIDTH - LABEL) / length
    height = ROW * len(tracks) * stage.num_ranks + 24
    yield f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    yield f'<defs><g id="{name}">'
    for span in spans:
        x, width = LABEL + (span.start_us - start) * scale, (span.end_us - span.start_us) * scale
        y = ROW * tracks.index(span.track) + 3
        colour = KIND_COLOURS.get(_category(span), OTHER)
        tip = escape(
            f"{span.name}\n{span.kind}, {format_us(span.end_us - span.start_us)}", quote=True
        )
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" height="{ROW - 6}"'
            f' fill="{colour}" data-tip="{tip}"/>'
        )
    yield "</g></defs>"
    for rank in range(stage.num_ranks):
        top = rank * ROW * len(tracks)
        for i, track in enumerate(tracks):
            y = top + ROW * i
            yield f'<text x="0" y="{y + 15}">rank {stage.first_rank + rank} {escape(track)}</text>'
            yield f'<line x1="0" x2="{WIDTH}" y1="{y + ROW}" y2="{y + ROW}" stroke="#e4e4e4"/>'
        yield f'<use href="#{name}" y="{top}"/>'
    for i in range(5):
        x = LABEL + (WIDTH - LABEL) * i / 4
        anchor = "end" if i == 4 else "start" if i == 0 else "middle"
        text = format_us(length * i / 4) if i else "0 us"
        position = f'x="{x:.0f}" y="{height - 6}" text-anchor="{anchor}"'
        yield f'<text class="small" {position}>{text}</text>'
    yield "</svg>"


def _bars(report: ExplainReport) -> Iterator[str]:
    rows: list[tuple[str, list[tuple[str, float]], list[tuple[str, float]]]] = []
    for stage in report.stages:
        memory = [(word, float(size)) for word, size in stage.memory.parts() if size]
        time = [(word, us) for word, us in stage.time.parts() if us]
        for rank in range(stage.num_ranks):
            rows.append((f"rank {stage.first_rank + rank}", memory, time))
    yield from _bar_chart("memory", [(name, parts) for name, parts, _ in rows], format_bytes)
    yield from _bar_chart("time", [(name, parts) for name, _, parts in rows], format_us)


def _bar_chart(
    what: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: Callable[[float], str]
) -> Iterator[str]:
    """Stacked bars on one scale, the total right of each."""
    words = list(dict.fromkeys(word for _, parts in rows for word, _ in parts))
    most = max(sum(size for _, size in parts) for _, parts in rows) or 1.0
    height, most_width = ROW * len(rows), WIDTH - LABEL - 90
    colours = dict(zip(words, PARTS, strict=False))
    keys = (f'<span style="background:{colours[word]}"></span>{escape(word)}' for word in words)
    yield f'<h3>{what}</h3><p class="key">{"".join(keys)}</p>'
    yield f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    for i, (name, parts) in enumerate(rows):
        x, y = float(LABEL), ROW * i
        yield f'<text x="0" y="{y + 15}">{escape(name)}</text>'
        for word, size in parts:
            width = most_width * size / most
            tip = escape(f"{word}: {unit(size)}", quote=True)
            yield (
                f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="{ROW - 6}"'
                f' fill="{colours[word]}" data-tip="{tip}"/>'
            )
            x += width
        yield f'<text x="{x + 6:.2f}" y="{y + 15}">{unit(sum(size for _, size in parts))}</text>'
    yield "</svg>"
