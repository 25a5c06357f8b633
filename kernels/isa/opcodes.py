"""Opcodes: what a record of a megakernel means, one frozen dataclass an opcode.

A `Ref` names an operand; element i (one index per dim) of it is at space + base * 128 bytes +
(first + sum of i * strides) items. `axis` is an index into the mesh axes, or -1 where the rank's
coordinate plays no part. What an instruction takes beyond its fields stands in ExtraOperands before
it. reference.py has one function an opcode; encoding.py lays the fields out in words. Next on the
walk: encoding.py.
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


def triple(values: tuple[int, ...]) -> Triple:
    """Three ints."""
    a, b, c = values
    return a, b, c


def six(values: tuple[int, ...]) -> Six:
    """Six ints."""
    a, b, c, d, e, f = values
    return a, b, c, d, e, f


COMBINES = ("sum", "max", "min")
"""Reductions by the number that stands for them in an instruction."""

SCANS = ("cumsum", "cumprod")
"""Ways of combining the elements of a row up to each one, likewise."""

WEIGHINGS = ("values", "softmax", "softmax_chosen")
"""What chosen columns weigh, likewise."""

ATTENDED = ("positions", "sequences", "bias")
"""What Attend takes besides keys and values: bit i of its `others` says whether there is the i-th.
"""


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
class ExtraOperand:
    """One more operand of the instruction behind it, which says what the strides run over."""

    x: Ref
    strides: Six


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
class Contract:
    """out[m, n] = sum over three dims s of x[m, s] * w[n, s], plus bias[m, n]: what a Linear is not
    enough for, sums that do not merge into one dim and biases that differ by row.
    """

    x: Ref
    w: Ref
    bias: Ref | None
    out: Ref
    m: int
    n: int
    sums: Triple
    x_strides: Quad
    w_strides: Quad
    bias_strides: Pair
    out_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """out[i, j] = expr(a0[i, j], ...): `expr` is the index of its first word in the constant table
    (see encoding.py). ExtraOperands before it are a4 and on, by strides over i, j.
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
    bias start at element 0 of a row; `kind` is an index into NORMS of
    program/ops/norms.py. vector_strides: of weight and bias.
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
    x_strides: Pair
    vector_strides: Pair
    out_strides: Pair
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """out[m, start + i] for i < count: the elements of row m of x up to that one, combined; `kind`
    is an index into SCANS. x starts at element 0 of a row.
    """

    x: Ref
    out: Ref
    kind: int
    rows: int
    start: int
    count: int
    x_strides: Pair
    out_strides: Pair


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
    table_strides: Pair
    position_stride: int
    x_strides: Triple
    out_strides: Triple


@dataclass(frozen=True, slots=True, kw_only=True)
class KvAppend:
    """cache[m, h, positions[m], d] = x[m, h, d], or cache[sequences[m], h, ...] where there are
    several `sequences`; strides of cache over (m or its sequence, h, t, d), the first 0 where all
    rows share one.
    """

    x: Ref
    positions: Ref
    sequences: Ref | None
    cache: Ref
    rows: int
    heads: int
    dim: int
    slots: int
    num_caches: int
    x_strides: Triple
    cache_strides: Quad
    vector_strides: Pair


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
class Attend:
    """out[m, h, g, :], values weighted by the softmax of q's scores with keys, wherever these lie
    and whatever a score may see: what an Attention is not enough for.

    ExtraOperands before it: keys over (m, h, t, d) and values over (m, h, t, e), or over (sequence,
    h, ...); then those of ATTENDED that `others` has. positions [m]: row m sees t <= positions[m],
    and t > positions[m] - window where window > 0. sequences [m]: row m sees cache sequences[m] of
    `num_caches`. bias (m, h, g, t): of bool what may be seen, else added to scores. A row that may
    see nothing gives zeros. softcap as of Attention.
    """

    q: Ref
    out: Ref
    m: int
    h: int
    g: int
    d: int
    e: int
    t: int
    q_strides: Quad
    out_strides: Quad
    others: int
    num_caches: int
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """out[m, d] = table[ids[m] - coordinate[axis] * stride, d], zero where another rank holds the
    row; extent: rows of all ranks, that of an id below 0 or from there on is refused on CPUs, zero
    on GPUs.
    """

    ids: Ref
    table: Ref
    out: Ref
    rows: int
    dim: int
    table_rows: int
    id_stride: int
    table_strides: Pair
    out_strides: Pair
    axis: int
    stride: int
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """out[i...] = x[i..., ids[i...]] over four dims and the `num` elements, `stride` apart, of
    which one is chosen; an id below 0 or from num on as that of an Embedding.
    """

    x: Ref
    ids: Ref
    out: Ref
    extents: Quad
    num: int
    stride: int
    x_strides: Quad
    ids_strides: Quad
    out_strides: Quad


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseColumns:
    """chosen[m, :] = the columns of the `num` largest of x[m, :extent], weights[m, :] what they
    weigh, as ops.top_k says; `weighing` is an index into WEIGHINGS.
    """

    x: Ref
    weights: Ref
    chosen: Ref
    rows: int
    extent: int
    num: int
    weighing: int
    x_strides: Pair
    weight_strides: Pair
    chosen_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """counts, offsets, order and slots of the pairs of ids[m, c], sorted by group, as ops.route
    says; used: the number of rows in use. The first three are vectors.
    """

    ids: Ref
    used: Ref | None
    counts: Ref
    offsets: Ref
    order: Ref
    slots: Ref
    rows: int
    num: int
    num_groups: int
    id_strides: Pair
    slot_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows:
    """out[p, j] = x[order[p] // num_choices - base, j] for p from `start` on, zero where that is no
    row of x or p is of another rank's groups. base: coordinate[axis] * stride. groups, num_groups,
    group_axis: this rank has `groups` of these from coordinate[group_axis] * groups on, or all.
    """

    x: Ref
    order: Ref
    offsets: Ref
    out: Ref
    start: int
    rows: int
    dim: int
    x_rows: int
    num_choices: int
    x_strides: Pair
    out_strides: Pair
    axis: int
    stride: int
    groups: int
    num_groups: int
    group_axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear:
    """out[p, n] = sum over k of x[p, k] * w[g, n, k], g the group of row p, for p from `start` on;
    zero in rows of other ranks' groups. groups, num_groups, group_axis as of GatherRows.
    """

    x: Ref
    w: Ref
    offsets: Ref
    out: Ref
    start: int
    rows: int
    n: int
    k: int
    x_strides: Pair
    w_strides: Triple
    out_strides: Pair
    groups: int
    num_groups: int
    group_axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRows:
    """out[p, j] = x[p, j] for p from `start` on, zero in rows of other ranks' groups. groups,
    num_groups, group_axis as of GatherRows.
    """

    x: Ref
    offsets: Ref
    out: Ref
    start: int
    rows: int
    dim: int
    x_strides: Pair
    out_strides: Pair
    groups: int
    num_groups: int
    group_axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterAdd:
    """out[m, j] = sum over choices c of weights[m, c] * y[slots[m, c], j], of this rank's groups.
    groups, num_groups, group_axis as of GatherRows.
    """

    y: Ref
    weights: Ref
    slots: Ref
    offsets: Ref
    out: Ref
    rows: int
    dim: int
    num: int
    y_rows: int
    y_strides: Pair
    weight_strides: Pair
    slot_strides: Pair
    out_strides: Pair
    groups: int
    num_groups: int
    group_axis: int


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
    columns: int
    row_strides: Triple
    step: int
    axis: int
    stride: int
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """values[m, :] = the num_top largest of x[m, :extent], largest first, and index[m, :], where
    they stand.
    """

    x: Ref
    values: Ref
    index: Ref | None
    rows: int
    extent: int
    num_top: int
    x_strides: Pair
    value_strides: Pair
    index_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutoff:
    """limits[m, :] of x[m, :extent] under settings[m, :], as ops.cutoff says."""

    x: Ref
    settings: Ref
    limits: Ref
    rows: int
    extent: int
    x_strides: Pair
    setting_strides: Pair
    limit_strides: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """value[m], index[m] sampled from x[m, v] as ops.sample says; indices as those of Argmax.
    Strides over m of the operands in their order; steps along a row of x and of limits.
    """

    x: Ref
    limits: Ref
    seeds: Ref
    positions: Ref
    value: Ref
    index: Ref
    rows: int
    columns: int
    axis: int
    stride: int
    extent: int
    strides: Six
    steps: Pair


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
class PushParts:
    """recv[my slot, i, ...] on rank r of the team along `axis` = x[r * shard + i, ...], zero where
    that index is not below `bound`; slots as of Push.
    """

    x: Ref
    recv: Ref
    extents: Quad
    x_strides: Quad
    recv_strides: Quad
    slot_stride: int
    axis: int
    shard: int
    bound: int


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
    | ExtraOperand | Contract | Scan | Attend | Gather | PushParts
    | ChooseColumns | Route | GatherRows | GroupedLinear | KeepRows | ScatterAdd
)  # fmt: skip
OPCODES: tuple[type[Instruction], ...] = get_args(Instruction)
"""The opcode of an instruction is its place here."""

TAKES_EXTRA = frozenset({Pointwise, Attend})
"""Instructions that ExtraOperands may stand before."""


def touches_peers(instruction: Instruction) -> bool:
    """Whether an operand lies in memory that peers write."""
    values = (getattr(instruction, field.name) for field in fields(instruction))
    return any(isinstance(value, Ref) and value.space is Space.PEER for value in values)
