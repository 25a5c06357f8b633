"""The laws of algebra that equal abstract expressions follow from: what pruning believes.

Comes in: an EGraph with a program's terms. Goes out: the same, saturated, or full. The laws are
those of a field, of sums over axes, of maxima and of exp; no law speaks of a program or of a norm,
an attention, a linear. A graph that the search finds is proven afresh by equivalence.py, which
knows none of them.

What pruning loses: graphs whose equality needs a law that is not here (a cancelled against 1 / a,
differences of equals, properties of opaque functions), and those that come after the e-graph is
full or the last round. A pair a - c = (a - b) + (b - c) is only put in where c is a maximum of b's.
"""

from collections.abc import Callable, Iterator, Mapping

from distmega.superopt.search.egraph import EGraph, Node
from distmega.superopt.search.terms import Data, exact_product, exact_sum

MAX_ROUNDS = 8

Law = Callable[[EGraph, int, Node], Iterator[int]]
"""Called with a class and one of its nodes; gives classes that equal it."""


def saturate(graph: EGraph) -> int:
    """Applies all laws until they find nothing new, the graph is full, or MAX_ROUNDS are over; the
    number of rounds.
    """
    for number in range(MAX_ROUNDS):
        before = graph.num_nodes, len(graph.classes())
        work = [(c, node) for c in graph.classes() for node in graph.nodes(c)]
        for owner, node in work:
            for law in LAWS.get(node[0], ()):
                for equal in _bounded(graph, law(graph, owner, node)):
                    graph.merge(owner, equal)
                if graph.is_full:
                    graph.rebuild()
                    return number + 1
        graph.rebuild()
        if (graph.num_nodes, len(graph.classes())) == before:
            return number + 1
    return MAX_ROUNDS


def _bounded(graph: EGraph, equals: Iterator[int]) -> list[int]:
    """What a law gives, until it alone has made as many nodes as a graph may have: of a large class
    it looks at all pairs of nodes.
    """
    found, most = [], graph.num_nodes + graph.max_nodes
    for equal in equals:
        found.append(equal)
        if graph.num_nodes >= most:
            break
    return found


def _of(graph: EGraph, number: int, op: str) -> list[Node]:
    return [node for node in graph.nodes(number) if node[0] == op]


def _axes(data: Data) -> tuple[str, ...]:
    assert isinstance(data, tuple), "sums and maxima have axes"
    return tuple(map(str, data))


def _reduce(graph: EGraph, op: str, axes: frozenset[str], x: int) -> int:
    return graph.add(op, tuple(sorted(axes)), x) if axes else graph.find(x)


def associate(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """(a b) c = a (b c), for sums and products."""
    op, _, (left, right) = node
    for x, y in ((left, right), (right, left)):
        for _, _, (a, b) in _of(graph, x, op):
            yield graph.add(op, None, a, graph.add(op, None, b, y))
            yield graph.add(op, None, b, graph.add(op, None, a, y))


def distribute(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """a (b + c) = a b + a c."""
    _, _, (left, right) = node
    for x, y in ((left, right), (right, left)):
        for _, _, (b, c) in _of(graph, y, "add"):
            if graph.axes(b) == graph.axes(c):
                ab, ac = graph.add("mul", None, x, b), graph.add("mul", None, x, c)
                yield graph.add("add", None, ab, ac)


def factor(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """a b + a c = a (b + c)."""
    _, _, (left, right) = node
    for _, _, one in _of(graph, left, "mul"):
        for _, _, two in _of(graph, right, "mul"):
            for a in set(map(graph.find, one)) & set(map(graph.find, two)):
                rest = [_other(graph, pair, a) for pair in (one, two)]
                yield graph.add("mul", None, a, graph.add("add", None, *rest))


def _other(graph: EGraph, pair: tuple[int, ...], a: int) -> int:
    return pair[1] if graph.find(pair[0]) == a else pair[0]


def fold_constants(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """A product of constants is a constant, where it is exact; 1 a = a."""
    a, b = (graph.constant(arg) for arg in node[2])
    if a is not None and b is not None and (found := exact_product(a, b)) is not None:
        yield graph.add("const", found)
    for value, other in ((a, node[2][1]), (b, node[2][0])):
        if value == 1.0:
            yield other


def add_constants(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """A sum of constants is a constant, where it is exact; 0 + a = a."""
    a, b = (graph.constant(arg) for arg in node[2])
    if a is not None and b is not None and (found := exact_sum(a, b)) is not None:
        yield graph.add("const", found)
    for value, other in ((a, node[2][1]), (b, node[2][0])):
        if value == 0.0:
            yield other


def push_into_sum(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """a sum_k(b) = sum_k(a b), where a does not run along k."""
    left, right = node[2]
    for x, y in ((left, right), (right, left)):
        for _, data, (b,) in _of(graph, y, "sum"):
            if not graph.axes(x) & set(_axes(data)):
                yield graph.add("sum", data, graph.add("mul", None, x, b))


def pull_from_sum(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """sum_k(a b) = a sum_k(b), for those axes k along which a does not run."""
    _, data, (inner,) = node
    axes = frozenset(_axes(data))
    for _, _, (left, right) in _of(graph, inner, "mul"):
        for x, y in ((left, right), (right, left)):
            free = axes - graph.axes(x)
            if free and free <= graph.axes(y):
                rest = graph.add("mul", None, x, _reduce(graph, "sum", free, y))
                yield _reduce(graph, "sum", axes - free, rest)


def sum_of_sum(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """sum_k(a + b) = sum_k(a) + sum_k(b), where both run along k."""
    _, data, (inner,) = node
    axes = frozenset(_axes(data))
    for _, _, (a, b) in _of(graph, inner, "add"):
        if axes <= graph.axes(a) and axes <= graph.axes(b):
            parts = (_reduce(graph, "sum", axes, part) for part in (a, b))
            yield graph.add("add", None, *parts)


def merge_reductions(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """sum_j(sum_k(a)) = sum_jk(a), and so for maxima and minima."""
    op, data, (inner,) = node
    for _, more, (a,) in _of(graph, inner, op):
        yield _reduce(graph, op, frozenset(_axes(data)) | set(_axes(more)), a)


def split_reduction(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """sum_jk(a) = sum_j(sum_k(a)), and so for maxima and minima."""
    op, data, (inner,) = node
    axes = frozenset(_axes(data))
    for axis in sorted(axes) if len(axes) > 1 else ():
        first = _reduce(graph, op, axes - {axis}, inner)
        yield _reduce(graph, op, frozenset({axis}), first)


def scale_maximum(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """max_k(c a) = c max_k(a), for a constant c above 0."""
    _, data, (inner,) = node
    for _, _, (left, right) in _of(graph, inner, "mul"):
        for x, y in ((left, right), (right, left)):
            if (graph.constant(x) or 0.0) > 0.0:
                yield graph.add("mul", None, x, graph.add("max", data, y))


def split_exponent(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """exp(a + b) = exp(a) exp(b); where b is less a maximum of c's, instead
    exp(a - max c) = exp(a - c) exp(c - max c), whose factors stay in range as the whole does.
    """
    minus = graph.find(graph.add("const", -1.0))
    for _, _, pair in _of(graph, node[2][0], "add"):
        tops = [top for part in pair for top in _negated_maxima(graph, part, minus)]
        if not tops:
            yield graph.add("mul", None, *(graph.add("exp", None, part) for part in pair))
        for a, b in (pair, pair[::-1]):
            for c in _negated_maxima(graph, b, minus):
                if graph.find(c) != graph.find(a) and graph.axes(c) < graph.axes(a):
                    near = graph.add("add", None, a, graph.add("mul", None, minus, c))
                    far = graph.add("add", None, c, b)
                    parts = (graph.add("exp", None, part) for part in (near, far))
                    yield graph.add("mul", None, *parts)


def _negated_maxima(graph: EGraph, number: int, minus: int) -> list[int]:
    """What the maxima are of whose negatives this class holds."""
    return [
        c
        for _, _, pair in _of(graph, number, "mul")
        if minus in map(graph.find, pair)
        for _, _, (c,) in _of(graph, _other(graph, pair, minus), "max")
    ]


def split_inverse(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """1 / (a b) = (1 / a) (1 / b)."""
    for _, _, (a, b) in _of(graph, node[2][0], "mul"):
        yield graph.add("mul", None, graph.add("inv", None, a), graph.add("inv", None, b))


def join_sums(graph: EGraph, owner: int, node: Node) -> Iterator[int]:
    """sum_k(a b) + sum_r(c d) = sum_kr([a c] [b d]), side by side along an axis of both extents."""
    left, right = node[2]
    for _, one, (x,) in _of(graph, left, "sum"):
        for _, two, (y,) in _of(graph, right, "sum"):
            first, second = _axes(one), _axes(two)
            if len(first) == len(second) == 1 and first != second:
                yield from _joined(graph, first[0], x, second[0], y)


def _joined(graph: EGraph, k: str, x: int, r: str, y: int) -> Iterator[int]:
    both = f"{k}_{r}"
    for _, _, one in _of(graph, x, "mul"):
        for _, _, two in _of(graph, y, "mul"):
            for c, d in (two, two[::-1]):
                pairs = ((one[0], c), (one[1], d))
                if all(_beside(graph, a, k, b, r) for a, b in pairs):
                    cats = (graph.add("cat", (k, r, both), a, b) for a, b in pairs)
                    yield graph.add("sum", (both,), graph.add("mul", None, *cats))


def _beside(graph: EGraph, a: int, k: str, b: int, r: str) -> bool:
    """Whether a along k and b along r can lie side by side."""
    x, y = graph.axes(a), graph.axes(b)
    return k in x and r in y and x - {k} == y - {r}


LAWS: Mapping[str, tuple[Law, ...]] = {
    "add": (associate, add_constants, factor, join_sums),
    "mul": (associate, fold_constants, distribute, push_into_sum),
    "sum": (pull_from_sum, sum_of_sum, merge_reductions, split_reduction),
    "max": (merge_reductions, split_reduction, scale_maximum),
    "min": (merge_reductions, split_reduction),
    "exp": (split_exponent,),
    "inv": (split_inverse,),
}
"""Laws by the op of the node that they start from; that a + b = b + a is how nodes are kept."""
