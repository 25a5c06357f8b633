"""Attention of rows over keys and values of the same rows, in no cache or in one that they share.

What turns rows and heads around before and behind it joins it, by where elements come from
(data_movement.py) and not by the ops' names; so do norms of heads, rotations and appends. Next on
the walk: choice.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmega.errors import UnsupportedError
from distmega.kernels.tasks.fuse.attention import append_to
from distmega.kernels.tasks.fuse.data_movement import (
    MOVEMENTS,
    Positions,
    moved,
    movements_to,
    source_of,
)
from distmega.kernels.tasks.fuse.state import Fusion, norm_of, out_of
from distmega.kernels.tasks.fuse.types import Fused, FusedRowAttention, HeadsOfRows, InputNorm
from distmega.program.kinds import kind_of
from distmega.program.types import Op, packed_strides


def attends_to_rows(fusion: Fusion, op: Op) -> bool:
    """Whether it mixes values that all rows may see: not those of caches of one row each, which
    are larger by far than what looking at each element's place is for.
    """
    if not kind_of(op).reads_positions:
        return True
    if op.extents["m"] > 1 and any("m" in index.axes for index in op.reads[1].dims):
        return False
    source = source_of(op.reads[1].tensor, fusion.producers)
    maker = fusion.producers.get(source)
    if maker is not None and not kind_of(maker).appends:
        return True
    if maker is None:
        return len(fusion.tensors[source].shape) == 3
    return len(fusion.tensors[source].shape) == 3 and op.extents["m"] > 1


def fuse_row_attention(fusion: Fusion, op: Op) -> Fused:
    """Attention over rows of the same step, and what is between the rows of products and it."""
    sizes, causal = op.extents, kind_of(op).reads_positions
    if "packed" in dict(op.attrs):
        raise _refused(op, "several sequences")
    caches = _caches(fusion, op)
    if sizes["d"] != sizes["e"]:
        raise _refused(op, "values of other sizes than keys")
    readers = (op, 0), *(((append, 0) for append in caches) if caches else ((op, 1), (op, 2)))
    q, k, v = (_find_heads(fusion, op, *reader) for reader in readers)
    rotations = {(one.positions, one.table) for one in (q, k)}
    if len(rotations) > 1 or v.table or v.norm or bool(q.norm) != bool(k.norm):
        raise _refused(op, "queries, keys and values that are rotated or normed differently")
    ((positions, table),) = rotations
    if causal:
        own = fusion.read(op, 3)
        if positions not in ("", own):
            raise _refused(op, "rotations at other positions")
        positions = own
    out = _find_rows(fusion, op)
    fusion.take(op, *caches, *q.ops, *k.ops, *v.ops, *out.ops)
    scale, softcap, window = op.get("scale", 0.0), op.get("softcap", 0.0), op.get("window", 0)
    assert isinstance(scale, float)
    assert isinstance(softcap, float)
    assert isinstance(window, int)
    return FusedRowAttention(
        name=op.name,
        num_sequences=sizes.get("b", 1),
        num_rows=sizes["m"],
        q=q.heads,
        k=k.heads,
        v=v.heads,
        num_heads=sizes["h"] * sizes["g"],
        num_kv_heads=sizes["h"],
        head_dim=sizes["d"],
        num_keys=sizes["t"],
        scale=scale,
        out=out.tensor,
        out_steps=out.steps,
        q_norm=q.norm,
        k_norm=k.norm,
        positions=positions,
        table=table,
        k_cache=fusion.read(op, 1) if caches else "",
        v_cache=fusion.read(op, 2) if caches else "",
        causal=causal,
        window=window,
        softcap=softcap,
        **_mask_of(fusion, op),
    )


def _caches(fusion: Fusion, op: Op) -> tuple[Op, ...]:
    """The appends of keys and of values to the cache that rows share, if there is one."""
    if not kind_of(op).reads_positions:
        return ()
    makers = [fusion.producers.get(fusion.read(op, n)) for n in (1, 2)]
    if not any(maker is not None and kind_of(maker).appends for maker in makers):
        return ()
    return tuple(append_to(fusion, op, fusion.read(op, n)) for n in (1, 2))


def _mask_of(fusion: Fusion, op: Op) -> Mapping[str, Any]:
    """What scores get, and the steps between the elements of heads, rows and keys in it."""
    number = {"attend": 3, "biased_attention": 4}.get(op.kind, len(op.reads))
    if number >= len(op.reads):
        return {}
    name = op.reads[number].tensor
    strides = packed_strides(fusion.tensors[name].shape)
    if op.kind == "biased_attention":  # [t, h, g]
        return {"mask": name, "mask_steps": (1, 0, strides[0])}
    steps = [
        step if index.axes else 0
        for step, index in zip(strides, op.reads[number].dims, strict=True)
    ]
    return {"mask": name, "mask_steps": tuple(steps[1:]), "mask_step": steps[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Heads of rows, what is done to them before rows see them, and the ops that do all that."""

    heads: HeadsOfRows
    ops: tuple[Op, ...]
    norm: InputNorm | None = None
    positions: str = ""
    table: str = ""


def _find_heads(fusion: Fusion, op: Op, user: Op, position: int) -> _Heads:
    """The rows that the heads of an operand are of, read by `user`, the attention or an append."""
    name = user.reads[position].tensor
    row = "t" if user is op and position else "m"
    by_rows = _rows_first(user, position, _own(fusion, name), row)
    ops: list[Op] = []
    found: dict[str, Any] = {}
    while True:
        movements = [*movements_to(name, fusion.producers)]
        source, at = moved(name, fusion.producers, fusion.tensors)
        by_rows = at.ravel()[by_rows]
        ops += [one for one in movements if not one.is_view]
        maker = fusion.producers.get(source)
        is_whole = np.array_equal(by_rows.ravel(), np.arange(fusion.size(source)))
        if is_whole and maker is not None and kind_of(maker).rotates and not found:
            found = {"positions": fusion.read(maker, 2), "table": fusion.read(maker, 3)}
        elif is_whole and maker is not None and _norms_heads(op, maker) and "norm" not in found:
            found["norm"] = norm_of(maker)
        else:
            break
        ops.append(maker)
        name = maker.reads[0].tensor
    length, width = fusion.size(source) // len(by_rows), by_rows.shape[1]
    first = int(by_rows.flat[0])
    if fusion.producers.get(source) is None:
        steps = _steps_of(by_rows - first, op.extents["d"])
        if steps is None:
            raise _refused(op, "given heads that do not lie by equal steps")
        heads = HeadsOfRows(tensor=source, first=first, steps=steps)
        return _Heads(heads=heads, ops=tuple(ops), **found)
    wanted = first + np.arange(width) + length * np.arange(len(by_rows))[:, None]
    if first + width > length or not (by_rows == wanted).all():
        raise _refused(op, "heads that do not lie side by side in rows")
    return _Heads(heads=HeadsOfRows(tensor=source, first=first), ops=tuple(ops), **found)


def _steps_of(by_rows: Positions, dim: int) -> tuple[int, int] | None:
    """The elements from one row, and from one head of `dim` elements, to the next, if equal."""
    heads = by_rows.reshape(len(by_rows), -1, dim)
    steps = [int(one[1]) if len(one) > 1 else 0 for one in (heads[:, 0, 0], heads[0, :, 0])]
    spans = [
        step * np.arange(extent) for step, extent in zip((*steps, 1), heads.shape, strict=True)
    ]
    wanted = spans[0][:, None, None] + spans[1][:, None] + spans[2]
    return (steps[0], steps[1]) if (heads == wanted).all() else None


def _norms_heads(op: Op, norm: Op) -> bool:
    """Whether an op is an rms norm, with a weight, of each head of an attention."""
    if norm.kind != "rms_norm" or len(norm.reads) < 3:
        return False
    return norm.num_reduced == op.extents["d"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the result leaves as: a tensor of rows, the ops up to it. steps: where it is none, but
    leaves the segment as it is: from one row and one head to the next.
    """

    tensor: str
    ops: tuple[Op, ...]
    steps: tuple[int, int] | None = None


def _find_rows(fusion: Fusion, op: Op) -> _Rows:
    """The tensor of rows that the result leaves as, and the movements up to it."""
    name: str | None = out_of(op)
    wanted = _rows_first(op, -1, _own(fusion, out_of(op)), "m")
    found: _Rows | None = None
    behind: list[Op] = []
    while name is not None:
        shown = moved(name, fusion.producers, fusion.tensors)[1]
        if np.array_equal(shown.ravel(), wanted.ravel()):
            found = _Rows(name, tuple(one for one in behind if not one.is_view))
        user = fusion.only_user(name)
        name = None
        if user is not None and user.kind in MOVEMENTS:
            behind.append(user)
            name = out_of(user)
    if found is not None:
        return found
    steps = _steps_of(wanted, op.extents["e"])
    if steps is None or fusion.users.get(out_of(op)) or out_of(op) not in fusion.outputs:
        raise _refused(op, "a result that does not become rows")
    return _Rows(out_of(op), (), steps)


def _own(fusion: Fusion, name: str) -> Positions:
    """Of each element of a tensor its place there."""
    shape = fusion.tensors[name].shape
    own: Positions = np.arange(fusion.size(name)).reshape(shape)
    return own


def _rows_first(op: Op, position: int, at: Positions, row: str) -> Positions:
    """Positions of an operand of an op, or of its result, with rows in front: [rows, n]. Rows are
    the points of axis `row`, of one sequence after the other.
    """
    access = (*op.reads, *op.writes)[position]
    axes = [name for index in access.dims for name in index.axes]
    spread = at.reshape([op.extents[name] for name in axes])
    rows = [name for name in ("b", row) if name in axes]
    front = [axes.index(name) for name in rows]
    num = math.prod(op.extents[name] for name in rows)
    return np.moveaxis(spread, front, range(len(front))).reshape(num, -1)


def _refused(op: Op, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"op {op.name!r} of kind {op.kind} does not fuse: its keys and values are seen by rows, "
        f"with {found}",
        expected="heads that lie side by side in rows of products, or are given, or one cache that "
        "they are appended to",
        remedy="run the segment by library ops",
    )
