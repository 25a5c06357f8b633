"""The results of a program: what the module gives, what it overwrites, what it leaves behind.

In: the graph's last node, and the values of all others. Out: a Graph (graph.py); new values of
states are written, and what the program can't give is left to torch behind it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, OutputKind

from distmega.errors import CaptureError
from distmega.program.builder import Handle
from distmega.torch_import.conversion.graph import (
    Continue,
    Empty,
    Ending,
    Graph,
    Late,
    Output,
    Shared,
    Views,
)
from distmega.torch_import.conversion.inputs import OF_STATES, Inputs
from distmega.torch_import.conversion.memory import order_of_dims, overlapping, sources
from distmega.torch_import.conversion.nodes import (
    is_seeded,
    node_results,
)
from distmega.torch_import.conversion.opaque import (
    OpaqueOps,
    Operands,
    checks_among,
    reported_names,
)
from distmega.torch_import.conversion.regions import NUMBERS
from distmega.torch_import.operators.build import Build
from distmega.torch_import.operators.values import TENSORS, Constant, Value, is_empty


@dataclass(slots=True)
class Outputs:
    """The results of a program under construction.

    values: of all nodes. given: what the module gives, as Graph.outputs. named: tensors that the
    program gives, by name. updated: output -> input that the module overwrites. pending: new values
    of states, each with its state. roots: of results that share memory, what they are views of, and
    how. whole: nodes that are outputs, as such.
    """

    b: Build
    values: Mapping[fx.Node, Value]
    inputs: Inputs
    opaque: OpaqueOps
    given: list[object] = field(default_factory=list)
    named: dict[str, Handle] = field(default_factory=dict)
    updated: dict[str, str] = field(default_factory=dict)
    pending: list[tuple[Handle, Handle]] = field(default_factory=list)
    roots: Mapping[fx.Node, tuple[fx.Node, Views]] = field(default_factory=dict)
    whole: dict[fx.Node, Output] = field(default_factory=dict)

    def finish(self, last: fx.Node, more: Continue | None) -> Graph:
        """The whole graph. more: as `convert` takes it."""
        known = {node for node, value in self.values.items() if isinstance(value, TENSORS)}
        self.roots = overlapping((x for x in self._user_results(last) if x in known), known)
        for spec, node in zip(self.signature.output_specs, last.args[0], strict=True):  # type: ignore[arg-type]
            self._add(spec, node, more is None)
        if more is not None:
            results = [self.b.handle(self._closed(node)) for node in self._user_results(last)]
            more_outputs = more(self.b.p, self.inputs.declared, results)
            self.named = {handle.name: handle for handle in more_outputs}
        ending = self._end() if self.opaque.late else None
        for handle, state in self.pending:
            if handle is not state:
                self.b.start(f"{state.name}.update", [])
                self.b.p.set(handle, into=state, name=self.b.name())
        return Graph(
            program=self.b.p.build(*self.named.values()),
            inputs=tuple(self.inputs.names),
            outputs=tuple(self.given),
            targets=self.inputs.targets,
            constants=self.b.constants,
            updated=self.updated,
            opaque=self.opaque.counts,
            ending=ending,
        )

    @property
    def signature(self) -> ExportGraphSignature:
        """What the module's inputs and results are."""
        signature: ExportGraphSignature = self.inputs.exported.graph_signature
        return signature

    def _add(self, spec: Any, node: Any, gives_results: bool) -> None:
        """One result: a new value of a state or an input, or what the module gives."""
        value = self.values[node] if isinstance(node, fx.Node) else node
        if isinstance(value, Late):
            self.given.append(value)
        elif spec.kind in OF_STATES:
            self._update_state(spec.target, node, value)
        elif not isinstance(value, TENSORS) or not gives_results:
            self.given.append(value)
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            if not is_empty(value):
                updated = self.inputs.names[self.inputs.positions[spec.target]]
                assert updated is not None, spec
                self.updated[self._name(value)] = updated
        else:
            self.given.append(self._result(node, value))

    def _update_state(self, target: str, node: fx.Node, value: Value) -> None:
        self.b.start(f"{self.inputs.stored[target]}.new", node_results(node))
        if target in self.inputs.states:
            held, _ = self.b.held(value)
            self.pending.append((self._own(held), self.inputs.states[target]))

    def _result(self, node: fx.Node, value: Value) -> object:
        """A tensor that the module gives: one of the program, an input, or without elements."""
        known = self._shared(node) or self._empty(node, value)
        if known is not None:
            return known
        root, views = self.roots.get(node, (node, ()))
        if root not in self.whole:
            self.whole[root] = self._whole(root)
        found = self.whole[root]
        return replace(found, views=(*found.views, *views))

    def _whole(self, node: fx.Node) -> Output:
        """A tensor of the program that lies in memory as torch's does."""
        like = node.meta["val"]
        value, dtype = self.b.held(self.values[node])
        if isinstance(like, NUMBERS):
            return Output(self._name(value), dtype, is_number=True)
        order = order_of_dims(like)
        if order == sorted(order):
            return Output(self._name(value), dtype)
        self.b.start(f"out.{len(self.named)}.turned", [])
        held = self.b.handle(value)
        pairs = [len(order)] if len(held.shape) > len(order) else []  # of a complex number
        back = [order.index(dim) for dim in range(len(order))]
        turned = self.b.transpose(held, [*order, *pairs])
        return Output(self._name(turned), dtype, views=((torch.permute, (back,), {}),))

    def _name(self, value: Value) -> str:
        """The name of an output that holds a value."""
        self.b.start(f"out.{len(self.named)}", [])
        handle = self._own(self.b.held(value)[0])
        if handle.name in self.named:
            handle = self.b.p.set(handle, name=self.b.name())
        self.named[handle.name] = handle
        return handle.name

    def _closed(self, node: fx.Node) -> Value:
        """A result that is a tensor of the program. CaptureError for another."""
        value = self.values[node]
        if isinstance(value, Late):
            raise CaptureError(
                f"{self.b.p.name} gives {node.name} of the shape {tuple(node.meta['val'].shape)}",
                expected="results of shapes that follow from those of the inputs",
                remedy="capture the module itself: distmega.capture(module, inputs)",
            )
        return value

    def _user_results(self, last: fx.Node) -> list[fx.Node]:
        """Nodes that are results of the module itself."""
        pairs = zip(self.signature.output_specs, last.args[0], strict=True)  # type: ignore[arg-type]
        return [
            node
            for spec, node in pairs
            if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, fx.Node)
        ]

    def _end(self) -> Ending:
        """What gives the results of open shapes; adds what it reads to the outputs by name."""
        late = self.opaque.late
        nodes = self._ending_nodes()
        operands = Operands()
        call = self.opaque.graph_text(nodes, list(late), operands)
        self.opaque.counts.update(reported_names(nodes))
        read = [self._readable(at, handle) for at, handle in enumerate(operands.handles)]
        return Ending(call, tuple(read))

    def _ending_nodes(self) -> list[fx.Node]:
        """What torch runs behind the program. CaptureError for random numbers that the program
        has sampled already.
        """
        late = self.opaque.late
        there = {node for node, value in self.values.items() if isinstance(value, TENSORS)}
        inside = dict.fromkeys(node for region in late.values() for node in region.nodes)
        checks = checks_among(inside)
        nodes = self.opaque.needed([*late, *checks], inside, there)
        if again := next((x for x in nodes if is_seeded(x) and x in self.opaque.ran), None):
            raise CaptureError(
                f"{self.b.p.name}: {again.target} behind results and operators of the program",
                expected="random numbers of a shape that data decide for one of them alone",
                remedy="sample them in the module for all elements, and choose among these",
            )
        return nodes

    def _readable(self, position: int, handle: Handle) -> str:
        """The name of a tensor that the ending reads: an output, unless it comes from outside."""
        if handle.tensor.role in ("input", "weight") and not self.b.p.is_view(handle):
            return handle.name
        self.b.start(f"end.{position}", [])
        own = self._own(handle)
        self.named[own.name] = own
        return own.name

    def _shared(self, node: fx.Node) -> Shared | None:
        """Of a result that is a view of an input as the module leaves it, or of a weight, or one of
        these itself.
        """
        positions, overwritten = self.inputs.positions, self.signature.user_inputs_to_mutate
        for source, views in sources(node):
            if source.name in overwritten:
                return Shared(positions[overwritten[source.name]], views)
            if source.name in positions and source.name not in overwritten.values():
                return Shared(positions[source.name], views)
            if name := self._weight_name(source):
                return Shared(name, views)
        return None

    def _empty(self, node: fx.Node, value: Value) -> Empty | None:
        """Of a result that has no elements, or that a module which isn't on meta puts there."""
        like = node.meta.get("val")
        if isinstance(like, torch.Tensor) and like.is_meta and not _begins_on_meta(node.graph):
            return Empty(tuple(like.shape), like.dtype, on_meta=True)
        if isinstance(value, Constant) and is_empty(value):
            return Empty(value.shape, value.tensor.dtype)
        return None

    def _weight_name(self, node: fx.Node) -> str:
        """Of a weight; "" for another node, and for what the module overwrites."""
        value = self.values[node] if node.op == "placeholder" else None
        if not isinstance(value, Handle) or value in self.inputs.states.values():
            return ""
        return value.name if value.name in self.inputs.targets else ""

    def _own(self, value: Value) -> Handle:
        """A handle in storage of its own: no view, which a state below it could change."""
        handle = self.b.handle(value)
        if handle in self.inputs.states.values():
            is_new_state = self.b.base.endswith(".new")
            return handle if is_new_state else self.b.p.set(handle, name=self.b.name())
        if handle.tensor.role != "temp" or self.b.p.is_view(handle):
            return self.b.p.set(handle, name=self.b.name())
        return handle


def _begins_on_meta(graph: fx.Graph) -> bool:
    """Whether an input or a weight has no values."""
    given = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    return any(isinstance(x, torch.Tensor) and x.is_meta for x in given)
