"""Opcodes: what a record of a megakernel means, one frozen dataclass an opcode.

A `Ref` names an operand; element i (one index per dim) of it is at space + base * 128 bytes +
(first + sum of i * strides) items. `axis` is an index into the mesh axes, or -1 where the rank's
coordinate plays no part. reference.py has one function an opcode; encoding.py lays the fields out
in words. Next on the walk: encoding.py.
"""

from dataclasses import dataclass, fields
from typing import get_args

from distmega.kernels.runtime.arena import ALIGNMENT_BYTES, Space

Pair = tuple[int, int]
Triple = tuple[int, int, int]
Quad = tuple[int, int, int, int]
Six = tuple[int, int, int, int, int, int]


def quad(values: tuple[int, ...]) -> Quad:
    """Four ints, as type checkers see them."""
    a, b, c, d = values
    return a, b, c, d


def six(values: tuple[int, ...]) -> Six:
    """Six ints."""
    a, b, c, d, e, f = values
    return a, b, c, d, e, f


COMBINES = ("sum", "max", "min")
"""Reductions by the number that stands for them in an instruction."""

NORMS = ("rms", "layer", "softmax")
"""Ways of normalising a row, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """An operand: space, element type, base in units of ALIGNMENT_BYTES, first element from
    there.
    """

    space: Space
    dtype: str
    base: int
    first: int

    def __str__(self) -> str:
        where = f"{self.space.name.lower()}+{self.base * ALIGNMENT_BYTES:#x}"
        return f"{where}[{self.first}]:{self.dtype}" if self.first else f"{where}:{self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nop:
    """Waits and signals only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n]. Strides in the order of these
    dims.
    """

    x: Ref
    w: Ref
    bias: Ref | None
    out: Ref
    m: int
    n: int
    k: int
    x_strides: Pair
    w_strides: Pair
    bias_stride: int
    out_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """out[i, j] = expr(a0[i, j], ...): `expr` is the index of its first word in the constant table
    (see encoding.py).
    """

    out: Ref
    a0: Ref | None
    a1: Ref | None
    a2: Ref | None
    a3: Ref | None
    expr: int
    extents: Pair
    out_strides: Pair
    a0_strides: Pair
    a1_strides: Pair
    a2_strides: Pair
    a3_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """out[i, j] = combine over r of x[i, r, j]; `combine` is an index into COMBINES."""

    x: Ref
    out: Ref
    combine: int
    extents: Triple
    x_strides: Triple
    out_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """out[m, start + i] for i < count, of rows normalised over all `dim` elements; x, weight and
    bias start at element 0 of a row; `kind` is an index into NORMS.
    """

    x: Ref
    weight: Ref | None
    bias: Ref | None
    out: Ref
    kind: int
    rows: int
    dim: int
    start: int
    count: int
    x_stride: int
    out_stride: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """out[m, h, start + i] for i < count, x[m, h, :] rotated by table[positions[m], :]; x starts at
    element 0 of a head.
    """

    x: Ref
    positions: Ref
    table: Ref
    out: Ref
    rows: int
    heads: int
    dim: int
    start: int
    count: int
    table_rows: int
    table_stride: int
    x_strides: Pair
    out_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class KvAppend:
    """cache[m, h, positions[m], d] = x[m, h, d]; strides of x over (m, h), of cache over (m, h, t),
    0 over m where all rows share one cache; d is contiguous.
    """

    x: Ref
    positions: Ref
    cache: Ref
    rows: int
    heads: int
    dim: int
    slots: int
    x_strides: Pair
    cache_strides: Triple


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention over caches: q and out over (m, h, g), caches k [h, t, d] and v [h, t, e],
    row-major. heads: 0 where all rows share these; else row m has caches of its own, m * heads * t
    positions on. softcap: 0, or scores are softcap * tanh(score / softcap).
    """

    q: Ref
    k: Ref
    v: Ref
    positions: Ref
    out: Ref
    m: int
    h: int
    g: int
    d: int
    e: int
    t: int
    q_strides: Triple
    out_strides: Triple
    heads: int
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """out[m, d] = table[ids[m] - coordinate[axis] * stride, d], zero where another rank holds the
    row.
    """

    ids: Ref
    table: Ref
    out: Ref
    rows: int
    dim: int
    vocab: int
    table_stride: int
    out_stride: int
    axis: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """dst[i...] = src[i...] over six dims: the slices, joins and reorderings of elements."""

    src: Ref
    dst: Ref
    extents: Six
    src_strides: Six
    dst_strides: Six


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeShard:
    """dst[i, ...] = src[coordinate[axis] * shard + i, ...] over four dims, zero where that index is
    not below `bound`.
    """

    src: Ref
    dst: Ref
    extents: Quad
    src_strides: Quad
    dst_strides: Quad
    axis: int
    shard: int
    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Argmax:
    """value[m], index[m] of the largest x[m, v]; indices count from coordinate[axis] * stride and
    stay below `extent`.
    """

    x: Ref
    value: Ref
    index: Ref
    rows: int
    vocab: int
    row_strides: Triple
    axis: int
    stride: int
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """out[m, :] = the num_top largest of x[m, :extent], largest first; strides of x and out over
    m.
    """

    x: Ref
    out: Ref
    rows: int
    extent: int
    num_top: int
    strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutoff:
    """limits[m, :] of x[m, :extent] under settings[m, :], as ops.cutoff says; strides over m."""

    x: Ref
    settings: Ref
    limits: Ref
    rows: int
    extent: int
    strides: Triple


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """value[m], index[m] sampled from x[m, v] as ops.sample says; indices as those of Argmax.
    Strides over m of the operands in their order.
    """

    x: Ref
    limits: Ref
    seeds: Ref
    positions: Ref
    value: Ref
    index: Ref
    rows: int
    vocab: int
    axis: int
    stride: int
    extent: int
    strides: Six


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """recv[my slot, i...] = x[i...] on every rank of the team along `axis`; slot s starts s *
    slot_stride elements on.
    """

    x: Ref
    recv: Ref
    extents: Quad
    x_strides: Quad
    recv_strides: Quad
    slot_stride: int
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRanks:
    """out[i...] = combine over slots s, in rank order, of recv[s, i...]."""

    recv: Ref
    out: Ref
    combine: int
    num_ranks: int
    extents: Quad
    recv_strides: Quad
    out_strides: Quad
    slot_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgmaxRanks:
    """value[m], index[m] of the largest of values[s, m] over slots s; the lowest index on ties."""

    values: Ref
    indices: Ref
    value: Ref
    index: Ref
    rows: int
    num_ranks: int
    slot_strides: Pair
    row_strides: Quad


Instruction = (
    Nop | Linear | Pointwise | Reduce | Norm | Rope | KvAppend | Attention
    | Embedding | Copy | TakeShard | Argmax | Top | Cutoff | Sample | Push | SumRanks | ArgmaxRanks
)  # fmt: skip
OPCODES: tuple[type[Instruction], ...] = get_args(Instruction)
"""The opcode of an instruction is its place here."""


def touches_peers(instruction: Instruction) -> bool:
    """Whether an operand lies in memory that peers write."""
    values = (getattr(instruction, field.name) for field in fields(instruction))
    return any(isinstance(value, Ref) and value.space is Space.PEER for value in values)
