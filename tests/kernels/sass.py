"""What the machine code of a kernel does, from a disassembly."""

import re
import subprocess
from functools import lru_cache
from pathlib import Path

from tests.kernels.sm90 import OBJDUMP

NUM_PRODUCTS = 64
"""Instructions by which a group of 8 units is multiplied by 1024 columns of x, a warp's part."""
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_CONTROL = re.compile(r"\b(BRA|BSSY|BSYNC|BAR|WARPSYNC|EXIT|CALL|RET|BREAK|SHFL)\b")


@lru_cache(maxsize=4)
def instructions(cubin: Path) -> tuple[tuple[str, str], ...]:
    """Place and text of each; disassembled once for all checks of a kernel."""
    command = [str(OBJDUMP), "-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = map(_ADDRESS.match, text.splitlines())
    return tuple((match[1], match[2]) for match in found if match)


def innermost_loops(cubin: Path, product: str, least: int) -> list[list[str]]:
    """Instructions of each loop that has at least so many of `product`, and no other such loop
    within. A wait whose retry lies far behind is none: it would begin in the middle of another.
    """
    found = instructions(cubin)
    lines = [line for _, line in found]
    index = {int(place, 16): at for at, (place, _) in enumerate(found)}
    products = [at for at, line in enumerate(lines) if product in line]
    loops: list[tuple[int, int]] = []
    for end, line in enumerate(lines):
        branch = _BRANCH.search(line)
        start = index.get(int(branch[1], 16), end) if branch else end
        overlaps = any(start < last for _, last in loops)
        if sum(start <= at < end for at in products) >= least and not overlaps:
            loops.append((start, end))
    assert loops, "no loop of products"
    return [lines[start:end] for start, end in loops]


def spills(loop: list[str]) -> list[str]:
    """Accesses to local memory."""
    return [line for line in loop if re.search(r"\b(LDL|STL)\b", line)]


def spills_in_products(cubin: Path) -> list[str]:
    """Accesses to local memory in the loop over k of a decode kernel's products."""
    return spills(min(innermost_loops(cubin, "HMMA", NUM_PRODUCTS), key=len))


def parted_at_barriers(cubin: Path) -> list[str]:
    """Branches by which lanes skip a few instructions, with nothing to bring the warp together
    before the barrier that both ways lead to. The warp stays parted behind it, and what it does
    once a warp from there on is done twice: a kernel of one row never ended.
    """
    found = instructions(cubin)
    index = {int(place, 16): at for at, (place, _) in enumerate(found)}
    lines = [line for _, line in found]

    def aim(at: int) -> int:
        branch = _BRANCH.search(lines[at])
        to = index.get(int(branch[1], 16), -1) if branch else -1
        # what is left of a wait for the warp that ptxas takes for needless
        while lines[to].strip() == "NOP":
            to += 1
        return to

    parted = []
    for at, line in enumerate(lines):
        barrier = aim(at)
        skips = re.match(r"@!?(P\d)", line)
        if not skips or "BAR.SYNC" not in lines[barrier] or is_of_all(skips[1], lines[:at]):
            continue
        end = next(n for n in range(at + 1, len(lines)) if _CONTROL.search(lines[n]))
        if end == barrier or (lines[end].startswith("BRA") and aim(end) == barrier):
            parted.append(f"{found[at][0]}: {line}")
    return parted


def is_of_all(predicate: str, before: list[str]) -> bool:
    """Whether all lanes have the same there: it was last set from uniform registers alone."""
    wrote = re.compile(rf"^(@!?U?P\d )?\S*(SETP|PLOP3)\S* (P[\dT], )?{predicate}, (.*)$")
    last = next((match for match in map(wrote.match, reversed(before)) if match), None)
    return bool(last) and not re.search(r"\b[RP]\d", last[4])
