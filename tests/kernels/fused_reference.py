"""What fused ops compute, in float64: each as its docstring says. Attention is not among them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distmega.hostir.library.pointwise import FUNCTIONS
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedPointwise,
    InputNorm,
    fuse_segment,
)
from distmega.program import expr
from distmega.program.types import Program


def run_fused(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a program of rows [m, n] by its fused ops, in f64."""
    known = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    for op in fuse_segment(program):
        _do(op, known)
    return {name: known[name] for name in program.outputs}


def normalised(x: Tensor, norm: InputNorm | None, known: Mapping[str, Tensor]) -> Tensor:
    """Rows after a norm."""
    if norm is None:
        return x
    if norm.kind == "softmax":
        return x.softmax(-1)
    if norm.kind == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    x = x * known[norm.weight] if norm.weight else x
    return x + known[norm.bias] if norm.bias else x


def evaluate(formula: expr.Expr, values: Sequence[Tensor]) -> Tensor:
    return expr.evaluate(
        formula, values, FUNCTIONS, lambda value: torch.tensor(value, dtype=torch.float64)
    )


def _do(op: Fused, known: dict[str, Tensor]) -> None:
    match op:
        case FusedEmbedding():
            known[op.out] = known[op.table][known[op.ids]]
        case FusedPointwise():
            taken = [normalised(known[op.x], op.norm, known)] if op.x else []
            taken += [known[name] for name in op.operands]
            known[op.out] = evaluate(op.formula, taken)
        case FusedChoice():
            known[op.chosen] = known[op.source].argmax(-1)
        case FusedContraction():
            x = normalised(known[op.x], op.norm, known)
            if op.normed:
                known[op.normed] = x
            products = []
            for stream in op.streams:
                parts = [
                    x @ known[weight].T + (known[bias] if bias else 0.0)
                    for weight, bias in zip(stream.weights, stream.biases, strict=True)
                ]
                products.append(torch.cat(parts, -1))
            y = evaluate(op.formula, [*products, *(known[name] for name in op.operands)])
            sizes = [len(known[name]) for name in op.streams[0].weights]
            known |= zip(op.outs, y.split(sizes, -1), strict=True)
        case _:
            raise NotImplementedError(type(op).__name__)
