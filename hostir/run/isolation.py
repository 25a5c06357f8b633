"""Tells kernels that what they are launched for is one run that begins behind all work before it.

Comes in: a block around such a run, or around its capture into a CUDA graph, each replay of which
is one. Goes out: whether this thread is in such a block. What neither this run writes nor anyone
beside it, as rows of a cache that earlier runs appended, may be read there before a kernel waits
for the one in front of it (programmatic dependent launch); elsewhere the kernel in front may be
followed by others that write it and are not done. Used by cuda_graph.py and by kernels of library
ops.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


@contextmanager
def isolated_run() -> Iterator[None]:
    """Within it, in this thread, one run is launched, and no other before its last kernel."""
    before = is_isolated()
    _here.is_isolated = True
    try:
        yield
    finally:
        _here.is_isolated = before


def is_isolated() -> bool:
    """Whether this thread is in a block of that kind."""
    return getattr(_here, "is_isolated", False)
