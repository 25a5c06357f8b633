"""The store over which ranks find each other: opened by one process, reached by the others.

In: a host, and a port where the store is known. Out: a torch store. Next: launch/worker.py.
"""

from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    PrefixStore,
    Store,
    TCPStore,
)

__all__ = [
    "DistError",
    "DistNetworkError",
    "PrefixStore",
    "Store",
    "TCPStore",
    "reach_store",
    "serve_store",
]


def serve_store(host: str, timeout_s: float, *, port: int = 0) -> TCPStore:
    """Open a store, on a port that the system chooses unless given; it lives as long as the
    returned object.
    """
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a store that another process serves."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
