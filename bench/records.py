"""What a benchmark writes: a list of records in bench/results/NAME-<device>.json, one a case.

A record is {case, device, num_gpus, ours_us, peers: {name: us}, floor_us, commit}. Times are
medians in microseconds, taken side by side in one run; floor_us is what the bytes or flops alone
take at rates measured in that run. tables.py turns the files into tables.
"""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One case. device: as torch names it, such as "NVIDIA H200"."""

    case: str
    device: str
    num_gpus: int
    ours_us: float
    peers: dict[str, float]
    floor_us: float
    commit: str


def current_commit() -> str:
    """The commit that is measured, with "+" when files differ from it; "unknown" without git."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
    path.write_text(text + "\n")


def read_records(path: Path) -> list[Record]:
    """Records of a file; none when there is no file."""
    if not path.exists():
        return []
    return [Record(**record) for record in json.loads(path.read_text())]
