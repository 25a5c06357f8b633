"""Linears summed over ranks with a bias that can't be held in parts: a sum, then the bias.

Comes in: a program, what annotations decided of it. Goes out: the program with such a linear as two
ops, so that the bias is added once, to the sum of all ranks. A weight that is free and added so
wherever it is used is left where it is: one rank holds it and the others zeros. Used by planner.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from distmega.program.ops.parts import fresh_name
from distmega.program.types import Op, Program, Tensor, verify_program
from distmega.sharding.layout.placements import Layout, Partial
from distmega.sharding.resolve.padding import additive_reads
from distmega.sharding.resolve.propagate import Hints


def split_biases(program: Program, hints: Hints, pins: Mapping[str, Layout]) -> Program:
    """The program with an op of its own for each bias that has to be added after a collective."""
    tensors = program.tensor_map()
    added = _axes_added_over(program, hints)
    divided = [op for op in program.ops if _needs_sum_first(op, added, hints[op.name], pins)]
    if not divided:
        return program
    names, taken = {op.name for op in divided}, {*tensors, *(op.name for op in program.ops)}
    ops: list[Op] = []
    for op in program.ops:
        ops += _in_two(op, tensors, taken) if op.name in names else (op,)
    return verify_program(replace(program, tensors=tuple(tensors.values()), ops=tuple(ops)))


def _axes_added_over(program: Program, hints: Hints) -> dict[str, set[str]]:
    """Weight -> mesh axes over which every op that uses it adds it to a divided sum. Outputs are
    whole, and without dims there is no part of a weight that a rank could leave out.
    """
    found: dict[str, set[str]] = {}
    for op in program.ops:
        summed = {axis for axis, name in hints[op.name].items() if op.axis(name).role == "reduce"}
        for position, read in enumerate(op.reads):
            axes = summed if position in additive_reads(op) else set()
            found[read.tensor] = found.get(read.tensor, axes) & axes
    weights = {tensor.name for tensor in program.with_role("weight") if tensor.shape}
    weights -= {*program.outputs}
    return {name: axes for name, axes in found.items() if name in weights}


def _needs_sum_first(
    op: Op, added: Mapping[str, set[str]], hints: Mapping[str, str], pins: Mapping[str, Layout]
) -> bool:
    for position in additive_reads(op):
        name = op.reads[position].tensor
        for axis, divided in hints.items():
            held = isinstance(pins[name].at(axis), Partial) if name in pins else None
            fixed = held is False or (held is None and axis not in added.get(name, ()))
            if fixed and op.axis(divided).role == "reduce":
                return True
    return False


def _in_two(op: Op, tensors: dict[str, Tensor], taken: set[str]) -> Iterator[Op]:
    """The linear without its bias, and the addition, which keeps the name. Declares the sum."""
    (write,), bias = op.writes, additive_reads(op)
    name = fresh_name(f"{op.name}.sum", taken)
    taken.add(name)
    tensors[name] = replace(tensors[write.tensor], name=name, role="temp")
    between = replace(write, tensor=name)
    reads = tuple(read for position, read in enumerate(op.reads) if position not in bias)
    yield replace(op, name=name, reads=reads, writes=(between,))
    terms = " + ".join(f"a{n}" for n in range(1 + len(bias)))
    yield Op(
        name=op.name,
        kind="pointwise",
        axes=tuple(axis for axis in op.axes if axis.role == "parallel"),
        reads=(between, *(op.reads[position] for position in bias)),
        writes=op.writes,
        attrs=(("expr", f"({terms})"),),
    )
