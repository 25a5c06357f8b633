"""Operators of our own for torch modules to call, so that capture finds them whole.

`distmega::attend` is attention under a mask with a soft cap; `append_rows` gives a cache with new
rows in it; `attend_rows` is causal attention over caches. All run by torch like any other. The
rules at the end say what they become. Used by ../conversion/, and by decoders of transformers
(../huggingface/attention.py). `mark` and `stand_in` are in graphs only until ../repeats.py has put
layers in their places.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from distmega.hostir.library import ops as library
from distmega.program.builder import Handle
from distmega.program.ops.attention import append_values
from distmega.torch_import.operators import attention
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.table import RULES


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


@torch.library.custom_op("distmega::append_rows", mutates_args=())
def append_rows(
    cache: Tensor, x: Tensor, positions: Tensor, sequences: Tensor | None = None
) -> Tensor:
    """The cache with rows x [m, h, d] in it; see attention.append_values."""
    done: torch.Tensor = append_values(cache.clone(), x, positions, sequences)
    return done


@append_rows.register_fake
def _(cache: Tensor, x: Tensor, positions: Tensor, sequences: Tensor | None = None) -> Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("distmega::attend_rows", mutates_args=())
def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sequences: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention of q [m, h, g, d] over caches; see the program's ops.attention."""
    if sequences is None:
        return library.attention(query, keys, values, positions, scale, window, softcap)
    return library.packed_attention(
        query, keys, values, positions, sequences, scale, window, softcap
    )


@attend_rows.register_fake
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sequences: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], values.shape[-1]))


@torch.library.custom_op("distmega::mark", mutates_args=())
def mark(x: Tensor, name: str) -> Tensor:
    """The tensor, with a name by which it is found in the graph."""
    return x.clone()


@mark.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("distmega::stand_in", mutates_args=())
def stand_in(
    given: Sequence[Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A result of that name, which a layer makes of tensors. Never run."""
    raise NotImplementedError(name)


@stand_in.register_fake
def _(given: Sequence[Tensor], name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return given[0].new_empty(shape, dtype=dtype)


for _operator in (torch.ops.distmega.mark.default, torch.ops.distmega.stand_in.default):
    fx.node.has_side_effect(_operator)  # so that they stay where nobody reads their results


def _attend_rule(b: Build, **arguments: Any) -> Any:
    arguments.setdefault("mask", None)
    return attention.attend(b, **arguments)


def _attend_rows_rule(
    b: Build,
    query: Any,
    keys: Any,
    values: Any,
    positions: Any,
    scale: float,
    window: int,
    softcap: float,
    sequences: Any = None,
    starts: Any = None,
) -> Handle:
    packed = None if sequences is None else (b.handle(sequences), b.handle(starts))
    return b.p.attention(
        b.handle(query),
        b.handle(keys),
        b.handle(values),
        b.handle(positions),
        scale,
        window,
        packed=packed,
        softcap=softcap,
        name=b.name(),
    )


RULES.update({"distmega.attend": _attend_rule, "distmega.attend_rows": _attend_rows_rule})
