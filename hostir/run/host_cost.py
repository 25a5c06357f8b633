"""What a host program costs the host: instructions of a run, and about how long they take it.

Comes in: a host program, the machine's rates. Goes out: numbers, and the line that explain prints.
timeline.HostClock measures the same on a device.
"""

from collections.abc import Sequence

from distmega.errors import counted
from distmega.hostir.ir.nodes import ForLoop, HostProgram, Node
from distmega.sharding.search.cost import Machine


def count_instructions(body: Sequence[Node]) -> int:
    """Nodes that the host runs, those of a loop once an iteration."""
    return sum(
        node.extent * count_instructions(node.body) if isinstance(node, ForLoop) else 1
        for node in body
    )


def explain_host(host: HostProgram, machine: Machine) -> str:
    """One line: instructions, the host's time for them, and what is held in peer memory."""
    num, rates = count_instructions(host.body), machine.overlap
    text = (
        f"{counted(num, 'instruction')} a run, about {num * rates.host_us:,.0f} us of the host, "
        f"{num * rates.replay_us:,.0f} us where captured as a graph"
    )
    symmetric_buffers = "".join(
        f"; 2 x {one.num_bytes:,} bytes of peer memory along {one.mesh_axis}"
        for one in host.symmetric_buffers
    )
    return text + symmetric_buffers
