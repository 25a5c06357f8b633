"""From an exported graph to a Program: the graph is walked once, each node becomes ops.

In: an ExportedProgram (exported.py). Out: Graph, the program with what its tensors were in torch.
What depends on no input is computed at once; in-place updates of buffers become states; operators
without a rule become opaque ops, and so do regions (regions.py). Next on the walk:
operators/table.py.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from distmega.errors import CaptureError, ProgramError
from distmega.hostir.library.opaque import encode_call
from distmega.hostir.library.opaque_graph import encode_graph
from distmega.hostir.library.opaque_text import makes_tensors, operator_name
from distmega.hostir.library.torch_types import HOLDERS, dtype_name, hold
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.types import Program
from distmega.torch_import.operators import EXPRESSIONS, RULES, Rule
from distmega.torch_import.operators.build import Build, NodeResult, require_dtype
from distmega.torch_import.operators.complexes import COMPLEX, COMPLEX_RULES, is_complex
from distmega.torch_import.operators.values import (
    TENSORS,
    Constant,
    Foreign,
    Spread,
    Value,
    any_value,
    map_values,
    value_dtype,
)
from distmega.torch_import.regions import (
    CHECKS,
    NUMBERS,
    OpaqueRegion,
    has_open_shape,
    host_reads,
    number_sources,
    order_nodes,
)
from distmega.torch_import.source_lines import line_of_node

IGNORED = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar",
           "aten.sym_constrain_range", "aten.sym_constrain_range_for_size")  # fmt: skip


TO_NUMBER = (math.trunc, torch.sym_int, torch.sym_float)
OF_NUMBERS = {
    operator.add: "{0} + {1}", operator.sub: "{0} - {1}", operator.mul: "{0} * {1}",
    operator.truediv: "{0} / {1}", operator.neg: "-{0}",
}  # fmt: skip
"""Functions of numbers that inputs decide."""

VIEWS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default
}
"""What does for views of inputs with other strides than those at capture."""

CONTRACTING = ("aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm")
"""Operators of which torch wants operands of one type."""
COMPUTED = ("aten.add", "aten.sub", "aten.rsub", "aten.div", "aten.clamp", "aten.clamp_min",
            "aten.clamp_max")  # fmt: skip
"""Operators besides expressions that may read numbers which the data decide."""

OF_STATES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
"""Results that are new values of what the module holds."""

TENSOR_VALUES = (Handle, Constant, Spread)

UNFILLED = ("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided",
            "aten.new_empty", "aten.new_empty_strided")  # fmt: skip
"""Operators that leave memory as they find it, which is another content on each rank."""

COMPUTING = ("aten.linear", "aten.matmul", "aten.softmax", "aten.scaled_dot_product_attention",
             "distmega.attend", "distmega.attend_rows")  # fmt: skip
"""Operators besides expressions whose results share no storage with what they read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A program, and where its tensors come from.

    inputs: in the order of the module's flat inputs, None for one that is no tensor or has no
    elements; one of a type that programs lack comes as `hold` gives it. outputs: of the module's
    flat outputs, Output, Shared, Empty, Late, or a value that is always the same. targets: weight
    or state -> parameter or buffer of the module. constants: weights known at capture. updated:
    output -> input that the module overwrites. opaque: operators that torch runs, and how often.
    ending: what torch runs behind the program, for results that have no shape before.
    """

    program: Program
    inputs: tuple[str | None, ...]
    outputs: tuple[object, ...]
    targets: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    updated: Mapping[str, str]
    opaque: Counter[str]
    ending: "Ending | None" = None


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the module that is a tensor of the program. dtype: torch's name of its element
    type, where programs lack it. is_number: the module gives what it holds as a number.
    """

    name: str
    dtype: str = ""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """A result of the module that the graph's ending gives. position: among what that gives."""

    position: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Operators that torch runs behind a program. call: as encode_graph gives it. operands: names
    of what it reads, the program's inputs as they came, its weights, and outputs.
    """

    call: str
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """A result of the module that lies in the memory of an input, as a view of it or the input
    itself. position: of the input among the flat ones. views: what leads from it to the result, a
    function of the tensor and further arguments each.
    """

    position: int
    views: tuple[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class Empty:
    """A result of the module without elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Continue = Callable[[ProgramBuilder, Mapping[str, Handle], Sequence[Handle]], Sequence[Handle]]
"""More ops, given the inputs by name and the module's results; gives the program's outputs."""


def convert(exported: ExportedProgram, name: str, more: Continue | None = None) -> Graph:
    """The program of an exported module. CaptureError for what programs can't hold. more: what
    comes behind the module's results, which must be tensors, in place of these.
    """
    return _Converter(exported, name, more).run()


@dataclass(slots=True)
class _Operands:
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
class _Converter:
    exported: ExportedProgram
    name: str
    more: Continue | None = None
    values: dict[fx.Node, Value] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    states: dict[str, Handle] = field(default_factory=dict)
    declared_inputs: dict[str, Handle] = field(default_factory=dict)
    inputs: list[str | None] = field(default_factory=list)
    opaque: Counter[str] = field(default_factory=Counter)
    order: dict[fx.Node, int] = field(default_factory=dict)
    num_named: Counter[str] = field(default_factory=Counter)
    b: Build = field(init=False)
    tied: dict[tuple[object, ...], str] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    late: dict[fx.Node, OpaqueRegion] = field(default_factory=dict)
    """Results of open shapes, each with the region that gives it."""
    ran: set[fx.Node] = field(default_factory=set)
    """What runs within regions."""

    def run(self) -> Graph:
        p = ProgramBuilder(self.name)
        self.b = Build(p)
        nodes = list(self.exported.graph.nodes)
        specs = iter(self.exported.graph_signature.input_specs)
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = self.placeholder(node, next(specs))
        known = {node for node, value in self.values.items() if not _varies(value)}
        (last,) = (node for node in nodes if node.op == "output")
        parts = list(order_nodes(nodes, known, _computes))
        self.number_nodes(parts, last)
        for part in parts:
            first = part.nodes[0] if isinstance(part, OpaqueRegion) else part
            try:
                if isinstance(part, OpaqueRegion):
                    self.run_region(part)
                else:
                    self.values[part] = self.call(part)
            except (CaptureError, ProgramError) as error:
                raise _located(error, first) from error
        return self.finish(last)

    def number_nodes(self, parts: Sequence[fx.Node | OpaqueRegion], last: fx.Node) -> None:
        """In the order in which they run; of a region that gives results at the end, at the end."""
        for position, part in enumerate(parts):
            if isinstance(part, OpaqueRegion):
                ends = any(last in node.users and _is_open(node) for node in part.nodes)
                self.order |= dict.fromkeys(part.nodes, len(parts) if ends else position)
            else:
                self.order[part] = position
        self.order[last] = len(parts)

    def placeholder(self, node: fx.Node, spec: Any) -> Value:
        """A parameter, a buffer, a constant or an input."""
        used = bool(node.users)
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                return self.stored(node, spec) if used else None
            case InputKind.CONSTANT_TENSOR:
                return Constant(self.exported.constants[spec.target])
            case InputKind.USER_INPUT:
                return self.user_input(node)
        raise CaptureError(
            f"{self.name}: an input of kind {spec.kind.name}{_effects(node)}",
            expected="tensors, parameters and buffers",
            remedy="keep other objects out of the module's forward",
        )

    def stored(self, node: fx.Node, spec: Any) -> Value:
        """A parameter or buffer: a weight, or a state where the module updates it; a buffer that no
        checkpoint holds is known.
        """
        signature = self.exported.graph_signature
        updated = {each.target for each in signature.output_specs if each.kind in OF_STATES}
        fixed = spec.kind is InputKind.BUFFER and spec.target in signature.non_persistent_buffers
        held = {**self.exported.constants, **self.exported.state_dict}[spec.target]
        if fixed and spec.target not in updated and not held.is_meta:
            return Constant(held)
        name, like = _plain(spec.target), node.meta["val"]
        if 0 in like.shape:
            return Constant(torch.empty(like.shape, dtype=held.dtype))
        self.targets[name] = spec.target
        if spec.target not in updated:
            return self.declared(name, like, self.b.p.weight)
        state = self.declared(name, like, self.b.p.state)
        self.states[spec.target] = state.held if isinstance(state, Foreign) else state
        return state

    def user_input(self, node: fx.Node) -> Value:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.inputs.append(None)
            return value
        self.positions[node.name] = len(self.inputs)
        if 0 in value.shape:
            self.inputs.append(None)
            return Constant(torch.empty(_as_result(value, node.name).shape, dtype=value.dtype))
        name = _plain(node.name)
        self.inputs.append(name)
        found = self.declared(name, value, self.b.p.input)
        self.declared_inputs[name] = found.held if isinstance(found, Foreign) else found
        return found

    def declared(
        self, name: str, like: torch.Tensor, declare: Callable[[str, Sequence[int], str], Handle]
    ) -> Handle | Foreign:
        """A tensor from outside, held in a type that programs have."""
        _as_result(like, name)
        foreign = like.dtype in HOLDERS
        held = hold(torch.empty_like(like, device="meta")) if foreign else like
        dtype = require_dtype(dtype_name(held.dtype), name)
        handle = declare(name, tuple(held.shape), dtype)
        return Foreign(handle, str(like.dtype)) if foreign else handle

    def call(self, node: fx.Node) -> Value:
        """The value of an operator's result."""
        if getattr(node.target, "__name__", "") == "getitem":
            source, position = node.args
            found = self.values[source]  # type: ignore[index]
            assert isinstance(found, list | tuple | dict), node
            return found[position]  # type: ignore[index]
        if not isinstance(node.target, torch._ops.OpOverload):
            return self.plain_call(node)
        packet = _packet(node)
        if packet in IGNORED or (not node.users and not node.target._schema.is_mutable):
            return None
        args, kwargs = self.given(node.args), self.given(node.kwargs)
        if self.is_known(node, args, kwargs):
            return self.evaluate(node, args, kwargs)
        if packet == "aten._local_scalar_dense":
            return self.number(node, args[0])
        results = _results(node)
        if isinstance(node.meta.get("val"), torch.Tensor) and 0 in results[0].shape:
            return Constant(torch.empty(results[0].shape, dtype=node.meta["val"].dtype))
        self.b.start(self.op_name(node, packet), results)
        if packet == "distmega.append_rows":
            return self.append(node, args)
        found = self.stated(node.target, packet, args, kwargs)
        return self.as_opaque(node, args, kwargs) if found is NotImplemented else found

    def op_name(self, node: fx.Node, packet: str) -> str:
        """The module that a node belongs to and its operator, numbered where it stands there more
        than once; so that equal modules have equal names but for their own.
        """
        path = _path(node)
        if not path:
            return _plain(node.name)
        name = _plain(f"{path}.{packet.rpartition('.')[2].strip('_')}")
        self.num_named[name] += 1
        return name if self.num_named[name] == 1 else f"{name}#{self.num_named[name]}"

    def number(self, node: fx.Node, value: Value) -> Value:
        """The number that a tensor holds: a tensor of no dims, in the type that numbers have."""
        self.b.start(_plain(node.name), [_number(node)])
        assert isinstance(value, Handle | Spread), value
        return self.b.cast(self.b.reshape(value, ()), self.b.dtype)

    def plain_call(self, node: fx.Node) -> Value:
        """A function of numbers; CaptureError for torch's control flow."""
        args = self.given(node.args)
        if callable(node.target) and not any_value(args, _is_tensor):
            return node.target(*args)
        self.b.start(_plain(node.name), [_number(node)])
        if node.target in TO_NUMBER:
            return self.b.cast(args[0], self.b.dtype)
        if node.target in OF_NUMBERS:
            return self.b.pointwise(OF_NUMBERS[node.target], *args)
        raise CaptureError(
            f"{self.name}: {_path(node) or node.name} calls {node.target}",
            expected="operators of torch",
            remedy="capture the parts of the module one by one",
        )

    def stated(
        self, target: Any, packet: str, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        """By its rule; NotImplemented without one."""
        if 0 in self.b.shape:
            return NotImplemented
        if any_value((args, kwargs), is_complex) or self.b.dtype in COMPLEX:
            if packet not in COMPLEX_RULES:
                return NotImplemented
            return COMPLEX_RULES[packet](self.b, **_bound(target, args, kwargs))
        if any_value((args, kwargs), _is_foreign) or self.b.dtype not in ITEM_BYTES:
            return NotImplemented
        named = _bound(target, args, kwargs)
        if packet in CONTRACTING:
            self.require_one_type(packet, named)
        overload = f"{packet}.{target._overloadname}"
        for key in (overload, packet):
            if key in EXPRESSIONS:
                names = list(dict.fromkeys(re.findall(r"{(\w+)}", EXPRESSIONS[key])))
                text = re.sub(r"{(\w+)}", lambda m: f"{{{names.index(m[1])}}}", EXPRESSIONS[key])  # noqa: B023
                return self.b.pointwise(text, *(named[each] for each in names))
            if key in RULES:
                rule: Rule = RULES[key]
                return rule(self.b, **named)
        return NotImplemented

    def require_one_type(self, packet: str, named: Mapping[str, Value]) -> None:
        """CaptureError for products of different types, which torch refuses when it runs them."""
        types = [value_dtype(each) for each in named.values() if isinstance(each, TENSOR_VALUES)]
        if len({*types}) > 1:
            raise CaptureError(
                f"{packet} in {self.b.base or self.name} of {', '.join(types)}",
                expected="operands of one type",
                remedy="give example inputs of the type of the weights, or convert in the module",
            )

    def is_known(self, node: fx.Node, args: Any, kwargs: Any) -> bool:
        """Whether a node depends on no input, weight or state, and gives the same every time."""
        if torch.Tag.nondeterministic_seeded in _tags(node):
            return False
        return not any_value((args, kwargs), _varies)

    def given(self, arguments: Any) -> Any:
        """Arguments of a node with the values of other nodes in their places."""
        return map_values(
            arguments, lambda each: self.values[each] if isinstance(each, fx.Node) else each
        )

    def evaluate(self, node: fx.Node, args: Any, kwargs: Any) -> Value:
        """What it gives, computed here and now."""
        known = map_values(args, _known_tensor)
        named = {
            key: torch.device("cpu") if isinstance(value, torch.device) else value
            for key, value in map_values(kwargs, _known_tensor).items()
        }
        with torch.no_grad():
            found = node.target(*known, **named)  # type: ignore[operator]
            if _packet(node) in UNFILLED:
                found.zero_()
        return map_values(
            found, lambda each: Constant(each) if isinstance(each, torch.Tensor) else each
        )

    def as_opaque(self, node: fx.Node, args: Any, kwargs: Any) -> Value:
        """The operator as torch has it."""
        target = str(node.target)
        operands = _Operands()

        def position(value: object) -> tuple[int, str] | None:
            return self.operand(value, operands) if isinstance(value, TENSORS) else None

        several = not isinstance(node.meta["val"], torch.Tensor)
        kept: list[int] = [0]
        if several:
            kept = sorted({each for user in node.users if isinstance(each := user.args[1], int)})
        call = encode_call(args, kwargs, position, kept, node.target)
        values = node.meta["val"] if several else [node.meta["val"]]
        reads = host_reads([node]) or _reads_mask(node)
        found = self.run_torch(node, target, call, operands, [values[at] for at in kept], reads)
        return dict(zip(kept, found, strict=True)) if several else found[0]

    def operand(self, value: Value, operands: _Operands) -> tuple[int, str]:
        """A tensor's place among what torch reads, and its type where it is held in another."""
        if isinstance(value, Constant) and value.tensor.dtype in HOLDERS:
            held = self.b.constant(hold(value.tensor))
            value = Foreign(held, str(value.tensor.dtype))
        if isinstance(value, Foreign):
            return operands.position_of(value.held, value.dtype), value.dtype
        return operands.position_of(self.b.handle(value), ""), ""

    def run_torch(
        self,
        node: fx.Node,
        target: str,
        call: str,
        operands: _Operands,
        results: Sequence[torch.Tensor],
        reads: str,
    ) -> list[Value]:
        """An opaque op and its results, which are like these."""
        shapes, foreign = [], []
        for result in results:
            _as_result(result, node.name)
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
        for name in target.split(", "):
            self.opaque[name] += 1
        made = self.b.p.opaque(
            target, call, operands.handles, shapes, name=self.b.name(), host_reads=reads
        )
        return [
            Foreign(handle, dtype) if dtype else handle
            for handle, dtype in zip(made, foreign, strict=True)
        ]

    def run_region(self, region: OpaqueRegion) -> None:
        """Its operators as one opaque op; what has an open shape is left to the program's end."""
        inside = {*region.nodes}
        leaving = [node for node in region.nodes if not inside.issuperset(node.users)]
        late = [node for node in leaving if _is_open(node)]
        closed = [node for node in leaving if not _is_open(node)]
        for node in late:
            self.values[node], self.late[node] = Late(len(self.late)), region
        for node in closed:
            if 0 in node.meta["val"].shape:
                shape = _as_result(node.meta["val"], node.name).shape
                self.values[node] = Constant(torch.empty(shape, dtype=node.meta["val"].dtype))
        wanted = [node for node in closed if node not in self.values]
        if not wanted:
            return
        checks = [] if late else [node for node in region.nodes if str(node.target) in CHECKS]
        nodes = self.with_checks(self.with_sources([*wanted, *checks], inside, set()))
        self.ran.update(nodes)
        own = [node for node in nodes if node in inside]
        first = next((node for node in own if _names(node)), own[0])
        self.b.start(self.op_name(first, operator_name(first.target)), [])
        operands = _Operands()
        call = self.graph_text(nodes, wanted, operands)
        target = ", ".join(dict.fromkeys(filter(None, map(_names, nodes)))) or "aten.alias.default"
        found = self.run_torch(
            first, target, call, operands, [node.meta["val"] for node in wanted], host_reads(nodes)
        )
        self.values.update(zip(wanted, found, strict=True))

    def with_sources(
        self, wanted: Sequence[fx.Node], inside: Collection[fx.Node], there: Collection[fx.Node]
    ) -> list[fx.Node]:
        """Nodes of a region with all of it that they read and that is not `there`, and with what
        computes numbers for them, in the order in which they run.
        """
        found, left = set[fx.Node](), list(wanted)
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += [x for x in node.all_input_nodes if x in inside and x not in there]
        numbers = {x for x in number_sources(found) if isinstance(self.values[x], TENSORS)}
        return self.in_order(found | numbers)

    def in_order(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        """As they stand in the exported graph."""
        return [node for node in self.exported.graph.nodes if node in nodes]

    def with_checks(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """These with the graph's checks of numbers that are theirs already."""
        there, more = {*nodes}, set[fx.Node]()
        for node in self.exported.graph.nodes:
            numbers = {*number_sources([node])} if str(node.target) in CHECKS else set()
            if numbers & there and not any(map(_takes, numbers - there)):
                more |= {node, *numbers}
        return self.in_order(there | more)

    def graph_text(
        self, nodes: Sequence[fx.Node], results: Sequence[fx.Node], operands: _Operands
    ) -> str:
        """Nodes as text for torch to run. ProgramError for what text can't hold."""

        def given(node: fx.Node) -> object:
            return as_text(self.values[node])

        def as_text(value: Value) -> object:
            if isinstance(value, list | tuple):
                return [as_text(each) for each in value]
            if not isinstance(value, TENSORS):
                return value
            if isinstance(value, Constant) and value.tensor.numel() == 0:
                return {"empty": [list(value.tensor.shape), str(value.tensor.dtype)]}
            return {"tensor": self.operand(value, operands)[0]}

        return encode_graph(nodes, results, given, operands.dtypes)

    def append(self, node: fx.Node, args: Sequence[Value]) -> Value:
        """New rows of a cache, in place where nobody reads the cache as it was afterwards."""
        cache, x, positions, *more = args
        old = node.args[0]
        assert isinstance(old, fx.Node)
        held = self.b.handle(cache)
        if held not in self.states.values() or self.last_read(old, node) > self.order[node]:
            return self.as_opaque(node, args, {})
        sequences = self.b.handle(more[0]) if more and more[0] is not None else None
        operands = self.b.handle(x), self.b.handle(positions)
        self.b.p.kv_append(held, *operands, sequences, name=self.b.name())
        return held

    def last_read(self, node: fx.Node, but: fx.Node) -> int:
        """Place of the last node that reads a value, through what may share its storage."""
        last_uses = [-1]
        for user in node.users:
            if user is but or _overwrites(user, node):
                continue
            last_uses.append(self.order[user])
            if self.values.get(user) is not None and _may_share(user):
                last_uses.append(self.last_read(user, but))
        return max(last_uses)

    def finish(self, last: fx.Node) -> Graph:
        """Writes states, and gives the outputs."""
        p, signature = self.b.p, self.exported.graph_signature
        named: dict[str, Handle] = {}
        outputs: list[object] = []
        updated: dict[str, str] = {}
        pending: list[tuple[Handle, Handle]] = []
        for spec, node in zip(signature.output_specs, last.args[0], strict=True):  # type: ignore[arg-type]
            value = self.values[node] if isinstance(node, fx.Node) else node
            if isinstance(value, Late):
                outputs.append(value)
                continue
            if spec.kind in OF_STATES:
                self.b.start(f"{_plain(spec.target)}.new", _results(node))
                if spec.target in self.states:
                    value = value.held if isinstance(value, Foreign) else value
                    pending.append((self.own(value), self.states[spec.target]))
                continue
            if not isinstance(value, TENSORS) or self.more is not None:
                outputs.append(value)
                continue
            if spec.kind is not OutputKind.USER_INPUT_MUTATION:
                known = self.shared(node) or _without_elements(value)
                if known is not None:
                    outputs.append(known)
                    continue
            self.b.start(f"out.{len(named)}", [])
            dtype = value.dtype if isinstance(value, Foreign) else ""
            handle = self.own(value.held if isinstance(value, Foreign) else value)
            named[handle.name] = handle
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                updated[handle.name] = _plain(spec.target)
            else:
                is_number = isinstance(node.meta.get("val"), NUMBERS)
                outputs.append(Output(handle.name, dtype, is_number))
        if self.more is not None:
            results = [self.b.handle(self.closed(node)) for node in self.user_results(last)]
            declared = {name: self.declared_inputs[name] for name in self.inputs if name}
            named = {handle.name: handle for handle in self.more(p, declared, results)}
        ending = self.end(named) if self.late else None
        for handle, state in pending:
            if handle is not state:
                p.set(handle, into=state, name=f"{state.name}.update")
        return Graph(
            program=p.build(*named.values()),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            targets=self.targets,
            constants=self.b.constants,
            updated=updated,
            opaque=self.opaque,
            ending=ending,
        )

    def closed(self, node: fx.Node) -> Value:
        """A result that is a tensor of the program. CaptureError for another."""
        value = self.values[node]
        if isinstance(value, Late):
            raise CaptureError(
                f"{self.name} gives {node.name} of the shape {tuple(node.meta['val'].shape)}",
                expected="results of shapes that follow from those of the inputs",
                remedy="capture the module itself: distmega.capture(module, inputs)",
            )
        return value

    def end(self, named: dict[str, Handle]) -> Ending:
        """What gives the results of open shapes; adds what it reads to the outputs by name."""
        there = {node for node, value in self.values.items() if isinstance(value, TENSORS)}
        checks = [
            node
            for region in dict.fromkeys(self.late.values())
            for node in region.nodes
            if str(node.target) in CHECKS
        ]
        inside = {node for region in self.late.values() for node in region.nodes}
        nodes = self.with_checks(self.with_sources([*self.late, *checks], inside, there))
        seeded = (x for x in nodes if torch.Tag.nondeterministic_seeded in _tags(x))
        if again := next((node for node in seeded if node in self.ran), None):
            raise CaptureError(
                f"{self.name}: {again.target} behind results and operators of the program",
                expected="random numbers of a shape that data decide for one of them alone",
                remedy="sample them in the module for all elements, and choose among these",
            )
        operands = _Operands()
        call = self.graph_text(nodes, list(self.late), operands)
        for name in dict.fromkeys(filter(None, map(_names, nodes))):
            self.opaque[name] += 1
        read: list[str] = []
        for handle in operands.handles:
            if handle.tensor.role not in ("input", "weight") or self.b.p.is_view(handle):
                self.b.start(f"end.{len(read)}", [])
                handle = self.own(handle)
                named[handle.name] = handle
            read.append(handle.name)
        return Ending(call, tuple(read))

    def shared(self, node: fx.Node) -> Shared | None:
        """Of a result that is a view of an input as the module leaves it, or the input itself."""
        signature = self.exported.graph_signature
        views: list[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]] = []
        while True:
            overwritten = signature.user_inputs_to_mutate
            if node.name in overwritten:
                return Shared(self.positions[overwritten[node.name]], tuple(reversed(views)))
            if node.name in self.positions and node.name not in overwritten.values():
                return Shared(self.positions[node.name], tuple(reversed(views)))
            source = _viewed(node)
            if source is None or not callable(node.target):
                return None
            views.append((VIEWS.get(node.target, node.target), node.args[1:], node.kwargs))
            node = source

    def user_results(self, last: fx.Node) -> list[fx.Node]:
        """Nodes that are results of the module itself."""
        specs = self.exported.graph_signature.output_specs
        pairs = zip(specs, last.args[0], strict=True)  # type: ignore[arg-type]
        return [
            node
            for spec, node in pairs
            if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, fx.Node)
        ]

    def own(self, value: Value) -> Handle:
        """A handle in storage of its own: no view, which a state below it could change."""
        handle = self.b.handle(value)
        if handle in self.states.values():
            return (
                handle if self.b.base.endswith(".new") else self.b.p.set(handle, name=self.b.name())
            )
        if handle.tensor.role != "temp" or self.b.p.is_view(handle):
            return self.b.p.set(handle, name=self.b.name())
        return handle


def _bound(target: Any, args: Sequence[Value], kwargs: Mapping[str, Value]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, without those left at None."""
    named = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value() and argument.default_value is not None:
            named[argument.name] = argument.default_value
    return named


def _number(node: fx.Node) -> NodeResult:
    """What stands for a number that inputs decide."""
    return NodeResult((), "f64" if isinstance(node.meta.get("val"), torch.SymFloat) else "i64")


def _results(node: fx.Node) -> list[NodeResult]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    several = value if isinstance(value, list | tuple) else [value]
    return [_as_result(each, node.name) for each in several if isinstance(each, torch.Tensor)]


def _as_result(value: torch.Tensor, name: str) -> NodeResult:
    """Shape and type. CaptureError for a shape that isn't known, and for a sparse tensor."""
    if value.layout is not torch.strided:
        raise CaptureError(
            f"{name} is a {str(value.layout).removeprefix('torch.')} tensor",
            expected="dense tensors",
            remedy="use to_dense() before, or keep this part out of what is captured",
        )
    if not all(type(extent) is int for extent in value.shape):
        raise CaptureError(
            f"{name} has the shape {tuple(value.shape)}",
            expected="shapes that follow from those of the inputs",
            remedy="capture the parts before and after it one by one",
        )
    return NodeResult(tuple(value.shape), dtype_name(value.dtype))


def _plain(name: str) -> str:
    """A name that programs allow."""
    plain = re.sub(r"[^\w./@#-]", "_", name)
    return plain if re.match(r"\w", plain) and plain not in ("return", "program") else f"x{plain}"


def _located(error: CaptureError | ProgramError, node: fx.Node) -> CaptureError:
    """The error with the operator that it is about, and the line of the module that calls it."""
    name = "" if _packet(node) in error.found else f", in {node.target}"
    where = line_of_node(node.meta.get("stack_trace") or "")
    return CaptureError(f"{error.found}{name}{where}", expected=error.expected, remedy=error.remedy)


def _effects(node: fx.Node) -> str:
    """Operators that have effects beside the graph, which their order by tokens shows."""
    users = [user for user in node.users if "with_effects" in str(user.target)]
    return "".join(
        f", for {user.args[1]}{line_of_node(user.meta.get('stack_trace') or '')}" for user in users
    )


def _packet(node: fx.Node) -> str:
    """The name of a node's operator, without that of its overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.replace("::", "."))
    return str(target)


def _path(node: fx.Node) -> str:
    """The module that a node belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).removeprefix("L.self.").strip(".")


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, or a part of several views; None for another node, and where more
    tensors decide which view.
    """
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or len(node.all_input_nodes) != 1:
        return None
    if node.target is operator.getitem:
        return source
    schema = getattr(node.target, "_schema", None)
    returned = schema.returns[0].alias_info if schema is not None and schema.returns else None
    return source if returned is not None and not returned.is_write else None


def _without_elements(value: Value) -> Empty | None:
    if isinstance(value, Constant) and value.tensor.numel() == 0:
        return Empty(value.shape, value.tensor.dtype)
    return None


def _is_open(node: fx.Node) -> bool:
    """Whether a result has a shape only when it is there, or is a number that data decide."""
    value = node.meta.get("val")
    return isinstance(value, NUMBERS) or has_open_shape(value)


def _names(node: fx.Node) -> str:
    """The operator, "" for a part of several values and for what handles numbers alone."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return ""
    name = operator_name(target)
    return "" if name in CHECKS or name.startswith("aten.sym_") else name


def _tags(node: fx.Node) -> Collection[torch.Tag]:
    found: Collection[torch.Tag] = getattr(node.target, "tags", ())
    return found


def _takes(node: fx.Node) -> bool:
    """Whether a number is read of a tensor."""
    return isinstance(node.target, torch._ops.OpOverload)


def _computes(node: fx.Node) -> bool:
    """Whether numbers that data decide may be read as tensors: in expressions."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target in TO_NUMBER or node.target in OF_NUMBERS
    packet = node.target._schema.name.replace("::", ".")
    key = f"{packet}.{node.target._overloadname}"
    return packet in EXPRESSIONS or key in EXPRESSIONS or packet in COMPUTED


def _reads_mask(node: fx.Node) -> str:
    """What the host reads where elements are chosen by a mask."""
    indices = node.args[1] if len(node.args) > 1 else None
    chosen = indices if isinstance(indices, list | tuple) else ()
    masks = (each.meta.get("val") for each in chosen if isinstance(each, fx.Node))
    is_mask = any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in masks
    )
    return "how many a mask chooses" if is_mask else ""


def _is_tensor(value: Value) -> bool:
    return isinstance(value, TENSORS)


def _is_foreign(value: Value) -> bool:
    """Whether a tensor has a type that programs lack."""
    known = isinstance(value, Constant) and value.tensor.dtype in HOLDERS
    return known or isinstance(value, Foreign)


def _varies(value: Value) -> bool:
    return isinstance(value, Handle | Spread | Foreign)


def _known_tensor(value: Value) -> Value:
    return value.tensor if isinstance(value, Constant) else value


def _overwrites(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` stands for a copy into `node`, whose old values it does not read."""
    return str(user.target) == "aten.copy.default" and user.args[0] is node


def _may_share(node: fx.Node) -> bool:
    """Whether a node's value may be another view of what it reads."""
    schema = getattr(node.target, "_schema", None)
    packet = schema.name.replace("::", ".") if schema is not None else "getitem"
    computes = packet in EXPRESSIONS or packet in COMPUTING
    return not computes
