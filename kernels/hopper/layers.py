"""What the kernel of several sequences knows: fused ops as embedding, layers and head, and their
extents.

In: fused ops (tasks/fuse.py) and the addresses of weights. Out: the parts, and a DecodeShape. The
kernel of one row takes fused ops in any order instead (queues.py). Next on the walk:
batch_queues.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distmega.kernels.hopper.matrices import Weights, tiles_k
from distmega.kernels.hopper.plan import HEAD_DIMS, DecodeShape, unfit
from distmega.kernels.tasks.fuse import (
    IDENTITY,
    Draw,
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    Norm,
    canonical,
    norms_of,
)
from distmega.program import expr
from distmega.program.types import Program

SUM = expr.parse("a0 + a1")
GATED = canonical(expr.parse("silu(a0) * a1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Products of x with weights whose rows lie one after the other; biases "" where none."""

    x: str
    norm: Norm | None
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    outs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """out = residual + weight x, the product summed over num_ranks ranks."""

    x: str
    weight: str
    residual: str
    out: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """out = silu(gate x) * (up x), x normalised first."""

    x: str
    norm: Norm | None
    gate: str
    up: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The contraction that a token is chosen from, and the choice."""

    x: str
    norm: Norm | None
    weight: str
    logits: str
    token: str
    vocab: int
    num_ranks: int
    draw: Draw | None


Block = tuple[Linear, FusedAttention, Residual, Gated, Residual]
"""The ops of a layer: qkv, attention, output, gated, down."""


def find_parts(
    fused: Sequence[Fused],
) -> tuple[FusedEmbedding | None, list[Block], Head | None]:
    """Embedding, layers and head, joined as a decoder's are; a stage of a pipeline may have no
    embedding, or no head. UnsupportedError for other ops.
    """
    first = fused[0] if isinstance(fused[0], FusedEmbedding) else None
    choice = fused[-1]
    layers = fused[int(first is not None) :]
    head = None
    if isinstance(choice, FusedChoice):
        head, layers = _head(choice, layers[-2]), layers[:-2]
    if not layers:
        raise unfit("a segment without layers")
    blocks: list[Block] = []
    x = first.out if first else getattr(layers[0], "x", "")
    for number, start in enumerate(range(0, len(layers), 5)):
        blocks.append(_joined(number, layers[start : start + 5], x))
        x = blocks[-1][4].out
    if head and head.x != x:
        raise unfit(f"a head of {head.x!r} instead of {x!r}")
    return first, blocks, head


def _head(choice: FusedChoice, op: Fused) -> Head:
    """The choice with the contraction that it follows."""
    match op:
        case FusedContraction(outs=(found,)) if found == choice.source:
            return Head(
                x=op.x, norm=op.norm, weight=op.streams[0].weights[0], logits=choice.logits,
                token=choice.token, vocab=choice.vocab, num_ranks=choice.num_ranks,
                draw=choice.draw,
            )  # fmt: skip
    raise unfit(f"a choice from {choice.source!r} after other ops")


def _joined(number: int, ops: Sequence[Fused], x: str) -> Block:
    """The ops of a layer that reads x."""
    match tuple(map(_in_words, ops)):
        case (
            Linear() as qkv,
            FusedAttention() as attention,
            Residual() as out,
            Gated() as gated,
            Residual() as down,
        ):
            edges = (
                (qkv.x, x), (qkv.outs, (attention.q, attention.k, attention.v)),
                (out.x, attention.out), (out.residual, x), (gated.x, out.out),
                (down.x, gated.out), (down.residual, out.out),
            )  # fmt: skip
            rotated = bool(attention.table)
            if any(found != wanted for found, wanted in edges) or not qkv.norm or not gated.norm:
                raise unfit(f"layer {number}, whose ops are joined in another way")
            if not rotated or {qkv.norm.kind, gated.norm.kind} != {"rms_norm"}:
                raise unfit(f"layer {number}, whose norms or rotations are others")
            return qkv, attention, out, gated, down
    raise unfit("layers other than attention and gated feed-forward")


def _in_words(op: Fused) -> Fused | Linear | Residual | Gated:
    """A contraction as what a layer of the batched kernel may hold; other ops as they are."""
    match op:
        case FusedContraction(streams=(stream,), formula=formula) if formula == IDENTITY:
            return Linear(
                x=op.x, norm=op.norm, weights=stream.weights, biases=stream.biases, outs=op.outs
            )
        case FusedContraction(streams=(stream,), norm=None, operands=(residual,)) if (
            op.formula == SUM and not any(stream.biases)
        ):
            return Residual(
                x=op.x, weight=stream.weights[0], residual=residual, out=op.outs[0],
                num_ranks=op.num_ranks,
            )  # fmt: skip
        case FusedContraction(streams=(gate, up), formula=formula, operands=()) if (
            formula == GATED and not any((*gate.biases, *up.biases))
        ):
            return Gated(
                x=op.x, norm=op.norm, gate=gate.weights[0], up=up.weights[0], out=op.outs[0]
            )
    return op


def find_shape(
    segment: Program, fused: Sequence[Fused], placed: Weights, max_rows: int = 1
) -> DecodeShape:
    """Extents of a segment of at most max_rows tokens; UnsupportedError for what no kernel does."""
    tensors = segment.tensor_map()
    _, blocks, head = find_parts(fused)
    attention = blocks[0][1]
    rows, num_kv_heads, group, head_dim = tensors[attention.q].shape
    columns = placed.columns
    if rows > max_rows or head_dim not in HEAD_DIMS:
        raise unfit(f"{rows} tokens, heads of {head_dim}")
    if any(length % 64 for length in columns.values()):
        raise unfit(f"rows of {sorted(set(columns.values()))} elements")
    norms = [norm.eps for op in fused for norm in norms_of(op)]
    if len(set(norms)) != 1:
        raise unfit(f"norms with eps {sorted(set(norms))}")
    num_ranks = blocks[0][2].num_ranks
    teams = {
        getattr(op, "num_ranks", num_ranks)
        for op in (*fused, *(part for block in blocks for part in block))
        if not isinstance(op, FusedContraction)
    }
    if len(teams) != 1:
        raise unfit(f"parts that {sorted(teams)} ranks share")
    return DecodeShape(
        num_layers=len(blocks),
        hidden=columns[blocks[0][0].weights[0]],
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=placed.rows_of(head.weight) if head else 0,
        max_context=tensors[attention.k_cache].shape[-2],
        qk_norm=attention.q_norm is not None,
        eps=norms[0],
        scale=attention.scale,
        max_tiles_k=max(map(tiles_k, columns.values())),
        num_ranks=num_ranks,
    )
