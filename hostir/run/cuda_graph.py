"""A whole host program as one CUDA graph: no host time an instruction, the same result.

Comes in: an Evaluator on a GPU and the tensors to bind. Goes out: a CapturedHost whose `run` copies
inputs to where the graph reads them and replays it. Streams and events become the graph's edges,
NCCL's collectives its nodes; signals between hosts, attention that asks positions how much to read,
grouped linears that ask how many rows each group has, and megakernels that keep state on the host
can't be captured.
"""

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from distmega.errors import ProgramError
from distmega.hostir.ir.nodes import LibraryOp, Node, Signal, WaitSignal, walk_nodes
from distmega.hostir.ir.text import print_node
from distmega.hostir.library.ops import attends_in_order, is_packed
from distmega.hostir.run.evaluator import Evaluator

NUM_WARM_UPS = 2
"""Runs before the capture: libraries choose and load their kernels, communicators connect."""


def _blocks(node: Node) -> bool:
    """Whether a node waits for the GPU, or is not the same each time."""
    if isinstance(node, LibraryOp):
        op = node.op
        if op.kind == "attention":
            return not (attends_in_order(op) or is_packed(op))
        return op.kind == "grouped_linear"
    return isinstance(node, Signal | WaitSignal)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Around a capture: cuBLAS takes a new workspace, of the graph's memory, and leaves it to the
    graph. Torch keeps the one of a stream until someone asks it to free them, as torch.compile
    does, and a graph that used it would then write into memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CapturedHost:
    """A host program bound to tensors: weights, states and inputs stay where they were given."""

    def __init__(
        self,
        evaluator: Evaluator,
        tensors: Mapping[str, Tensor],
        pool: Any = None,
    ) -> None:
        """Runs the program a few times, so states must be such that this does no harm. pool: as of
        torch.cuda.graph; graphs that share one overwrite each other's outputs.

        Every rank of the mesh captures at the same point of its program. ProgramError for nodes
        that block the host.
        """
        host = evaluator.host
        blocking = [node for node in walk_nodes(host.body) if _blocks(node)]
        if blocking:
            raise ProgramError(
                f"host program {host.name!r} with {print_node(blocking[0])!r}",
                expected="nodes that only queue work on the GPU, the same each time",
                remedy="run it without capture",
            )
        self._given, self._matmuls = dict(tensors), evaluator.matmuls
        self._inputs = [b.name for b in host.buffers if b.role == "input"]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                evaluator.run(self._given)
            self._matmuls.settle()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with (
            _own_workspaces(),
            torch.cuda.stream(torch.cuda.current_stream()),  # restored even if the capture fails
            torch.cuda.graph(self._graph, pool, side, capture_error_mode="thread_local"),
        ):
            self._outputs = evaluator.run(self._given)
            self._matmuls.settle()
        _ALIVE.add(self)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, overwritten by the next run. inputs: those to change since the last."""
        for name in self._inputs:
            if name in inputs and inputs[name] is not self._given[name]:
                self._given[name].copy_(inputs[name])
        self._matmuls.settle()
        self._graph.replay()
        return self._outputs

    def release(self) -> None:
        """Frees the graph; there are no more runs."""
        self._graph.reset()


_ALIVE: WeakSet[CapturedHost] = WeakSet()


def release_graphs() -> None:
    """Frees all graphs. Before torch.distributed ends: NCCL then waits for graphs that hold its
    collectives, without limit.
    """
    for captured in list(_ALIVE):
        captured.release()
    _ALIVE.clear()


atexit.register(release_graphs)
