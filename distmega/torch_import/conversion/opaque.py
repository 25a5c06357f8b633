"""Operators that torch runs itself, as opaque ops: one without a rule, or a region of several.

In: nodes and the values of what they read. Out: ops of the program, and their results as values.
What has a shape only when it is there is left to the graph's ending (outputs.py). How calls are
written as text: hostir/library/opaque_text.py.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from distmega.errors import CaptureError
from distmega.hostir.library.opaque import encode_call
from distmega.hostir.library.opaque_graph import encode_graph
from distmega.hostir.library.opaque_text import makes_tensors, operator_name
from distmega.hostir.library.torch_types import HOLDERS, dtype_name, hold
from distmega.program.builder import Handle
from distmega.torch_import.conversion.graph import Late
from distmega.torch_import.conversion.nodes import (
    OpNames,
    is_open,
    mask_reads,
    reported_name,
    takes_number,
    tensor_result,
)
from distmega.torch_import.conversion.regions import (
    CHECKS,
    OpaqueRegion,
    host_reads,
    number_sources,
)
from distmega.torch_import.operators.build import Build, require_dtype
from distmega.torch_import.operators.values import TENSORS, Constant, Foreign, Value, is_empty


@dataclass(slots=True)
class Operands:
    """What torch reads of a program when it runs some operators: tensors, and the types of those
    that are held in another one.
    """

    handles: list[Handle] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def position_of(self, handle: Handle, dtype: str) -> int:
        """Where a tensor stands among them, from now on."""
        pairs = list(zip(self.handles, self.dtypes, strict=True))
        if (handle, dtype) not in pairs:
            self.handles.append(handle)
            self.dtypes.append(dtype)
            return len(pairs)
        return pairs.index((handle, dtype))


@dataclass(slots=True)
class OpaqueOps:
    """Opaque ops of a program under construction.

    nodes: all of the graph, in its order. values: of nodes so far. counts: operators that torch
    runs, and how often. late: results of open shapes, each with the region that gives it. ran: what
    runs within regions.
    """

    nodes: Sequence[fx.Node]
    b: Build
    values: dict[fx.Node, Value]
    names: OpNames
    counts: Counter[str] = field(default_factory=Counter)
    late: dict[fx.Node, OpaqueRegion] = field(default_factory=dict)
    ran: set[fx.Node] = field(default_factory=set)

    def run_node(self, node: fx.Node, args: Any, kwargs: Any) -> Value:
        """An operator as torch has it."""
        target = str(node.target)
        operands = Operands()

        def as_text(value: object) -> object:
            if not isinstance(value, TENSORS) or is_empty(value):
                return _empty_text(value)
            at, dtype = self._operand(value, operands)
            return {"held": [at, dtype]} if dtype else {"tensor": at}

        several = not isinstance(node.meta["val"], torch.Tensor)
        values = node.meta["val"] if several else [node.meta["val"]]
        kept, empty = [0], dict[int, Value]()
        if several:
            wanted = sorted({each for user in node.users if isinstance(each := user.args[1], int)})
            empty = {at: _without_values(values[at]) for at in wanted if 0 in values[at].shape}
            kept = [at for at in wanted if at not in empty]
            if empty and not kept:
                return empty
        call = encode_call(args, kwargs, as_text, kept, node.target)
        reads = host_reads([node]) or mask_reads(node)
        found = self._run(node, target, call, operands, [values[at] for at in kept], reads)
        return dict(zip(kept, found, strict=True)) | empty if several else found[0]

    def run_region(self, region: OpaqueRegion) -> None:
        """Its operators as one opaque op; what has an open shape is left to the graph's ending."""
        inside = {*region.nodes}
        leaving = [node for node in region.nodes if not inside.issuperset(node.users)]
        late = [node for node in leaving if is_open(node)]
        closed = [node for node in leaving if not is_open(node)]
        for node in late:
            self.values[node], self.late[node] = Late(len(self.late)), region
        for node in closed:
            if 0 in node.meta["val"].shape:
                tensor_result(node.meta["val"], node.name)
                self.values[node] = _without_values(node.meta["val"])
        wanted = [node for node in closed if node not in self.values]
        if not wanted:
            return
        checks = [] if late else checks_among(region.nodes)
        nodes = self.needed([*wanted, *checks], inside, set())
        self.ran.update(nodes)
        own = [node for node in nodes if node in inside]
        first = next((node for node in own if reported_name(node)), own[0])
        self.b.start(self.names.name_of(first, operator_name(first.target)), [])
        operands = Operands()
        call = self.graph_text(nodes, wanted, operands)
        target = ", ".join(reported_names(nodes)) or "aten.alias.default"
        results = [node.meta["val"] for node in wanted]
        found = self._run(first, target, call, operands, results, host_reads(nodes))
        self.values.update(zip(wanted, found, strict=True))

    def needed(
        self, wanted: Sequence[fx.Node], inside: Collection[fx.Node], there: Collection[fx.Node]
    ) -> list[fx.Node]:
        """Nodes of a region with all of it that they read and that is not `there`, with what
        computes numbers for them, and with the graph's checks of these; in the graph's order.
        """
        found, left = set[fx.Node](), list(wanted)
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [x for x in node.all_input_nodes if x in inside and x not in there]
        found |= {x for x in number_sources(found) if isinstance(self.values[x], TENSORS)}
        found |= self._checks_of(found)
        return [node for node in self.nodes if node in found]

    def graph_text(
        self, nodes: Sequence[fx.Node], results: Sequence[fx.Node], operands: Operands
    ) -> str:
        """Nodes as text for torch to run. ProgramError for what text can't hold."""

        def given(node: fx.Node) -> object:
            return as_text(self.values[node])

        def as_text(value: Value) -> object:
            if isinstance(value, list | tuple):
                return [as_text(each) for each in value]
            if not isinstance(value, TENSORS):
                return value
            if is_empty(value):
                return _empty_text(value)
            return {"tensor": self._operand(value, operands)[0]}

        return encode_graph(nodes, results, given, operands.dtypes)

    def _checks_of(self, there: Collection[fx.Node]) -> set[fx.Node]:
        """The graph's checks of numbers that these nodes have, and what computes them."""
        found = set[fx.Node]()
        for node in checks_among(self.nodes):
            numbers = {*number_sources([node])}
            if not numbers.isdisjoint(there) and not any(
                takes_number(x) for x in numbers if x not in there
            ):
                found |= {node, *numbers}
        return found

    def _operand(self, value: Value, operands: Operands) -> tuple[int, str]:
        """A tensor's place among what torch reads, and its type where it is held in another."""
        held, dtype = self.b.held(value)
        return operands.position_of(self.b.handle(held), dtype), dtype

    def _run(
        self,
        node: fx.Node,
        target: str,
        call: str,
        operands: Operands,
        results: Sequence[torch.Tensor],
        reads: str,
    ) -> list[Value]:
        """An opaque op and its results, which are like these."""
        shapes, foreign = [], []
        for result in results:
            tensor_result(result, node.name)
            held = hold(torch.empty_like(result, device="meta"))
            foreign.append(str(result.dtype) if result.dtype in HOLDERS else "")
            dtype = require_dtype(dtype_name(held.dtype), f"{target} in {self.b.base}")
            shapes.append((tuple(held.shape), dtype))
        if not shapes or any(0 in shape for shape, _ in shapes):
            raise CaptureError(
                f"{target} in {self.b.base} gives {shapes}",
                expected="tensors with elements",
                remedy="keep this part out of what is captured",
            )
        if not operands.handles and makes_tensors(node.target):  # where to make them
            operands.position_of(self.b.constant(torch.zeros(1)), "")
        self.counts.update(target.split(", "))
        made = self.b.p.opaque(
            target, call, operands.handles, shapes, name=self.b.name(), host_reads=reads
        )
        return [
            Foreign(handle, dtype) if dtype else handle
            for handle, dtype in zip(made, foreign, strict=True)
        ]


def _empty_text(value: Value) -> object:
    """What stands for a tensor without elements; None for no tensor."""
    if not isinstance(value, Constant):
        return None
    return {"empty": [list(value.tensor.shape), str(value.tensor.dtype)]}


def _without_values(like: torch.Tensor) -> Constant:
    """A result without elements."""
    return Constant(torch.empty(like.shape, dtype=like.dtype))


def checks_among(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those that only raise errors."""
    return [node for node in nodes if str(node.target) in CHECKS]


def reported_names(nodes: Iterable[fx.Node]) -> list[str]:
    """The operators of nodes, each once."""
    return list(dict.fromkeys(filter(None, map(reported_name, nodes))))
