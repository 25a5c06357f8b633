"""Norms that a module wrote out, sums of squares and all, as the norms that programs state.

In: a draft. Out: the same with ops rms_norm and layer_norm in their places. Found by value
(algebra.py), so that it doesn't matter in which order factors, casts and roots are written. Next
on the walk: products.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from distmega.hostir.library.torch_types import torch_dtype
from distmega.program.kinds import kind_of
from distmega.program.ops.norms import layer_norm, rms_norm
from distmega.program.ops.parts import Built
from distmega.program.types import Op, Tensor
from distmega.torch_import.forms.algebra import (
    Algebra,
    FunctionNode,
    LinearSum,
    Node,
    TensorLeaf,
    without_ones,
)
from distmega.torch_import.forms.draft import Draft
from distmega.torch_import.operators.build import constant_name

_CLOSE = 1e-6
"""Relative, of factors that are rounded on the way, as 1/n is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """What a reduction says: x centred or not, over the root of its mean square.

    parts: nodes whose product is the norm without weight. kind: of the norm. x: the tensor.
    """

    kind: str
    x: str
    eps: float
    parts: tuple[Node, Node]


def state_norms(draft: Draft, constants: dict[str, torch.Tensor]) -> None:
    """Replaces norms that are written out. constants: takes the ones of norms without weight."""
    algebra = Algebra(draft)
    for op in draft.ops:
        if algebra.is_pointwise(op):
            algebra.of(op.writes[0].tensor)
    found = list(_spreads(draft, algebra))
    if not found:
        return
    by_root = {spread.parts[1]: spread for spread in found}
    changes: dict[str, list[Op]] = {}
    for op in draft.ops:
        if not algebra.is_pointwise(op):
            continue
        built = _norm(draft, algebra, by_root, op, constants)
        if built is not None:
            changes[op.name] = [built[0]]
    draft.replace(changes)


def _spreads(draft: Draft, algebra: Algebra) -> Iterator[_Spread]:
    """Of each sum over a last dim, the norms that it may be part of."""
    roots: dict[Node, list[tuple[Node, float]]] = {}
    for node in range(len(algebra.forms)):
        inner = _root_of(algebra, node)
        if inner is not None and len(inner.terms) == 1:
            roots.setdefault(inner.terms[0][0], []).append((node, inner.constant))
    sums = {
        op.writes[0].tensor: op
        for op in draft.ops
        if op.kind == "reduce" and op.attr("combine") == "sum" and _over_last(op)
    }
    for name, op in sums.items():
        total = algebra.numbers.get(_kept(draft, name))
        for root, eps in roots.get(total, ()) if total is not None else ():
            width = op.axes[-1].extent
            inner = _root_of(algebra, root)
            assert inner is not None
            if abs(inner.terms[0][1] * width - 1) > _CLOSE or eps < 0:
                continue
            squared = algebra.of(op.reads[0].tensor)
            source = algebra.producers.get(op.reads[0].tensor)
            for x in {read.tensor for read in source.reads} if source else ():
                if algebra.product(1.0, [algebra.of(x)] * 2) != squared:
                    continue
                yield _Spread(kind="rms_norm", x=x, eps=eps, parts=(algebra.of(x), root))
                yield from _centred(draft, algebra, sums, x, eps, root)


def _centred(
    draft: Draft, algebra: Algebra, sums: dict[str, Op], off: str, eps: float, root: Node
) -> Iterator[_Spread]:
    """The layer norm, if `off` is a tensor less its mean."""
    op = algebra.producers.get(off)
    for x in {read.tensor for read in op.reads} if op else ():
        for name, total in sums.items():
            if total.axes[-1].extent != draft.tensors[x].shape[-1]:
                continue
            if algebra.of(total.reads[0].tensor) != algebra.of(x):
                continue
            mean = algebra.numbers.get(_kept(draft, name))
            if mean is None:
                continue
            width = total.axes[-1].extent
            wanted = algebra.sum((algebra.of(x), 1.0), (mean, -1.0 / width))
            if wanted == algebra.of(off):
                yield _Spread(kind="layer_norm", x=x, eps=eps, parts=(algebra.of(off), root))


def _norm(
    draft: Draft,
    algebra: Algebra,
    by_root: dict[Node, _Spread],
    op: Op,
    constants: dict[str, torch.Tensor],
) -> Built | None:
    """The norm that a pointwise op ends, if it does."""
    out = draft.tensors[op.writes[0].tensor]
    node, bias = algebra.of(out.name), None
    form = algebra.forms[node]
    if isinstance(form, LinearSum) and len(form.terms) == 2 and not form.constant:
        vectors = [n for n, times in form.terms if times == 1 and _vector(draft, algebra, n, out)]
        others = [(n, times) for n, times in form.terms if n not in vectors]
        if len(vectors) != 1 or others[0][1] != 1:
            return None
        bias, node = _vector(draft, algebra, vectors[0], out), others[0][0]
    found = algebra.divided(node, ())
    assert found is not None
    for root in found[1]:
        spread = by_root.get(root)
        left = algebra.divided(node, spread.parts) if spread else None
        if spread is None or left is None or abs(left[0] - 1) > _CLOSE or len(left[1]) > 1:
            continue
        x = _in_type(draft, algebra, spread.x, out)
        weight = _vector(draft, algebra, left[1][0], out) if left[1] else None
        if x is None or (left[1] and weight is None) or x.shape != out.shape:
            continue
        if spread.kind == "layer_norm":
            if bias is not None and weight is None:
                continue
            return layer_norm(out.name, x, weight, bias, spread.eps)
        if bias is not None:
            continue
        if weight is None:
            ones = torch.ones(x.shape[-1], dtype=torch_dtype(x.dtype))
            name = constant_name(ones)
            constants[name] = ones
            weight = draft.constant(name, ones.shape, x.dtype)
        return rms_norm(out.name, x, weight, spread.eps)
    return None


def _root_of(algebra: Algebra, node: Node) -> LinearSum | None:
    """The sum that a node is 1 over the root of."""
    form = algebra.forms[node]
    if not isinstance(form, FunctionNode) or form.name != "power":
        return None
    if algebra.number(form.nodes[1]) != -0.5:
        return None
    inner = algebra.forms[form.nodes[0]]
    return inner if isinstance(inner, LinearSum) else None


def _kept(draft: Draft, name: str) -> TensorLeaf:
    """The leaf of a reduction's result that stands beside what it is of, its last dim being 1."""
    return TensorLeaf(name, without_ones((*draft.tensors[name].shape, 1)))


def _over_last(op: Op) -> bool:
    """Whether a reduction takes the last dim of a tensor away."""
    return op.axes[-1].role == "reduce"


def _vector(draft: Draft, algebra: Algebra, node: Node, out: Tensor) -> Tensor | None:
    """The weight along the last dim that a node is."""
    form = algebra.forms[node]
    if not isinstance(form, TensorLeaf):
        return None
    tensor = draft.tensors[form.tensor]
    return tensor if tensor.role == "weight" and tensor.shape == out.shape[-1:] else None


def _in_type(draft: Draft, algebra: Algebra, name: str, out: Tensor) -> Tensor | None:
    """A tensor, or what it was converted from, in the type of the result; of a state none, which
    may change before the norm is done.
    """
    while True:
        tensor = draft.tensors[name]
        if tensor.role == "state" or draft.tensors[algebra.base(name)].role == "state":
            return None
        if tensor.dtype == out.dtype:
            return tensor
        op = algebra.producers.get(name)
        if op is None or not kind_of(op).is_elementwise or str(op.attr("expr")) != "a0":
            return None
        name = op.reads[0].tensor
