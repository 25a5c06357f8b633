"""Where in a module's source an error comes from.

In: the trace of a graph's node, or an error. Out: a file and a line. Used by exported.py and
conversion/.
"""

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

FOLDERS = Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[1]
TOOLS = tuple(f"{folder}/" for folder in FOLDERS)
"""Folders of what calls modules, and of what they call."""

STANDARD = f"{Path(sysconfig.get_path('stdlib')).resolve()}/"
"""Folder of Python's own modules, which may have a folder of other packages inside."""


def line_of_node(trace: str) -> str:
    """What a message adds, as " at model.py:12": the deepest call that is none of torch's own, by a
    node's stack_trace; torch's own where there is no other, nothing for an empty trace.
    """
    calls = [(path, int(line)) for path, line in re.findall(r'File "(.*)", line (\d+)', trace)]
    return _named(_outside(calls) or calls[-1:])


def line_of_error(error: BaseException) -> str:
    """What a message adds, as " at model.py:12": the deepest call that neither torch nor we make,
    on the way to an error; nothing where there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return _named(_outside([(frame.filename, frame.lineno or 0) for frame in frames]))


def _outside(calls: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(path, line) for path, line in calls if not _is_tool(path)]


def _is_tool(path: str) -> bool:
    whole = str(Path(path).resolve())
    is_standard = whole.startswith(STANDARD) and "-packages/" not in whole
    return path.startswith("<") or whole.startswith(TOOLS) or is_standard


def _named(calls: Sequence[tuple[str, int]]) -> str:
    return " at {}:{}".format(*calls[-1]) if calls else ""
