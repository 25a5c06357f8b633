"""Layers that do the same as another one are exported once.

In: a module and which of its modules are its layers. `find_kinds` runs it on tensors without
values, and compares what layers do, operator by operator: layers of one kind do the same to what
they are given, each with parameters and buffers of its own. `folded` lets the module export with
one node in the place of each but the first of a kind; `unfold` puts copies of the first one's
nodes there, so that the graph is the one of all layers. Used by exported.py; next on the walk:
conversion/converter.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmega.torch_import.attributes import kept_attributes
from distmega.torch_import.operators import custom_ops

Layer = tuple[str, ...]
"""Paths of a module and of others that belong to it alone, in the same order for all layers."""

MAX_COMPARED = 64
"""Elements of constants that are compared by their values."""


@dataclass(slots=True, eq=False)
class _Call:
    """What a layer was given and gave, as leaves, and the operators it called: which, how its
    arguments are nested, these as leaves, results as leaves.
    """

    given: list[Any]
    given_spec: pytree.TreeSpec
    ops: list[tuple[Any, pytree.TreeSpec, list[Any], list[Any]]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    results_spec: pytree.TreeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers that do the same.

    layers: the first one, which is exported, and the others. varying: which of their arguments,
    as leaves, are not the same tensor for all of them. made: which of their results they make;
    results: shapes and types of these. template: their results as leaves, an int for an argument
    that comes back, and how they are nested.
    """

    layers: tuple[Layer, ...]
    varying: tuple[int, ...]
    made: tuple[int, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    template: tuple[object, ...]
    spec: pytree.TreeSpec


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the operators of each layer. inside: tensors that layers made, by id; read: those
    of them that are read outside. All tensors are kept, so that ids stay theirs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: _Call | None = None
        self.inside: dict[int, Tensor] = {}
        self.read: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        if self.current is None:
            self.read.update(id(each) for each in leaves if id(each) in self.inside)
            return out
        made = pytree.tree_leaves(out)
        self.current.ops.append((func, spec, leaves, made))
        self.inside.update({id(each): each for each in made if isinstance(each, Tensor)})
        return out


@dataclass(slots=True)
class _Comparison:
    """Names of the module's tensors, by id, and tensors that layers made and did not give back."""

    names: Mapping[int, tuple[str, ...]]
    hidden: set[int]

    def varying(self, first: tuple[Layer, _Call], other: tuple[Layer, _Call]) -> set[int] | None:
        """Leaves of the arguments that are not the same tensor for two layers that do the same;
        None if they do not.
        """
        (one, a), (two, b) = first, other
        if a.given_spec != b.given_spec or a.results_spec != b.results_spec:
            return None
        pairs: dict[int, int] = {}
        varying = set()
        for position, (x, y) in enumerate(zip(a.given, b.given, strict=True)):
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x is not y:
                if not _same_layout(x, y) or pairs.setdefault(id(x), id(y)) != id(y):
                    return None
                varying.add(position)
            elif not _equal(x, y):
                return None
        if len(a.ops) != len(b.ops):
            return None
        for mine, others in zip(a.ops, b.ops, strict=True):
            if mine[:2] != others[:2]:
                return None
            for x, y in zip(mine[2], others[2], strict=True):
                if not self._same(x, y, pairs, one, two):
                    return None
            if _overwrites_outside(mine, pairs, self._own, one):
                return None
            for x, y in zip(mine[3], others[3], strict=True):
                if isinstance(x, Tensor) and not self._own(x, one):
                    pairs.setdefault(id(x), id(y))
        results = zip(a.results, b.results, strict=True)
        same = all(self._same(x, y, pairs, one, two) for x, y in results)
        return varying if same else None

    def _same(self, x: Any, y: Any, pairs: Mapping[int, int], one: Layer, two: Layer) -> bool:
        """Whether two leaves stand for the same thing in two layers."""
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            return _equal(x, y)
        if id(x) in pairs:
            return pairs[id(x)] == id(y)
        own = self._own(x, one)
        if own:
            return own == self._own(y, two) and _same_layout(x, y)
        if x is y:
            return id(x) not in self.hidden
        known = not isinstance(x, FakeTensor) and not isinstance(y, FakeTensor)
        small = max(x.numel(), y.numel()) <= MAX_COMPARED
        return (
            known and small and not self._own(y, two) and _same_layout(x, y) and torch.equal(x, y)
        )

    def _own(self, x: Tensor, layer: Layer) -> tuple[tuple[int, str], ...]:
        """Names of a tensor within a layer; none for one that others have as well."""
        found = []
        for name in self.names.get(id(x), ()):
            inner = _inner_name(name, layer)
            if inner is None:
                return ()
            found.append(inner)
        return tuple(found)


def find_kinds(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layers: Sequence[Layer],
) -> list[Kind]:
    """Kinds of two layers or more. The module runs once, on tensors without values; of each layer
    that is called more or less than once nothing is known.
    """
    recorder, calls = _Recorder(), dict[Layer, list[_Call]]()

    def enter(layer: Layer, _: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.current = _Call(*pytree.tree_flatten((args, dict(kwargs))))
        calls.setdefault(layer, []).append(recorder.current)

    def leave(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        assert recorder.current is not None
        call, recorder.current = recorder.current, None
        call.results, call.results_spec = pytree.tree_flatten(out)

    handles = []
    for layer in layers:
        inner = module.get_submodule(layer[0])
        before = partial(enter, layer)
        handles.append(inner.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(inner.register_forward_hook(leave, with_kwargs=True))
    try:
        with without_values(module), recorder:
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    given_back = {id(x) for made in calls.values() for call in made for x in call.results}
    if recorder.read - given_back:
        return []
    once = [(layer, made[0]) for layer, made in calls.items() if len(made) == 1]
    comparison = _Comparison(_names(module), set(recorder.inside) - given_back)
    return _group(once, comparison)


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """Calls of the module compute shapes alone, and leave its attributes as they were."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with kept_attributes(module), fake, torch.no_grad():
        yield


def _group(calls: Sequence[tuple[Layer, _Call]], comparison: _Comparison) -> list[Kind]:
    groups: list[tuple[list[tuple[Layer, _Call]], set[int]]] = []
    for call in calls:
        for members, varying in groups:
            found = comparison.varying(members[0], call)
            if found is not None:
                members.append(call)
                varying |= found
                break
        else:
            groups.append(([call], set()))
    kinds = (_kind(members, varying) for members, varying in groups if len(members) > 1)
    return [kind for kind in kinds if kind is not None]


def _kind(members: Sequence[tuple[Layer, _Call]], varying: set[int]) -> Kind | None:
    """None where results are something else than arguments, numbers and new tensors."""
    call = members[0][1]
    made_here = {id(x) for *_, made in call.ops for x in made}
    at = {id(x): position for position, x in enumerate(call.given) if not _is_plain(x)}
    template: list[object] = []
    made: list[int] = []
    for position, x in enumerate(call.results):
        if id(x) in at:
            template.append(at[id(x)])
        elif isinstance(x, Tensor) and id(x) in made_here and x.is_contiguous():
            template.append(None)
            made.append(position)
        elif x is None:
            template.append(None)
        else:
            return None
    results = tuple((tuple(call.results[n].shape), call.results[n].dtype) for n in made)
    assert call.results_spec is not None
    if not varying or not made:
        return None
    return Kind(
        layers=tuple(layer for layer, _ in members),
        varying=tuple(sorted(varying)),
        made=tuple(made),
        results=results,
        template=tuple(template),
        spec=call.results_spec,
    )


@contextmanager
def folded(module: nn.Module, kinds: Sequence[Kind]) -> Iterator[None]:
    """While it lasts, the first layer of each kind marks what goes in and comes out, and the others
    call one operator.
    """
    changed = []
    for number, kind in enumerate(kinds):
        for position, layer in enumerate(kind.layers):
            inner = module.get_submodule(layer[0])
            forward = inner.forward
            inner.forward = (
                partial(_stand_in, kind, f"{number}.{position}")
                if position
                else partial(_marked, kind, str(number), forward)
            )
            changed.append(inner)
    try:
        yield
    finally:
        for inner in changed:
            del inner.forward


def _marked(kind: Kind, name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for position in kind.varying:
        leaves[position] = custom_ops.mark(leaves[position], f"{name} in {position}")
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    results = pytree.tree_leaves(forward(*args, **kwargs))
    made = [custom_ops.mark(results[n], f"{name} out {n}") for n in kind.made]
    return _results(kind, leaves, made)


def _stand_in(kind: Kind, name: str, *args: Any, **kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    given = [leaves[position] for position in kind.varying]
    made = [
        custom_ops.stand_in(given, f"{name} out {n}", shape, dtype)
        for n, (shape, dtype) in zip(kind.made, kind.results, strict=True)
    ]
    return _results(kind, leaves, made)


def _results(kind: Kind, leaves: Sequence[Any], made: Sequence[Tensor]) -> Any:
    found = [leaves[each] if isinstance(each, int) else None for each in kind.template]
    for position, x in zip(kind.made, made, strict=True):
        found[position] = x
    return pytree.tree_unflatten(found, kind.spec)


def unfold(exported: ExportedProgram, kinds: Sequence[Kind]) -> None:
    """Puts the nodes of each kind's first layer in the places of the others, as theirs."""
    graph = exported.graph
    specs = exported.graph_signature.input_specs
    (last,) = (node for node in graph.nodes if node.op == "output")
    made_specs = exported.graph_signature.output_specs
    firsts = list(zip(made_specs, last.args[0], strict=True))
    updates: list[tuple[OutputSpec, Any]] = []
    given = [node for node in graph.nodes if node.op == "placeholder"]
    holders = dict(zip(given, specs, strict=True))
    stand_ins, marks = _special(graph)
    nodes = list(graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    for number, kind in enumerate(kinds):
        inside = {position: marks[f"{number} in {position}"] for position in kind.varying}
        outside = [marks[f"{number} out {n}"] for n in kind.made]
        start = min(order[node] for node in inside.values())
        stop = max(order[node] for node in outside)
        special = {*inside.values(), *outside}
        body = [node for node in nodes[start:stop] if node not in special]
        for position, layer in enumerate(kind.layers[1:], 1):
            renamed = _Renamed(kind.layers[0], layer)
            stood = [stand_ins[f"{number}.{position} out {n}"] for n in kind.made]
            given_nodes: Any = stood[0].args[0]
            env = dict(zip(inside.values(), given_nodes, strict=True))
            env.update(_own_placeholders(holders, renamed))
            env.update(_copied(graph, stood[0], body, env, renamed))
            for node, mark in zip(stood, outside, strict=True):
                source = _source(mark)
                node.replace_all_uses_with(env.get(source, source))
                graph.erase_node(node)
            updates += _own_updates(firsts, env, renamed)
        for mark in special:
            mark.replace_all_uses_with(_source(mark))
            graph.erase_node(mark)
    _put_outputs(exported, last, [*updates, *zip(made_specs, last.args[0], strict=True)])
    if kinds:
        graph.eliminate_dead_code()


def _source(mark: fx.Node) -> fx.Node:
    """What a mark stands behind."""
    source = mark.args[0]
    assert isinstance(source, fx.Node)
    return source


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Names of one layer's as those of another."""

    old: Layer
    new: Layer

    def __call__(self, name: str) -> str | None:
        """None for a name that is not the old layer's."""
        found = _inner_name(name, self.old)
        return None if found is None else f"{self.new[found[0]]}{found[1]}"


def _special(graph: fx.Graph) -> tuple[dict[str, fx.Node], dict[str, fx.Node]]:
    """Nodes that stand for layers, and marks, by their names."""
    operators = torch.ops.distmega
    stand_ins, marks = {}, {}
    for node in graph.nodes:
        if node.target is operators.stand_in.default:
            stand_ins[node.args[1]] = node
        elif node.target is operators.mark.default:
            marks[node.args[1]] = node
    return stand_ins, marks


def _own_placeholders(
    holders: Mapping[fx.Node, InputSpec], renamed: _Renamed
) -> dict[fx.Node, fx.Node]:
    """Placeholders of the first layer's parameters and buffers -> those of another's; constants are
    the same for both.
    """
    held = (InputKind.PARAMETER, InputKind.BUFFER)
    by_target = {
        spec.target: node
        for node, spec in holders.items()
        if spec.target is not None and spec.kind in held
    }
    found = {}
    for target, node in by_target.items():
        other = renamed(target)
        if other is not None:
            found[node] = by_target[other]
    return found


def _copied(
    graph: fx.Graph,
    before: fx.Node,
    body: Sequence[fx.Node],
    env: Mapping[fx.Node, fx.Node],
    renamed: _Renamed,
) -> dict[fx.Node, fx.Node]:
    """Nodes -> copies of them before another node."""
    found = dict(env)
    with graph.inserting_before(before):
        for node in body:
            copy = graph.node_copy(node, lambda each: found.get(each, each))
            stack = node.meta.get("nn_module_stack")
            if stack:
                copy.meta["nn_module_stack"] = {
                    key: (renamed(path) or path, kind) for key, (path, kind) in stack.items()
                }
            found[node] = copy
    return found


def _own_updates(
    outputs: Sequence[tuple[OutputSpec, Any]], env: Mapping[fx.Node, fx.Node], renamed: _Renamed
) -> list[tuple[OutputSpec, Any]]:
    """Updates of another layer's buffers, as the first one's are."""
    found = []
    for spec, node in outputs:
        update = spec.kind is OutputKind.BUFFER_MUTATION and spec.target is not None
        other = renamed(str(spec.target)) if update else None
        if other is not None:
            value = env[node]
            found.append((replace(spec, arg=TensorArgument(name=value.name), target=other), value))
    return found


def _put_outputs(
    exported: ExportedProgram, last: fx.Node, outputs: Sequence[tuple[OutputSpec, Any]]
) -> None:
    """Updates in the order of what they update, then the others."""
    signature = exported.graph_signature
    order = {spec.target: position for position, spec in enumerate(signature.input_specs)}

    def position(output: tuple[OutputSpec, Any]) -> int:
        update = output[0].kind is OutputKind.BUFFER_MUTATION
        return order[output[0].target] if update else len(order)

    placed = sorted(outputs, key=position)
    signature.output_specs[:] = [spec for spec, _ in placed]
    last.args = (tuple(node for _, node in placed),)


def _names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Names of parameters and buffers by the id of the tensor."""
    found: dict[int, tuple[str, ...]] = {}
    held = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in held:
        found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found


def _inner_name(name: str, layer: Layer) -> tuple[int, str] | None:
    """Which of a layer's modules a name is of, and the rest of it; None for another's."""
    for number, path in enumerate(layer):
        if name == path or name.startswith(f"{path}."):
            return number, name[len(path) :]
    return None


def _overwrites_outside(
    op: tuple[Any, pytree.TreeSpec, list[Any], list[Any]],
    pairs: Mapping[int, int],
    own: Any,
    layer: Layer,
) -> bool:
    """Whether an operator overwrites what is neither the layer's own nor made by it."""
    func, _, given, _ = op
    if not func._schema.is_mutable:
        return False
    x = given[0]
    return not isinstance(x, Tensor) or not (id(x) in pairs or own(x, layer))


def _same_layout(x: Tensor, y: Tensor) -> bool:
    return (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def _is_plain(x: object) -> bool:
    return x is None or isinstance(x, bool | int | float | str)


def _equal(x: object, y: object) -> bool:
    """Whether two leaves that are not both tensors are the same."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return x is y
    return x is y or (type(x) is type(y) and _is_comparable(x) and x == y)


def _is_comparable(x: object) -> bool:
    return _is_plain(x) or isinstance(
        x, torch.dtype | torch.device | torch.layout | torch.memory_format
    )
