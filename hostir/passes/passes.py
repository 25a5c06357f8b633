"""All passes over host programs, in one list, and the runner that verifies after each.

Comes in: what lower.py made. Goes out: the program the evaluator runs. A pass is a plain function
from program to program, in a file of its own beside this one; the runner logs its time and can
write the text after each pass to numbered files. Next: sink_waits.py, then evaluator.py.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from distmega.collecting import gc_paused
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.ir.text import print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.passes.borrow import borrow_results
from distmega.hostir.passes.coalesce import coalesce_send_recv
from distmega.hostir.passes.deallocations import insert_deallocations
from distmega.hostir.passes.event_waits import prune_event_waits
from distmega.hostir.passes.kernel_order import order_kernels
from distmega.hostir.passes.sink_waits import sink_waits

logger = logging.getLogger(__name__)

Pass = Callable[[HostProgram], HostProgram]

PASSES: tuple[Pass, ...] = (
    sink_waits,
    coalesce_send_recv,
    order_kernels,
    prune_event_waits,
    insert_deallocations,
    borrow_results,
)
"""All passes, in order."""


@gc_paused
def run_passes(
    host: HostProgram, dump: Path | None = None, passes: Sequence[Pass] | None = None
) -> HostProgram:
    """Applies `passes` (PASSES by default), verifying after each that changes something; buffers'
    allocations stay as they come in.

    dump: a folder for the text after each pass, "01_sink_waits.hostir" and so on. Raises
    VerifyError.
    """
    passes = PASSES if passes is None else passes
    finalized, symmetric_buffers = verify_host(host, freed=False).buffers, host.symmetric_buffers
    freed = False
    _dump(host, dump, 0, "lowered")
    for number, each in enumerate(passes, start=1):
        start = time.perf_counter()
        before, host = host, each(host)
        frees = each is insert_deallocations
        freed = freed or frees
        if frees or host != before:
            verify_host(host, freed=freed, finalized=finalized, symmetric_buffers=symmetric_buffers)
        elapsed_us = (time.perf_counter() - start) * 1e6
        logger.debug("%s: pass %s took %.0f us", host.name, each.__name__, elapsed_us)
        _dump(host, dump, number, each.__name__)
    return host


def _dump(host: HostProgram, folder: Path | None, number: int, name: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}_{name}.hostir").write_text(print_host(host))
