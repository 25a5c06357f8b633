"""What a node of an exported graph says of itself: its operator, its place in the module, its
results, what it may share or read.

In: nodes of torch.fx. Out: names, shapes, types, answers. Used by the files beside it.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch import fx

from distmega.errors import CaptureError, ProgramError
from distmega.hostir.library.opaque_text import operator_name
from distmega.hostir.library.torch_types import dtype_name
from distmega.torch_import.conversion.regions import CHECKS, NUMBERS, has_open_shape
from distmega.torch_import.operators import EXPRESSIONS
from distmega.torch_import.operators.build import NodeResult, require_dense
from distmega.torch_import.operators.values import Value
from distmega.torch_import.source_lines import line_of_node

TO_NUMBER = (math.trunc, torch.sym_int, torch.sym_float)
OF_NUMBERS = {
    operator.add: "{0} + {1}", operator.sub: "{0} - {1}", operator.mul: "{0} * {1}",
    operator.truediv: "{0} / {1}", operator.neg: "-{0}",
}  # fmt: skip
"""Functions of numbers that inputs decide."""

COMPUTED = ("aten.add", "aten.sub", "aten.rsub", "aten.div", "aten.clamp", "aten.clamp_min",
            "aten.clamp_max")  # fmt: skip
"""Operators besides expressions that may read numbers which the data decide."""

COMPUTING = ("aten.linear", "aten.matmul", "aten.softmax", "aten.scaled_dot_product_attention",
             "distmega.attend", "distmega.attend_rows")  # fmt: skip
"""Operators besides expressions whose results share no storage with what they read."""


@dataclass(slots=True)
class OpNames:
    """Names of a program's ops, by the nodes that they come from."""

    num_named: Counter[str] = field(default_factory=Counter)

    def name_of(self, node: fx.Node, packet: str) -> str:
        """The module that a node belongs to and its operator, numbered where it stands there more
        than once; so that equal modules have equal names but for their own.
        """
        path = module_path(node)
        if not path:
            return plain_name(node.name)
        name = plain_name(f"{path}.{packet.rpartition('.')[2].strip('_')}")
        self.num_named[name] += 1
        return name if self.num_named[name] == 1 else f"{name}#{self.num_named[name]}"


def plain_name(name: str) -> str:
    """A name that programs allow."""
    plain = re.sub(r"[^\w./@#-]", "_", name)
    return plain if re.match(r"\w", plain) and plain not in ("return", "program") else f"x{plain}"


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Names that programs allow, by those that they stand for: one that is allowed stays as it is,
    others keep apart from it and from each other.
    """
    names = list(names)
    found = {name: name for name in names if plain_name(name) == name}
    taken = {*found}
    for name in names:
        if name not in found:
            found[name] = numbered(plain_name(name), taken.__contains__)
            taken.add(found[name])
    return found


def numbered(name: str, is_taken: Callable[[str], bool]) -> str:
    """The name, with a number behind it where it is taken."""
    others = (f"{name}#{number}" for number in count(2))
    return next(each for each in chain([name], others) if not is_taken(each))


def packet_name(node: fx.Node) -> str:
    """The name of a node's operator, without that of its overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.replace("::", "."))
    return str(target)


def reported_name(node: fx.Node) -> str:
    """The operator, "" for a part of several values and for what handles numbers alone."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return ""
    name = operator_name(target)
    return "" if name in CHECKS or name.startswith("aten.sym_") else name


def module_path(node: fx.Node) -> str:
    """The module that a node belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).removeprefix("L.self.").strip(".")


def bound_arguments(
    target: Any, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> dict[str, Any]:
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


def number_result(node: fx.Node) -> NodeResult:
    """What stands for a number that inputs decide."""
    return NodeResult((), "f64" if isinstance(node.meta.get("val"), torch.SymFloat) else "i64")


def node_results(node: fx.Node) -> list[NodeResult]:
    """Shapes and types of a node's tensors. CaptureError as tensor_result."""
    value = node.meta.get("val")
    several = value if isinstance(value, list | tuple) else [value]
    return [tensor_result(each, node.name) for each in several if isinstance(each, torch.Tensor)]


def tensor_result(value: torch.Tensor, name: str) -> NodeResult:
    """Shape and type. CaptureError for a shape that isn't known, and for a sparse tensor."""
    require_dense(value, name)
    if not all(type(extent) is int for extent in value.shape):
        raise CaptureError(
            f"{name} has the shape {tuple(value.shape)}",
            expected="shapes that follow from those of the inputs",
            remedy="capture the parts before and after it one by one",
        )
    return NodeResult(tuple(value.shape), dtype_name(value.dtype))


def located(error: CaptureError | ProgramError, node: fx.Node) -> CaptureError:
    """The error with the operator that it is about, and the line of the module that calls it."""
    name = "" if packet_name(node) in error.found else f", in {node.target}"
    where = line_of_node(node.meta.get("stack_trace") or "")
    return CaptureError(f"{error.found}{name}{where}", expected=error.expected, remedy=error.remedy)


def viewed_node(node: fx.Node) -> fx.Node | None:
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


def is_open(node: fx.Node) -> bool:
    """Whether a result has a shape only when it is there, or is a number that data decide."""
    value = node.meta.get("val")
    return isinstance(value, NUMBERS) or has_open_shape(value)


def is_seeded(node: fx.Node) -> bool:
    """Whether a node gives random numbers."""
    tags: Collection[torch.Tag] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def takes_number(node: fx.Node) -> bool:
    """Whether a number is read of a tensor."""
    return isinstance(node.target, torch._ops.OpOverload)


def computes_numbers(node: fx.Node) -> bool:
    """Whether numbers that data decide may be read as tensors: in expressions."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target in TO_NUMBER or node.target in OF_NUMBERS
    packet = packet_name(node)
    key = f"{packet}.{node.target._overloadname}"
    return packet in EXPRESSIONS or key in EXPRESSIONS or packet in COMPUTED


def mask_reads(node: fx.Node) -> str:
    """What the host reads where elements are chosen by a mask."""
    indices = node.args[1] if len(node.args) > 1 else None
    chosen = indices if isinstance(indices, list | tuple) else ()
    masks = (each.meta.get("val") for each in chosen if isinstance(each, fx.Node))
    is_mask = any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in masks
    )
    return "how many a mask chooses" if is_mask else ""


def overwrites(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` stands for a copy into `node`, whose old values it does not read."""
    return str(user.target) == "aten.copy.default" and user.args[0] is node


def may_share(node: fx.Node) -> bool:
    """Whether a node's value may be another view of what it reads."""
    schema = getattr(node.target, "_schema", None)
    packet = schema.name.replace("::", ".") if schema is not None else "getitem"
    computes = packet in EXPRESSIONS or packet in COMPUTING
    return not computes


def effects_of(node: fx.Node) -> str:
    """Operators that have effects beside the graph, which their order by tokens shows: as words
    that end a message.
    """
    users = [user for user in node.users if "with_effects" in str(user.target)]
    return "".join(
        f", for {user.args[1]}{line_of_node(user.meta.get('stack_trace') or '')}" for user in users
    )
