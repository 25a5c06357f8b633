"""Operators of our own for torch modules to call, so that capture finds them whole.

`distmega::attend` is attention under a mask with a soft cap; `distmega::kv_append` gives a cache
with new rows in it. Both run by torch like any other. RULES says what they become. Used by
convert.py and by the caches of decoders.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distmega.hostir.library import ops as library
from distmega.torch_import import rules
from distmega.torch_import.build import Build


@torch.library.custom_op("distmega::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention of q [b, h g, m, d] over k [b, h, t, d] and v [b, h, t, e]; see the library's."""
    return library.attend(query, key, value, mask, scale, softcap)


@attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("distmega::kv_append", mutates_args=())
def kv_append(cache: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    """The cache [h, t, d] with x [m, h, d] at t = positions[m], or [m, h, t, d] a row each."""
    return library.kv_append(cache.clone(), x, positions)


@kv_append.register_fake
def _(cache: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    return torch.empty_like(cache)


def _attend_rule(b: Build, **arguments: Any) -> Any:
    arguments.setdefault("mask", None)
    return rules.attend(b, **arguments)


RULES: dict[str, Callable[..., Any]] = {"distmega.attend": _attend_rule}
"""Operator -> its rule."""
