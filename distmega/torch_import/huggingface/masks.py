"""Whether attention that a captured decoder wrote out hides what its caches hold behind a token.

In: a program as it was captured, with its inputs of rows. Out: nothing, or a CaptureError. A class
may take its mask from the length of its cache instead of the positions that it is given; then every
token sees rows that nobody wrote. So every softmax of scores over a cache, and attention under a
mask, is looked at with all scores zero: where a token must not look, what goes in must be far below
that. Attention over caches that programs state as one op masks by itself. Used by decoders.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor as Values

from distmega.errors import CaptureError, DistmegaError
from distmega.hostir.library.ops import compile_op
from distmega.hostir.library.torch_types import torch_dtype
from distmega.program.kinds import kind_of
from distmega.program.types import Op, Program

HIDDEN = -5e3
"""Scores below it weigh nothing beside zero."""
MAX_ELEMENTS = 1 << 22
"""Of a tensor that is worked out; larger scores are not looked at."""


def check_masks(program: Program, constants: Mapping[str, Values], max_context: int) -> None:
    """CaptureError if a token sees rows of the caches behind its own position. max_context: rows of
    a cache. A prompt's tokens are looked at as one sequence.
    """
    makers = _Makers.of(program)
    looked_at = [op for op in program.ops if makers.weighs_cache(op)]
    if not looked_at or max_context < 2:
        return
    inputs = {tensor.name: tensor for tensor in program.with_role("input")}
    num_rows = inputs["positions"].shape[0]
    whole = [min(row, max_context - 1) for row in range(num_rows)]
    last = max_context - 2
    tried = [whole] if "sequences" in inputs else [[p] * num_rows for p in {0, last // 2, last}]
    for positions in tried:
        given = {name: _zeros(tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
        given["positions"] = torch.tensor(positions)
        if "starts" in inputs:
            given["starts"] = torch.full(inputs["starts"].shape, num_rows)
            given["starts"][0] = 0
        values = _Values(program, makers, {**constants, **given})
        for op in looked_at:
            seen = values.seen(op, max_context)
            if seen is not None:
                _require_hidden(op, seen, positions)


def _require_hidden(op: Op, seen: Values, positions: Sequence[int]) -> None:
    """seen: [.., t], what an op may look at, rows of tokens in one of its dims or in none."""
    num, width = len(positions), seen.shape[-1]
    hidden = torch.arange(width) > torch.tensor(positions)[:, None]
    front = [num if extent == num else 1 for extent in seen.shape[:-1]]
    by_row = num > 1 and front.count(num) == 1
    hidden = hidden.reshape(*front, width) if by_row else hidden.all(0)
    if bool((seen & hidden).any()):
        raise CaptureError(
            f"{op.name}: of {seen.shape[-1]} rows of a cache, tokens at positions {positions[0]} "
            f"to {positions[-1]} see some that lie behind them",
            expected="a mask that hides these, made from the positions that the class is given",
            remedy="install a newer release of transformers: in older ones some classes take it "
            "from the length of the cache",
        )


@dataclass(slots=True)
class _Makers:
    """Which op makes what."""

    program: Program
    ops: dict[str, Op]
    states: frozenset[str]

    @classmethod
    def of(cls, program: Program) -> "_Makers":
        states = frozenset(tensor.name for tensor in program.with_role("state"))
        made = {w.tensor: op for op in program.ops for w in op.writes if w.tensor not in states}
        return cls(program, made, states)

    def weighs_cache(self, op: Op) -> bool:
        """Whether an op makes weights of scores over rows of a cache."""
        kind = kind_of(op)
        if kind.mixes_values and not kind.reads_positions:
            return self.is_cached(op.reads[1].tensor)
        if op.kind != "softmax":
            return False
        products = self.found(op.reads[0].tensor, lambda each: kind_of(each).contracts)
        return any(self.is_cached(read.tensor) for each in products for read in each.reads[:2])

    def is_cached(self, name: str) -> bool:
        """Whether a tensor is made of rows of a cache, moved or in another type."""
        op = self.ops.get(name)
        if op is None:
            return name in self.states
        kind = kind_of(op)
        if kind.looks_up_rows:
            return self.is_cached(op.reads[1].tensor)
        is_copy = op.is_view or kind.only_copies or (kind.is_elementwise and len(op.reads) == 1)
        return is_copy and any(self.is_cached(read.tensor) for read in op.reads)

    def found(self, name: str, wanted: Callable[[Op], bool]) -> list[Op]:
        """The nearest ops that are wanted behind a tensor, through what moves or maps elements."""
        found: list[Op] = []
        waiting, known = [name], {name}
        while waiting:
            op = self.ops.get(waiting.pop())
            if op is None:
                continue
            kind = kind_of(op)
            if wanted(op):
                found.append(op)
            elif op.is_view or kind.only_copies or kind.is_elementwise:
                new = {read.tensor for read in op.reads} - known
                known |= new
                waiting += sorted(new)
        return found


class _TooLarge(Exception):
    """A tensor that is not worked out."""


@dataclass(slots=True)
class _Values:
    """Tensors as they are if all products are zero. known: inputs and constants."""

    program: Program
    makers: _Makers
    known: dict[str, Values]
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {t.name: (t.shape, t.dtype) for t in self.program.tensors}

    def seen(self, op: Op, max_context: int) -> Values | None:
        """What an op may look at of a cache, bool [.., t]; None where that is too large."""
        try:
            if not kind_of(op).mixes_values:
                return self.value(op.reads[0].tensor)[..., :max_context] > HIDDEN
            if len(op.reads) < 4:  # no mask
                return torch.ones((1, max_context), dtype=torch.bool)
            mask = self.value(op.reads[3].tensor)
            seen = mask if mask.dtype == torch.bool else mask > HIDDEN
            return seen.expand(*seen.shape[:-1], max_context)
        except _TooLarge:
            return None

    def value(self, name: str) -> Values:
        """One tensor; zeros for what nobody knows."""
        if name not in self.known:
            self.known[name] = self.new_value(name)
        return self.known[name]

    def new_value(self, name: str) -> Values:
        shape, dtype = self.tensors[name]
        if math.prod(shape) > MAX_ELEMENTS:
            raise _TooLarge
        op = self.makers.ops.get(name)
        if op is None or kind_of(op).calls_torch or kind_of(op).mixes_values:
            return _zeros(shape, dtype)
        products = op.reads[:2] if kind_of(op).contracts else ()
        if products and len(op.reads) == 2:
            return _zeros(shape, dtype)
        operands = [
            _zeros(*self.tensors[read.tensor]) if read in products else self.value(read.tensor)
            for read in op.reads
        ]
        try:
            made = compile_op(op, {})(operands)
        except (DistmegaError, RuntimeError, IndexError):
            return _zeros(shape, dtype)
        return made[[write.tensor for write in op.writes].index(name)]


def _zeros(shape: Sequence[int], dtype: str) -> Values:
    return torch.zeros(shape, dtype=torch_dtype(dtype))
