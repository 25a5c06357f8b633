"""What is done to heads before attention, in torch: norms, rotations, appends to caches; and what
is done to them with the attention of one row of each sequence.

Comes in: an op of kind fused_heads or fused_attention. Goes out: a function of its operands and of
what it writes, by torch here or by a kernel that takes the same arguments. Used by ops.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distmega.hostir.library.norms import normalise
from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.passes.fuse_heads import next_heads, op_parts
from distmega.program.ops.attention import append_values, rope_values
from distmega.program.ops.norms import eps_of
from distmega.program.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """x [m, ..., d], each head by its norm if there is a weight [d], then rotated if `rotates`,
    goes to out: a tensor of x's shape or, if `appends`, a cache [h, t, d] or [s, h, t, d].
    """

    x: Tensor
    weight: Tensor | None
    out: Tensor
    rotates: bool
    appends: bool


MoveHeads = Callable[[Sequence[Heads], Tensor, Tensor | None, Tensor | None, float], None]
"""As move_heads."""


def move_heads(
    parts: Sequence[Heads],
    positions: Tensor,
    table: Tensor | None,
    sequences: Tensor | None,
    eps: float,
) -> None:
    """All parts one after the other; results are rounded to x's type after each step. positions
    [m]; table [t, d] where a part rotates; sequences [m] of several caches, without which row m
    goes to cache m; eps of norms.
    """
    for part in parts:
        x = part.x
        if part.weight is not None:
            x, _ = normalise("rms_norm", x, None, part.weight, None, eps)
        if part.rotates:
            assert table is not None, "what rotates has angles"
            x = rope_values(x, positions, table)
        if part.appends:
            append_values(part.out, x, positions, sequences)
        else:
            part.out.copy_(x)


def compile_heads(op: Op, move: MoveHeads) -> OpFunction:
    """The op bound to its attributes; `move` does the work."""
    eps, several, parts = eps_of(op), op.attr("several"), op_parts(op)
    has_table = any("rope" in steps for steps in parts)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        xs = iter(operands[: len(op.reads)])
        outs = operands[len(op.reads) :]
        positions = next(xs)
        table = next(xs) if has_table else None
        sequences = next(xs) if several else None
        heads = []
        for steps, out in zip(parts, outs, strict=True):
            x, weight = next_heads(xs, steps)
            heads.append(
                Heads(
                    x=x,
                    weight=weight,
                    out=out,
                    rotates="rope" in steps,
                    appends="append" in steps,
                )
            )
        move(heads, positions, table, sequences, eps)
        return tuple(outs)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeads:
    """Heads of a row of each sequence, q [m, h, g, d], k [m, h, d] and v [m, h, e]: q and k by
    norms of their heads, with `eps`, if they have weights [d], then rotated at `positions` [m] if
    there is a table of angles [t, d]. k and v go there in the caches [m, h, t, d] and [m, h, t, e],
    or [h, t, d] and [h, t, e] of a single row; what the row sees in them to out [m, h, g, e].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    positions: Tensor
    table: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor


AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]
"""Of q [m, h, g, d], both caches, positions, and where the result goes."""


def attend_in_turn(given: StepHeads, move: MoveHeads, attend: AttendRows) -> None:
    """First what is done to heads, by `move`, then attention."""
    rotates = given.table is not None
    q = torch.empty(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    parts = [
        Heads(x=given.q, weight=given.q_weight, out=q, rotates=rotates, appends=False),
        Heads(x=given.k, weight=given.k_weight, out=given.k_cache, rotates=rotates, appends=True),
        Heads(x=given.v, weight=None, out=given.v_cache, rotates=False, appends=True),
    ]
    move(parts, given.positions, given.table, None, given.eps)
    attend(q, given.k_cache, given.v_cache, given.positions, given.out)


def compile_step(op: Op, attend: Callable[[StepHeads], object]) -> OpFunction:
    """An op of kind fused_attention bound to its attributes; `attend` does the work."""
    eps, steps = eps_of(op), op_parts(op)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        xs = iter(operands)
        positions = next(xs)
        table = next(xs) if "rope" in steps[0] else None
        (q, q_weight), (k, k_weight), (v, _) = (next_heads(xs, each) for each in steps)
        k_cache, v_cache, out, *_ = xs
        given = StepHeads(
            q=q,
            k=k,
            v=v,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            positions=positions,
            table=table,
            k_cache=k_cache,
            v_cache=v_cache,
            out=out,
        )
        attend(given)
        return out, k_cache, v_cache

    return run
