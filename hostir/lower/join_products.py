"""Products of one operand whose weights lie side by side in memory become one product.

In: a rank's program, and which weight follows which in memory, as an arena lays them out. Out: the
same program in which a weight A@C, the memory from weight A to weight C, is multiplied once, and
what the products were are views of the result. A gathered operand then has one reader, so that its
gather may run beside the product, as the cost model says. Used by decode_planner.py
and prefill_planner.py of distmega/engine/.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distmega.hostir.lower.joined_weights import SPAN
from distmega.program.ops.parts import access_named, axis_names, make_op
from distmega.program.types import Access, Axis, Index, Op, Tensor, accesses
from distmega.sharding.localize import LocalProgram
from distmega.sharding.overlap.pairs import (
    BY_LIBRARY,
    OverlapChoice,
    choose_overlaps,
    find_pairs,
    plain_rows,
)
from distmega.sharding.search.cost import Machine


def join_products(
    local: LocalProgram, neighbours: Mapping[str, str], machine: Machine
) -> LocalProgram:
    """neighbours: weight -> the one of its type whose memory follows its own without a gap.

    Products join where each adds over the operand's same dims, without a bias, into a temp of its
    own, one after the other with nothing between them that writes the operand or is part of a host
    loop or a pair; the joined one takes the place of the first.
    """
    joined = _Joining(local, neighbours).run()
    if joined is local:
        return local
    return replace(joined, fused=(*joined.fused, *_new_pairs(local, joined, machine)))


def _new_pairs(
    before: LocalProgram, local: LocalProgram, machine: Machine
) -> tuple[OverlapChoice, ...]:
    """Pairs with joined products that are best run as one kernel."""
    known = before.program.tensor_map()
    apart = {name for loop in local.host_loops for name, _ in loop.splits}
    apart |= {name for choice in local.fused for name in (choice.pair.first, choice.pair.second)}
    ops = [op for op in local.program.ops if op.name not in apart]

    def is_whole(name: str, axis: str) -> bool:
        parts = [op.writes[0].tensor for op in ops if op.is_view and op.reads[0].tensor == name]
        domains = [local.allocations[part] for part in parts or [name]]
        return not any(axis in dict(dim.axes) for each in domains for dim in each.dims)

    pairs = find_pairs(ops, local.program.tensor_map(), is_whole, local.mesh, local.program.outputs)
    new = [pair for pair in pairs if pair.result not in known or pair.between not in known]
    return tuple(
        choice for choice in choose_overlaps(new, machine, BY_LIBRARY) if choice.way == "kernel"
    )


class _Joining:
    """The products of one program that can be joined."""

    def __init__(self, local: LocalProgram, neighbours: Mapping[str, str]) -> None:
        self.local, self.neighbours = local, neighbours
        program = local.program
        self.tensors = program.tensor_map()
        self.apart = {name for loop in local.host_loops for name, _ in loop.splits}
        for choice in local.fused:
            self.apart |= {choice.pair.first, choice.pair.second}
        self.sources: dict[str, str] = {}
        self.writers: dict[str, int] = {}
        for op in program.ops:
            for access in op.writes:
                self.writers[access.tensor] = self.writers.get(access.tensor, 0) + 1

    def run(self) -> LocalProgram:
        program = self.local.program
        first: dict[str, list[Op]] = {}
        for group in self.groups(program.ops):
            first[group[0].name] = group
        if not first:
            return self.local
        gone = {op.name for group in first.values() for op in group}
        tensors, ops = dict.fromkeys(program.tensors), list[Op]()
        for op in program.ops:
            if op.name in first:
                weight, product, views = self.join(first[op.name])
                tensors |= dict.fromkeys([weight, product[1]])  # others may read this weight too
                ops += [product[0], *views]
            elif op.name not in gone:
                ops.append(op)
        changed = replace(program, tensors=tuple(tensors), ops=tuple(ops))
        return replace(self.local, program=changed)

    def groups(self, ops: Sequence[Op]) -> list[list[Op]]:
        """Two products or more each, whose weights follow each other."""
        found: list[list[Op]] = []
        open_: dict[tuple[object, ...], list[Op]] = {}
        for op in ops:
            if op.is_view:
                self.sources[op.writes[0].tensor] = self.root(op.reads[0].tensor)
                continue
            written = {self.root(access.tensor) for access in op.writes}
            open_ = {key: group for key, group in open_.items() if key[0] not in written}
            if not self.joins(op):
                continue
            key = self.key(op)
            group = open_.get(key)
            if group and self.neighbours.get(group[-1].reads[1].tensor) == op.reads[1].tensor:
                group.append(op)
                continue
            open_[key] = [op]
            found.append(open_[key])
        return [group for group in found if len(group) > 1]

    def joins(self, op: Op) -> bool:
        """Whether an op is a product of a weight that may be joined with others."""
        if not plain_rows(op) or op.name in self.apart:
            return False
        weight, out = op.reads[1].tensor, op.writes[0].tensor
        return (
            self.tensors[weight].role == "weight"
            and self.tensors[op.reads[0].tensor].role != "state"
            and self.tensors[out].role == "temp"
            and self.writers[out] == 1
            and out not in self.local.program.outputs
        )

    def key(self, op: Op) -> tuple[object, ...]:
        """What products that join have in common: the operand's storage first, itself, its rows,
        types.
        """
        x, w, out = (self.tensors[access.tensor] for access in accesses(op))
        return self.root(x.name), x.name, plain_rows(op), w.dtype, out.dtype

    def root(self, name: str) -> str:
        """What a view is a view of."""
        return self.sources.get(name, name)

    def join(self, group: Sequence[Op]) -> tuple[Tensor, tuple[Op, Tensor], list[Op]]:
        """The joined weight, the product with its result, and views for the results of each."""
        x = self.tensors[group[0].reads[0].tensor]
        num_rows = plain_rows(group[0])
        weights = [self.tensors[op.reads[1].tensor] for op in group]
        outs = [self.tensors[op.writes[0].tensor] for op in group]
        widths = [math.prod(out.shape[num_rows:]) for out in outs]
        rows, sums = x.shape[:num_rows], x.shape[num_rows:]
        weight = Tensor(
            name=f"{weights[0].name}{SPAN}{weights[-1].name}",
            shape=(sum(widths), *sums),
            dtype=weights[0].dtype,
            role="weight",
        )
        name = f"{group[0].name}{SPAN}{group[-1].name}"
        out = Tensor(name=name, shape=(*rows, sum(widths)), dtype=outs[0].dtype)
        m, k = axis_names("m", len(rows)), axis_names("k", len(sums))
        axes = [Axis(name=n, extent=e) for n, e in zip(m, rows, strict=True)]
        axes.append(Axis(name="n", extent=sum(widths)))
        axes += [
            Axis(name=n, extent=e, role="reduce", combine="sum")
            for n, e in zip(k, sums, strict=True)
        ]
        reads = [access_named(x.name, *m, *k), access_named(weight.name, "n", *k)]
        product = make_op(name, "linear", axes, reads, [access_named(name, *m, "n")])
        views, start = [], 0
        for each, width in zip(outs, widths, strict=True):
            views.append(_view(each, out, num_rows, start))
            start += width
        return weight, (product, out), views


def _view(part: Tensor, whole: Tensor, num_rows: int, start: int) -> Op:
    """`part` as columns of `whole` from `start` on."""
    names = axis_names("i", len(part.shape))
    axes = [Axis(name=n, extent=e) for n, e in zip(names, part.shape, strict=True)]
    rows = tuple(Index(axes=(name,)) for name in names[:num_rows])
    columns = Index(axes=tuple(names[num_rows:]), offset=start)
    read = Access(tensor=whole.name, dims=(*rows, columns))
    return make_op(part.name, "view", axes, [read], [access_named(part.name, *names)])
