"""What a program takes and holds: inputs, weights and states, from the placeholders of a graph.

In: placeholders and what the graph's signature says of them. Out: their values, and Inputs, which
tell later what each was in torch. Next on the walk: converter.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from distmega.errors import CaptureError
from distmega.hostir.library.torch_types import HOLDERS, dtype_name, hold
from distmega.program.builder import Handle, ProgramBuilder
from distmega.torch_import.conversion.nodes import (
    distinct_names,
    effects_of,
    numbered,
    plain_name,
    tensor_result,
)
from distmega.torch_import.operators.build import require_dtype
from distmega.torch_import.operators.values import Constant, Foreign, Value

OF_STATES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
"""Results that are new values of what the module holds."""
STORED = (InputKind.PARAMETER, InputKind.BUFFER)
"""What the module holds."""


@dataclass(slots=True)
class Inputs:
    """The inputs, weights and states of a program under construction.

    names: of the module's flat inputs, None for one that is no input of the program. positions: of
    those by the names of their nodes. declared: inputs by name. targets: weight or state ->
    parameter or buffer. states: by parameter or buffer. stored: names of all parameters and
    buffers, those that forward does not read too, so that each has one name in all programs of the
    module.
    """

    exported: ExportedProgram
    p: ProgramBuilder
    names: list[str | None] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    declared: dict[str, Handle] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    states: dict[str, Handle] = field(default_factory=dict)
    stored: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        specs = self.exported.graph_signature.input_specs
        self.stored = distinct_names(x.target for x in specs if x.kind in STORED)

    def declare(self, node: fx.Node, spec: Any) -> Value:
        """The value of a placeholder: a parameter, a buffer, a constant or an input; CaptureError
        for another one.
        """
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                return self.declare_stored(node, spec) if node.users else None
            case InputKind.CONSTANT_TENSOR:
                return Constant(self.exported.constants[spec.target])
            case InputKind.USER_INPUT:
                return self.declare_input(node)
        raise CaptureError(
            f"{self.p.name}: an input of kind {spec.kind.name}{effects_of(node)}",
            expected="tensors, parameters and buffers",
            remedy="keep other objects out of the module's forward",
        )

    def declare_stored(self, node: fx.Node, spec: Any) -> Value:
        """A parameter or buffer: a weight, or a state where the module updates it; a buffer that no
        checkpoint holds is known.
        """
        signature = self.exported.graph_signature
        updated = {each.target for each in signature.output_specs if each.kind in OF_STATES}
        fixed = spec.kind is InputKind.BUFFER and spec.target in signature.non_persistent_buffers
        held = {**self.exported.constants, **self.exported.state_dict}[spec.target]
        if fixed and spec.target not in updated and not held.is_meta:
            return Constant(held)
        name, like = self.stored[spec.target], node.meta["val"]
        if 0 in like.shape:
            return Constant(torch.empty(like.shape, dtype=held.dtype))
        self.targets[name] = spec.target
        if spec.target not in updated:
            return _declared(name, like, self.p.weight)
        state = _declared(name, like, self.p.state)
        self.states[spec.target] = state.held if isinstance(state, Foreign) else state
        return state

    def declare_input(self, node: fx.Node) -> Value:
        """An input of the module: one of the program, if it is a tensor with elements."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.names.append(None)
            return value
        self.positions[node.name] = len(self.names)
        if 0 in value.shape:
            self.names.append(None)
            return Constant(torch.empty(tensor_result(value, node.name).shape, dtype=value.dtype))
        name = numbered(plain_name(node.name), {*self.targets, *self.declared}.__contains__)
        self.names.append(name)
        found = _declared(name, value, self.p.input)
        self.declared[name] = found.held if isinstance(found, Foreign) else found
        return found


def _declared(
    name: str, like: torch.Tensor, declare: Callable[[str, Sequence[int], str], Handle]
) -> Handle | Foreign:
    """A tensor from outside, held in a type that programs have."""
    tensor_result(like, name)
    foreign = like.dtype in HOLDERS
    held = hold(torch.empty_like(like, device="meta")) if foreign else like
    dtype = require_dtype(dtype_name(held.dtype), name)
    handle = declare(name, tuple(held.shape), dtype)
    return Foreign(handle, str(like.dtype)) if foreign else handle
