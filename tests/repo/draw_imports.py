"""Draws which room imports which, as docs/imports.svg: `python -m tests.repo.draw_imports`.

Comes in: the import graph of the installed package (source.py). Goes out: an SVG, the same for the
same imports. A box is a folder with the number of its files; who imports stands above what it
imports, also late (distmega/lazy.py). A line that two others imply is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tests.repo.source import PACKAGES, ROOT, import_graph, modules

PICTURE = ROOT / "docs" / "imports.svg"

BANDS = (
    ("what users call", ("distmega.cli", "names")),
    ("starting ranks", ("distmega.launch",)),
    (
        "models, engine",
        (
            "distmega.compiled",
            "distmega.engine",
            "distmega.models",
            "distmega.sources",
            "distmega.torch_import",
            "top",
        ),
    ),
    ("kernels", ("distmega.kernels",)),
    ("host programs", ("distmega.hostir",)),
    ("plans", ("distmega.sharding", "distmega.superopt")),
    ("programs", ("distmega.program", "foundation")),
)
"""Titles of the layers from the top, and the packages within each. `top` and `foundation` are files
of distmega/ itself, `names` are its doors, for Python and for
`python -m`.
"""

DOORS = ("distmega", "distmega.__main__")
LOW = ("distmega.sharding", "distmega.hostir", "distmega.kernels", "distmega.program")
COLOURS = ("#b279a2", "#9d755d", "#e0734c", "#d9a441", "#72b7b2", "#5b8db8", "#7aa35a")
WIDTH, HEIGHT, GAP, ROW, LABEL = 132, 34, 14, 62, 110
"""Of a box, between boxes, from row to row, and of the titles, in pixels."""

Graph = Mapping[str, set[str]]


def rooms_of(graph: Graph) -> dict[str, str]:
    """Module -> its room: a package, one of the two halves of distmega's own files, or the public
    names.
    """
    needed = {
        target for name, targets in graph.items() if name.startswith(LOW) for target in targets
    }
    more = needed
    while more:
        more = {t for name in more for t in graph[name]} - needed
        needed |= more
    packages = set(PACKAGES)
    found = {}
    for name in graph:
        package = name if name in packages else name.rpartition(".")[0]
        own = "foundation" if name in needed else "names" if name in DOORS else "top"
        found[name] = own if package == "distmega" else package
    return found


def room_graph(graph: Graph, rooms: Mapping[str, str]) -> dict[str, set[str]]:
    """Room -> rooms that its files import."""
    found: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, targets in graph.items():
        found[rooms[name]] |= {rooms[target] for target in targets} - {rooms[name]}
    return found


def reached(graph: Graph, start: Iterable[str]) -> set[str]:
    """All that can be reached from some rooms, these included."""
    seen: set[str] = set()
    left = [*start]
    while left:
        room = left.pop()
        if room not in seen:
            seen.add(room)
            left += graph[room]
    return seen


def needed_lines(graph: Graph) -> list[tuple[str, str]]:
    """Imports that are not implied by two others. Rooms that need each other keep their lines."""
    lines = []
    for room in sorted(graph):
        for target in sorted(graph[room]):
            others = {
                other
                for other in graph[room] - {target}
                if room not in reached(graph, [other]) and other not in reached(graph, [target])
            }
            if room in reached(graph, [target]) or target not in reached(graph, others):
                lines.append((room, target))
    return lines


def rows_of(rooms: Sequence[str], graph: Graph) -> list[list[str]]:
    """Rooms of a band in rows, who imports above what it imports where that has an end."""
    inside = {room: {t for t in graph[room] if t in rooms} for room in rooms}
    heights = dict.fromkeys(rooms, 0)
    for _ in rooms:
        for room in rooms:
            below = [
                heights[t] + 1 for t in inside[room] if room not in reached(inside, inside[t] | {t})
            ]
            heights[room] = max([heights[room], *below])
    tallest = max(heights.values())
    found = [[r for r in sorted(rooms) if heights[r] == h] for h in range(tallest, -1, -1)]
    return [row[i : i + 6] for row in found for i in range(0, len(row), 6)]


def draw() -> str:
    """The picture."""
    modules_graph = import_graph()
    rooms = rooms_of(modules_graph)
    graph = room_graph(modules_graph, rooms)
    counts = dict.fromkeys(graph, 0)
    for name, path in modules().items():
        counts[rooms[name]] += path.name != "__init__.py"
    places: dict[str, tuple[float, float]] = {}
    parts: list[str] = []
    most = LABEL + 6 * (WIDTH + GAP)
    top = 8.0
    for (title, names), colour in zip(BANDS, COLOURS, strict=True):
        inside = [r for r in graph if any(r == n or r.startswith(f"{n}.") for n in names)]
        rows = rows_of(inside, graph)
        height = ROW * len(rows)
        parts.append(
            f'<rect x="0" y="{top:.0f}" width="{most}" height="{height - 6}" fill="{colour}"'
            f' opacity="0.13"/><text x="8" y="{top + 20:.0f}" font-weight="bold">{title}</text>'
        )
        for i, row in enumerate(rows):
            left = LABEL + (6 * (WIDTH + GAP) - len(row) * (WIDTH + GAP)) / 2
            for j, room in enumerate(row):
                places[room] = (left + j * (WIDTH + GAP), top + ROW * i + 11)
        top += height
    assert places.keys() == graph.keys(), set(graph) - set(places)
    boxes = [_box(room, places[room], counts[room]) for room in sorted(places)]
    lines = [_line(places[a], places[b]) for a, b in needed_lines(graph)]
    body = "\n".join((*parts, *lines, *boxes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {most} {top + 4:.0f}"'
        f' font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _box(room: str, place: tuple[float, float], count: int) -> str:
    x, y = place
    names = {
        "top": "distmega/*.py",
        "foundation": "distmega/*.py (basics)",
        "names": "import distmega",
    }
    name = names.get(room) or room.removeprefix("distmega.").replace(".", "/")
    files = f"{count} file{'s' * (count != 1)}"
    middle = x + WIDTH / 2
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#fff"'
        f' stroke="#555"/><text x="{middle:.0f}" y="{y + 15:.0f}" text-anchor="middle">'
        f'{escape(name)}</text><text x="{middle:.0f}" y="{y + 28:.0f}" text-anchor="middle"'
        f' font-size="10" fill="#666">{files}</text>'
    )


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From the lower edge of who imports to the upper one of what it imports; beside each other or
    upwards within a band, from side to side.
    """
    (x0, y0), (x1, y1) = start, end
    if y1 > y0:
        a, b = (x0 + WIDTH / 2, y0 + HEIGHT), (x1 + WIDTH / 2, y1)
        bend = (b[1] - a[1]) / 2
        path = (
            f"M{a[0]:.0f},{a[1]:.0f} C{a[0]:.0f},{a[1] + bend:.0f}"
            f" {b[0]:.0f},{b[1] - bend:.0f} {b[0]:.0f},{b[1]:.0f}"
        )
    else:
        a, b = (x0, y0 + HEIGHT / 2), (x1 + WIDTH, y1 + HEIGHT / 2)
        path = f"M{a[0]:.0f},{a[1]:.0f} L{b[0]:.0f},{b[1]:.0f}"
    return f'<path d="{path}" fill="none" stroke="#777" stroke-opacity="0.55"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
