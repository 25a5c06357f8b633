"""What is done to heads before attention, in torch: norms, rotations, appends to caches.

Comes in: an op of kind fused_heads. Goes out: a function of its operands and of what it writes, by
torch here or by a kernel that takes the same arguments. Used by ops.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from distmega.hostir.library.norms import normalise
from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.passes.fuse_heads import op_parts
from distmega.program.ops.attention import append_values, rope_values
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
    eps, several, parts = op.attr("eps"), op.attr("several"), op_parts(op)
    assert isinstance(eps, float), f"eps={eps!r} of a verified op"
    has_table = any("rope" in steps for steps in parts)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        xs = iter(operands[: len(op.reads)])
        outs = operands[len(op.reads) :]
        positions = next(xs)
        table = next(xs) if has_table else None
        sequences = next(xs) if several else None
        heads = []
        for steps, out in zip(parts, outs, strict=True):
            x = next(xs)
            if steps != ("append",):
                next(xs)
            weight = next(xs) if "norm" in steps else None
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
