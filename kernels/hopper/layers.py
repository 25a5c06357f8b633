"""A fused segment as embedding, layers and head, and the extents of the model.

In: fused ops (fusion.py) and the addresses of weights. Out: the parts, and a DecodeShape. Next on
the walk: queues.py and batch_queues.py, which share them.
"""

from collections.abc import Sequence

from distmega.kernels.fusion import (
    Fused,
    FusedAttention,
    FusedEmbedding,
    FusedGated,
    FusedHead,
    FusedLinear,
    FusedResidual,
    Norm,
)
from distmega.kernels.hopper.matrices import Weights, tiles_k
from distmega.kernels.hopper.plan import HEAD_DIMS, DecodeShape, unfit
from distmega.program.types import Program

Block = tuple[FusedLinear, FusedAttention, FusedResidual, FusedGated, FusedResidual]
"""The ops of a layer: qkv, attention, output, gated, down."""


def find_parts(
    fused: Sequence[Fused],
) -> tuple[FusedEmbedding | None, list[Block], FusedHead | None]:
    """Embedding, layers and head, joined as a decoder's are; a stage of a pipeline may have no
    embedding, or no head. VerifyError for other ops.
    """
    first = fused[0] if isinstance(fused[0], FusedEmbedding) else None
    head = fused[-1] if isinstance(fused[-1], FusedHead) else None
    layers = fused[int(first is not None) : len(fused) - int(head is not None)]
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


def _joined(number: int, ops: Sequence[Fused], x: str) -> Block:
    """The ops of a layer that reads x."""
    match tuple(ops):
        case (
            FusedLinear() as qkv,
            FusedAttention() as attention,
            FusedResidual() as out,
            FusedGated() as gated,
            FusedResidual() as down,
        ):
            edges = (
                (qkv.x, x), (qkv.outs, (attention.q, attention.k, attention.v)),
                (out.x, attention.out), (out.residual, x), (gated.x, out.out),
                (down.x, gated.out), (down.residual, out.out),
            )  # fmt: skip
            if any(found != wanted for found, wanted in edges) or not qkv.norm or not gated.norm:
                raise unfit(f"layer {number}, whose ops are joined in another way")
            return qkv, attention, out, gated, down
    raise unfit("layers other than attention and gated feed-forward")


def find_shape(
    segment: Program, fused: Sequence[Fused], placed: Weights, max_rows: int = 1
) -> DecodeShape:
    """Extents of a segment of at most max_rows tokens; VerifyError for what no kernel does."""
    tensors = segment.tensor_map()
    _, blocks, head = find_parts(fused)
    attention = blocks[0][1]
    rows, num_kv_heads, group, head_dim = tensors[attention.q].shape
    columns = placed.columns
    if rows > max_rows or head_dim not in HEAD_DIMS:
        raise unfit(f"{rows} tokens, heads of {head_dim}")
    if any(length % 64 for length in columns.values()):
        raise unfit(f"rows of {sorted(set(columns.values()))} elements")
    norms = [norm.eps for op in fused for norm in _norms(op)]
    if len(set(norms)) != 1:
        raise unfit(f"norms with eps {sorted(set(norms))}")
    num_ranks = blocks[0][2].num_ranks
    teams = {getattr(op, "num_ranks", num_ranks) for op in fused}
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


def _norms(op: Fused) -> list[Norm]:
    if isinstance(op, FusedAttention):
        return [norm for norm in (op.q_norm, op.k_norm) if norm]
    norm = getattr(op, "norm", None)
    return [norm] if isinstance(norm, Norm) else []
