"""Fused ops: the kinds of work that one persistent kernel does.

Made by segment.py, read by the planners of both kernels (../../hopper/row_plan/,
../../hopper/batch_plan/). Next on the walk: segment.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distmega.program import expr
from distmega.program.types import Tensor

Limits = Literal["given", "candidates", "all"]
IDENTITY = expr.Arg(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputNorm:
    """A norm applied to x on its way in. kind: "rms_norm" or "layer_norm", or "softmax" where no
    contraction follows; weight, bias: "" without one.
    """

    weight: str
    eps: float
    kind: str = "rms_norm"
    bias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStream:
    """Weights whose rows lie one after the other, and the bias of each, "" where there is none."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlots:
    """Weights [num_own, n, k] of which a contraction takes the matrices of num_chosen experts,
    those of the slots of `routing`, a FusedRouting. num_own: of num_experts experts, all, or where
    ranks have whole ones those of this rank, in the order of the team; slots of others give zeros.

    by "rows": of a row of x each slot makes a row of the result, [num_chosen, n], and what its
    expert weighs is the last argument of the formula. by "columns": each slot has a row of x
    [num_chosen, k], and their products are added up. Of several rows each has slots of its own.
    """

    routing: str
    by: Literal["rows", "columns"]
    num_experts: int
    num_own: int
    num_chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedContraction:
    """Rows of one vector or more: formula(products of x with a row of each stream, operands).

    x is normalised first if `norm`. Argument i of the formula is the product of stream i with its
    bias added; arguments after the streams are `operands`, tensors of as many elements as a stream
    has rows. With several ranks the product of the only stream is summed over them first. outs: the
    result, cut where the weights of the first stream are, or of one weight the columns of the
    result that an attention takes. normed: the normalised x, if it is also
    an operand of later ops or leaves. name: of the op that gave the result. experts: where the
    weights are of several, and data choose.
    """

    name: str
    x: str
    norm: InputNorm | None
    streams: tuple[WeightStream, ...]
    outs: tuple[str, ...]
    formula: expr.Expr = IDENTITY
    operands: tuple[str, ...] = ()
    num_ranks: int = 1
    normed: str = ""
    experts: ExpertSlots | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRouting:
    """The experts of the num_chosen largest of num_experts `scores` of each row, a slot each, and
    what they weigh; see ops.top_k for order and weighing. name: of the op that sorts rows.
    """

    name: str
    scores: str
    num_experts: int
    num_chosen: int
    weighing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedEmbedding:
    """out = the row of `table` at `ids`; one of num_ranks ranks has it, or each has a part."""

    name: str
    ids: str
    table: str
    out: str
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Rotates q and k after their norms, appends k and v to the caches, attends. softcap: unless it
    is 0, scores are softcap * tanh(score / softcap). bias: "" or a weight [t, h, g], which is added
    to scores.

    q [1, h, g, d], k and v [1, h, d]: before norm and rotation. table: "" where nothing is rotated.
    """

    name: str
    q: str
    k: str
    v: str
    q_norm: InputNorm | None
    k_norm: InputNorm | None
    positions: str
    table: str
    k_cache: str
    v_cache: str
    scale: float
    window: int
    out: str
    softcap: float = 0.0
    bias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOfRows:
    """Heads side by side in rows of a tensor, from element `first` of each row on. steps: of a
    tensor that no op makes, the elements from one row, and from one head, to the next.
    """

    tensor: str
    first: int
    steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRowAttention:
    """Attention of rows over keys and values of rows, or over one cache that rows share: q [m,
    heads, d] over k and v [t, kv heads, d], out [m, heads, d].

    num_sequences: rows are of so many, equally many each, which see nothing of each other; num_rows
    and num_keys are those of one.

    q and k are normalised and rotated first, at `positions`, where there are norms and a table.
    k_cache, v_cache: "", or [kv heads, t, d], to which k and v are appended at `positions` before
    any row sees them. causal: whether row m sees keys t <= positions[m] alone, and t > positions[m]
    - window where window > 0. mask: "", or what scores get, a bool, which says what may be seen, or
    floats, which are added: that of a head, row and key lies by `mask_steps` elements of each from
    its first one. softcap: as of FusedAttention. out_steps: None where out is rows; else it only
    leaves the segment, and these are the elements from one row, and from one head, to the next.
    mask_step: from what scores of one sequence get to that of the next.
    """

    name: str
    num_sequences: int
    num_rows: int
    q: HeadsOfRows
    k: HeadsOfRows
    v: HeadsOfRows
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_keys: int
    scale: float
    out: str
    out_steps: tuple[int, int] | None = None
    q_norm: InputNorm | None = None
    k_norm: InputNorm | None = None
    positions: str = ""
    table: str = ""
    k_cache: str = ""
    v_cache: str = ""
    causal: bool = False
    window: int = 0
    mask: str = ""
    mask_steps: tuple[int, int, int] = (0, 0, 0)
    mask_step: int = 0
    softcap: float = 0.0

    @property
    def prepares(self) -> bool:
        """Whether heads change, or are stored in a cache, before rows see them."""
        return bool(self.table or self.q_norm or self.k_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPointwise:
    """out = formula(x after its norm, operands), all of as many elements; without x, x is "", norm
    is None and the formula takes the operands alone. length: elements that are normalised together.
    """

    name: str
    x: str
    norm: InputNorm | None
    length: int
    out: str
    formula: expr.Expr = IDENTITY
    operands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGather:
    """out = the columns that num_ranks ranks have of each row, x of each, in rank order; where that
    is more than `out` has, the last ones are left out.
    """

    name: str
    x: str
    out: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSample:
    """An id sampled as ops.sample says, at the last of `positions`, instead of the most likely.

    limits: "given", and sampling is what ops.sample takes; else sampling is settings of ops.cutoff,
    whose limits are looked for among few "candidates" or among "all" logits, of all ranks.
    """

    sampling: str
    seeds: str
    positions: str
    limits: Limits = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedChoice:
    """chosen = argmax of the result of the contraction before, `source`, or sampled from it.

    Over num_ranks ranks, each has as many rows of all `num_logits` ones, in rank order. logits:
    what all ranks have or, where none asks for them, the rank's own.
    """

    name: str
    source: str
    logits: str
    chosen: str
    num_logits: int
    num_ranks: int = 1
    sampler: FusedSample | None = None


Fused = (
    FusedContraction
    | FusedRouting
    | FusedEmbedding
    | FusedAttention
    | FusedRowAttention
    | FusedPointwise
    | FusedGather
    | FusedChoice
)


def taken_by(op: Fused) -> tuple[str, ...]:
    """Tensors of rows that an op takes."""
    match op:
        case FusedContraction() | FusedPointwise():
            return (op.x, *op.operands) if op.x else op.operands
        case FusedAttention():
            return op.q, op.k, op.v
        case FusedRowAttention():
            return tuple(dict.fromkeys(one.tensor for one in (op.q, op.k, op.v)))
        case FusedRouting():
            return (op.scores,)
        case FusedGather():
            return (op.x,)
        case FusedChoice():
            return (op.source,)
    return ()


def norms_of(op: Fused) -> list[InputNorm]:
    """All norms of a fused op."""
    if isinstance(op, FusedAttention | FusedRowAttention):
        return [norm for norm in (op.q_norm, op.k_norm) if norm]
    norm = getattr(op, "norm", None)
    return [norm] if isinstance(norm, InputNorm) else []


def attention_extents(
    op: FusedAttention, tensors: Mapping[str, Tensor]
) -> tuple[int, int, int, int]:
    """Rows, kv heads, query heads of each, elements of a head."""
    rows = tensors[op.positions].num_elements
    *_, num_kv_heads, _, head_dim = tensors[op.k_cache].shape
    return (
        rows,
        num_kv_heads,
        tensors[op.q].num_elements // (rows * num_kv_heads * head_dim),
        head_dim,
    )
