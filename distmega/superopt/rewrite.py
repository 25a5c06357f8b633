"""Graphs back into programs: the ops of a uGraph as ordinary ops, and rules applied to programs.

Comes in: a Program and Rules. Goes out: a Program in which ops that a rule matches (matching.py)
are the ops of its graph (apply_rules), or one op that is the graph itself (fuse_graphs); each is
named after the rule. Of several matches the one that saves most comes first; none is used that
saves nothing. Next: distmega/program/types.py, whose ops these are.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from distmega.errors import ProgramError, VerifyError
from distmega.program.dtypes import item_bytes
from distmega.program.kinds import FUSED_GRAPH
from distmega.program.types import (
    Access,
    Axis,
    Index,
    Op,
    Program,
    Role,
    Tensor,
    accesses,
    verify_program,
)
from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.graph.ugraph import BlockOp, UGraph
from distmega.superopt.matching import Match, find_matches
from distmega.superopt.proof.equivalence import is_as_good
from distmega.superopt.resize import Constants, Sizes, resized_rule
from distmega.superopt.rules import RewriteRule
from distmega.superopt.surroundings import Surroundings

KINDS = {
    "map": "pointwise",
    "contract": "linear",
    "sum": "reduce",
    "max": "reduce",
    "min": "reduce",
}
"""Op kind of a program for each of a block's ops that has one."""


def graph_program(graph: UGraph) -> Program:
    """The graph's ops as ordinary ops, in the widest type of its inputs and outputs. ProgramError
    if it joins operands side by side, which would copy them in every call.
    """
    known = graph.tensor_map()
    named = [t for t in graph.tensors if t.role != "temp" or t.name in graph.outputs]
    dtype = max((t.dtype for t in named), key=item_bytes)
    extents = dict(graph.extents)
    tensors = [_tensor(t.name, t.dims, t.dtype, extents, t.role) for t in graph.tensors
               if t.role != "temp"]  # fmt: skip
    ops: list[Op] = []
    for kernel in graph.kernels:
        values: dict[str, tuple[str, Dims]] = {x.name: (x.tensor, x.dims) for x in kernel.loads}
        for op in kernel.ops:
            if op.kind not in KINDS:
                raise ProgramError(
                    f"graph {graph.name!r}: {op.name!r} joins operands",
                    expected="ops that ordinary ops can do without copies",
                    remedy="run the graph as a kernel",
                )
            same = [known[name].dims for name in graph.outputs if known[name].axes == op.axes]
            if op.name in known:  # others load it by these
                dims = known[op.name].dims
            elif same:  # with its dims of one element, as what is made of it has them
                dims = same[0]
            else:
                dims = tuple((axis,) for axis in op.axes)
            mine = known[op.name].dtype if op.name in graph.outputs else dtype
            tensors.append(_tensor(op.name, dims, mine, extents, "temp"))
            args = _in_order(op, values) if op.kind == "contract" else op.args
            ops.append(_op(op, [values[arg] for arg in args], dims, extents))
            values[op.name] = op.name, dims
    program = Program(
        name=graph.name, tensors=tuple(tensors), ops=tuple(ops), outputs=graph.outputs
    )
    return verify_program(program)


def _in_order(op: BlockOp, values: Mapping[str, tuple[str, Dims]]) -> tuple[str, ...]:
    """Operands of a contraction, that of the result's outer axes first: x, then a weight."""

    def first(arg: str) -> int:
        own = [axis for dim in values[arg][1] for axis in dim if axis not in op.reduced]
        return min(map(op.axes.index, own), default=-1)

    return tuple(sorted(op.args, key=first))


def graph_op(
    rule: RewriteRule,
    sizes: Sizes = (),
    constants: Constants = (),
    constant: tuple[str, ...] = (),
) -> Program:
    """The rule's graph as one op of kind FUSED_GRAPH. sizes, constants: of resize.py, by which the
    rule was made of the one of that name; the op states them, so that op_rule finds it. constant:
    of its inputs those that no kernel writes.
    """
    graph = parse_graph(rule.graph)
    extents = dict(graph.extents)
    given = [t for t in graph.tensors if t.role != "temp"]
    made = [graph.tensor_map()[name] for name in graph.outputs]
    written = {axis for t in made for axis in t.axes}
    used = {axis for t in (*given, *made) for axis in t.axes}
    axes = [
        Axis(name=axis, extent=extent)
        if axis in written
        else Axis(name=axis, extent=extent, role="reduce", combine="sum")
        for axis, extent in graph.extents
        if axis in used
    ]
    op = Op(
        name="graph",
        kind=FUSED_GRAPH,
        axes=tuple(axes),
        reads=tuple(_access(t.name, t.dims) for t in given),
        writes=tuple(_access(t.name, t.dims) for t in made),
        attrs=(
            ("constant", constant),
            ("constants", constants),
            ("rule", rule.name),
            ("sizes", sizes),
        ),
    )
    tensors = [_tensor(t.name, t.dims, t.dtype, extents, t.role) for t in (*given, *made)]
    program = Program(name=graph.name, tensors=tuple(tensors), ops=(op,), outputs=graph.outputs)
    return verify_program(program)


def op_rule(op: Op, rules: Mapping[str, RewriteRule]) -> RewriteRule:
    """The rule, at its sizes, of an op of kind FUSED_GRAPH. ProgramError where it is unknown."""
    name = str(op.attr("rule"))
    if name not in rules:
        raise ProgramError(
            f"op {op.name!r}: rule {name!r}",
            expected=f"one of {', '.join(rules) or 'none'}",
            remedy="lower and run a program with the same rules",
        )
    sizes, constants = op.attr("sizes"), op.attr("constants")
    return resized_rule(rules[name], sizes, constants)


def rules_of_ops(program: Program, rules: Mapping[str, RewriteRule]) -> dict[str, list[str]]:
    """Of each rule that apply_rules used, by name and number: the ops that it made."""
    found: dict[str, list[str]] = {}
    for op in program.ops:
        name, _, rest = op.name.partition("#")
        if rest and name in rules:
            found.setdefault(f"{name}#{rest.partition('.')[0]}", []).append(op.name)
    return found


def explain_op(op: Op, rules: Mapping[str, RewriteRule]) -> str:
    """Which rule made an op, at which sizes, and what it is predicted to save."""
    rule = op_rule(op, rules)
    sizes = op.attr("sizes")
    assert isinstance(sizes, tuple), "as graph_op makes it"
    shown = " ".join(f"{axis}={extent}" for axis, extent in sizes)  # type: ignore[str-unpack, misc]
    known = "its own sizes" if rule == rules[rule.name] else shown
    made = f"op {op.name} is made by rule {rule.name} at {known}"
    if rule.measured_us:
        times = f"{rule.measured_us:.1f} us measured on {rule.machine}, {rule.library_us:.1f}"
    else:
        times = f"{rule.graph_us:.1f} us predicted on {rule.machine}, {rule.program_us:.1f}"
    return f"{made}: {times} by its ops"


def _tensor(name: str, dims: Dims, dtype: str, extents: Mapping[str, int], role: Role) -> Tensor:
    shape = []
    for dim in dims:
        size = 1
        for axis in dim:
            size *= extents[axis]
        shape.append(size)
    return Tensor(name=name, shape=tuple(shape), dtype=dtype, role=role)


def _op(
    op: BlockOp, reads: Sequence[tuple[str, Dims]], dims: Dims, extents: Mapping[str, int]
) -> Op:
    combine = "sum" if op.kind in ("contract", "sum") else op.kind
    axes = [Axis(name=axis, extent=extents[axis]) for axis in op.axes]
    axes += [
        Axis(name=axis, extent=extents[axis], role="reduce", combine=combine) for axis in op.reduced
    ]
    attrs = {"map": (("expr", op.expr),), "contract": ()}
    return Op(
        name=op.name,
        kind=KINDS[op.kind],
        axes=tuple(axes),
        reads=tuple(_access(tensor, found) for tensor, found in reads),
        writes=(_access(op.name, dims),),
        attrs=attrs.get(op.kind, (("combine", combine),)),
    )


def _access(tensor: str, dims: Dims) -> Access:
    return Access(tensor=tensor, dims=tuple(Index(axes=dim) for dim in dims))


Cost = Callable[[Program], float]
"""Predicted time of a program; inf for one that can't be run."""


def apply_rules(
    program: Program,
    rules: Sequence[RewriteRule],
    cost: Cost | None = None,
    kept: Container[str] = (),
) -> Program:
    """The program with matches of the rules replaced by their graphs' ops, until none is better;
    ops that a rule made stay.

    Only graphs that are as good in ordinary ops are used (RewriteRule.as_ops, is_as_good at other
    sizes). cost: by which a program with ops replaced must be better; by default what the rules'
    kernels save; where a program can't be run, the first rule that helps it is used wherever it
    fits. Ops of a replaced part whose results others use stay out of it, and those named
    in `kept`.
    """
    fitting = [rule for rule in rules if rule.as_ops]

    def made(match: Match) -> Program:
        return graph_program(parse_graph(match.sized.graph))

    def is_good(match: Match) -> bool:
        rule = match.confirm()
        graph = parse_graph(rule.graph)
        return rule == match.rule or is_as_good(rule.program, graph, graph_program, 0)

    ways = (made, is_good)
    if cost and cost(program) == math.inf:
        alone = (_apply(program, [rule], ways, kept, None) for rule in fitting)
        program = next((new for new in alone if cost(new) < math.inf), program)
    return _apply(program, fitting, ways, kept, cost)


def fuse_graphs(
    program: Program,
    rules: Sequence[RewriteRule],
    kept: Container[str] = (),
    is_usable: Callable[[RewriteRule], bool] | None = None,
) -> Program:
    """The program with matches of the rules replaced by one op of kind FUSED_GRAPH each, until none
    saves anything. kept: names of ops that stay as they are. is_usable: whether a rule at a match's
    sizes has kernels.
    """

    written = {access.tensor for op in program.ops for access in op.writes}
    weights = {t.name for t in program.with_role("weight")} - written

    def made(match: Match) -> Program:
        constant = tuple(name for name, mine in match.names.items() if mine in weights)
        return graph_op(match.sized, match.sizes, match.constants, constant)

    def is_good(match: Match) -> bool:
        if is_usable is not None and not is_usable(match.sized):
            return False
        match.confirm()  # takes longer
        return True

    return _apply(program, rules, (made, is_good), kept, None)


def _apply(
    program: Program,
    rules: Sequence[RewriteRule],
    ways: tuple[Callable[[Match], Program], Callable[[Match], bool]],
    kept: Container[str],
    cost: Cost | None,
) -> Program:
    """ways: what is put in a match's place, and whether it is as good, which takes longer. What did
    not help is not tried again in like surroundings.
    """
    make, is_good = ways
    number, found, apart = 0, True, set[str]()
    surroundings, useless = Surroundings(), set[Hashable]()
    while found:
        found = False
        left = [op.name for op in program.ops if op.name in kept or op.name in apart]
        matches = [m for m in find_matches(program, rules, left) if cost or m.saved_us > 0.0]
        uses, now_us = _Uses(program), cost(program) if cost and matches else 0.0
        near = surroundings.of(program) if cost and matches else {}
        for match in _by_saving(matches):
            like = match.rule, match.sizes, match.constants, *(near.get(op) for op in match.ops)
            if like in useless or not uses.frees(match) or _position(program, match) is None:
                continue
            free = _free_number(program, match.rule.name, number)
            prefix = f"{match.rule.name}#{free}"
            new = _replaced(program, match, make(match), prefix)
            new_us = cost(new) if cost else -math.inf
            if new_us >= now_us:
                useless.add(like)
                continue
            try:
                if not is_good(match):
                    continue
            except VerifyError:
                continue
            program, number, found = new, free + 1, True
            uses, now_us = _Uses(program), new_us if cost else 0.0
            near = surroundings.of(program) if cost else {}
            apart.update(op.name for op in program.ops if op.name.startswith(f"{prefix}."))
    return verify_program(program) if number else program


def _free_number(program: Program, rule: str, least: int) -> int:
    """A number by which nothing of the program is named after a rule, as what an earlier call made
    is.
    """
    names = [*program.tensor_map(), *(op.name for op in program.ops)]
    while any(name.startswith(f"{rule}#{least}.") for name in names):
        least += 1
    return least


def _by_saving(matches: Sequence[Match]) -> list[Match]:
    """Those of the most saving first; of those of the same ops one that was measured, else one that
    was searched for these sizes, if any.
    """
    most: dict[frozenset[str], float] = {}
    for match in matches:
        key = frozenset(match.ops)
        most[key] = max(most.get(key, -math.inf), match.saved_us)

    def order(match: Match) -> tuple[float, bool, bool, float]:
        rule = match.sized
        known = not rule.launches, rule != match.rule
        return -most[frozenset(match.ops)], *known, -match.saved_us

    return sorted(matches, key=order)


class _Uses:
    """Who reads and writes each tensor of a program."""

    def __init__(self, program: Program) -> None:
        self.ops = {op.name: op for op in program.ops}
        self.outputs = frozenset(program.outputs)
        self.states = {t.name for t in program.with_role("state")}
        self.by: dict[str, set[str]] = {}
        self.writers = Counter(a.tensor for op in program.ops for a in op.writes)
        for op in program.ops:
            for access in accesses(op):
                self.by.setdefault(access.tensor, set()).add(op.name)

    def frees(self, match: Match) -> bool:
        """Whether a match's ops are there, nobody else needs what they hide, and nothing that they
        read changes.
        """
        if not self.ops.keys() >= set(match.ops):
            return False
        hidden = _hidden([self.ops[name] for name in match.ops], match)
        if hidden & self.outputs or any(self.by[name] - set(match.ops) for name in hidden):
            return False
        inputs = _given(match)
        if any(self.writers[name] > 1 for name in inputs | set(match.names.values())):
            return False
        return not inputs & self.states


def _hidden(inside: Iterable[Op], match: Match) -> set[str]:
    """Tensors that the match's ops, `inside`, write and the new ones don't."""
    kept = {match.names[name] for name in match.rule.program.outputs}
    return {a.tensor for op in inside for a in op.writes} - kept


def _given(match: Match) -> set[str]:
    """Tensors that stand for the rule's inputs and weights."""
    given = [t.name for t in match.rule.program.tensors if t.role != "temp"]
    return {match.names[name] for name in given if name in match.names}


def _position(program: Program, match: Match) -> int | None:
    """Before which op the new ones stand: behind what they read, before what reads them."""
    inputs = _given(match)
    outputs = {match.names[name] for name in match.rule.program.outputs}
    others = [(n, op) for n, op in enumerate(program.ops) if op.name not in match.ops]
    behind = [n + 1 for n, op in others if any(a.tensor in inputs for a in op.writes)]
    before = [n for n, op in others if any(a.tensor in outputs for a in op.reads)]
    first, last = max(behind, default=0), min(before, default=len(program.ops))
    return last if first <= last else None


def _replaced(program: Program, match: Match, made: Program, prefix: str) -> Program:
    position = _position(program, match)
    assert position is not None, "only places with room are matches"

    def renamed(name: str) -> str:
        known = made.tensor_map()[name].role != "temp" or name in made.outputs
        return match.names[name] if known else f"{prefix}.{name}"

    new = [
        replace(
            op,
            name=f"{prefix}.{op.name}",
            reads=tuple(replace(a, tensor=renamed(a.tensor)) for a in op.reads),
            writes=tuple(replace(a, tensor=renamed(a.tensor)) for a in op.writes),
        )
        for op in made.ops
    ]
    ops = [op for op in program.ops[:position] if op.name not in match.ops]
    ops += new
    ops += [op for op in program.ops[position:] if op.name not in match.ops]
    gone = _hidden((op for op in program.ops if op.name in match.ops), match)
    tensors = [t for t in program.tensors if t.name not in gone]
    tensors += [
        replace(t, name=renamed(t.name))
        for t in made.tensors
        if t.role == "temp" and t.name not in made.outputs
    ]
    return replace(program, tensors=tuple(tensors), ops=tuple(ops))
