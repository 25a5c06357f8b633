"""What a forward puts in the place of a module's tensors: whether the next call would see the same.

In: a module, and which of its attributes are asked for. `WithAttributes` is the module with results
more, what these are behind a call; `changed` says of the exported one which of them another call
would find changed. Used by exported.py: a program has the tensors of capture in each call.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument

from distmega.hostir.library.torch_types import in_stated_types

Attribute = tuple[str, str]
"""The path of a module in another one, and the name of an attribute there."""

SAME = (
    "aten.alias.default",
    "aten.clone.default",
    "aten.detach.default",
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten._to_copy.default",
)
"""Operators that give the numbers of their first operand in their order, if they keep its type."""


class WithAttributes(nn.Module):
    """A module that gives beside its results what attributes of it are then."""

    def __init__(self, module: nn.Module, attributes: Sequence[Attribute]) -> None:
        super().__init__()
        self.module, self.attributes = module, attributes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.module(*args, **kwargs)
        return out, [self._found(path, name) for path, name in self.attributes]

    def _found(self, path: str, name: str) -> Any:
        owner = self.module
        for part in path.split(".") if path else ():
            owner = getattr(owner, part)
        found = getattr(owner, name, None)
        return found if isinstance(found, Tensor) else None  # a list would be several results


def plain_tensors(module: nn.Module) -> dict[Attribute, Tensor]:
    """Tensors that are neither parameters nor buffers."""
    return {
        (path, name): x
        for path, part in module.named_modules()
        for name, x in part.__dict__.items()
        if isinstance(x, Tensor)
    }


def buffers(module: nn.Module) -> dict[Attribute, Tensor]:
    """Buffers, under one of their names."""
    named = (name.rpartition(".") for name, _ in module.named_buffers())
    return {(path, name): module.get_submodule(path).get_buffer(name) for path, _, name in named}


def changed(exported: ExportedProgram, held: Mapping[Attribute, Tensor]) -> set[Attribute]:
    """Those of `held` for which a call puts another tensor, with other numbers as far as is known.
    exported: of WithAttributes with these, in their order.

    What is computed from plain tensors alone, and has the numbers now that stood there, does not
    change, however often it is computed. Of another shape or type, as of a table that grows, it
    changes where it is computed from inputs.
    """
    nodes = {node.name: node for node in exported.graph.nodes}
    given = _given(exported, nodes)
    found: dict[Attribute, fx.Node] = {}
    shown = exported.graph_signature.output_specs[-len(held) :]
    for (key, x), spec in zip(held.items(), shown, strict=True):
        if isinstance(spec.arg, TensorArgument):
            node = nodes[spec.arg.name]
            own = [each for each, tensor in given.items() if tensor is x]
            own += _updated(exported, own, nodes)
            if _origin(node) not in own:
                found[key] = node
    resized = {key for key, node in found.items() if not _same_form(node.meta["val"], held[key])}
    plain = exported.graph_signature.inputs_to_lifted_tensor_constants
    known = {node: x for node, x in given.items() if node.name in plain}
    computed = {key: _leaves(node) for key, node in found.items()}
    lost = {
        key
        for key, node in found.items()
        if key not in resized
        and (not computed[key] <= known.keys() or not _is_now(node, known, held[key]))
    }
    lost |= {key for key in resized if not computed[key] <= given.keys()}
    while late := {  # computed from one that the next call finds changed
        key
        for key in found.keys() - lost
        if any(known[leaf] is held[other] for leaf in computed[key] for other in lost)
    }:
        lost |= late
    return lost


def _same_form(x: Tensor, other: Tensor) -> bool:
    return (x.shape, x.dtype) == (other.shape, other.dtype)


def read_attributes(exported: ExportedProgram, held: Mapping[Attribute, Tensor]) -> set[Attribute]:
    """Those of `held` that the exported module reads."""
    nodes = {node.name: node for node in exported.graph.nodes}
    read = {id(x) for node, x in _given(exported, nodes).items() if node.users}
    return {key for key, x in held.items() if id(x) in read}


def _given(exported: ExportedProgram, nodes: Mapping[str, fx.Node]) -> dict[fx.Node, Tensor]:
    """The module's own tensors among the inputs of a program."""
    signature = exported.graph_signature
    stored = {**exported.constants, **exported.state_dict}
    targets = {
        **signature.inputs_to_lifted_tensor_constants,
        **signature.inputs_to_buffers,
        **signature.inputs_to_parameters,
    }
    return {nodes[name]: stored[target] for name, target in targets.items()}


def _updated(
    exported: ExportedProgram, own: Sequence[fx.Node], nodes: Mapping[str, fx.Node]
) -> Iterator[fx.Node]:
    """What buffers that the program has as its inputs `own` are after updates in place."""
    names = exported.graph_signature.inputs_to_buffers
    targets = {names[node.name] for node in own if node.name in names}
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.BUFFER_MUTATION and spec.target in targets:
            yield _origin(nodes[spec.arg.name])


def _origin(node: fx.Node) -> fx.Node:
    """Where the numbers of a node come from, in their order."""
    while str(node.target) in SAME and isinstance(before := node.args[0], fx.Node):
        if node.meta["val"].dtype != before.meta["val"].dtype:
            break
        node = before
    return node


def _leaves(node: fx.Node) -> set[fx.Node]:
    """Inputs of the program that a node is computed from; itself where that can't be told."""
    found, left, seen = set[fx.Node](), [node], set[fx.Node]()
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        tags = getattr(each.target, "tags", None)
        if each.op == "call_function" and tags is not None:
            if torch.Tag.nondeterministic_seeded in tags:
                return {node}
            left += each.all_input_nodes
        elif each.op == "placeholder":
            found.add(each)
        else:
            return {node}
    return found


def _is_now(node: fx.Node, known: Mapping[fx.Node, Tensor], x: Tensor) -> bool:
    """Whether a node, computed from known tensors, has the numbers of x."""
    values: dict[fx.Node, Any] = dict(known)

    def value(each: fx.Node) -> Any:
        if each not in values:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), value)
            assert callable(each.target)
            values[each] = each.target(*args, **kwargs)
        return values[each]

    try:
        with in_stated_types():
            return torch.equal(value(node), x)
    except Exception:  # of torch, as of tensors without values
        return False
