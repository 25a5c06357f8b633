"""What PTX says of loads, waits and signals."""

import re

TMA = "cp.async.bulk.tensor"
WAIT = "mbarrier.try_wait"

_LABEL = re.compile(r"^\s*(\$?\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$?\w+);")
_LOAD = re.compile(r"\bld(\.[\w:.]+)\s+.*\[\s*(\$?%?\w+)")
_RELEASE = re.compile(r"\b(?:atom|red|st)\.[\w.]*release")
_BARRIER = re.compile(r"\b(?:bar|barrier)\.(?:cta\.)?(?:sync|red)")


def loads(code: str) -> int:
    """TMA loads."""
    return sum(TMA in line and "mbarrier::complete_tx" in line for line in code.splitlines())


def stores(code: str) -> int:
    """TMA stores."""
    return sum(TMA in line and ".bulk_group" in line for line in code.splitlines())


def vector_accesses(code: str) -> bool:
    """Whether a thread reads and writes global memory by 8 or 16 bytes only."""
    lines = [line for line in code.splitlines() if "ld.global" in line or "st.global" in line]
    return bool(lines) and all(re.search(r"\.v[24]\.b32", line) for line in lines)


def stored_bytes(code: str) -> set[int]:
    """Of a thread, at once, by the plain stores to global memory."""
    found = re.findall(r"\bst\.global(?:\.v(\d))?\.[a-z](\d+)", code)
    return {int(num or 1) * int(bits) // 8 for num, bits in found}


def plain_spins(code: str) -> list[str]:
    """Plain loads that a loop repeats from one address: the compiler may read once and spin on a
    register. Loads that are relaxed, acquire or volatile are as they should be.
    """
    lines = code.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    bad = []
    for end, line in enumerate(lines):
        branch = _BRANCH.search(line)
        start = labels.get(branch[1], end + 1) if branch else end + 1
        body = lines[start : end + 1]
        changed = {name for each in body for name in written(each)}
        if start > end or any("st." in each or "bar" in each for each in body):
            continue
        for each in body:
            load = _LOAD.search(each)
            weak = load and not re.search("relaxed|acquire|volatile|shared|param", load[1])
            if weak and load[2] not in changed:
                bad.append(each.strip())
    return bad


def written(line: str) -> list[str]:
    """Registers that an instruction writes, as far as loops that poll need it."""
    if "st." in line or "red." in line or "bra" in line:
        return []
    text = re.sub(r"^\s*@!?[\w%]+\s+", "", line).strip().rstrip(";")
    if not text or text.startswith(("//", ".", "$", "{", "}")) or " " not in text:
        return []
    operands = text.split(None, 1)[1]
    if operands.startswith("{"):
        return re.findall(r"%?\w+", operands[1 : operands.index("}")])
    return re.findall(r"%?\w+", operands.split(",")[0])


def bare_signals(code: str) -> list[str]:
    """Signals of release semantics that no barrier of the program precedes since its last store to
    global memory: they order one thread's stores only.
    """
    bad, ordered = [], False
    for line in code.splitlines():
        if _BARRIER.search(line):
            ordered = True
        elif _RELEASE.search(line):
            if not ordered:
                bad.append(line.strip())
        elif re.search(r"\bst\.(?!shared|local)", line):
            ordered = False
    return bad


def unfenced_loads(code: str) -> list[str]:
    """Expected TMA loads that nothing orders behind reads of the memory they write: no fence of the
    async proxy stands between them and the last wait or the start of their block.
    """
    bad, fenced = [], False
    for line in code.splitlines():
        label = _LABEL.match(line)
        if (label and label[1].startswith("$L__BB")) or WAIT in line:
            fenced = False
        elif "fence.proxy.async.shared" in line:
            fenced = True
        elif "mbarrier.arrive.expect_tx" in line and not fenced:
            bad.append(line.strip())
    return bad
