"""A rule's graph as an op of a host program.

In: a Rule. Out: a function of the op's operands, as KernelOps compiles ops: on GPUs, and where
Triton interprets kernels, the graph's own kernels, launched as the rule says or, where nobody
measured that, as geometry.py chooses; elsewhere the graph's ops one by one. Used by
../library/device_ops.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from distmega.hostir.library.ops import compile_op, op_operands
from distmega.kernels.runtime.compilations import has_triton, is_interpreted
from distmega.kernels.runtime.memory import packed
from distmega.kernels.ugraphs.geometry import rule_plan
from distmega.kernels.ugraphs.runner import GraphRunner
from distmega.program.types import Op
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.rewrite import graph_program, op_rule
from distmega.superopt.rules import RewriteRule


class GraphOp:
    """One rule's graph, bound to no tensors."""

    def __init__(self, rule: RewriteRule, constant: Iterable[str] = ()) -> None:
        """constant: inputs that no kernel writes."""
        self.rule, self.constant = rule, frozenset(constant)
        self.graph = parse_graph(rule.graph)
        self.inputs = [t.name for t in self.graph.tensors if t.role != "temp"]
        self._runners: dict[frozenset[str], GraphRunner] = {}

    def __call__(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs of the graph; xs: its inputs and weights, in the order of the graph's tensors."""
        values = dict(zip(self.inputs, xs, strict=True))
        if is_interpreted() or (xs[0].is_cuda and has_triton()):
            given = {name: packed(x) for name, x in values.items()}
            # a copy is written by what stands in front of the kernel
            constant = frozenset(name for name in self.constant if given[name] is values[name])
            found = self.runner(constant)(given)
            return tuple(found[name] for name in self.graph.outputs)
        for operands, names, call in self.calls:
            values.update(zip(names, call([values[name] for name in operands]), strict=True))
        return tuple(values[name] for name in self.graph.outputs)

    def runner(self, constant: frozenset[str]) -> GraphRunner:
        """The graph's kernels, to which these inputs are constant; interpreted ones start in
        turn.
        """
        if constant not in self._runners:
            plan = rule_plan(self.rule)
            launches = tuple(replace(launch, constant=constant) for launch in plan.launches)
            if is_interpreted():
                launches = tuple(replace(one, early=False, eager=False) for one in launches)
            self._runners[constant] = GraphRunner.of(plan.graph, launches)
        return self._runners[constant]

    @cached_property
    def calls(
        self,
    ) -> list[tuple[tuple[str, ...], list[str], Callable[[Sequence[Tensor]], tuple[Tensor, ...]]]]:
        """The graph's ops by the library: operands, results, the function."""
        ops = graph_program(self.graph).ops
        return [
            (op_operands(op), [access.tensor for access in op.writes], compile_op(op, {}))
            for op in ops
        ]


def compile_graph(op: Op, rules: Mapping[str, RewriteRule]) -> GraphOp:
    """The function of an op of kind FUSED_GRAPH. ProgramError where its rule is unknown."""
    constant = op.attr("constant")
    assert isinstance(constant, tuple), "as graph_op makes it"
    return GraphOp(op_rule(op, rules), map(str, constant))
