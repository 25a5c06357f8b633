"""Norms of layers, groups, batches and roots of mean squares.

In: as table.py says. Out: rules of its table. Next: attention.py.
"""

import math
from collections.abc import Sequence

import torch

from distmega.hostir.library.torch_types import torch_dtype
from distmega.program.builder import Handle
from distmega.program.dtypes import HALVES
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import rule
from distmega.torch_import.operators.values import Constant, TensorValue, Value


@rule("layer_norm")
def layer_norm(
    b: Build,
    input: TensorValue,
    normalized_shape: Sequence[int],
    weight: TensorValue | None = None,
    bias: TensorValue | None = None,
    eps: float = 1e-5,
    **other: Value,
) -> Value:
    return b.reshape(_layer_norm(b, input, len(normalized_shape), weight, bias, eps), b.shape)


def _layer_norm(
    b: Build,
    x: TensorValue,
    num_dims: int,
    weight: TensorValue | None,
    bias: TensorValue | None,
    eps: float,
) -> Handle:
    """Over the last dims, which become one."""
    rows = x.shape[: len(x.shape) - num_dims]
    width = math.prod(x.shape[len(rows) :])
    if weight is None and bias is not None:
        weight = Constant(torch.ones(width, dtype=torch_dtype(b.dtype)))

    def vector(value: TensorValue | None) -> Handle | None:
        return None if value is None else b.handle(b.reshape(value, (width,)))

    row = b.handle(b.reshape(x, (*rows, width)))
    return b.p.layer_norm(row, vector(weight), vector(bias), eps, name=b.name())


@rule("native_layer_norm")
def native_layer_norm(
    b: Build, input: TensorValue, normalized_shape: Sequence[int], weight: TensorValue | None,
    bias: TensorValue | None, eps: float,
) -> Value:  # fmt: skip
    return [layer_norm(b, input, normalized_shape, weight, bias, eps), None, None]


@rule("rms_norm", "_fused_rms_norm")
def rms_norm(
    b: Build, input: TensorValue, normalized_shape: Sequence[int],
    weight: TensorValue | None = None, eps: float | None = None,
) -> Value:  # fmt: skip
    if len(normalized_shape) != 1:
        return NotImplemented
    if weight is None:
        weight = Constant(torch.ones(tuple(normalized_shape), dtype=torch_dtype(b.dtype)))
    if eps is None:
        eps = torch.finfo(torch_dtype("f32" if b.dtype in HALVES else b.dtype)).eps
    found = b.p.rms_norm(b.handle(input), b.handle(weight), float(eps), name=b.name())
    return found if len(b.results) == 1 else [found, None]


@rule("native_group_norm")
def group_norm(
    b: Build, input: TensorValue, weight: TensorValue | None, bias: TensorValue | None, N: int,  # noqa: N803
    C: int, HxW: int, group: int, eps: float,  # noqa: N803
) -> Value:  # fmt: skip
    rows = b.reshape(input, (N, group, C // group * HxW))
    normed = b.reshape(b.p.layer_norm(b.handle(rows), None, None, eps, name=b.name()), b.shape)
    return [_scaled_by_channel(b, normed, weight, bias), None, None]


def _scaled_by_channel(
    b: Build, x: TensorValue, weight: TensorValue | None, bias: TensorValue | None
) -> TensorValue:
    shape = (1, x.shape[1]) + (1,) * (len(x.shape) - 2)
    for vector, text in ((weight, "{0} * {1}"), (bias, "{0} + {1}")):
        if vector is not None:
            x = b.pointwise(text, x, b.reshape(vector, shape))
    return x


@rule("_native_batch_norm_legit_no_training")
def batch_norm(
    b: Build, input: TensorValue, weight: TensorValue | None, bias: TensorValue | None,
    running_mean: TensorValue, running_var: TensorValue, momentum: float, eps: float,
) -> Value:  # fmt: skip
    shape = (1, input.shape[1]) + (1,) * (len(input.shape) - 2)
    mean, spread = (b.reshape(vector, shape) for vector in (running_mean, running_var))
    normed = b.pointwise("({0} - {1}) * rsqrt({2} + {3})", input, mean, spread, eps)
    return [_scaled_by_channel(b, normed, weight, bias), None, None]


@rule("_native_batch_norm_legit.no_stats")
def instance_norm(
    b: Build, input: TensorValue, weight: TensorValue | None, bias: TensorValue | None,
    training: bool, momentum: float, eps: float,
) -> Value:  # fmt: skip
    """Every channel over all samples and places."""
    order = [1, 0, *range(2, len(input.shape))]
    turned = b.transpose(input, order)
    rows = b.reshape(turned, (turned.shape[0], math.prod(turned.shape[1:])))
    normed = b.p.layer_norm(b.handle(rows), None, None, eps, name=b.name())
    back = b.transpose(b.reshape(normed, turned.shape), order)
    return [_scaled_by_channel(b, back, weight, bias), None, None]
