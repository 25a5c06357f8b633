"""What a kernel leaves behind when a wait never ends, and the error that the host makes of it.

In: a word that a kernel wrote. Out: a Report, and by what each kernel's queues say of it
(hopper/diagnosis.py, records/diagnosis.py) a HangError. Torch-free. Next on the walk: alarm.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distmega.errors import HangError

REPORT_FIRST, REPORT_LIMIT, REPORT_ALARM = range(3)
"""64-bit words at the start of what a kernel polls. Of all waits that were given up, the least
(flag, word, last): 32, 24 and 8 bits, from the highest; all bits set while there is none.
Nanoseconds that a wait may last. Address of the host's alarm, an int32.
"""
REPORT_WORDS = 16
NO_REPORT = -1
LAST_BITS, WORD_BITS = 8, 24

NAMED_DEBTORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A wait that was given up, the least of all. Of the kernel of one row: SM `last` waited for
    flag (steps ever run) * generations + generation + 1 at a flagged word. Of the batched kernel:
    for the count `flag` of event `word`, which `last` SMs still owed; or where ranks share the
    model, for an event or as the kernel of one row for a flagged word, `flag` being (steps ever
    run) * instructions + instruction + 1 of the one that waits. Of the kernel of records: in
    launch `flag`, from 1 on, SM `last` waited for event `word` // ranks from rank `word` % ranks.
    """

    flag: int
    word: int
    last: int


def read_report(word: int) -> Report:
    """The report in a signed 64-bit word."""
    last = word & 2**LAST_BITS - 1
    return Report(
        flag=word >> LAST_BITS + WORD_BITS & 0xFFFFFFFF,
        word=word >> LAST_BITS & 2**WORD_BITS - 1,
        last=last,
    )


def hang_error(
    waiter: str, awaited: str, *, limit_s: float, expected: str, debtors: Sequence[str]
) -> HangError:
    """The error of a wait. waiter: rank, SM and task; awaited: a word or an event; debtors: by
    rank, SM and task who may owe it.
    """
    more = f" or {len(debtors) - NAMED_DEBTORS} more" if len(debtors) > NAMED_DEBTORS else ""
    owed = " or ".join(debtors[:NAMED_DEBTORS]) + more or "nobody: no instruction writes it"
    return HangError(
        f"{waiter} waited {limit_s:g} s for {awaited}",
        expected=expected,
        remedy=f"it is owed by {owed}; see whether that SM ran, or report this as a bug",
    )
