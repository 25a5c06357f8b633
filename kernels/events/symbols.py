"""Which iteration axes have extents that are known only at run time, from one dim each.

Comes in: a Program, and for each symbol a tensor's dim whose extent it is. Goes out: op -> axis ->
symbol. A symbol spreads along access maps, forwards and backwards, wherever an axis is a dim; the
extents of the program are its upper bounds. Used by analyse.py.
"""

import re
from collections.abc import Mapping

from distmega.errors import ProgramError
from distmega.kernels.events.arguments import require
from distmega.program.types import Access, Index, Op, Program, accesses

AxisSymbols = dict[str, dict[str, str]]
"""Op -> axis -> symbol."""


def spread_symbols(program: Program, symbols: Mapping[str, tuple[str, int]]) -> AxisSymbols:
    """ProgramError for a dim that the program lacks, or that two symbols meet in, and for sums over
    what a symbol ends in the middle of.
    """
    require(symbols, Mapping, "symbols", "(tensor, dim) by name of the symbol")
    tensors = program.tensor_map()
    dims: dict[tuple[str, int], str] = {}
    for symbol, pair in symbols.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ProgramError(
                f"symbol {symbol!r} for {pair!r:.60}",
                expected="a pair (tensor, dim)",
                remedy="name the tensor and the dim whose extent it is",
            )
        tensor, dim = pair
        if not isinstance(symbol, str) or not re.fullmatch(r"\w+", symbol):
            raise ProgramError(
                f"symbol {symbol!r}",
                expected="letters, digits and underscores, so that it can be printed",
                remedy="give it another name",
            )
        named = tensors.get(tensor) if isinstance(tensor, str) else None
        dims_there = range(len(named.shape)) if named else ()
        if type(dim) is not int or dim not in dims_there:
            raise ProgramError(
                f"symbol {symbol!r} for dim {dim!r} of {tensor!r}",
                expected=f"a dim of a tensor of program {program.name!r}",
                remedy="name one of its tensors and a dim that it has",
            )
        _agree(dims, (tensor, dim), symbol)
    found: AxisSymbols = {op.name: {} for op in program.ops}
    size = -1
    while size != len(dims):
        size = len(dims)
        for op in program.ops:
            known = found[op.name]
            for access, dim, axis in _whole_dims(program, op):
                symbol = dims.get((access.tensor, dim), "")
                if symbol and known.setdefault(axis, symbol) != symbol:
                    raise _meet(f"axis {axis!r} of {op.name!r}", known[axis], symbol)
            for access, dim, axis in _whole_dims(program, op):
                if axis in known:
                    _agree(dims, (access.tensor, dim), known[axis])
    _refuse_sums(program, found, dims)
    return found


def _refuse_sums(program: Program, found: AxisSymbols, dims: Mapping[tuple[str, int], str]) -> None:
    """ProgramError for an op that takes a dim at once of which a symbol says what is in use, but
    not up to where: one that holds a part of what the symbol counts, or more than that, or shares
    it out among several dims. dims: those whose extent is a symbol.
    """
    inside: dict[tuple[str, int], str] = {}
    for op in program.ops:
        known = found[op.name]
        cut = dict[str, str]()
        for read in op.reads:
            for dim, index in enumerate(read.dims):
                at = read.tensor, dim
                if at in inside:
                    cut |= dict.fromkeys(index.axes, inside[at])
                elif at in dims:
                    cut |= {name: dims[at] for name in index.axes if name not in known}
        for name, symbol in cut.items():
            axis = op.axis(name)
            if axis.role != "parallel" and not axis.lookup:
                raise ProgramError(
                    f"op {op.name!r} of all of axis {name!r}, in which symbol {symbol!r} ends",
                    expected="a dim that is one axis, so that the symbol is its extent",
                    remedy="take the dims apart, or sum before what cuts or joins them",
                )
        carried = cut | known
        for write in op.writes:
            for dim, index in enumerate(write.dims):
                at = write.tensor, dim
                for name in index.axes:
                    if name in carried and at not in dims:
                        inside[at] = carried[name]


def _whole_dims(program: Program, op: Op) -> list[tuple[Access, int, str]]:
    """Accesses of which a dim is one axis of the op, of the same extent."""
    tensors, extents = program.tensor_map(), op.extents
    return [
        (access, dim, index.axes[0])
        for access in accesses(op)
        for dim, index in enumerate(access.dims)
        if index == Index(axes=index.axes)
        and len(index.axes) == 1
        and extents[index.axes[0]] == tensors[access.tensor].shape[dim]
        and not op.axis(index.axes[0]).lookup
    ]


def _agree(dims: dict[tuple[str, int], str], key: tuple[str, int], symbol: str) -> None:
    if dims.setdefault(key, symbol) != symbol:
        raise _meet(f"dim {key[1]} of {key[0]!r}", dims[key], symbol)


def _meet(where: str, one: str, other: str) -> ProgramError:
    return ProgramError(
        f"symbols {one!r} and {other!r} meet in {where}",
        expected="one symbol for what has one extent",
        remedy="name the dim by one of them alone",
    )
