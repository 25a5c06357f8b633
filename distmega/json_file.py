"""Small JSON files that distmega keeps for itself: a path in, what it holds out.

Used by those who know what should be in it, kernels/gemm/times/rates_file.py and
kernels/pipelined/tuning.py.
"""

import json
from pathlib import Path

MAX_BYTES = 2**24


def read_json_file(path: Path) -> object:
    """What the file holds. OSError where it can't be read, ValueError where it is no JSON, no
    regular file or larger than MAX_BYTES.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    if (num_bytes := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {num_bytes} bytes, more than {MAX_BYTES}")
    return parse_json_text(path.read_text(encoding="utf-8"))


def parse_json_text(text: str) -> object:
    """What the text holds. ValueError where it is no JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it has too many brackets inside each other") from error
