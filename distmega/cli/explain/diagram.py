"""One layer of a plan as a drawing: ops as boxes, tensors as lines coloured by the mesh axis that
divides them, collectives as pills on the lines.

Comes in: a stage's facts and the number of a layer. Goes out: SVG. Boxes stand in rows by the
longest way from the layer's input. Used by page.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from distmega.cli.explain.facts import CollectiveFacts, OpFacts, StageFacts, TensorFacts
from distmega.cli.explain.fold import layer_of, without_layer
from distmega.sharding.explain import format_bytes, format_us

AXIS_COLOURS = ("#1f77b4", "#d95f02", "#2a9d55", "#8856a7")
WHOLE = "#8a8a8a"
BOX, GAP, BETWEEN, LINE, LETTER = 240, 28, 58, 15, 6.6
"""Least width of a box, between boxes of a row, between rows, a line of text and a letter of it, in
pixels.
"""


@dataclass(frozen=True, slots=True)
class _Node:
    """A box or a pill. key: unique; lines: texts with their colours; tip: shown at a pointer."""

    key: str
    lines: tuple[tuple[str, str], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kind: str
    colour: str
    tip: str

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 12


@dataclass(frozen=True, slots=True)
class _Corner:
    """Where a node stands: its top left corner."""

    x: float
    y: float


def axis_colours(stage: StageFacts) -> dict[str, str]:
    """Colours of the mesh axes that divide something."""
    axes = [axis for axis, size in stage.ranks if size > 1]
    return dict(zip(axes, AXIS_COLOURS, strict=False))


def middle_layer(stage: StageFacts) -> int | None:
    """The layer to show: the middle one of those with most ops; None for ops without layers."""
    layers = [layer for op in stage.ops if (layer := layer_of(op.name)) is not None]
    if not layers:
        return None
    most = max(layers.count(layer) for layer in set(layers))
    full = sorted(layer for layer in set(layers) if layers.count(layer) == most)
    return full[len(full) // 2]


def tip_of(op: OpFacts) -> str:
    """What an op costs, how it is divided, and what was rejected, a line each."""
    lines = [
        f"{op.kind}: {format_us(op.time_us)}, {format_bytes(op.num_bytes)}, bound by {op.bound}"
    ]
    lines.append(f"divided: {', '.join(op.divided) or 'whole on every rank'}")
    for one in op.rejected:
        if one.change_us is None:
            lines.append(f"not {one.choice}/{one.mesh_axis}: {one.why}")
            continue
        sign = "+" if one.change_us >= 0 else "-"
        joined = "but" if one.change_us < 0 else "with"
        why = f", {joined} {one.why}" if one.why else ""
        change = format_us(abs(one.change_us))
        lines.append(f"not {one.choice}/{one.mesh_axis}: {sign}{change}{why}")
    return "\n".join(lines)


def write_layer(stage: StageFacts, layer: int | None) -> str:
    """The drawing; all ops where `layer` is None."""
    colours = axis_colours(stage)
    forms = {tensor.name: tensor for tensor in stage.parts}
    nodes = [*_nodes(stage, layer, colours)]
    nodes = [*_sources(nodes, forms, colours), *nodes]
    rows = _rows(nodes)
    box = max(BOX, *(LETTER * len(text) + 16 for node in nodes for text, _ in node.lines))
    corners = _corners(nodes, rows, box)
    width = max(corner.x for corner in corners.values()) + box + 4
    height = max(corners[node.key].y + node.height for node in nodes) + 4
    parts = [*_edges(nodes, corners, rows, forms, colours, box)]
    parts += [_box(node, corners[node.key], box) for node in nodes]
    size = f'viewBox="-60 0 {width + 120:.0f} {height:.0f}" width="{width + 120:.0f}"'
    body = "\n".join(parts)
    return f'<svg class="layer" {size} height="{height:.0f}">\n{body}\n</svg>'


def _nodes(stage: StageFacts, layer: int | None, colours: Mapping[str, str]) -> Iterator[_Node]:
    tensors = {tensor.name: tensor for tensor in stage.tensors}
    ops = [op for op in stage.ops if layer is None or layer_of(op.name) == layer]
    for op in ops:
        text = f"{without_layer(op.name)} = {op.kind}  {format_us(op.time_us)}"
        lines = [(text, "#111")]
        for name in op.weights:
            tensor = tensors[name]
            lines.append((f"{without_layer(name)} {tensor}", tensor_colour(tensor, colours)))
        axes = [part.partition("/")[2] for part in op.divided]
        colour = colours.get(axes[0], WHOLE) if axes else WHOLE
        yield _Node(op.name, tuple(lines), op.reads, op.writes, "op", colour, tip_of(op))
    seen = {name for op in ops for name in (*op.reads, *op.writes)}
    for one in stage.collectives:
        if not (seen & {*one.reads} and (layer is None or layer_of(one.name) == layer)):
            continue
        yield _pill(one, colours)


def _pill(one: CollectiveFacts, colours: Mapping[str, str]) -> _Node:
    text = f"{one.kind} {one.mesh_axis}  {format_us(one.time_us)}"
    sent = f"{format_bytes(one.num_bytes)} sent by a rank"
    tip = f"{one.kind} of {one.name} over {one.mesh_axis}\n{sent}"
    colour = colours.get(one.mesh_axis, WHOLE)
    key = f"{one.kind} {one.writes[0]}"
    return _Node(key, ((text, "#fff"),), one.reads, one.writes, "collective", colour, tip)


def _sources(
    nodes: Sequence[_Node], forms: Mapping[str, TensorFacts], colours: Mapping[str, str]
) -> Iterator[_Node]:
    """What comes from before the layer, but for what lives across steps."""
    made = {name for node in nodes for name in node.writes}
    wanted = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
    for name in wanted:
        form = forms.get(name)
        if form is not None and form.role == "temp":
            lines = ((f"from {name}", "#444"),)
            yield _Node(name, lines, (), (name,), "source", tensor_colour(form, colours), "")


def _rows(nodes: Sequence[_Node]) -> dict[str, int]:
    """Each node's row: one below the lowest of what it reads. Nodes come in any order."""
    makers = {name: node.key for node in nodes for name in node.writes}
    reads = {node.key: [makers[n] for n in node.reads if n in makers] for node in nodes}
    rows = dict.fromkeys(reads, 0)
    for _ in nodes:
        for key, above in reads.items():
            lowest = max((rows[one] for one in above if one != key), default=-1)
            rows[key] = min(max(rows[key], lowest + 1), len(nodes))
    return rows


def _corners(nodes: Sequence[_Node], rows: Mapping[str, int], box: float) -> dict[str, _Corner]:
    by_row: dict[int, list[_Node]] = {}
    for node in nodes:
        by_row.setdefault(rows[node.key], []).append(node)
    most = max(len(row) for row in by_row.values())
    middle = (most * box + (most - 1) * GAP) / 2
    corners: dict[str, _Corner] = {}
    top = 4.0
    for _, row in sorted(by_row.items()):
        left = middle - (len(row) * box + (len(row) - 1) * GAP) / 2
        for i, node in enumerate(row):
            corners[node.key] = _Corner(left + i * (box + GAP), top)
        top += max(node.height for node in row) + BETWEEN
    return corners


def tensor_colour(tensor: TensorFacts, colours: Mapping[str, str]) -> str:
    """That of the first mesh axis that divides it, or sums it up."""
    axes = [axis for axes in tensor.axes for axis in axes.split("*") if axis]
    return next((colours[axis] for axis in (*axes, *tensor.partial) if axis in colours), WHOLE)


def _edges(
    nodes: Sequence[_Node],
    corners: Mapping[str, _Corner],
    rows: Mapping[str, int],
    forms: Mapping[str, TensorFacts],
    colours: Mapping[str, str],
    box: float,
) -> Iterator[str]:
    makers = {name: node for node in nodes for name in node.writes}
    labelled: dict[str, str] = {}
    labels: list[str] = []
    for node in nodes:
        for name in dict.fromkeys(node.reads):
            maker = makers.get(name)
            if maker is None or maker is node:
                continue
            form = forms.get(name)
            colour = tensor_colour(form, colours) if form else WHOLE
            dashed = ' stroke-dasharray="5 4"' if form and form.partial else ""
            start, end = corners[maker.key], corners[node.key]
            x0, y0 = start.x + box / 2, start.y + maker.height
            x1, y1 = end.x + box / 2, end.y
            if rows[node.key] - rows[maker.key] > 1 and abs(x0 - x1) < box:
                bend = -30 - max(start.x, end.x) / 3  # so the curve stays left of all boxes
                path = (
                    f"M{start.x:.0f},{start.y + maker.height / 2:.0f} C{bend:.0f},{y0:.0f}"
                    f" {bend:.0f},{y1:.0f} {end.x:.0f},{y1 + node.height / 2:.0f}"
                )
            else:
                half = (y0 + y1) / 2
                path = (
                    f"M{x0:.0f},{y0:.0f} C{x0:.0f},{half:.0f} {x1:.0f},{half:.0f} {x1:.0f},{y1:.0f}"
                )
            yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
            if form and name not in labelled and maker.kind != "source":
                below = y0 + 14 + 12 * [*labelled.values()].count(maker.key)
                labelled[name] = maker.key
                labels.append(
                    f'<text class="small" x="{x0 + 6:.0f}" y="{below:.0f}" style="fill:{colour}">'
                    f"{escape(str(form))}</text>"
                )
    yield from labels


def _box(node: _Node, corner: _Corner, box: float) -> str:
    fill = {"op": "#fff", "collective": node.colour, "source": "#f4f4f4"}[node.kind]
    radius = {"op": 4, "collective": 12, "source": 4}[node.kind]
    tip = f' tabindex="0" data-tip="{escape(node.tip, quote=True)}"' if node.tip else ""
    texts = "".join(
        f'<text x="{corner.x + 8:.0f}" y="{corner.y + 18 + LINE * i:.0f}" style="fill:{colour}">'
        f"{escape(text)}</text>"
        for i, (text, colour) in enumerate(node.lines)
    )
    return (
        f'<g class="{node.kind}"{tip}><rect x="{corner.x:.0f}" y="{corner.y:.0f}" width="{box:.0f}"'
        f' height="{node.height}" rx="{radius}" fill="{fill}" stroke="{node.colour}"'
        f' stroke-width="1.5"/>{texts}</g>'
    )
