"""What ends a CUDA graph: nodes and tensors for which each run needs the host, said by name.

Comes in: a host program, what runs it, tensors to bind. Goes out: one line for each thing that
can't be captured; none where the whole program is one graph. Used by evaluator.py,
cuda_graph.py and distmega/compiled/replay.py.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from distmega.hostir.ir.nodes import (
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Signal,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.text import print_node
from distmega.hostir.library.ops import DeviceOps


def graph_breaks(
    host: HostProgram,
    device: torch.device,
    ops: DeviceOps,
    *,
    signals_on_device: bool,
    bound_kernels: Collection[str] = (),
) -> Iterator[str]:
    """Nodes that need the host in each run, and a device without graphs.

    signals_on_device: whether GPUs signal each other by themselves. bound_kernels: segments whose
    launches keep state on the host.
    """
    if device.type != "cuda":
        yield f"its tensors are on the {device.type.upper()}, which has no graphs"
    tensors = host.buffer_map()
    for node in walk_nodes(host.body):
        match node:
            case LibraryOp(op=op) if reason := ops.reads_host(op, tensors):
                yield f"op {op.name!r} ({op.kind}): {reason}"
            case Signal() | WaitSignal() if not signals_on_device:
                yield f"{print_node(node)!r}: the host sends it"
            case LaunchMegakernel(kernel=kernel) if kernel in bound_kernels:
                yield f"kernel {kernel!r}: the host keeps its position"


def tensor_breaks(
    host: HostProgram, device: torch.device, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Tensors to bind that are not on the program's device."""
    for buffer in host.buffers:
        found = tensors.get(buffer.name)
        if found is not None and found.device.type != device.type:
            yield f"{buffer.role} {buffer.name!r} is on the {found.device.type.upper()}"
