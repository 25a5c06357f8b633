"""The walk over an exported graph: each node becomes ops, a constant or an opaque op.

In: an ExportedProgram. Out: a Graph (graph.py). What depends on no input is computed at once;
in-place updates of buffers become states; operators without a rule become opaque ops (opaque.py),
and so do regions (regions.py). Next on the walk: ../operators/table.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from distmega.errors import CaptureError, ProgramError
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.dtypes import ITEM_BYTES
from distmega.torch_import.conversion.graph import Continue, Graph
from distmega.torch_import.conversion.inputs import Inputs
from distmega.torch_import.conversion.nodes import (
    OF_NUMBERS,
    TO_NUMBER,
    OpNames,
    bound_arguments,
    computes_numbers,
    is_open,
    is_seeded,
    located,
    may_share,
    module_path,
    node_results,
    number_result,
    overwrites,
    packet_name,
    plain_name,
)
from distmega.torch_import.conversion.opaque import OpaqueOps
from distmega.torch_import.conversion.outputs import Outputs
from distmega.torch_import.conversion.regions import OpaqueRegion, order_nodes
from distmega.torch_import.operators import EXPRESSIONS, RULES, Rule
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.complexes import COMPLEX, COMPLEX_RULES, is_complex
from distmega.torch_import.operators.values import (
    Constant,
    Spread,
    Value,
    any_value,
    is_empty,
    is_foreign,
    is_tensor,
    map_values,
    value_dtype,
    varies,
)

IGNORED = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar",
           "aten.sym_constrain_range", "aten.sym_constrain_range_for_size")  # fmt: skip

CONTRACTING = ("aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm")
"""Operators of which torch wants operands of one type."""

FIRST_ALONE = ("aten.native_layer_norm", "aten.native_group_norm", "aten._fused_rms_norm",
               "aten._native_batch_norm_legit_no_training",
               "aten._native_batch_norm_legit")  # fmt: skip
"""Operators whose rules give the first result and no other."""

UNFILLED = ("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided",
            "aten.new_empty", "aten.new_empty_strided")  # fmt: skip
"""Operators that leave memory as they find it, which is another content on each rank."""


def convert(exported: ExportedProgram, name: str, more: Continue | None = None) -> Graph:
    """The program of an exported module. CaptureError for what programs can't hold. more: what
    comes behind the module's results, which must be tensors, in place of these.
    """
    b = Build(ProgramBuilder(name))
    values: dict[fx.Node, Value] = {}
    nodes, names = list(exported.graph.nodes), OpNames()
    opaque = OpaqueOps(nodes, b, values, names)
    converter = Converter(b, Inputs(exported, b.p), opaque, values, names)
    with torch.device("cpu"):  # where constants are, whatever the caller's default device
        return converter.run(nodes, more)


@dataclass(slots=True)
class Converter:
    """A program under construction, while the nodes of its graph are walked.

    values: of the nodes so far. order: of each node, when it runs.
    """

    b: Build
    inputs: Inputs
    opaque: OpaqueOps
    values: dict[fx.Node, Value]
    names: OpNames
    order: dict[fx.Node, int] = field(default_factory=dict)

    def run(self, nodes: Sequence[fx.Node], more: Continue | None) -> Graph:
        """The whole graph, from these nodes."""
        specs = iter(self.inputs.exported.graph_signature.input_specs)
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = self.inputs.declare(node, next(specs))
        known = {node for node, value in self.values.items() if not varies(value)}
        (last,) = (node for node in nodes if node.op == "output")
        parts = list(order_nodes(nodes, known, computes_numbers))
        self.number_nodes(parts, last)
        for part in parts:
            self.convert_part(part)
        return Outputs(self.b, self.values, self.inputs, self.opaque).finish(last, more)

    def number_nodes(self, parts: Sequence[fx.Node | OpaqueRegion], last: fx.Node) -> None:
        """In the order in which they run; of a region that gives results at the end, at the end."""
        for position, part in enumerate(parts):
            if isinstance(part, OpaqueRegion):
                ends = any(last in node.users and is_open(node) for node in part.nodes)
                self.order |= dict.fromkeys(part.nodes, len(parts) if ends else position)
            else:
                self.order[part] = position
        self.order[last] = len(parts)

    def convert_part(self, part: fx.Node | OpaqueRegion) -> None:
        """Ops of a node or a region. CaptureError names the operator and the module's line."""
        first = part.nodes[0] if isinstance(part, OpaqueRegion) else part
        try:
            if isinstance(part, OpaqueRegion):
                self.opaque.run_region(part)
            else:
                self.values[part] = self.call(part)
        except (CaptureError, ProgramError) as error:
            raise located(error, first) from error

    def call(self, node: fx.Node) -> Value:
        """The value of an operator's result."""
        if getattr(node.target, "__name__", "") == "getitem":
            source, position = node.args
            found = self.values[source]  # type: ignore[index]
            assert isinstance(found, list | tuple | dict), node
            return found[position]  # type: ignore[index]
        if not isinstance(node.target, torch._ops.OpOverload):
            return self.call_of_numbers(node)
        packet = packet_name(node)
        if packet in IGNORED or (not node.users and not node.target._schema.is_mutable):
            return None
        args, kwargs = self.given(node.args), self.given(node.kwargs)
        if not is_seeded(node) and not any_value((args, kwargs), varies):
            return _evaluate(node, args, kwargs)
        if packet == "aten._local_scalar_dense":
            return self.number(node, args[0])
        results = node_results(node)
        if isinstance(node.meta.get("val"), torch.Tensor) and 0 in results[0].shape:
            return Constant(torch.empty(results[0].shape, dtype=node.meta["val"].dtype))
        self.b.start(self.names.name_of(node, packet), results)
        if packet == "distmega.append_rows":
            return self.append(node, args)
        if packet in FIRST_ALONE and any(user.args[1] != 0 for user in node.users):
            return self.opaque.run_node(node, args, kwargs)
        found = self.stated(node.target, packet, args, kwargs)
        return self.opaque.run_node(node, args, kwargs) if found is NotImplemented else found

    def given(self, arguments: Any) -> Any:
        """Arguments of a node with the values of other nodes in their places."""
        return map_values(
            arguments, lambda each: self.values[each] if isinstance(each, fx.Node) else each
        )

    def number(self, node: fx.Node, value: Value) -> Value:
        """The number that a tensor holds: a tensor of no dims, in the type that numbers have."""
        self.b.start(plain_name(node.name), [number_result(node)])
        assert isinstance(value, Handle | Spread), value
        return self.b.cast(self.b.reshape(value, ()), self.b.dtype)

    def call_of_numbers(self, node: fx.Node) -> Value:
        """A function of numbers; CaptureError for torch's control flow."""
        args = self.given(node.args)
        if callable(node.target) and not any_value(args, is_tensor):
            return node.target(*args)
        self.b.start(plain_name(node.name), [number_result(node)])
        if node.target in TO_NUMBER:
            return self.b.cast(args[0], self.b.dtype)
        if node.target in OF_NUMBERS:
            return self.b.pointwise(OF_NUMBERS[node.target], *args)
        raise CaptureError(
            f"{self.b.p.name}: {module_path(node) or node.name} calls {node.target}",
            expected="operators of torch",
            remedy="capture the parts of the module one by one",
        )

    def stated(
        self, target: Any, packet: str, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        """By its rule; NotImplemented without one."""
        if 0 in self.b.shape:
            return NotImplemented
        named = bound_arguments(target, args, kwargs)
        if any_value((args, kwargs), is_complex) or self.b.dtype in COMPLEX:
            known = packet in COMPLEX_RULES
            return COMPLEX_RULES[packet](self.b, **named) if known else NotImplemented
        if any_value((args, kwargs), is_foreign) or self.b.dtype not in ITEM_BYTES:
            return NotImplemented
        if _lacks_dims(packet, named) or (
            packet != "aten.cat" and any_value((args, kwargs), is_empty)
        ):
            return NotImplemented
        if packet in CONTRACTING:
            self.require_one_type(packet, named)
        for key in (f"{packet}.{target._overloadname}", packet):
            if key in EXPRESSIONS:
                return self.expression(EXPRESSIONS[key], named)
            if key in RULES:
                rule: Rule = RULES[key]
                return rule(self.b, **named)
        return NotImplemented

    def expression(self, template: str, named: Mapping[str, Value]) -> Value:
        """A pointwise op of an expression that names the operator's arguments, as "{self} + 1"."""
        names = list(dict.fromkeys(re.findall(r"{(\w+)}", template)))
        text = re.sub(r"{(\w+)}", lambda found: f"{{{names.index(found[1])}}}", template)
        return self.b.pointwise(text, *(named[each] for each in names))

    def require_one_type(self, packet: str, named: Mapping[str, Value]) -> None:
        """CaptureError for products of different types, which torch refuses when it runs them."""
        types = [
            value_dtype(each)
            for each in named.values()
            if isinstance(each, Handle | Constant | Spread)
        ]
        if len({*types}) > 1:
            raise CaptureError(
                f"{packet} in {self.b.base or self.b.p.name} of {', '.join(types)}",
                expected="operands of one type",
                remedy="give example inputs of the type of the weights, or convert in the module",
            )

    def append(self, node: fx.Node, args: Sequence[Value]) -> Value:
        """New rows of a cache, in place where nobody reads the cache as it was afterwards."""
        cache, x, positions, *more = args
        old = node.args[0]
        assert isinstance(old, fx.Node)
        held = self.b.handle(cache)
        is_state = held in self.inputs.states.values()
        if not is_state or self.last_read(old, node) > self.order[node]:
            return self.opaque.run_node(node, args, {})
        sequences = self.b.handle(more[0]) if more and more[0] is not None else None
        operands = self.b.handle(x), self.b.handle(positions)
        self.b.p.kv_append(held, *operands, sequences, name=self.b.name())
        return held

    def last_read(self, node: fx.Node, but: fx.Node) -> int:
        """Place of the last node that reads a value, through what may share its storage."""
        last_uses = [-1]
        for user in node.users:
            if user is but or overwrites(user, node):
                continue
            last_uses.append(self.order[user])
            if self.values.get(user) is not None and may_share(user):
                last_uses.append(self.last_read(user, but))
        return max(last_uses)


def _lacks_dims(packet: str, named: Mapping[str, Value]) -> bool:
    """Whether an operator goes along a dim, as the first, of a tensor that has none."""
    x, dims = named.get("self"), named.get("dim", named.get("dims"))
    is_scalar = isinstance(x, Handle | Constant | Spread) and not x.shape
    return is_scalar and dims not in (None, []) and packet != "aten.unsqueeze"


def _evaluate(node: fx.Node, args: Any, kwargs: Any) -> Value:
    """What a node gives that depends on no input, weight or state, computed here and now."""
    known = map_values(args, _known_tensor)
    named = {
        key: torch.device("cpu") if isinstance(value, torch.device) else value
        for key, value in map_values(kwargs, _known_tensor).items()
    }
    with torch.no_grad():
        found = node.target(*known, **named)  # type: ignore[operator]
        if packet_name(node) in UNFILLED:
            found.zero_()
    return map_values(
        found, lambda each: Constant(each) if isinstance(each, torch.Tensor) else each
    )


def _known_tensor(value: Value) -> Value:
    return value.tensor if isinstance(value, Constant) else value
