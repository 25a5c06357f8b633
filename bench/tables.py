"""Writes the tables of PAGES from bench/results/*.json, one file a table.

A table stands between `<!-- table:NAME -->` and `<!-- end -->`, NAME being the file's stem. A name
without a file reads "no results yet". `<!-- summary -->` is followed by the rows of SUMMARY.
"""

import re
from pathlib import Path

from bench.records import RESULTS, ROOT, Record, read_records

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", RESULTS / "README.md")

SUMMARY = (
    ("a token of one sequence, Llama-3.2-1B", "decode", "llama-3.2-1b batch=1 ctx=512"),
    ("a token of one sequence, Qwen3-8B", "decode", "qwen3-8b batch=1 ctx=512"),
    ("a step of 16 sequences, Llama-3.2-1B", "decode", "llama-3.2-1b batch=16 ctx=4096"),
    ("a token of one sequence, Llama-3.2-1B", "decode", "llama-3.2-1b batch=1 ctx=512 tp=2"),
    ("a token of one sequence, Qwen3-8B", "decode", "qwen3-8b batch=1 ctx=512 tp=4"),
    ("a token after a prompt of 448, Qwen3-8B", "decode", "qwen3-8b prompt=448 batch=1 tp=2"),
    ("first token of a prompt of 2048, Qwen3-8B", "prefill", "qwen3-8b prompt=2048 batch=1"),
    ("first tokens of 16 prompts of 4032, Qwen3-8B", "prefill", "qwen3-8b prompt=4032 batch=16"),
    ("a gated MLP of 16 layers, one row", "programs", "gated_mlp rows=1"),
    ("an encoder, 128 rows", "programs", "encoder rows=128"),
)
"""What a row of the front page says, the benchmark, its case."""

DEVICE = "nvidia-h200"
"""Of the front page."""

_SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.DOTALL)
_SECTION = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(path: Path) -> str:
    """The Markdown table of one result file; microseconds, and how much faster than each peer. Each
    line names its commit where they are not all of one.
    """
    records = read_records(path)
    if not records:
        return "no results yet\n"
    peers = list(dict.fromkeys(peer for record in records for peer in record.peers))
    columns = ["case", "distmega us", *(f"{peer} us (x)" for peer in peers), "floor us", "of floor"]
    rows = [_cells(record, peers) for record in records]
    source = ", ".join(sorted({f"{record.num_gpus} x {record.device}" for record in records}))
    if len({record.commit for record in records}) == 1:
        source += f"; commit {records[0].commit}"
    else:
        columns.append("commit")
        rows = [[*row, record.commit] for row, record in zip(rows, records, strict=True)]
    lines = [_line(row) for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines) + f"\n\n{source}.\n"


def summary(results: Path) -> str:
    """The table of SUMMARY; beside each case the fastest of its peers."""
    columns = ["what", "GPUs", "distmega us", "beside", "us (x)"]
    rows = []
    for what, benchmark, case in SUMMARY:
        records = read_records(results / f"{benchmark}-{DEVICE}.json")
        for record in (record for record in records if record.case == case):
            peer = min(record.peers, key=record.peers.__getitem__, default="-")
            gpus, ours_us = str(record.num_gpus), _us(record.ours_us)
            rows.append([what, gpus, ours_us, peer, _peer(record, peer)])
    return "".join(f"{_line(row)}\n" for row in (columns, ["---"] * len(columns), *rows))


def _cells(record: Record, peers: list[str]) -> list[str]:
    times = [_peer(record, peer) for peer in peers]
    return [record.case, _us(record.ours_us), *times, *_floor(record)]


def _floor(record: Record) -> tuple[str, str]:
    if record.floor_us is None:
        return "-", "-"
    return _us(record.floor_us), f"{100 * record.floor_us / record.ours_us:.0f}%"


def _peer(record: Record, peer: str) -> str:
    if peer not in record.peers:
        return "-"
    return f"{_us(record.peers[peer])} ({record.peers[peer] / record.ours_us:.2f})"


def _us(time_us: float) -> str:
    return f"{time_us:.0f}" if time_us >= 100 else f"{time_us:.3g}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def fill(text: str, results: Path) -> str:
    """`text` with every marked section replaced by the table of that name."""
    text = _SUMMARY.sub(lambda m: m[1] + summary(results) + m[2], text)
    return _SECTION.sub(lambda m: m[1] + table(results / f"{m[2]}.json") + m[3], text)


def unused(text: str, results: Path) -> list[str]:
    """Names of result files that have no section in `text`."""
    named = {match[2] for match in _SECTION.finditer(text)}
    return sorted(path.stem for path in results.glob("*.json") if path.stem not in named)


def main() -> None:
    """Rewrites the pages."""
    for page in PAGES:
        page.write_text(fill(page.read_text(), RESULTS))


if __name__ == "__main__":
    main()
