"""Chains of pointwise ops as one op, however many ops a program states them in.

Comes in: ops of a program. Goes out: Chains, one op each that does what several do, an op by itself
included. A pointwise op joins the only one that reads its result along the same axes;
operands that are read alike are one. Next: matching.py.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import Access, Op, Program, accesses
from distmega.superopt.search.terms import substitute

MOST_MEMBERS = 4
"""Ops of a chain, at most."""


@dataclass(frozen=True, slots=True)
class Chain:
    """An op, and the names of the program's ops that it does."""

    op: Op
    members: tuple[str, ...]


class ChainFinder:
    """What may join in one program. apart: names of ops that join nothing."""

    def __init__(self, program: Program, apart: Container[str] = ()) -> None:
        self.producers: dict[str, Op] = {}
        users: dict[str, list[Op]] = {}
        writers: dict[str, int] = {}
        for op in program.ops:
            for read in {access.tensor for access in op.reads}:
                users.setdefault(read, []).append(op)
            for access in op.writes:
                writers[access.tensor] = writers.get(access.tensor, 0) + 1
                self.producers[access.tensor] = op
        self.inner = {
            name: op
            for name, op in self.producers.items()
            if kind_of(op).is_elementwise and op.name not in apart and name not in program.outputs
            and len(users.get(name, ())) == 1 and writers[name] == 1
        }  # fmt: skip
        self.apart = apart

    def links(self, op: Op) -> Iterator[Chain]:
        """An op, and what it is with those before it, each once; the op alone comes first."""
        if not kind_of(op).is_elementwise or op.name in self.apart:
            yield Chain(op, (op.name,))
            return
        seen: set[frozenset[str]] = set()
        left = [Chain(without_repeats(op), (op.name,))]
        while left:
            link = left.pop(0)
            if frozenset(link.members) in seen:
                continue
            seen.add(frozenset(link.members))
            yield link
            if len(link.members) == MOST_MEMBERS:
                continue
            for read in link.op.reads:
                before = self.inner.get(read.tensor)
                joined = before and join_ops(before, link.op, read)
                if before and joined:
                    left.append(Chain(joined, (before.name, *link.members)))

    def longest(self, op: Op) -> Chain:
        """The op with all that joins it."""
        return max(self.links(op), key=lambda link: len(link.members))


def joined_program(program: Program) -> Program:
    """The program with as few pointwise ops as can be."""
    chains = ChainFinder(program)
    links = [chains.longest(op) for op in reversed(program.ops)]
    kept: list[Op] = []
    gone: set[str] = set()
    for link in links:
        name = link.members[-1]
        if name not in gone:
            kept.append(link.op)
            gone.update(link.members[:-1])
    ops = tuple(reversed(kept))
    used = {access.tensor for op in ops for access in accesses(op)}
    tensors = tuple(t for t in program.tensors if t.role != "temp" or t.name in used)
    return replace(program, tensors=tensors, ops=ops)


def join_ops(before: Op, after: Op, read: Access) -> Op | None:
    """Two pointwise ops as one, where `after` reads the result of `before` by `read`; None where it
    does so along other axes.
    """
    renamed = _renaming(before, read)
    position = after.reads.index(read)
    if renamed is None or sum(other.tensor == read.tensor for other in after.reads) > 1:
        return None
    reads = list(after.reads[:position]) + list(after.reads[position + 1 :])
    kept: list[Access] = []
    mine = [_position(kept, access) for access in reads]
    inner = tuple(_position(kept, _renamed(access, renamed)) for access in before.reads)
    tree = expr.parse(str(before.attr("expr")))
    arguments: list[expr.Expr] = [expr.Arg(n) for n in mine]
    arguments.insert(position, substitute(tree, [expr.Arg(n) for n in inner]))
    return _with_operands(after, kept, arguments)


def without_repeats(op: Op) -> Op:
    """A pointwise op that reads nothing twice in the same way."""
    kept: list[Access] = []
    arguments = [expr.Arg(_position(kept, access)) for access in op.reads]
    return _with_operands(op, kept, arguments)


def _with_operands(op: Op, reads: Sequence[Access], arguments: Sequence[expr.Expr]) -> Op:
    """The op on other operands, of which its expression's arguments are made."""
    tree = substitute(expr.parse(str(op.attr("expr"))), arguments)
    attrs = tuple((name, str(tree) if name == "expr" else value) for name, value in op.attrs)
    return replace(op, reads=tuple(reads), attrs=attrs)


def _position(kept: list[Access], access: Access) -> int:
    """Where an operand is among those kept, put there if it is new."""
    if access not in kept:
        kept.append(access)
    return kept.index(access)


def _renaming(before: Op, read: Access) -> Mapping[str, tuple[str, ...]] | None:
    """Axes of the op before -> those along which its result is read: one each, none of extent 1."""
    found: dict[str, tuple[str, ...]] = {}
    for mine, theirs in zip(before.writes[0].dims, read.dims, strict=True):
        if any(i.offset or i.stride != 1 or i.is_grouped for i in (mine, theirs)):
            return None
        if len(mine.axes) > 1 or len(theirs.axes) > 1:
            return None
        if mine.axes:
            extent = before.axis(mine.axes[0]).extent
            if not theirs.axes and extent > 1:
                return None
            found[mine.axes[0]] = theirs.axes
        elif theirs.axes:
            return None
    return found if all(axis.name in found for axis in before.axes) else None


def _renamed(access: Access, names: Mapping[str, tuple[str, ...]]) -> Access:
    dims = tuple(
        replace(i, axes=tuple(new for axis in i.axes for new in names[axis])) for i in access.dims
    )
    return Access(tensor=access.tensor, dims=dims)
