"""Graphs back into programs: the ops of a uGraph as ordinary ops, and rules applied to programs.

Comes in: a Program and Rules. Goes out: a Program in which the ops that a rule's left side matches
are the ops of its graph (apply_rules), or one op that is the graph itself (fuse_graphs); each is
named after the rule. Next: distmega/program/types.py, whose ops these are.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from distmega.errors import ProgramError
from distmega.program.dtypes import item_bytes
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
from distmega.superopt.named import Dims
from distmega.superopt.rules import RewriteRule
from distmega.superopt.text import parse_graph
from distmega.superopt.ugraph import BlockOp, UGraph

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
            is_output = op.name in graph.outputs
            dims = known[op.name].dims if is_output else tuple((axis,) for axis in op.axes)
            mine = known[op.name].dtype if is_output else dtype
            tensors.append(_tensor(op.name, dims, mine, extents, "temp"))
            ops.append(_op(op, [values[arg] for arg in op.args], dims, extents))
            values[op.name] = op.name, dims
    program = Program(
        name=graph.name, tensors=tuple(tensors), ops=tuple(ops), outputs=graph.outputs
    )
    return verify_program(program)


FUSED_GRAPH = "fused_graph"
"""Kind of an op that a rule's graph does: reads its inputs, writes its outputs, names the rule."""


def graph_op(rule: RewriteRule) -> Program:
    """The rule's graph as one op of kind FUSED_GRAPH."""
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
        attrs=(("rule", rule.name),),
    )
    tensors = [_tensor(t.name, t.dims, t.dtype, extents, t.role) for t in (*given, *made)]
    program = Program(name=graph.name, tensors=tuple(tensors), ops=(op,), outputs=graph.outputs)
    return verify_program(program)


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


def apply_rules(program: Program, rules: Sequence[RewriteRule]) -> Program:
    """The program with every match of every rule replaced, rules in order, until none matches.

    Only rules whose graph is as good in ordinary ops are used (Rule.as_ops). Ops of a replaced part
    whose results others use stay out of it.
    """
    fitting = [rule for rule in rules if rule.as_ops]
    made = [graph_program(parse_graph(rule.graph)) for rule in fitting]
    return _apply(program, fitting, made, ())


def fuse_graphs(
    program: Program, rules: Sequence[RewriteRule], kept: Container[str] = ()
) -> Program:
    """The program with every match of every rule replaced by one op of kind FUSED_GRAPH, rules in
    order, until none matches. kept: names of ops that stay as they are.
    """
    return _apply(program, rules, [graph_op(rule) for rule in rules], kept)


def _apply(
    program: Program, rules: Sequence[RewriteRule], made: Sequence[Program], kept: Container[str]
) -> Program:
    number = 0
    for rule, new in zip(rules, made, strict=True):
        while found := next(_matches(program, rule.program, kept), None):
            program = _replaced(program, rule.program, new, found, f"{rule.name}#{number}")
            number += 1
    return program


Match = dict[str, int]
"""Pattern op -> number of the program's op."""


def _matches(program: Program, pattern: Program, kept: Container[str] = ()) -> Iterator[Match]:
    """Places in a program where the pattern's ops stand, with inputs of the same shapes."""
    forms = [_form(op) for op in program.ops]

    def extend(index: int, match: Match, names: dict[str, str]) -> Iterator[Match]:
        if index == len(pattern.ops):
            if _is_free(program, pattern, match, names):
                yield dict(match)
            return
        wanted = pattern.ops[index]
        form = _form(wanted)
        for number, op in enumerate(program.ops):
            if number in match.values() or forms[number] != form or op.name in kept:
                continue
            joined = _joined(program, pattern, wanted, op, names)
            if joined is not None:
                yield from extend(index + 1, match | {wanted.name: number}, joined)

    yield from extend(0, {}, {})


def _form(op: Op) -> object:
    """What two ops that do the same have in common: all but names."""
    position = {axis.name: n for n, axis in enumerate(op.axes)}
    maps = [
        tuple((tuple(position[a] for a in i.axes), i.offset, i.stride) for i in access.dims)
        for access in accesses(op)
    ]
    axes = [(axis.extent, axis.role, axis.combine, axis.lookup) for axis in op.axes]
    return op.kind, op.attrs, axes, maps


def _joined(
    program: Program, pattern: Program, wanted: Op, op: Op, names: Mapping[str, str]
) -> dict[str, str] | None:
    """Names of pattern tensors in the program with this op's; None if they don't fit."""
    mine, theirs = program.tensor_map(), pattern.tensor_map()
    found = dict(names)
    for a, b in zip(accesses(wanted), accesses(op), strict=True):
        one, two = theirs[a.tensor], mine[b.tensor]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return None
        if found.setdefault(a.tensor, b.tensor) != b.tensor:
            return None
    return found


def _is_free(program: Program, pattern: Program, match: Match, names: Mapping[str, str]) -> bool:
    """Whether nobody else needs what the matched ops leave out, nothing that they read changes, and
    there is a place for the new ops.
    """
    inside = set(match.values())
    temps = {t.name for t in pattern.with_role("temp")} - set(pattern.outputs)
    hidden = {names[name] for name in temps}
    users = [op for n, op in enumerate(program.ops) if n not in inside]
    if any(a.tensor in hidden for op in users for a in accesses(op)):
        return False
    if hidden & set(program.outputs):
        return False
    written = [a.tensor for op in program.ops for a in op.writes]
    inputs = {names[t.name] for t in pattern.tensors if t.role != "temp" and t.name in names}
    if any(written.count(name) > 1 for name in inputs | set(names.values())):
        return False
    states = {t.name for t in program.with_role("state")}
    return not inputs & states and _position(program, pattern, match, names) is not None


def _position(
    program: Program, pattern: Program, match: Match, names: Mapping[str, str]
) -> int | None:
    """Before which op the new ones stand: behind what they read, before what reads them."""
    inside = set(match.values())
    inputs = {names[t.name] for t in pattern.tensors if t.role != "temp" and t.name in names}
    outputs = {names[name] for name in pattern.outputs}
    behind = [
        n + 1
        for n, op in enumerate(program.ops)
        if n not in inside and any(a.tensor in inputs for a in op.writes)
    ]
    before = [
        n
        for n, op in enumerate(program.ops)
        if n not in inside and any(a.tensor in outputs for a in op.reads)
    ]
    first, last = max(behind, default=0), min(before, default=len(program.ops))
    return last if first <= last else None


def _replaced(
    program: Program, pattern: Program, made: Program, match: Match, prefix: str
) -> Program:
    names: dict[str, str] = {}
    for op in pattern.ops:
        found = program.ops[match[op.name]]
        for a, b in zip(accesses(op), accesses(found), strict=True):
            names[a.tensor] = b.tensor
    kept = {names[name] for name in pattern.outputs}
    position = _position(program, pattern, match, names)
    assert position is not None, "only places with room are matches"

    def renamed(name: str) -> str:
        known = made.tensor_map()[name].role != "temp" or name in made.outputs
        return names[name] if known else f"{prefix}.{name}"

    new = [
        replace(
            op,
            name=f"{prefix}.{op.name}",
            reads=tuple(replace(a, tensor=renamed(a.tensor)) for a in op.reads),
            writes=tuple(replace(a, tensor=renamed(a.tensor)) for a in op.writes),
        )
        for op in made.ops
    ]
    inside = set(match.values())
    ops = [op for n, op in enumerate(program.ops) if n not in inside and n < position]
    ops += new
    ops += [op for n, op in enumerate(program.ops) if n not in inside and n >= position]
    gone = {a.tensor for n in inside for a in program.ops[n].writes} - kept
    tensors = [t for t in program.tensors if t.name not in gone]
    tensors += [
        replace(t, name=renamed(t.name))
        for t in made.tensors
        if t.role == "temp" and t.name not in made.outputs
    ]
    return verify_program(replace(program, tensors=tuple(tensors), ops=tuple(ops)))
