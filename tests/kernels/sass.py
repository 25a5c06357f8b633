"""What the machine code of a kernel does, from a disassembly."""

import re
import subprocess
from pathlib import Path

from tests.kernels.sm90 import OBJDUMP

NUM_PRODUCTS = 64
"""Instructions by which a group of 8 units is multiplied by 1024 columns of x, a warp's part."""
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BACK = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")


def instructions(cubin: Path) -> list[tuple[str, str]]:
    """Place and text of each."""
    command = [str(OBJDUMP), "-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(match[1], match[2]) for line in text.splitlines() if (match := _ADDRESS.match(line))]


def spills_in_products(cubin: Path) -> list[str]:
    """Accesses to local memory in the loop over k of a decode kernel's products."""
    found = instructions(cubin)
    lines = [line for _, line in found]
    index = {int(place, 16): at for at, (place, _) in enumerate(found)}
    products = [at for at, line in enumerate(lines) if "HMMA" in line]
    loops = []
    for end, line in enumerate(lines):
        branch = _BACK.search(line)
        start = index.get(int(branch[1], 16), end) if branch else end
        if sum(start <= at < end for at in products) >= NUM_PRODUCTS:
            loops.append((end - start, start, end))
    assert loops, "no loop of products"
    _, start, end = min(loops)
    return [line for line in lines[start:end] if re.search(r"\b(LDL|STL)\b", line)]
