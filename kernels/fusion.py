"""Fusion: the ops of a decode segment as the few kinds of work that the GPU megakernel does.

In: a segment (a Program) of one token, its collectives included. Out: fused ops in program order;
each names the tensors it reads and writes, nothing of the hardware. The rules look at ops and at
who uses their results, never at names, so any program with these shapes fuses. What no rule takes
is an error that names the op.
"""

from dataclasses import dataclass
from typing import Literal

from distmega.errors import VerifyError
from distmega.program import expr
from distmega.program.types import Op, Program

SUM = expr.parse("a0 + a1")
GATED = expr.parse("silu(a0) * a1")

Limits = Literal["given", "candidates", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An rms norm applied on the way in: its weight and eps."""

    weight: str
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedEmbedding:
    """out = the row of `table` at `ids`; one of num_ranks ranks has it, or each has a part."""

    ids: str
    table: str
    out: str
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """Products of one vector x, normalised first if `norm`, with several weights, plus biases.

    One output for each weight; biases are aligned with weights, "" where there is none.
    """

    x: str
    norm: Norm | None
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    outs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedResidual:
    """out = residual + weight x, the product summed over num_ranks ranks."""

    x: str
    weight: str
    residual: str
    out: str
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGated:
    """out = silu(gate x) * (up x), x normalised first."""

    x: str
    norm: Norm | None
    gate: str
    up: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """Rotates q and k after their norms, appends k and v to the caches, attends.

    q [1, h, g, d], k and v [1, h, d]: before norm and rotation.
    """

    q: str
    k: str
    v: str
    q_norm: Norm | None
    k_norm: Norm | None
    positions: str
    table: str
    k_cache: str
    v_cache: str
    scale: float
    window: int
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A token drawn as ops.sample says, at the last of `positions`, instead of the likeliest.

    limits: "given", and sampling is what ops.sample takes; else sampling is settings of ops.cutoff,
    whose limits are looked for among few "candidates" or among "all" tokens, of all ranks.
    """

    sampling: str
    seeds: str
    positions: str
    limits: Limits = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedHead:
    """token = argmax of weight x, x normalised first, or drawn; `logits` is the product.

    Over num_ranks ranks, each has as many rows of all `vocab` ones, in rank order, and `logits` is
    what all ranks have or, where none asks for them, the rank's own.
    """

    x: str
    norm: Norm | None
    weight: str
    logits: str
    token: str
    vocab: int
    num_ranks: int = 1
    draw: Draw | None = None


Fused = FusedEmbedding | FusedLinear | FusedResidual | FusedGated | FusedAttention | FusedHead


def fuse_segment(segment: Program) -> tuple[Fused, ...]:
    """The fused ops of a segment. Raises VerifyError naming the first op that no rule takes."""
    return _Fusion(segment).run()


class _Fusion:
    """One pass over a segment. `taken`: ops that a fused op already contains."""

    def __init__(self, segment: Program) -> None:
        self.segment = segment
        self.producers = {w.tensor: op for op in segment.ops for w in op.writes}
        self.users: dict[str, list[Op]] = {}
        for op in segment.ops:
            for name in dict.fromkeys(read.tensor for read in op.reads):
                self.users.setdefault(name, []).append(op)
        self.taken: set[str] = set()

    def run(self) -> tuple[Fused, ...]:
        """Fused ops, each at the place of the first linear, attention or embedding in it."""
        rules = {
            "embedding": self.fuse_embedding,
            "linear": self.fuse_linear,
            "attention": self.fuse_attention,
        }
        fused = [
            rules[op.kind](op) for op in self.segment.ops if op.kind in rules and self.is_free(op)
        ]
        for op in self.segment.ops:
            if op.name not in self.taken:
                raise _unfit(op)
        return tuple(fused)

    def is_free(self, op: Op) -> bool:
        """Whether no fused op has taken it yet; asked in order, while fused ops are made."""
        return op.name not in self.taken

    def fuse_embedding(self, op: Op) -> Fused:
        out, num_ranks, ops = self.summed(op)
        if bool(op.get("base_axis", "")) != (num_ranks > 1):
            raise _unfit(op)
        gather = self.only_user(out)
        if gather is not None and gather.kind == "all_gather" and num_ranks == 1:
            out, num_ranks, ops = _out(gather), _num_ranks(gather), (op, gather)
        self.take(*ops)
        return FusedEmbedding(ids=_read(op, 0), table=_read(op, 1), out=out, num_ranks=num_ranks)

    def fuse_linear(self, op: Op) -> Fused:
        """A linear with what surrounds it: gated pair, residual, head, or all linears of its x."""
        x, norm = self.normed(_read(op, 0))
        user = self.only_user(_out(op))
        if user is not None and _is_pointwise(user, GATED):
            gate, up = (self.producers[read.tensor] for read in user.reads)
            is_biased = any(map(_bias, (gate, up)))
            alike = gate.kind == up.kind == "linear" and _read(gate, 0) == _read(up, 0)
            if alike and not is_biased:
                self.take(gate, up, user)
                weights = _read(gate, 1), _read(up, 1)
                return FusedGated(x=x, norm=norm, gate=weights[0], up=weights[1], out=_out(user))
        total, num_ranks, ops = self.summed(op)
        user = self.only_user(total)
        if user is not None and _is_pointwise(user, SUM) and norm is None and not _bias(op):
            (residual,) = (read.tensor for read in user.reads if read.tensor != total)
            self.take(*ops, user)
            return FusedResidual(
                x=x, weight=_read(op, 1), residual=residual, out=_out(user), num_ranks=num_ranks
            )
        head = None if _bias(op) else self.fuse_head(op, x, norm)
        if head is not None:
            return head
        together = [one for one in self.users[_read(op, 0)] if one.kind == "linear"]
        self.take(*together)
        return FusedLinear(
            x=x,
            norm=norm,
            weights=tuple(_read(one, 1) for one in together),
            biases=tuple(map(_bias, together)),
            outs=tuple(map(_out, together)),
        )

    def fuse_head(self, op: Op, x: str, norm: Norm | None) -> FusedHead | None:
        """A linear whose result a token is chosen from, by an argmax or a draw, gathered before or
        compared afterwards where several ranks have parts of it.
        """
        logits, num_ranks, ops = _out(op), 1, [op]
        for gather in self.users.get(logits, []):
            if gather.kind == "all_gather":
                logits, num_ranks = _out(gather), _num_ranks(gather)
                ops.append(gather)
        users = self.users.get(logits, [])
        chosen = next((one for one in users if one.kind in ("argmax", "sample")), None)
        if chosen is None:
            return None
        token, vocab = chosen.writes[1].tensor, self.segment.tensor_map()[logits].shape[-1]
        ops.append(chosen)
        if chosen.get("base_axis", ""):
            compare = self.only_user(token)
            if compare is None or compare.kind != "all_reduce":
                raise _unfit(chosen)
            token, num_ranks = compare.writes[1].tensor, _num_ranks(compare)
            ops.append(compare)
            extent = chosen.attr("extent")
            assert isinstance(extent, int)
            vocab = extent
        draw = self.draw(chosen, logits) if chosen.kind == "sample" else None
        self.take(*ops)
        return FusedHead(
            x=x, norm=norm, weight=_read(op, 1), logits=logits, token=token, vocab=vocab,
            num_ranks=num_ranks, draw=draw,
        )  # fmt: skip

    def draw(self, sample: Op, logits: str) -> Draw:
        """How `sample` draws: at a temperature, within limits or not. Where each rank draws from
        its own logits, limits come from candidates that all ranks gathered.
        """
        seeds, positions = _read(sample, 2), _read(sample, 3)
        cutoff = self.producers.get(_read(sample, 1))
        if cutoff is None:
            return Draw(sampling=_read(sample, 1), seeds=seeds, positions=positions)
        found, is_whole = _read(cutoff, 0), not sample.get("base_axis", "")
        ops, gather = [cutoff], self.producers.get(found)
        if not is_whole and gather is not None and gather.kind == "all_gather":
            found, is_whole = _read(gather, 0), True
            ops.append(gather)
        limits: Limits = "all"
        if found != logits:
            top = self.producers.get(found)
            if top is None or top.kind != "top" or _read(top, 0) != logits:
                raise _unfit(cutoff)
            limits = "candidates"
            ops.append(top)
        if not is_whole:
            raise _unfit(cutoff)
        self.take(*ops)
        return Draw(sampling=_read(cutoff, 1), seeds=seeds, positions=positions, limits=limits)

    def fuse_attention(self, op: Op) -> Fused:
        """Attention with the rotations, norms and appends in front of it."""
        appends = [self.append_to(op, _read(op, place)) for place in (1, 2)]
        q, q_norm, q_rope = self.rotated(op, _read(op, 0))
        k, k_norm, k_rope = self.rotated(op, _read(appends[0], 0))
        if _read(q_rope, 3) != _read(k_rope, 3):
            raise _unfit(k_rope)
        self.take(op, *appends)
        scale, window = op.attr("scale"), op.attr("window")
        assert isinstance(scale, float)
        assert isinstance(window, int)
        return FusedAttention(
            q=q,
            k=k,
            v=_read(appends[1], 0),
            q_norm=q_norm,
            k_norm=k_norm,
            positions=_read(op, 3),
            table=_read(q_rope, 3),
            k_cache=_read(op, 1),
            v_cache=_read(op, 2),
            scale=scale,
            window=window,
            out=_out(op),
        )

    def normed(self, name: str) -> tuple[str, Norm | None]:
        """What `name` is the norm of, if it is one that only linears read."""
        op = self.producers.get(name)
        if op is None or op.kind != "rms_norm" or any(u.kind != "linear" for u in self.users[name]):
            return name, None
        self.take(op)
        return _read(op, 0), _norm(op)

    def rotated(self, attention: Op, name: str) -> tuple[str, Norm | None, Op]:
        """What `name` is the rotation of, the norm before it, and the rope op."""
        rope = self.producers.get(name)
        if rope is None or rope.kind != "rope" or _read(rope, 2) != _read(attention, 3):
            raise _unfit(attention)
        self.take(rope)
        norm = self.producers.get(_read(rope, 0))
        if norm is None or norm.kind != "rms_norm" or self.only_user(_out(norm)) is not rope:
            return _read(rope, 0), None, rope
        self.take(norm)
        return _read(norm, 0), _norm(norm), rope

    def append_to(self, attention: Op, cache: str) -> Op:
        """The op that appends to a cache at the positions of `attention`."""
        op = self.producers.get(cache)
        if op is None or op.kind != "kv_append" or _read(op, 1) != _read(attention, 3):
            raise _unfit(attention)
        return op

    def summed(self, op: Op) -> tuple[str, int, tuple[Op, ...]]:
        """The result of an op summed over ranks, their number, and the ops that make it."""
        user = self.only_user(_out(op))
        if user is None or user.kind != "all_reduce" or user.get("combine", "") != "sum":
            return _out(op), 1, (op,)
        return _out(user), _num_ranks(user), (op, user)

    def only_user(self, name: str) -> Op | None:
        """The op that reads `name`, if there is one alone and it is no output."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.segment.outputs else None

    def take(self, *ops: Op) -> None:
        self.taken.update(op.name for op in ops)


def _read(op: Op, place: int) -> str:
    return op.reads[place].tensor


def _out(op: Op) -> str:
    return op.writes[0].tensor


def _num_ranks(collective: Op) -> int:
    found = collective.attr("num_ranks")
    assert isinstance(found, int)
    return found


def _bias(op: Op) -> str:
    return _read(op, 2) if len(op.reads) == 3 else ""


def _norm(op: Op) -> Norm:
    eps = op.attr("eps")
    assert isinstance(eps, float)
    return Norm(weight=_read(op, 2), eps=eps)


def _is_pointwise(op: Op, tree: expr.Expr) -> bool:
    return op.kind == "pointwise" and expr.parse(str(op.attr("expr"))) == tree


def _unfit(op: Op) -> VerifyError:
    return VerifyError(
        f"op {op.name!r} of kind {op.kind} does not fuse",
        expected="a decode step of the Llama family, tensor-parallel or on one rank",
        remedy="run the segment by library ops",
    )
