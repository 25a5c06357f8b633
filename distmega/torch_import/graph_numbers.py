"""Which floats of dynamo's graph are inputs of its programs, and which are a part of them.

In: a graph that takes floats as tensors, of which it reads the number. Out: NumberForm, the graph
that takes some of them as numbers. At first all are inputs. Where a capture fails, maybe since it
asks for the value of one, all are bound; one that another call brings another value of is tried as
an input again, and bound for good where that fails too. Used by backend.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from distmega.torch_import.exported import EXPORTING


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NumberForm:
    """A graph, and which of its inputs, by position, it takes as numbers."""

    graph: fx.GraphModule
    bound: frozenset[int]

    def inputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Its inputs, of those that dynamo gives."""
        if not self.bound:
            return tuple(args)
        return tuple(x.item() if at in self.bound else x for at, x in enumerate(args))


class GraphNumbers:
    """The form of a graph that calls take now; threads may find another one at once."""

    def __init__(self, graph: fx.GraphModule) -> None:
        given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._graph = graph
        self._all = frozenset(at for at, node in enumerate(given) if _is_number(node))
        self._asked = frozenset[int]()
        """Those that captures ask for."""
        self._free = frozenset[int]()
        """Those that were inputs of what was captured."""
        self._first: dict[int, str] = {}
        """What they were when they were first bound."""
        self.form = NumberForm(graph=graph, bound=frozenset())

    def note_captured(self, form: NumberForm) -> None:
        """A program of this form was captured."""
        with EXPORTING:
            self._free |= self._all - form.bound - self._asked

    def bind(self, form: NumberForm, args: Sequence[Any]) -> bool:
        """After a capture of this form that failed: whether there is another form to try."""
        if form.bound == self._all:
            return False
        with EXPORTING:
            if self.form is form:
                inputs = self._all - form.bound
                if self._first:
                    self._asked |= (inputs - self._free) or inputs
                else:
                    self._first = {at: repr(args[at].item()) for at in self._all}
                self._free -= self._asked
                self._take(self._all - self._free if self._asked else self._all)
        return True

    def free(self, form: NumberForm, args: Sequence[Any]) -> bool:
        """Before a capture of this form: whether there is one with fewer numbers to try."""
        changed = frozenset(
            at for at in form.bound - self._asked if repr(args[at].item()) != self._first[at]
        )
        if not changed:
            return False
        with EXPORTING:
            if self.form is form:
                self._take(form.bound - changed)
        return True

    def _take(self, bound: frozenset[int]) -> None:
        self.form = NumberForm(graph=_without_items(self._graph, bound), bound=bound)


def _is_number(given: fx.Node) -> bool:
    """Whether an input of dynamo's graph is a float: a tensor of which only its number is read."""
    example = given.meta.get("example_value")
    return (
        isinstance(example, Tensor)
        and (example.dim(), example.dtype, example.device.type) == (0, torch.float64, "cpu")
        and bool(given.users)
        and all((user.op, user.target) == ("call_method", "item") for user in given.users)
    )


def _without_items(module: fx.GraphModule, numbers: Collection[int]) -> fx.GraphModule:
    """The module, which takes inputs at these positions as numbers, not as tensors of these."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    given = [node for node in graph.nodes if node.op == "placeholder"]
    for at in numbers:
        for taken in [*given[at].users]:
            taken.replace_all_uses_with(given[at])
            graph.erase_node(taken)
    return fx.GraphModule(module, graph)
