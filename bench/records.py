"""What a benchmark writes: a list of records in bench/results/NAME-<device>.json, one a case; and
where to, by the same two options of every benchmark that writes.

A record is {case, device, num_gpus, ours_us, peers: {name: us}, floor_us, commit}. Times are
medians in microseconds, taken side by side in one run; floor_us is what the bytes or flops alone
take at rates measured in that run, None where none was measured. tables.py turns the files into
tables.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distmega.whole_file import replace_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
UNKNOWN = "unknown"
"""In place of a commit that nobody knows; bench/results takes no such records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One case. device: as torch names it, such as "NVIDIA H200"."""

    case: str
    device: str
    num_gpus: int
    ours_us: float
    peers: dict[str, float]
    floor_us: float | None
    commit: str = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """Where records go, and the commit that they name."""

    folder: Path
    commit: str

    def write(self, benchmark: str, record: Record, *, by_ranks: bool = False) -> None:
        """Puts a record into its file: one a benchmark and device, and number of ranks if asked."""
        stem = result_name(benchmark, record.device)
        stem += f"-tp{record.num_gpus}" if by_ranks else ""
        write_records(self.folder / f"{stem}.json", [replace(record, commit=self.commit)])


def add_book_options(parser: ArgumentParser) -> None:
    """--results and --commit, as open_book reads them."""
    parser.add_argument(
        "--results", "--out", type=Path, default=RESULTS, help="folder to write records to"
    )
    parser.add_argument("--commit", help="what records name; by default the commit of git here")


def open_book(folder: Path, commit: str | None) -> Book:
    """The book of these options. Ends the program where nobody knows the commit, unless records go
    elsewhere than to the repository's own.
    """
    commit = commit or current_commit()
    if commit == UNKNOWN:
        reported = "no commit known; expected git here, or --commit"
        if folder.resolve() == RESULTS:
            sys.exit(f"{reported}; give --commit, or another folder than {RESULTS} by --results")
        print(f"{reported}; records will say {UNKNOWN!r}", file=sys.stderr)
    return Book(folder=folder, commit=commit)


def current_commit() -> str:
    """The commit that is measured, with "+" when files differ from it; UNKNOWN without git."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def result_name(benchmark: str, device: str) -> str:
    """The file's stem: decode-nvidia-h200 for benchmark "decode" on an "NVIDIA H200"."""
    return f"{benchmark}-{device.lower().replace(' ', '-')}"


def write_records(path: Path, records: list[Record]) -> None:
    """Replaces the cases of `records` in the file, keeps its others, in the order they came."""
    known = {record.case: record for record in read_records(path)}
    known |= {record.case: record for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(record) for record in known.values()], indent=1)
    replace_text(path, text + "\n")


def read_records(path: Path) -> list[Record]:
    """Records of a file; none when there is no file."""
    if not path.exists():
        return []
    return [Record(**record) for record in json.loads(path.read_text())]
