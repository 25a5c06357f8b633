"""Fuses the ops of a segment into the kinds of work that one persistent kernel does.

In: a segment (a Program) of one row, or of a row of each of several sequences, its collectives
included. Out: fused ops in an order in which each follows what it reads. The rules look at the
structure of ops and at who uses their results, never at names and never at one expression:

- a norm that contractions read becomes their prologue; if others take it too, the first of them
  also gives the normalised row;
- a chain of pointwise ops joins the epilogue of the contraction whose result it takes last;
- contractions of the same x whose results meet in one epilogue are streams of one contraction;
- contractions of the same x whose results leave as they are stand side by side in one;
- a sum over ranks, and the choice of an id, join the contraction before them;
- rotations, the norms before them and appends to caches join the attention that they serve;
- attention over keys and values of the same rows takes in what turns heads and rows around;
- a gather of columns over ranks is a fused op of its own;
- experts: the choice of them is a fused op, their first matrices with what joins them one
  contraction whose rows lie where the choice says, their last ones one whose columns do; what an
  expert weighs stands before the last product, since it can be multiplied in on either side;
- a chain that takes no product, or a norm or softmax that no contraction takes in, is pointwise
  work on rows, whose first argument may be normalised.

What no rule takes is an error that names the op. Next on the walk: ../../hopper/row_plan/queues.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

from distmega.errors import UnsupportedError
from distmega.kernels.tasks.fuse.attention import fuse_attention
from distmega.kernels.tasks.fuse.choice import fuse_choice
from distmega.kernels.tasks.fuse.experts import fuse_expert_rows, fuse_expert_sum, fuse_routing
from distmega.kernels.tasks.fuse.products import fuse_chain, fuse_linear
from distmega.kernels.tasks.fuse.row_attention import attends_to_rows, fuse_row_attention
from distmega.kernels.tasks.fuse.rows import fuse_norm
from distmega.kernels.tasks.fuse.state import (
    MAX_STREAMS,
    Fusion,
    Joining,
    TakesNorm,
    does_not_fuse,
    num_ranks_of,
    out_of,
    takes_every_norm,
)
from distmega.kernels.tasks.fuse.types import Fused, FusedContraction, FusedEmbedding, FusedGather
from distmega.program.kinds import kind_of
from distmega.program.types import Op, Program, contracts

T = TypeVar("T")

MOST = Joining()
"""The fewest fused ops."""
NUM_KEPT = 16
"""Fused segments: all ways to fuse one, and those of a program beside it."""
CHOICES = ("argmax", "sample")
"""Kinds that choose an id."""


def fuse_segment(
    segment: Program, takes_norm: TakesNorm = takes_every_norm, joining: Joining = MOST
) -> tuple[Fused, ...]:
    """The fused ops of a segment; norms that contractions can't do are pointwise work of their own.
    UnsupportedError names the first op that no rule takes.
    """
    return _fused(segment, takes_norm, joining)


@lru_cache(maxsize=NUM_KEPT)
def _fused(segment: Program, takes_norm: TakesNorm, joining: Joining) -> tuple[Fused, ...]:
    """Kept for who asks next: of one segment the time is predicted, weights are put in order, and a
    kernel is planned.
    """
    return apply_rules(Fusion(segment, takes_norm, joining))


def first_that_fits(
    segment: Program,
    build: Callable[[tuple[Fused, ...]], T],
    takes_norm: TakesNorm = takes_every_norm,
) -> T:
    """What `build` makes of the fewest fused ops that it takes: where it refuses these,
    contractions take in less. The first UnsupportedError where it takes none.
    """
    tried: list[tuple[Fused, ...]] = []
    refusal: UnsupportedError | None = None
    for norms, beside, streams in product((True, False), (True, False), (MAX_STREAMS, 1)):
        try:
            joining = Joining(norms=norms, beside=beside, streams=streams)
            fused = fuse_segment(segment, takes_norm, joining)
            if fused not in tried:
                tried.append(fused)
                return build(fused)
        except UnsupportedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def apply_rules(fusion: Fusion) -> tuple[Fused, ...]:
    """Fused ops, each where all that it reads has been made."""
    found: list[tuple[int, Fused]] = []
    for fits, rule in RULES:
        for op in fusion.segment.ops:
            if op.name not in fusion.taken and fits(op) and is_last(fusion, op):
                found.append((fusion.position[op.name], rule(fusion, op)))
    for op in fusion.segment.ops:
        if op.name not in fusion.taken and not op.is_view:
            raise does_not_fuse(op)
    return give_norms(fusion, (fused for _, fused in sorted(found, key=lambda item: item[0])))


def give_norms(fusion: Fusion, found: Iterable[Fused]) -> tuple[Fused, ...]:
    """Fused ops, the first contraction that a shared norm is part of giving its result."""
    result: list[Fused] = []
    for op in found:
        if isinstance(op, FusedContraction) and op.norm:
            op = replace(op, normed=fusion.shared_norms.pop((op.x, op.norm), ""))
        result.append(op)
    return tuple(result)


def is_last(fusion: Fusion, op: Op) -> bool:
    """Whether no pointwise op goes on with the result of a pointwise op alone."""
    user = fusion.only_user(out_of(op))
    return not kind_of(op).is_elementwise or user is None or not kind_of(user).is_elementwise


def fuse_embedding(fusion: Fusion, op: Op) -> Fused:
    """Rows of a table, with the sum over ranks that share it, or the gather of its columns."""
    out, num_ranks, ops = fusion.summed(op)
    has_heads = len(fusion.tensors[out].shape) > 2
    if has_heads or bool(op.get("base_axis", "")) != (num_ranks > 1):
        raise does_not_fuse(op)
    gather = fusion.only_user(out)
    if gather is not None and kind_of(gather).gathers_all and num_ranks == 1:
        out, num_ranks, ops = out_of(gather), num_ranks_of(gather), (op, gather)
    fusion.take(*ops)
    return FusedEmbedding(
        name=op.name, ids=fusion.read(op, 0), table=fusion.read(op, 1), out=out, num_ranks=num_ranks
    )


def fuse_gather(fusion: Fusion, op: Op) -> Fused:
    """A gather of columns."""
    if op.attr("dim") != 1:
        raise does_not_fuse(op)
    fusion.take(op)
    return FusedGather(
        name=op.name, x=fusion.read(op, 0), out=out_of(op), num_ranks=num_ranks_of(op)
    )


def fuse_mixed_values(fusion: Fusion, op: Op) -> Fused:
    """Attention over caches, or over rows of the same step."""
    fuse = fuse_row_attention if attends_to_rows(fusion, op) else fuse_attention
    return fuse(fusion, op)


RULES: tuple[tuple[Callable[[Op], bool], Callable[[Fusion, Op], Fused]], ...] = (
    (lambda op: kind_of(op).looks_up_rows, fuse_embedding),
    (lambda op: kind_of(op).mixes_values, fuse_mixed_values),
    (lambda op: op.kind in CHOICES, fuse_choice),
    (lambda op: op.kind == "route", fuse_routing),
    (lambda op: op.kind == "gather_rows", fuse_expert_rows),
    (lambda op: kind_of(op).is_elementwise, fuse_chain),
    (lambda op: op.kind == "scatter_add", fuse_expert_sum),
    (contracts, fuse_linear),
    (lambda op: kind_of(op).is_norm, fuse_norm),
    (lambda op: kind_of(op).gathers_all, fuse_gather),
)
"""Which ops each is for. Ops are offered to one after the other; a rule takes, with its own, those
that it joins to it."""
