"""Makes one exchange of sends and receives that stand side by side.

Comes in: a host program after sink_waits.py. Goes out: the program with groups in their place, each
of which starts together. Next: kernel_order.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from distmega.hostir.ir.nodes import (
    EndCoalescing,
    ForLoop,
    HostProgram,
    Node,
    Recv,
    Send,
    StartCoalescing,
    Wait,
)


def coalesce_send_recv(host: HostProgram) -> HostProgram:
    """Puts consecutive sends and receives into one group with one handle, waited for where the
    first was.
    """

    def coalesce(body: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        members: list[Send | Recv] = []
        joined: dict[str, str] = {}
        done: set[str] = set()

        def close() -> None:
            if len(members) < 2:
                out.extend(members)
            else:
                handle = members[0].handle
                joined.update({member.handle: handle for member in members})
                bare = (replace(member, handle="") for member in members)
                out.extend((StartCoalescing(), *bare, EndCoalescing(handle=handle)))
            members.clear()

        for node in body:
            if isinstance(node, Send | Recv) and node.handle:
                members.append(node)
                continue
            close()
            if isinstance(node, Wait):
                handle = joined.get(node.handle, node.handle)
                if handle not in done:
                    out.append(Wait(handle=handle))
                if handle in joined:
                    done.add(handle)
            elif isinstance(node, ForLoop):
                out.append(replace(node, body=coalesce(node.body)))
            else:
                out.append(node)
        close()
        return tuple(out)

    return replace(host, body=coalesce(host.body))
