"""What the ops of a segment must agree on, which both kernels are specialised for.

In: a segment and its fused ops. Out: its `Agreement`: ranks, the rows that come in, the choice of
an id, extents of attention, eps. UnsupportedError where ops differ. Next on the walk:
row_plan/queues.py.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from distmega.errors import counted
from distmega.kernels.hopper.plan.types import AttentionShape, unfit
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedPointwise,
    FusedRowAttention,
    FusedSample,
    attention_extents,
    norms_of,
    shown_by_views,
)
from distmega.program.types import Program, Role, Tensor

ROLES: tuple[Role, ...] = ("weight", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """num_ranks: of the team. embedding: what looks up the rows that come in, if something does;
    entry: their tensor; others: inputs of rows besides; rows: of the one with the most. tables:
    embeddings besides, of the same ids or of positions, by what they give. choice: how an id
    is chosen from the last op's result. attention: what all attention ops share; positions: of
    attention or, without any, of a table, "" without either. eps: of the norms that contractions
    and attention take in, 0.0 without one.
    """

    num_ranks: int
    embedding: FusedEmbedding | None
    entry: str
    others: tuple[str, ...]
    tables: Mapping[str, FusedEmbedding]
    rows: int
    choice: FusedChoice | None
    attention: AttentionShape | None
    positions: str
    eps: float


def is_ranked(op: FusedContraction, choice: FusedChoice | None) -> bool:
    """Whether an id is chosen from the result of an op."""
    return choice is not None and op.outs == (choice.source,)


def find_agreement(
    segment: Program, fused: Sequence[Fused], *, max_rows: int, head_dims: Container[int]
) -> Agreement:
    """What all ops share. max_rows, head_dims: what the kernel takes."""
    _require_given(segment, fused)
    positions = _find_positions(fused)
    entries = _given_rows(segment, fused)
    comes_in = not entries or _multiplies_looked_up(fused, positions)
    embedding, tables = _find_tables(fused, positions, comes_in=comes_in)
    entry, others = _find_entry(entries, embedding)
    if tables and not positions:
        positions = next((op.ids for op in tables.values() if op.ids != _ids(embedding)), "")
    rows = max(math.prod(segment.tensor_map()[name].shape[:-1]) for name in (entry, *others))
    if not 1 <= rows <= max_rows:
        raise unfit(counted(rows, "row"), most_rows=max_rows)
    if others and max_rows == 1:
        raise unfit(f"inputs {[entry, *others]} of one row each")
    choice = _find_choice(fused)
    return Agreement(
        num_ranks=_team_size(fused),
        embedding=embedding,
        entry=entry,
        others=others,
        tables=tables,
        rows=rows,
        choice=choice,
        attention=_attention_shape(segment, fused, choice, rows, head_dims),
        positions=positions,
        eps=_eps(fused),
    )


def _find_positions(fused: Sequence[Fused]) -> str:
    """The positions of attention, "" without any."""
    attended = [op for op in fused if isinstance(op, FusedAttention | FusedRowAttention)]
    found = dict.fromkeys(op.positions for op in attended if op.positions)
    if len(found) > 1 and any(isinstance(op, FusedRowAttention) for op in attended):
        raise unfit(f"attention at several of {sorted(found)}")
    return next(iter(found), "")


def _require_given(segment: Program, fused: Sequence[Fused]) -> None:
    """Refuses a segment without products, and one where what is read in place of rows is computed:
    norms, biases and tables are weights; ids, positions and settings are inputs.
    """
    if not any(isinstance(op, FusedContraction) for op in fused):
        raise unfit("a program without products of weights")
    given = {role: {t.name for t in segment.with_role(role)} for role in ROLES}
    for op in fused:
        for role, names in _given_to(op).items():
            for name in names:
                if name and name not in given[role]:
                    raise unfit(f"{op.name!r} with {name!r}, which is no {role}")


def _given_to(op: Fused) -> dict[Role, tuple[str, ...]]:
    """What an op takes besides rows, by the role that it must have; "" is nothing."""
    weights = [name for norm in norms_of(op) for name in (norm.weight, norm.bias)]
    inputs: tuple[str, ...] = ()
    match op:
        case FusedContraction():
            for stream in op.streams:
                weights += [*stream.weights, *stream.biases]
        case FusedEmbedding():
            weights.append(op.table)
            inputs = (op.ids,)
        case FusedAttention():
            weights += [op.table, op.bias]
            inputs = (op.positions,)
        case FusedRowAttention():
            weights.append(op.table)
            inputs = (op.positions,)
        case FusedChoice(sampler=FusedSample() as sampler):
            inputs = sampler.sampling, sampler.seeds, sampler.positions
    return {"weight": tuple(weights), "input": inputs}


def _team_size(fused: Sequence[Fused]) -> int:
    """Ranks that share ops, 1 where none do."""
    teams = {getattr(op, "num_ranks", 1) for op in fused} - {1}
    if len(teams) > 1:
        raise unfit(f"parts that {sorted(teams)} ranks share")
    return max(teams, default=1)


def _given_rows(segment: Program, fused: Sequence[Fused]) -> list[Tensor]:
    """Inputs that contractions or pointwise work take."""
    given = {tensor.name for tensor in segment.with_role("input")}
    taken = {
        name
        for op in fused
        if isinstance(op, FusedContraction | FusedPointwise)
        for name in (op.x, *op.operands)
    }
    return [tensor for tensor in segment.tensors if tensor.name in taken & given]


def _multiplies_looked_up(fused: Sequence[Fused], positions: str) -> bool:
    """Whether contractions take rows of a table of other ids than positions."""
    taken = {op.x for op in fused if isinstance(op, FusedContraction)}
    return any(
        isinstance(op, FusedEmbedding) and op.ids != positions and op.out in taken for op in fused
    )


def _find_tables(
    fused: Sequence[Fused], positions: str, *, comes_in: bool
) -> tuple[FusedEmbedding | None, dict[str, FusedEmbedding]]:
    """The embedding whose rows any op may take, if one comes in, and others, which pointwise work
    takes.
    """
    tables = [op for op in fused if isinstance(op, FusedEmbedding)]
    own = [op for op in tables if op.ids != positions] or tables
    embedding = own[0] if own and comes_in else None
    others = [op for op in tables if op is not embedding]
    known = {_ids(embedding), positions} if positions else {_ids(embedding)}
    strange = {op.ids for op in others} - known
    shared = [op.name for op in others if op.num_ranks > 1]
    if shared or len(strange) > (0 if positions else 1):
        raise unfit(f"embeddings {[op.name for op in tables]} of {sorted(strange | known)}")
    return embedding, {op.out: op for op in others}


def _ids(embedding: FusedEmbedding | None) -> str:
    return embedding.ids if embedding else ""


def _find_entry(
    entries: Sequence[Tensor], embedding: FusedEmbedding | None
) -> tuple[str, tuple[str, ...]]:
    """What the embedding gives, or the input of the most rows that is bf16, and inputs besides."""
    if embedding:
        return embedding.out, tuple(tensor.name for tensor in entries)
    halves = [tensor for tensor in entries if tensor.dtype == "bf16"]
    if not halves:
        found = [f"{tensor.name!r} of {tensor.dtype}" for tensor in entries]
        raise unfit(f"inputs {found} instead of an embedding or one of bf16")
    entry = max(halves, key=lambda tensor: math.prod(tensor.shape[:-1]))
    return entry.name, tuple(tensor.name for tensor in entries if tensor is not entry)


def _find_choice(fused: Sequence[Fused]) -> FusedChoice | None:
    """The choice of an id, which is the last op."""
    choices = [op for op in fused if isinstance(op, FusedChoice)]
    if len(choices) > 1 or (choices and fused[-1] is not choices[0]):
        raise unfit("choices of ids before other ops")
    return choices[0] if choices else None


def _attention_shape(
    segment: Program,
    fused: Sequence[Fused],
    choice: FusedChoice | None,
    num_rows: int,
    head_dims: Container[int],
) -> AttentionShape | None:
    """Extents of the attention ops, which all have the same, rotated by one table, at the same
    positions as a sample.
    """
    tensors = segment.tensor_map()
    ops = [op for op in fused if isinstance(op, FusedAttention)]
    found: set[AttentionShape] = set()
    are_apart = not all(_are_together(segment, fused, op) for op in ops)
    for op in ops:
        rows, num_kv_heads, group, head_dim = attention_extents(op, tensors)
        if tensors[op.v_cache].shape[-1] != head_dim:
            widths = [tensors[name].shape[-1] for name in (op.k_cache, op.v_cache)]
            raise unfit(f"{op.name!r} with keys and values of {widths} elements")
        if rows != num_rows or head_dim not in head_dims or op.window < 0:
            raise unfit(f"{counted(rows, 'row')}, heads of {head_dim}")
        found.add(
            AttentionShape(
                num_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                max_context=tensors[op.k_cache].shape[-2],
                qk_norm=op.q_norm is not None,
                rotated=bool(op.table),
                scale=op.scale,
                apart=are_apart,
                softcap=op.softcap,
                biased=bool(op.bias),
            )
        )
    tables, positions = {op.table for op in ops}, {op.positions for op in ops}
    if choice and choice.sampler and ops:
        positions.add(choice.sampler.positions)
    if len(found) > 1 or len(tables) > 1 or len(positions) > 1:
        names = sorted(tables | positions)
        raise unfit(f"attention of several shapes, or by or at several of {names}")
    return found.pop() if found else None


def _are_together(segment: Program, fused: Sequence[Fused], op: FusedAttention) -> bool:
    """Whether one contraction gives queries, keys and values, in this order."""
    shown = shown_by_views(segment)
    names = tuple(shown[x].tensor if x in shown else x for x in (op.q, op.k, op.v))
    outs = [other.outs for other in fused if isinstance(other, FusedContraction)]
    return len(set(names)) == 1 or any(
        names == each[i : i + 3] for each in outs for i in range(len(each))
    )


def _eps(fused: Sequence[Fused]) -> float:
    """Of the norms that contractions and attention take in."""
    ops = [op for op in fused if not isinstance(op, FusedPointwise)]
    found = {norm.eps for op in ops for norm in norms_of(op)}
    if len(found) > 1:
        raise unfit(f"norms with eps {sorted(found)}")
    return found.pop() if found else 0.0
