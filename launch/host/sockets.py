"""Where the sockets of ranks listen: on loopback where all ranks share a machine.

In: the address of this machine at which the other ranks reach it. Out: settings that gloo and NCCL
read when they open sockets, unless the user has some of his own. Used by local_rank.py, torchrun.py
and on_ray/actors.py; the rendezvous store is in stores.py.
"""

import os
import socket
import struct
import sys
from collections.abc import MutableMapping

if sys.platform == "linux":
    import fcntl

LOOPBACK = "127.0.0.1"

SIOCGIFADDR = 0x8915
"""The request of ioctl for an interface's IPv4 address (netdevice(7))."""

NAME_BYTES = 15
REQUEST_BYTES = 40
ADDRESS = slice(20, 24)
"""Of struct ifreq: longest name, size, and where the answer has the address."""


def listen_at(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo's sockets listen at `address` alone, and NCCL's too if that is loopback: between
    machines NCCL knows better. To be called before the process group opens.
    """
    if name := interface_of(address):
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        if address == LOOPBACK:
            environment.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; empty if none has, or this is not Linux."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{REQUEST_BYTES}s", name.encode()[:NAME_BYTES])
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(found[ADDRESS]) == address:
                return name
    return ""
