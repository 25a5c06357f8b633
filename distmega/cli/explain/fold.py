"""Folds what equal layers repeat: names and lines that differ in the number of a layer only.

Comes in: lines of text. Goes out: fewer lines, blocks that come again once, with how often and for
which layers. Used by text.py, page.py and diagram.py, for plan and host program alike.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+(?=\W|$)")
LONGEST = 200
"""Lines of a block that may repeat."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Lines that come `times` times in a row; in the first of them, and their numbers' steps."""

    lines: tuple[str, ...]
    times: int


def layer_of(name: str) -> int | None:
    """The number of the layer in a name such as layers.3.wq; None without one."""
    found = _NUMBER.search(name)
    return int(found[0]) if found else None


def without_layer(name: str) -> str:
    """A name as it is within its layer: wq for layers.3.wq."""
    found = _NUMBER.search(name)
    return name[found.end() + 1 :] if found and found.end() < len(name) else name


def fold_lines(lines: Sequence[str]) -> list[Folded]:
    """The lines in order, repeated blocks folded: of blocks that begin at a line, the one that
    covers most. Numbers in a block may rise from repetition to repetition, all by the same steps.
    """
    shapes = [_NUMBER.sub("#", line) for line in lines]
    numbers = [tuple(map(int, _NUMBER.findall(line))) for line in lines]
    found: list[Folded] = []
    at = 0
    while at < len(lines):
        period, times = _best(shapes, numbers, at)
        block = lines[at : at + period]
        if times > 1:
            later = lines[at + (times - 1) * period : at + times * period]
            block = [_span(one, other) for one, other in zip(block, later, strict=True)]
        if times == 1 and found and found[-1].times == 1:
            found[-1] = Folded((*found[-1].lines, *block), 1)
        else:
            found.append(Folded(tuple(block), times))
        at += period * times
    return found


def _best(shapes: Sequence[str], numbers: Sequence[tuple[int, ...]], at: int) -> tuple[int, int]:
    """Length and repetitions of the block at a line that saves most lines; 1, 1 for none."""
    best, saved = (1, 1), 0
    for period in range(1, min(LONGEST, (len(shapes) - at) // 2) + 1):
        if shapes[at] != shapes[at + period]:
            continue
        times = 1
        while _repeats(shapes, numbers, at, period, times):
            times += 1
        if (times - 1) * period > saved:
            best, saved = (period, times), (times - 1) * period
    return best


def _repeats(
    shapes: Sequence[str], numbers: Sequence[tuple[int, ...]], at: int, period: int, times: int
) -> bool:
    """Whether the block at a line comes once more after `times` times, its numbers rising as they
    did from the first time to the second.
    """
    first, new = at, at + times * period
    if new + period > len(shapes) or shapes[first : first + period] != shapes[new : new + period]:
        return False
    step = [_difference(numbers, first + i, at + period + i) for i in range(period)]
    return all(
        _difference(numbers, first + i, new + i) == tuple(times * value for value in step[i])
        for i in range(period)
    )


def _difference(numbers: Sequence[tuple[int, ...]], one: int, other: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(numbers[one], numbers[other], strict=True))


def _span(first: str, last: str) -> str:
    """A line of the first repetition with the numbers up to the last's: layers.{0-15}.wq."""
    ends = iter(_NUMBER.findall(last))

    def both(match: re.Match[str]) -> str:
        end = next(ends)
        return match[0] if match[0] == end else f"{{{match[0]}-{end}}}"

    return _NUMBER.sub(both, first)


def folded_text(lines: Sequence[str]) -> list[str]:
    """The lines with a heading above each block that comes more than once."""
    found: list[str] = []
    for part in fold_lines(lines):
        if part.times == 1:
            found += part.lines
            continue
        indent = " " * min(len(line) - len(line.lstrip()) for line in part.lines)
        if len(part.lines) == 1:
            found.append(f"{indent}{part.times} x {part.lines[0].strip()}")
            continue
        found.append(f"{indent}{part.times} times")
        found += [f"  {line}" for line in part.lines]
    return found
