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
        groups: dict[str, Sequence[str]] = {}
        """By the handle of each member, which may be of another communication after its wait."""
        waited: set[str] = set()

        def close() -> None:
            if len(members) < 2:
                out.extend(members)
            else:
                handles = [member.handle for member in members]
                groups.update(dict.fromkeys(handles, handles))
                bare = (replace(member, handle="") for member in members)
                out.extend((StartCoalescing(), *bare, EndCoalescing(handle=handles[0])))
            members.clear()

        for node in body:
            if isinstance(node, Send | Recv) and node.handle:
                members.append(node)
                continue
            close()
            if isinstance(node, Wait):
                group = groups.pop(node.handle, [node.handle])
                if node.handle not in waited:
                    out.append(Wait(handle=group[0]))
                    waited.update(group)
                waited.remove(node.handle)
            elif isinstance(node, ForLoop):
                out.append(replace(node, body=coalesce(node.body)))
            else:
                out.append(node)
        close()
        return tuple(out)

    return replace(host, body=coalesce(host.body))
