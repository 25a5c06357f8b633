"""Runs a uGraph on a GPU: its kernels, compiled once, one launch each.

In: a UGraph and how its kernels are launched. Out: a GraphRunner, called with tensors. Kernels'
sources are kept in linecache, where Triton and tracebacks find them; no file is written.
"""

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distmega.errors import ProgramError
from distmega.kernels.runtime import late
from distmega.kernels.runtime.gpus import made_current
from distmega.kernels.ugraphs.source import GraphLaunch, graph_source, kernel_tensors
from distmega.superopt.graph.ugraph import GraphTensor, UGraph

TORCH_TYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32,
}  # fmt: skip


def load_kernels(graph: UGraph, launches: Sequence[GraphLaunch]) -> dict[str, Any]:
    """The graph's kernels as Triton functions, by name."""
    text = graph_source(graph, launches)
    name = f"<ugraph {graph.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)
    module: dict[str, Any] = {"__name__": f"distmega.kernels.ugraphs.made.{graph.name}"}
    exec(compile(text, name, "exec"), module)
    return {kernel.name: module[kernel.name] for kernel in graph.kernels}


@dataclass(slots=True)
class GraphRunner:
    """A graph's launches. Temporary tensors are allocated in each call, so that calls may overlap;
    in a CUDA graph they stay where they are.
    """

    graph: UGraph
    launches: tuple[GraphLaunch, ...]
    _kernels: dict[str, Any]

    @classmethod
    def of(cls, graph: UGraph, launches: Sequence[GraphLaunch]) -> "GraphRunner":
        """Compiles nothing yet: Triton does with the first call."""
        return cls(graph, tuple(launches), load_kernels(graph, launches))

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name. inputs: of the graph's inputs and weights, contiguous, on one GPU.
        ProgramError for a tensor of another shape, type or stride.
        """
        values = {t.name: self._given(t, inputs) for t in self.graph.tensors if t.role != "temp"}
        device = next(iter(values.values())).device
        for tensor in self.graph.tensors:
            if tensor.role == "temp":
                dtype = TORCH_TYPES[tensor.dtype]
                values[tensor.name] = torch.empty(self.shape(tensor), dtype=dtype, device=device)
        with made_current(device):
            for kernel, launch in zip(self.graph.kernels, self.launches, strict=True):
                arguments = [values[name] for name in kernel_tensors(kernel)]
                options = {"num_warps": launch.num_warps, "launch_pdl": launch.starts_early(kernel)}
                num_blocks = launch.resident or kernel.num_blocks
                late.launch(self._kernels[kernel.name], (num_blocks,), *arguments, **options)
        return {name: values[name] for name in self.graph.outputs}

    def shape(self, tensor: GraphTensor) -> tuple[int, ...]:
        """Extents of a tensor's dims."""
        extents = dict(self.graph.extents)
        shape = []
        for dim in tensor.dims:
            size = 1
            for axis in dim:
                size *= extents[axis]
            shape.append(size)
        return tuple(shape)

    def _given(self, tensor: GraphTensor, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs[tensor.name]
        wanted = (self.shape(tensor), TORCH_TYPES[tensor.dtype])
        if (tuple(x.shape), x.dtype) != wanted or not x.is_contiguous():
            raise ProgramError(
                f"tensor {tensor.name!r}: {x.dtype}{list(x.shape)}, strides {x.stride()}",
                expected=f"{wanted[1]}{list(wanted[0])}, contiguous",
                remedy="call .contiguous(), or pass the tensor that the program names",
            )
        return x
