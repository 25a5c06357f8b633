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
    """Attention of any number of dims as the op's four: the ones before the heads are one."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (_in_four_dims(b, x) for x in (query, key, value))
    if q.shape[0] != k.shape[0] or v.shape[:3] != k.shape[:3]:
        return NotImplemented
    seen = None
    if mask is not None:
        front = (1,) * max(4 - len(mask.shape), 0)
        if len(mask.shape) > 4 and any(extent > 1 for extent in mask.shape[:-4]):
            return NotImplemented
        if uniform_value(mask) not in (True, 0.0) or value_dtype(mask) == "bool":
            seen = b.reshape(mask, (*front, *mask.shape[-4:]))
    if isinstance(seen, Spread):
        source = seen.source
        seen = b.reshape(source, (1,) * (4 - len(source.shape)) + source.shape)
    operand = None if seen is None else b.handle(seen)
    handles = b.handle(q), b.handle(k), b.handle(v)
    out = b.p.attend(*handles, operand, float(scale), softcap, name=b.name())
    return b.reshape(out, b.shape)


def _in_four_dims(b: Build, x: TensorValue) -> TensorValue:
    rank = len(x.shape)
    if rank <= 4:
        return b.reshape(x, (1,) * (4 - rank) + x.shape)
    return b.reshape(x, (math.prod(x.shape[: rank - 3]), *x.shape[rank - 3 :]))
