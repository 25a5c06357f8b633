"""Attention as torch's scaled_dot_product_attention states it.

In: as table.py says. Out: rules of its table. Next: custom_ops.py.
"""

import math

import torch

from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import rule
from distmega.torch_import.operators.values import (
    Constant,
    Spread,
    TensorValue,
    Value,
    uniform_value,
    value_dtype,
)


@rule("scaled_dot_product_attention")
def attention(
    b: Build,
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    attn_mask: TensorValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    if dropout_p or len(query.shape) < 2:
        return NotImplemented
    if is_causal:
        rows = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        attn_mask = Constant(rows)
    return attend(b, query, key, value, attn_mask, scale, 0.0)


def attend(
    b: Build,
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    mask: TensorValue | None,
    scale: float | None,
    softcap: float,
) -> Value:
    """Attention of any number of dims as the op's four: the ones before the heads are one.
    NotImplemented where operands are repeated along dims that this does not tell apart.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rank = max(4, *(len(x.shape) for x in (query, key, value, mask) if x is not None))
    (*front, heads, _, _), keys, values = (_shape_of(x, rank) for x in (query, key, value))
    if [*keys[:-3]] != front or values[:-1] != keys[:-1] or heads % keys[-3]:
        return NotImplemented
    q, k, v = (_in_four_dims(b, x, rank) for x in (query, key, value))
    seen = None
    if mask is not None:
        *before, of_heads, _, _ = _shape_of(mask, rank)
        if before not in ([1] * len(before), front) or of_heads not in (1, heads):
            return NotImplemented
        if uniform_value(mask) not in (True, 0.0) or value_dtype(mask) == "bool":
            seen = _in_four_dims(b, mask, rank)
    if isinstance(seen, Spread):
        source = seen.source
        seen = b.reshape(source, (1,) * (4 - len(source.shape)) + source.shape)
    operand = None if seen is None else b.handle(seen)
    handles = b.handle(q), b.handle(k), b.handle(v)
    out = b.p.attend(*handles, operand, float(scale), softcap, name=b.name())
    return b.reshape(out, b.shape)


def _in_four_dims(b: Build, x: TensorValue, rank: int) -> TensorValue:
    shape = _shape_of(x, rank)
    return b.reshape(x, (math.prod(shape[:-3]), *shape[-3:]))


def _shape_of(x: TensorValue, rank: int) -> tuple[int, ...]:
    """Its shape as of that many dims."""
    return (1,) * (rank - len(x.shape)) + x.shape
