"""Several operators of torch as one opaque op: nodes of a graph as JSON text, and back.

Comes in: nodes of torch.fx with what they read, parts of their own (branches of torch.cond, bodies
of loops) among it. Goes out: text that is equal for equal graphs, whatever their nodes are called;
`open_graph` makes a function of it. Used by opaque.py, and by who captures torch modules.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from distmega.errors import ProgramError
from distmega.hostir.library.opaque_text import (
    DTYPES,
    decode_named,
    decode_value,
    encode_named,
    encode_value,
    find_operator,
    operator_name,
    read_call,
)
from distmega.hostir.library.torch_types import unhold


def encode_graph(
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
    given: Callable[[fx.Node], object],
    operand_dtypes: Sequence[str],
) -> str:
    """Nodes, in an order in which they can run, and which of them or of what they read is wanted.

    given: what stands for a node that is read and not among them: {"tensor": position among the
    operands}, or a number. operand_dtypes: torch's name of each operand's type where programs lack
    it, "" otherwise; filled as `given` is called. ProgramError for what text can't hold.
    """
    body = _encode(nodes, list(results), given)
    return json.dumps({"operands": [*operand_dtypes], **body})


def is_graph(text: str) -> bool:
    """Whether it is of encode_graph."""
    return text.startswith("{")


def open_graph(text: str) -> Callable[[Sequence[Tensor]], list[Any]]:
    """From operands to results, tensors and numbers; ProgramError for operators that torch lacks,
    and for text that encode_graph did not write.

    Factories make their tensors where the first operand is.
    """
    return read_call(text, _read)


def _read(body: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], list[Any]]:
    dtypes = body["operands"]
    modules = {torch.device("cpu"): _open(body, len(dtypes), torch.device("cpu"))}

    def run(operands: Sequence[Tensor]) -> list[Any]:
        device = operands[0].device if operands else torch.device("cpu")
        if device not in modules:
            modules[device] = _open(body, len(dtypes), device)
        pairs = zip(operands, dtypes, strict=True)
        found: list[Any] = modules[device](*(unhold(x, DTYPES[d]) if d else x for x, d in pairs))
        return found

    return run


def _encode(
    nodes: Sequence[fx.Node], results: object, given: Callable[[fx.Node], object]
) -> dict[str, object]:
    positions = {node: number for number, node in enumerate(nodes)}

    def special(value: object) -> object:
        if isinstance(value, fx.Node):
            if value in positions:
                return {"node": positions[value]}
            return _encode_part(value) if value.op == "get_attr" else given(value)
        if isinstance(value, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            return {"operator": operator_name(value)}
        if isinstance(value, tuple):
            return {"tuple": [encode_value(each, special) for each in value]}
        if isinstance(value, slice):
            bounds = (value.start, value.stop, value.step)
            return {"slice": [encode_value(each, special) for each in bounds]}
        if isinstance(value, Mapping):
            return {"dict": {key: encode_value(each, special) for key, each in value.items()}}
        return None

    def call(node: fx.Node) -> list[object]:
        named = encode_named(node.target, node.kwargs, special)
        args = [encode_value(each, special) for each in node.args]
        return [operator_name(node.target), args, named]

    return {"nodes": [call(node) for node in nodes], "results": encode_value(results, special)}


def _encode_part(node: fx.Node) -> object:
    """A graph that an operator calls."""
    root = node.graph.owning_module
    part = getattr(root, str(node.target), None)
    if not isinstance(part, fx.GraphModule):
        raise ProgramError(
            f"{node.target!s}, a {type(part).__name__} inside of a graph",
            expected="graphs, tensors as inputs of these",
            remedy="hand it to the branch or loop as an operand",
        )
    inside = list(part.graph.nodes)
    inputs = [each for each in inside if each.op == "placeholder"]
    calls = [each for each in inside if each.op == "call_function"]
    (last,) = (each for each in inside if each.op == "output")
    body = _encode(calls, last.args[0], lambda each: {"tensor": inputs.index(each)})
    return {"graph": {"inputs": len(inputs), **body}}


def _open(body: Mapping[str, Any], num_inputs: int, device: torch.device) -> fx.GraphModule:
    """The graph as a module whose factories make tensors on that device."""
    graph, root = fx.Graph(), nn.Module()
    inputs = [graph.placeholder(f"x{number}") for number in range(num_inputs)]
    made: list[fx.Node] = []

    def special(kind: str, content: Any) -> Any:
        match kind:
            case "tensor":
                return inputs[content]
            case "node":
                return made[content]
            case "tuple":
                return tuple(decode_value(each, special) for each in content)
            case "slice":
                return slice(*(decode_value(each, special) for each in content))
            case "dict":
                return {key: decode_value(each, special) for key, each in content.items()}
            case "operator":
                return find_operator(content)
            case "device":
                return device
            case "empty":
                shape, dtype = content
                return graph.call_function(
                    torch.empty, (shape,), {"dtype": DTYPES[dtype], "device": device}
                )
            case _:
                name = f"part{len(list(root.children()))}"
                root.add_module(name, _open(content, content["inputs"], device))
                return graph.get_attr(name)

    for target, args, kwargs in body["nodes"]:
        values = tuple(decode_value(each, special) for each in args)
        named = decode_named(kwargs, special)
        made.append(graph.call_function(find_operator(target), values, named))
    graph.output(decode_value(body["results"], special))
    return fx.GraphModule(root, graph)
