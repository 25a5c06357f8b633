"""What the evaluator calls for a matmul with its collective.

Comes in: FusedMatmul nodes, the symmetric buffers of a program. Goes out: functions of tensors. On
GPUs one kernel computes the product while its collective runs (kernels/gemm/host.py);
SequentialMatmuls, for every other device, does one after the other. Next: evaluator.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm, SymmetricBuffer
from distmega.hostir.ir.nodes import Collective
from distmega.hostir.library.norms import normalise
from distmega.hostir.library.pointwise import OpFunction, evaluate_all
from distmega.hostir.library.torch_types import operand_dtype
from distmega.program import expr
from distmega.program import types as program
from distmega.program.types import Op

NormedProduct = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Of x [rows, sums], w [columns, sums] and what a SumNorm reads: the norm and what it is of, each
[rows, columns]."""

StartCollective = Callable[[Sequence[Tensor], Sequence[Tensor]], CommHandle]
"""Starts one with what it reads and what it writes."""


class Matmuls(Protocol):
    """How a device does matmuls with a collective, and collectives that nothing runs beside."""

    def open_symmetric_buffers(self, symmetric_buffers: Sequence[SymmetricBuffer]) -> None:
        """Makes the peer memory of a program before it runs; every rank calls it."""
        ...

    def settle(self) -> None:
        """Brings the peer memory to where each run of a captured graph begins and ends. All ranks
        call it; it queues work.
        """
        ...

    def rewind(self) -> None:
        """To where runs begin, without work: what was counted belonged to a capture that failed."""
        ...

    def compile(
        self, node: FusedMatmul, *, is_final: bool = False
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """What a node does with x [rows, sums] and w [columns, sums]: its out, [rows, columns].
        is_final: nobody writes into the memory of x any more.
        """
        ...

    def compile_normed(self, node: FusedMatmul, norm: SumNorm) -> NormedProduct:
        """What a node does that has a norm."""
        ...

    def compile_collective(self, node: Collective, otherwise: StartCollective) -> StartCollective:
        """How a collective is done whose results are waited for at once, on one stream. otherwise:
        by the communicator.
        """
        ...

    def stand_in(self) -> "Matmuls | None":
        """What launches the same kernels on memory of this rank alone, without the others, for a
        caller who sees to it that they are compiled and do not run; None if there are none.
        """
        ...


class SequentialMatmuls:
    """Torch's matmul, the communicator's collective before or after it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def open_symmetric_buffers(self, symmetric_buffers: Sequence[SymmetricBuffer]) -> None:
        """Nothing to make."""

    def settle(self) -> None:
        """Nothing to do."""

    def rewind(self) -> None:
        """Nothing to do."""

    def compile(
        self, node: FusedMatmul, *, is_final: bool = False
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See Matmuls; sums over ranks are the communicator's."""
        comm, axis = self.comm, node.mesh_axis
        formula = expr.parse(node.mixes) if node.mixes else None
        size = comm.mesh.size(axis)

        def gather(x: Tensor, w: Tensor) -> Tensor:
            whole = x.new_empty(size * x.shape[0], x.shape[1])
            comm.all_gather(axis, x, whole, 0).wait()
            return mix_columns(product(whole, w), formula)

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

    def compile_normed(self, node: FusedMatmul, norm: SumNorm) -> NormedProduct:
        """See Matmuls."""
        multiply = self.compile(node)

        def run(x: Tensor, w: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            residual, weight, *bias = given
            shift = bias[0] if bias else None
            return normalise(norm.kind, multiply(x, w), residual, weight, shift, norm.eps)

        return run

    def compile_collective(self, node: Collective, otherwise: StartCollective) -> StartCollective:
        """By the communicator."""
        return otherwise

    def stand_in(self) -> Matmuls | None:
        """It has no kernels of its own."""
        return None


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + bias, in the type in which library linears multiply."""
    dtype = operand_dtype(x)
    shift = None if bias is None else bias.to(dtype)
    return F.linear(x.to(dtype), w.to(dtype), shift).to(x.dtype)


def mix_columns(product: Tensor, formula: expr.Expr | None) -> Tensor:
    """One column of columns n and N / 2 + n of a product [M, N] by a formula, if there is one."""
    return product if formula is None else _mix_halves(product.chunk(2, 1), formula)


def _mix_halves(halves: Sequence[Tensor], formula: expr.Expr) -> Tensor:
    (found,) = evaluate_all([formula], halves, None)
    return found


MixedProduct = Callable[[Tensor, Tensor, Tensor | None, expr.Expr], Tensor]
"""Of x [rows, sums], w [columns, sums], the other weight or None, and a formula: as mixed_product.
"""


def mixed_product(x: Tensor, w: Tensor, other: Tensor | None, formula: expr.Expr) -> Tensor:
    """x W' with columns mixed, [rows, columns / 2]; or those of x W' and of x other', as many."""
    if other is None:
        return mix_columns(product(x, w), formula)
    return _mix_halves((product(x, w), product(x, other)), formula)


def compile_mixed(op: Op, multiply: MixedProduct) -> OpFunction:
    """An op of kind fused_linear; `multiply` does the work."""
    formula, num_rows = expr.parse(str(op.attr("expr"))), len(op.writes[0].dims) - 1
    is_one = op.reads[1].tensor == op.reads[2].tensor

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, upper, lower = operands
        rows, num_sums = x.shape[:num_rows], math.prod(x.shape[num_rows:])
        w, other = (each.reshape(-1, num_sums) for each in (upper, lower))
        found = multiply(x.reshape(-1, num_sums), w, None if is_one else other, formula)
        return (found.view(*rows, -1),)

    return run


ShapedProduct = Callable[[Tensor, Tensor, Tensor | None, expr.Expr], Tensor]
"""Of x [rows, sums], w [columns, sums], a bias [columns] or None, and a formula: as shaped_product.
"""


def shaped_product(x: Tensor, w: Tensor, bias: Tensor | None, formula: expr.Expr) -> Tensor:
    """A formula of each element of x W' + bias."""
    (found,) = evaluate_all([formula], [product(x, w, bias)], None)
    return found


def compile_shaped(op: Op, multiply: ShapedProduct) -> OpFunction:
    """An op of kind fused_product; `multiply` does the work."""
    formula, num_rows = expr.parse(str(op.attr("expr"))), len(op.writes[0].dims) - 1

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, w, *bias = operands
        rows, num_sums = x.shape[:num_rows], math.prod(x.shape[num_rows:])
        flat = x.reshape(-1, num_sums), w.reshape(-1, num_sums)
        found = multiply(*flat, bias[0] if bias else None, formula)
        return (found.view(*rows, -1),)

    return run


def compile_split(op: Op) -> OpFunction:
    """An op of kind split_linear."""
    num_parts, num_rows = len(op.writes), len(op.writes[0].dims) - 1

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, w = operands
        num_sums = math.prod(x.shape[num_rows:])
        found = split_product(x.reshape(-1, num_sums), w.reshape(-1, num_sums), num_parts)
        return found.view(num_parts, *x.shape[:num_rows], -1).unbind(0)

    return run


def split_product(x: Tensor, w: Tensor, num_parts: int) -> Tensor:
    """Parts of x W', f32 [num_parts, rows, columns], of x [rows, sums] and w [columns, sums]: each
    of equally many terms, the first in the first. num_parts divides the sums.
    """
    (rows, num_sums), columns = x.shape, w.shape[0]
    each = num_sums // num_parts
    xs = x.reshape(rows, num_parts, each).transpose(0, 1)
    ws = w.reshape(columns, num_parts, each).permute(1, 2, 0)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.bmm(xs, ws, out_dtype=torch.float32)
    return torch.bmm(xs.float(), ws.float())


def compile_matmul(
    node: FusedMatmul, out: program.Tensor, matmuls: Matmuls, *, is_final: bool = False
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """What a node does with what it reads, x and w of any number of dims: what it writes, each of
    out's shape. is_final: as Matmuls.compile.
    """
    if node.norm is None:
        call = matmuls.compile(node, is_final=is_final)
    else:
        normed = matmuls.compile_normed(node, node.norm)

    def run(operands: Sequence[Tensor]) -> Sequence[Tensor]:
        x, w, *given = operands
        num_sums = math.prod(x.shape[node.num_rows :])
        x, w = x.reshape(-1, num_sums), w.reshape(-1, num_sums)
        if node.norm is None:
            return (call(x, w).view(out.shape),)
        residual, *vectors = given
        rows = residual.reshape(-1, residual.shape[-1])
        return [each.view(out.shape) for each in normed(x, w, (rows, *vectors))]

    return run
