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
    SetStream,
    StartCoalescing,
    Wait,
    walk_nodes,
)


def coalesce_send_recv(host: HostProgram) -> HostProgram:
    """Puts consecutive sends and receives that one stream waits for into one group with one handle,
    waited for where the first was.
    """

    def coalesce(body: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        members: list[Send | Recv] = []
        streams = _waiting_streams(body)
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

        for at, node in enumerate(body):
            if isinstance(node, Send | Recv) and node.handle:
                if at - 1 in streams and streams[at - 1] != streams.get(at):
                    close()
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


def _waiting_streams(body: Sequence[Node]) -> dict[int, object]:
    """By the place of each send and receive outside of groups: the stream that waits for it."""
    found: dict[int, object] = {}
    pending: dict[str, int] = {}
    stream: object = None  # of what stands around the body
    for at, node in enumerate(body):
        match node:
            case SetStream():
                stream = node.stream
            case ForLoop() if any(isinstance(each, SetStream) for each in walk_nodes(node.body)):
                stream = at  # that of its last pass
            case Send(handle=handle) | Recv(handle=handle) if handle:
                pending[handle] = at
            case Wait(handle=handle) if handle in pending:
                found[pending.pop(handle)] = stream
    return found
