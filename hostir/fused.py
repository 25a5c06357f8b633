"""A matmul and a collective as one instruction: FusedMatmul, and the peer memory that it needs.

Comes in: pairs of ops that sharding/overlap.py chose, as lower.py makes them nodes. Goes out: the
node, its Room, and what the evaluator calls for it. On GPUs one kernel computes the product while
its collective runs (kernels/device_ops.py); TorchOps, for every other device, does one after the
other. Next: evaluator.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega import program
from distmega.hostir.comm import Communicator
from distmega.hostir.fused_nodes import FusedMatmul, Room
from distmega.hostir.library import OpFunction, compile_op
from distmega.hostir.torch_types import operand_dtype
from distmega.program import Op


class DeviceOps(Protocol):
    """How a device does library ops and fused matmuls."""

    def compile(self, op: Op, coordinate: Mapping[str, int]) -> OpFunction:
        """The op bound to its attributes and to a rank's mesh coordinate."""
        ...

    def open_rooms(self, rooms: Sequence[Room]) -> None:
        """Makes the peer memory of a program before it runs; every rank calls it."""
        ...

    def fuse(self, node: FusedMatmul) -> Callable[[Tensor, Tensor], Tensor]:
        """What a node does with x [rows, sums] and w [columns, sums]: its out, [rows, columns]."""
        ...


class TorchOps:
    """Torch's own ops; the collective of a fused matmul before or after it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def compile(self, op: Op, coordinate: Mapping[str, int]) -> OpFunction:
        """See DeviceOps."""
        return compile_op(op, coordinate)

    def open_rooms(self, rooms: Sequence[Room]) -> None:
        """Nothing to make."""

    def fuse(self, node: FusedMatmul) -> Callable[[Tensor, Tensor], Tensor]:
        """See DeviceOps; sums over ranks are the communicator's."""
        comm, axis = self.comm, node.mesh_axis
        size = comm.mesh.size(axis)

        def gather(x: Tensor, w: Tensor) -> Tensor:
            whole = x.new_empty(size * x.shape[0], x.shape[1])
            comm.all_gather(axis, x, whole, 0).wait()
            return product(whole, w)

        def scatter(x: Tensor, w: Tensor) -> Tensor:
            partial = product(x, w)
            out = partial.new_empty(partial.shape[0] // size, partial.shape[1])
            comm.reduce_scatter(axis, partial, out, 0, "sum").wait()
            return out

        def reduce(x: Tensor, w: Tensor) -> Tensor:
            partial = product(x, w)
            out = torch.empty_like(partial)
            comm.all_reduce(axis, [partial], [out], "sum").wait()
            return out

        ways = {
            "all_gather_matmul": gather,
            "matmul_reduce_scatter": scatter,
            "matmul_all_reduce": reduce,
        }
        return ways[node.kind]


def product(x: Tensor, w: Tensor) -> Tensor:
    """x W', in the type in which library linears multiply."""
    dtype = operand_dtype(x)
    return F.linear(x.to(dtype), w.to(dtype)).to(x.dtype)


def compile_fused(
    node: FusedMatmul, out: program.Tensor, ops: DeviceOps
) -> Callable[[Tensor, Tensor], Tensor]:
    """What a node does with x and w of any number of dims: a tensor of out's shape."""
    call = ops.fuse(node)

    def run(x: Tensor, w: Tensor) -> Tensor:
        num_sums = math.prod(x.shape[node.num_rows :])
        return call(x.reshape(-1, num_sums), w.reshape(-1, num_sums)).view(out.shape)

    return run
