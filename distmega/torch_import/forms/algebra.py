"""Normal forms of what pointwise ops compute, so that equal values are found by comparing numbers.

In: a draft. Out: for each tensor a node: a leaf, a constant, a product of powers of nodes with a
factor, a sum of multiples of nodes with a constant, or a function of nodes. Equal nodes are one
object of the table; conversions between float types are left out. Used by norms.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Op
from distmega.torch_import.forms.draft import Draft
from distmega.torch_import.operators.values import is_float

Node = int
"""Place in the table."""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor that no pointwise op makes, read in a shape, without the ones in front of it."""

    tensor: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Monomial:
    """factor * product of nodes, which are sorted."""

    factor: float
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class LinearSum:
    """constant + sum of factor * node, sorted by node."""

    constant: float
    terms: tuple[tuple[Node, float], ...]


@dataclass(frozen=True, slots=True)
class FunctionNode:
    """A function of expr.py of other nodes."""

    name: str
    nodes: tuple[Node, ...]


Form = TensorLeaf | Monomial | LinearSum | FunctionNode


@dataclass(slots=True)
class Algebra:
    """The table, and the nodes of tensors that were asked for."""

    draft: Draft
    producers: dict[str, Op] = field(init=False)
    forms: list[Form] = field(default_factory=list)
    numbers: dict[Form, Node] = field(default_factory=dict)
    tensors: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = self.draft.producers()

    def node(self, form: Form) -> Node:
        """The number of a form, entered if it is new."""
        if form not in self.numbers:
            self.numbers[form] = len(self.forms)
            self.forms.append(form)
        return self.numbers[form]

    def of(self, tensor: str) -> Node:
        """The node of a tensor."""
        waiting = [tensor]
        while waiting:
            name = waiting[-1]
            op = self.producers.get(name)
            if name in self.tensors:
                waiting.pop()
            elif op is None or not self.is_pointwise(op):
                self.tensors[name] = self.node(self.leaf(name))
            else:
                left = [each.tensor for each in op.reads if each.tensor not in self.tensors]
                waiting += left
                if not left:
                    tree = expr.parse(str(op.attr("expr")))
                    operands = [self.tensors[each.tensor] for each in op.reads]
                    self.tensors[name] = self.tree(tree, operands)
        return self.tensors[tensor]

    def leaf(self, name: str) -> TensorLeaf:
        """A tensor as a leaf."""
        return TensorLeaf(self.base(name), without_ones(self.draft.tensors[name].shape))

    def is_pointwise(self, op: Op) -> bool:
        """Whether it computes floats of floats, element by element."""
        names = [access.tensor for access in (*op.reads, *op.writes)]
        floats = all(is_float(self.draft.tensors[name].dtype) for name in names)
        return kind_of(op).is_elementwise and floats

    def base(self, name: str) -> str:
        """The tensor below views that only put dims of extent 1 in or out."""
        while (op := self.producers.get(name)) is not None and op.is_view:
            source = op.reads[0].tensor
            shapes = [
                [extent for extent in self.draft.tensors[each].shape if extent > 1]
                for each in (name, source)
            ]
            if shapes[0] != shapes[1]:
                break
            name = source
        return name

    def tree(self, tree: expr.Expr, operands: Sequence[Node]) -> Node:
        """An expression of nodes."""
        match tree:
            case expr.Arg(index):
                return operands[index]
            case expr.Const(value):
                return self.product(float(value), ())
        nodes = [self.tree(each, operands) for each in tree.args]
        match tree.fn:
            case "add":
                return self.sum((nodes[0], 1.0), (nodes[1], 1.0))
            case "sub":
                return self.sum((nodes[0], 1.0), (nodes[1], -1.0))
            case "neg":
                return self.product(-1.0, nodes)
            case "mul":
                return self.product(1.0, nodes)
            case "div":
                return self.product(1.0, (nodes[0], self.power(nodes[1], -1.0)))
            case "sqrt":
                return self.power(nodes[0], 0.5)
            case "rsqrt":
                return self.power(nodes[0], -0.5)
            case "pow" if (exponent := self.number(nodes[1])) is not None:
                return self.power(nodes[0], exponent)
        return self.node(FunctionNode(tree.fn, tuple(nodes)))

    def number(self, node: Node) -> float | None:
        """The constant that a node is."""
        form = self.forms[node]
        return form.factor if isinstance(form, Monomial) and not form.nodes else None

    def power(self, node: Node, exponent: float) -> Node:
        """Whole positive powers are products; others functions "power"."""
        number = self.number(node)
        if number is not None and (number > 0 or (number and exponent == -1)):
            return self.product(1 / number if exponent == -1 else number**exponent, ())
        if exponent in (1.0, 2.0, 3.0, 4.0):
            return self.product(1.0, [node] * int(exponent))
        form = self.forms[node]
        if exponent == -1.0 and isinstance(form, FunctionNode) and form.name == "power":
            return self.power(form.nodes[0], -self._exponent(form))
        return self.node(FunctionNode("power", (node, self.product(exponent, ()))))

    def _exponent(self, form: FunctionNode) -> float:
        found = self.number(form.nodes[1])
        assert found is not None
        return found

    def product(self, factor: float, nodes: Sequence[Node]) -> Node:
        """A product, products in it opened."""
        parts: list[Node] = []
        for node in nodes:
            form = self.forms[node]
            inner = form if isinstance(form, Monomial) else Monomial(1.0, (node,))
            factor *= inner.factor
            parts += inner.nodes
        if factor == 1.0 and len(parts) == 1:
            return parts[0]
        return self.node(Monomial(factor, tuple(sorted(parts))))

    def sum(self, *terms: tuple[Node, float]) -> Node:
        """A sum of multiples, sums in it opened."""
        total: Counter[Node] = Counter()
        constant = 0.0
        for node, factor in terms:
            form = self.forms[node]
            if isinstance(form, LinearSum):
                constant += factor * form.constant
                for inner, times in form.terms:
                    total[inner] += factor * times  # type: ignore[assignment]
            elif isinstance(form, Monomial):
                bare = self.product(1.0, form.nodes)
                constant += factor * form.factor if not form.nodes else 0.0
                if form.nodes:
                    total[bare] += factor * form.factor  # type: ignore[assignment]
            else:
                total[node] += factor  # type: ignore[assignment]
        left = tuple(sorted((node, float(times)) for node, times in total.items() if times))
        if not left:
            return self.product(constant, ())
        if not constant and len(left) == 1:
            return self.product(left[0][1], (left[0][0],))
        return self.node(LinearSum(constant, left))

    def divided(self, node: Node, by: Sequence[Node]) -> tuple[float, tuple[Node, ...]] | None:
        """Factor and nodes that are left of a product without the nodes of others."""
        form = self.forms[node]
        mine = form if isinstance(form, Monomial) else Monomial(1.0, (node,))
        factor, left = mine.factor, Counter(mine.nodes)
        for each in by:
            other = self.forms[each]
            other = other if isinstance(other, Monomial) else Monomial(1.0, (each,))
            factor /= other.factor
            left.subtract(other.nodes)
        if any(times < 0 for times in left.values()):
            return None
        return factor, tuple(left.elements())


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without the ones in front of it."""
    first = next((position for position, extent in enumerate(shape) if extent > 1), len(shape))
    return tuple(shape[first:])
