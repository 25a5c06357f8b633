"""Writes the README's tables from bench/results/*.json: one file a table, nothing typed by hand.

A result file `NAME.json` holds {"columns": [...], "rows": [[...], ...], "note": "..."}, as the
benchmark that measured it wrote them. Its table stands in README.md between `<!-- table:NAME -->`
and `<!-- end -->`; a name without a result file reads "no results yet".
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"

_SECTION = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(path: Path) -> str:
    """The Markdown table of one result file, its note below it; "no results yet" without one."""
    if not path.exists():
        return "no results yet\n"
    result = json.loads(path.read_text())
    columns, rows = result["columns"], result["rows"]
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"{path}: a row has not {len(columns)} cells; run the benchmark again")
    lines = [_line(columns), _line(["---"] * len(columns)), *map(_line, rows)]
    return "\n".join(lines) + "\n" + (f"\n{result['note']}\n" if result.get("note") else "")


def _line(cells: list[str | int | float]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def fill(text: str, results: Path) -> str:
    """`text` with every marked section replaced by the table of that name."""
    return _SECTION.sub(lambda m: m[1] + table(results / f"{m[2]}.json") + m[3], text)


def unused(text: str, results: Path) -> list[str]:
    """Names of result files that have no section in `text`."""
    named = {match[2] for match in _SECTION.finditer(text)}
    return sorted(path.stem for path in results.glob("*.json") if path.stem not in named)


def main() -> None:
    """Rewrites README.md."""
    README.write_text(fill(README.read_text(), RESULTS))


if __name__ == "__main__":
    main()
