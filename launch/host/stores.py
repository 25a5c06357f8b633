"""The store over which ranks find each other: opened by one process, reached by the others.

In: a host, and a port where the store is known. Out: a torch store, without credentials, so who
reaches its address can read and write it; what ranks believe of it is data, never code. A HashStore
is for a rank alone, and has no address. Next: launch/worker.py.
"""

import socket
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from distmega.errors import LaunchError

__all__ = [
    "DistError",
    "DistNetworkError",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "reach_store",
    "serve_store",
]


def serve_store(host: str, timeout_s: float, *, port: int = 0) -> TCPStore:
    """Open a store that listens at `host` and at no other address of this machine, on a port that
    the system chooses unless given; it lives as long as the returned object.

    LaunchError if the host is not this machine, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise LaunchError(
            f"no rendezvous store at {host}, port {port or 'any'} ({error})",
            expected="an address of this machine, and a port that is free",
            remedy="correct what names the first rank's machine, such as MASTER_ADDR",
        ) from error
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # torch by itself listens at all addresses
    )


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a store that another process serves."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
