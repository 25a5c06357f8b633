"""Factors where they cost nothing: a residual stream without the one that it begins with, tokens
chosen without what does not change their order.

In: a draft whose chains are joined. Out: the same with other norms' eps and other factors. Used by
`normalise`, last of its passes but names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.ops.compute import pointwise
from distmega.program.types import Attr, Op
from distmega.torch_import.forms.draft import Draft


def drop_stream_factors(draft: Draft) -> None:
    """x = c * y, to which others are added and which norms alone read, becomes y: what is added is
    divided by c, eps by its square.
    """
    for op in list(draft.ops):
        factor = _factor(op)
        if factor is not None:
            stream = _Stream(draft, factor)
            if stream.follow(op.writes[0].tensor):
                stream.apply(op)


def _factor(op: Op) -> float | None:
    """c of an op c * a0."""
    if not kind_of(op).is_elementwise or len(op.reads) != 1:
        return None
    match expr.parse(str(op.attr("expr"))):
        case expr.Call("mul", (expr.Arg(), expr.Const(value))) if value > 0:
            return float(value)
        case expr.Call("mul", (expr.Const(value), expr.Arg())) if value > 0:
            return float(value)
    return None


@dataclass(slots=True)
class _Stream:
    """Ops that a factor passes through. changes: what they become."""

    draft: Draft
    factor: float
    changes: dict[str, Op] = field(default_factory=dict)

    def follow(self, first: str) -> bool:
        """Whether all that reads the stream lets the factor through."""
        users = self.draft.users()
        waiting, seen = [first], {first}
        while waiting:
            name = waiting.pop()
            if name in self.draft.outputs or self.draft.tensors[name].role != "temp":
                return False
            for op in users.get(name, []):
                at = [n for n, read in enumerate(op.reads) if read.tensor == name]
                if kind_of(op).scales_elements and at == [0, 1]:
                    self.changes[op.name] = self.norm(op)
                    continue
                added = self.added(op, at)
                out = op.writes[0].tensor if op.writes else ""
                if added is None or out in seen:
                    return False
                self.changes[op.name] = added
                seen.add(out)
                waiting.append(out)
        return True

    def norm(self, op: Op) -> Op:
        """The norm with the eps that an x without the factor asks for."""
        attrs = dict(op.attrs)
        eps = attrs["eps"]
        assert isinstance(eps, float)
        attrs["eps"] = eps / self.factor**2
        items: list[tuple[str, Attr]] = sorted(attrs.items())
        return replace(op, attrs=tuple(items))

    def added(self, op: Op, at: Sequence[int]) -> Op | None:
        """A sum of the stream and of others, these divided; None for another op."""
        if not kind_of(op).is_elementwise or len(at) != 1:
            return None
        names = [read.tensor for read in op.reads]
        out = self.draft.tensors[op.writes[0].tensor]
        if out.shape != self.draft.tensors[names[at[0]]].shape:
            return None
        tree = _divided(expr.parse(str(op.attr("expr"))), at[0], self.factor)
        if tree is None:
            return None
        operands = [self.draft.tensors[name] for name in names]
        made, _ = pointwise(out.name, str(tree), *operands, dtype=out.dtype)
        return replace(made, name=op.name)

    def apply(self, first: Op) -> None:
        """Puts the changes in, and the stream's beginning in the place of its multiple."""
        self.draft.replace({name: [op] for name, op in self.changes.items()})
        self.draft.replace({first.name: []})
        self.draft.rename({first.writes[0].tensor: first.reads[0].tensor})


def _divided(tree: expr.Expr, stream: int, factor: float) -> expr.Expr | None:
    """stream + others as stream + others / factor; None for another expression."""
    if tree == expr.Arg(stream):
        return tree
    if not isinstance(tree, expr.Call) or tree.fn not in ("add", "sub"):
        return None
    left, right = tree.args
    if not _reads(right, stream):
        kept = _divided(left, stream, factor)
        return kept and expr.Call(tree.fn, (kept, _scaled(right, 1 / factor)))
    if tree.fn == "add" and not _reads(left, stream):
        kept = _divided(right, stream, factor)
        return kept and expr.Call("add", (_scaled(left, 1 / factor), kept))
    return None


def _reads(tree: expr.Expr, index: int) -> bool:
    if isinstance(tree, expr.Call):
        return any(_reads(part, index) for part in tree.args)
    return tree == expr.Arg(index)


def _scaled(tree: expr.Expr, factor: float) -> expr.Expr:
    """factor * tree, known factors joined."""
    match tree:
        case expr.Call("add" | "sub" as fn, (left, right)):
            return expr.Call(fn, (_scaled(left, factor), _scaled(right, factor)))
        case expr.Call("mul", (inner, expr.Const(value))) | expr.Call(
            "mul", (expr.Const(value), inner)
        ):
            return expr.Call("mul", (inner, expr.Const(value * factor)))
    return expr.Call("mul", (tree, expr.Const(factor)))


def choose_before(draft: Draft) -> None:
    """An argmax of a rising function of scores is theirs: it reads the scores themselves where
    nobody asks for the largest value, nor for the function's results: scores would then leave in
    both forms.
    """
    producers, users = draft.producers(), draft.users()
    changes: dict[str, list[Op]] = {}
    for op in draft.ops:
        if op.kind != "argmax" or len(op.reads) != 1:
            continue
        largest, results = op.writes[0].tensor, op.reads[0].tensor
        before = producers.get(results)
        if results in draft.outputs or len(users.get(results, ())) > 1:
            continue
        if largest in draft.outputs or largest in users or before is None:
            continue
        if not kind_of(before).is_elementwise or len(before.reads) != 1:
            continue
        scores = draft.tensors[before.reads[0].tensor]
        same = scores.shape == draft.tensors[op.reads[0].tensor].shape
        if same and _direction(expr.parse(str(before.attr("expr")))) == 1:
            read = replace(op.reads[0], tensor=scores.name)
            changes[op.name] = [replace(op, reads=(read,))]
            value = draft.tensors[largest]
            draft.tensors[largest] = replace(value, dtype=scores.dtype)
    draft.replace(changes)


def _direction(tree: expr.Expr) -> int:
    """1 for an expression that rises with its argument, -1 for one that falls, 0 if unknown."""
    match tree:
        case expr.Arg():
            return 1
        case expr.Call("tanh" | "sigmoid" | "exp", (inner,)):
            return _direction(inner)
        case expr.Call("neg", (inner,)):
            return -_direction(inner)
        case expr.Call("add", (inner, expr.Const())) | expr.Call("add", (expr.Const(), inner)):
            return _direction(inner)
        case expr.Call("sub", (inner, expr.Const())):
            return _direction(inner)
        case expr.Call("sub", (expr.Const(), inner)):
            return -_direction(inner)
        case expr.Call("mul" | "div", (inner, expr.Const(value))) if value:
            return _direction(inner) * (1 if value > 0 else -1)
        case expr.Call("mul", (expr.Const(value), inner)) if value:
            return _direction(inner) * (1 if value > 0 else -1)
    return 0
