"""Tells kernels what they may read before the kernel in front of them is done (programmatic
dependent launch).

Comes in: a block around a run, around its capture into a CUDA graph, or around its rehearsal. Goes
out: whether this thread is in such a block. Behind a kernel that starts in turn, as the first of a
run, work that was queued before the run is done. So what no kernel of the run writes may be read
early: constants, as weights, and where nothing else is queued with the run what earlier ones wrote
and this one does not, as old rows of a cache. Used by cuda_graph.py, engine/prefill.py and kernels
of library ops.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


@contextmanager
def early_reads(*, states: bool) -> Iterator[None]:
    """Within it, in this thread, one run is launched, whose first kernel starts in turn, and no
    other before its last kernel. states: whether what it does not write of its states is read
    early too; constants are.
    """
    before = reads_constants_early(), reads_states_early()
    _here.constants, _here.states = True, states
    try:
        yield
    finally:
        _here.constants, _here.states = before


def reads_constants_early() -> bool:
    """Whether this thread is in such a block."""
    return getattr(_here, "constants", False)


def reads_states_early() -> bool:
    """Whether it is in one where states are read early."""
    return getattr(_here, "states", False)
