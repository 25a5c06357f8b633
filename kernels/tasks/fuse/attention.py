"""Attention with the rotations, norms and appends in front of it.

Next on the walk: row_attention.py.
"""

from collections.abc import Container
from itertools import accumulate

from distmega.kernels.tasks.fuse.state import Fusion, does_not_fuse, norm_of, out_of
from distmega.kernels.tasks.fuse.types import Fused, FusedAttention, InputNorm
from distmega.program.kinds import kind_of
from distmega.program.types import Op


def fuse_attention(fusion: Fusion, op: Op) -> Fused:
    """Attention with the rotations, norms and appends in front of it."""
    bias = fusion.read(op, 4) if op.kind == "biased_attention" else ""
    if len(op.reads) > 4 and (not bias or fusion.tensors[bias].role != "weight"):
        raise does_not_fuse(op)
    appends = [append_to(fusion, op, fusion.read(op, position)) for position in (1, 2)]
    q, q_last, q_table = rotated(fusion, op, fusion.read(op, 0))
    k, k_last, k_table = rotated(fusion, appends[0], fusion.read(appends[0], 0))
    if q_table != k_table:
        raise does_not_fuse(appends[0])
    head_dim = fusion.tensors[fusion.read(op, 1)].shape[-1]
    norms = [head_norm(fusion, *each, head_dim) for each in ((q, q_last), (k, k_last))]
    q_norm = k_norm = None
    if q_table and all(norms):  # of queries and keys, or of neither
        (q, q_norm), (k, k_norm) = (taken_norm(fusion, norm) for norm in norms if norm)
    fusion.take(op, *appends)
    v = fusion.read(appends[1], 0)
    fusion.attended += [q, k, v]
    note_parts(fusion, (q, k, v))
    scale, window = op.attr("scale"), op.attr("window")
    softcap = op.get("softcap", 0.0)
    assert isinstance(scale, float)
    assert isinstance(softcap, float)
    assert isinstance(window, int)
    return FusedAttention(
        name=op.name,
        q=q,
        k=k,
        v=v,
        q_norm=q_norm,
        k_norm=k_norm,
        positions=fusion.read(op, 3),
        table=q_table,
        k_cache=fusion.read(op, 1),
        v_cache=fusion.read(op, 2),
        scale=scale,
        window=window,
        softcap=softcap,
        bias=bias,
        out=out_of(op),
    )


def note_parts(fusion: Fusion, names: tuple[str, ...]) -> None:
    """Notes the tensor of rows of which these are the columns, one after the other and all of them,
    if there is one and it is nothing else.
    """
    columns = [fusion.columns.get(name) for name in names]
    found = [each for each in columns if each is not None]
    if len(found) < len(names) or len({each.tensor for each in found} - fusion.outputs) != 1:
        return
    whole, ends = found[0].tensor, [0, *accumulate(each.num for each in found)]
    covers = ends[-1] * fusion.tensors[whole].shape[0] == fusion.size(whole)
    alone = all(is_view_towards(fusion, user, names) for user in fusion.users.get(whole, []))
    if covers and alone and [each.first for each in found] == ends[:-1]:
        fusion.parts[whole] = names


def is_view_towards(fusion: Fusion, op: Op, names: Container[str]) -> bool:
    """Whether an op is a view that is one of these tensors, or which views alone go on from that
    do.
    """
    if not op.is_view or out_of(op) in fusion.outputs:
        return False
    users = fusion.users.get(out_of(op), [])
    return out_of(op) in names or all(is_view_towards(fusion, user, names) for user in users)


def rotated(fusion: Fusion, user: Op, name: str) -> tuple[str, Op, str]:
    """What `name`, which attention or an append takes, is the rotation of; the op that takes
    that; the table of angles.
    """
    rope = fusion.producers.get(name)
    if rope is None or not kind_of(rope).rotates:
        return name, user, ""
    positions = 1 if kind_of(user).appends else 3
    if fusion.read(rope, 2) != fusion.read(user, positions):
        raise does_not_fuse(user)
    fusion.take(rope)
    return fusion.read(rope, 0), rope, fusion.read(rope, 3)


def head_norm(fusion: Fusion, name: str, user: Op, head_dim: int) -> Op | None:
    """The rms norm of each head that `name` is, if `user` alone takes it."""
    norm = fusion.producers.get(name)
    if norm is None or norm.kind != "rms_norm" or norm.num_reduced != head_dim:
        return None
    return norm if fusion.only_user(name) is user else None


def taken_norm(fusion: Fusion, norm: Op) -> tuple[str, InputNorm]:
    """What a norm that attention does is of, and how."""
    fusion.take(norm)
    return fusion.read(norm, 0), norm_of(norm)


def append_to(fusion: Fusion, attention: Op, cache: str) -> Op:
    """The op that appends to a cache at the positions of `attention`."""
    op = fusion.producers.get(cache)
    if op is None or not kind_of(op).appends or fusion.read(op, 1) != fusion.read(attention, 3):
        raise does_not_fuse(attention)
    if fusion.position[op.name] > fusion.position[attention.name]:
        raise does_not_fuse(op)
    if len(op.reads) > 2:  # says of each row whose cache it is
        raise does_not_fuse(op)
    return op
