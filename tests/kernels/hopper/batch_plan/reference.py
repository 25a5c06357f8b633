"""What the queues of the kernel of several rows compute, in float64 on a CPU: each instruction as
its words say, SM by SM, without attention or a choice of tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distmega.hostir.library.pointwise import FUNCTIONS
from distmega.kernels.hopper.batch_plan.types import BatchEpilogue, BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_PAIRED,
    NORM_KINDS,
    NORMED,
    BatchEmbed,
    BatchInstruction,
    BatchLinear,
    BatchNorm,
)
from distmega.kernels.hopper.plan.words import NOTHING, TILE_K, UNIT_ROWS, VECTOR_MULTIPLE
from distmega.kernels.runtime.arena import ArenaLayout
from distmega.program import expr

ITEM_BYTES = 2


def _evaluate(formula: expr.Expr, values: Sequence[Tensor]) -> Tensor:
    def lift(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    return expr.evaluate(formula, values, FUNCTIONS, lift)


class Reference:
    """Memory of one rank; weights in the places that the layout gives them."""

    def __init__(
        self, queues: BatchQueues, layout: ArenaLayout, weights: Mapping[str, Tensor]
    ) -> None:
        self.queues = queues
        self.arena = torch.zeros(layout.num_bytes // ITEM_BYTES, dtype=torch.float64)
        for name, value in weights.items():
            first = layout.offset(name) // ITEM_BYTES
            self.arena[first : first + value.numel()] = value.double().flatten()
        self.x = torch.zeros(queues.num_chunks * TILE_K, BATCH, dtype=torch.float64)
        self.numbers = torch.zeros(queues.num_numbers, dtype=torch.float64)
        shape = queues.num_slots, len(queues.queues), BATCH
        self.squares = torch.zeros(shape, dtype=torch.float64)

    def step(self, rows: Tensor, order: Sequence[int]) -> dict[str, Tensor]:
        """Outputs for the rows that come in; SMs take turns in `order` in each instruction."""
        given = torch.zeros(BATCH, rows.shape[1], dtype=torch.float64)
        given[: len(rows)] = rows.double()
        for i in range(len(self.queues.queues[0])):
            for sm in order:
                self.do(self.queues.queues[sm][i], sm, given)
        return {
            kept.tensor: self.numbers[kept.first : kept.first + BATCH * kept.num]
            .view(BATCH, kept.num)[: len(rows)]
            .clone()
            for kept in self.queues.outputs
        }

    def do(self, one: BatchInstruction, sm: int, given: Tensor) -> None:
        match one:
            case BatchEmbed():
                stop = min(one.row0 + one.num_units * UNIT_ROWS, one.num_rows)
                own = torch.arange(one.row0, max(one.row0, stop))
                self.write(one, sm, own, given[:, own], one.num_rows, self.queues.epilogues.entry)
            case BatchLinear():
                self.multiply(one, sm)
            case BatchNorm():
                self.normalise(one, sm)
            case _:
                raise NotImplementedError(type(one).__name__)

    def multiply(self, one: BatchLinear, sm: int) -> None:
        """Rows of weights as the loader brings them, units of two streams in turn."""
        epilogue = self.queues.epilogues.each[one.opcode]
        matrix = self.queues.matrices[one.matrix]
        first = matrix.offset // ITEM_BYTES
        weights = self.arena[first : first + matrix.num_rows * matrix.columns]
        weights = weights.view(matrix.num_rows, matrix.columns)
        x = self.x[one.src * TILE_K :][: matrix.columns]
        factor = torch.ones(BATCH, dtype=torch.float64)
        if one.flags & NORMED:
            mean = self.squares[one.squares].sum(0) / one.length
            factor = (mean + self.queues.eps).rsqrt()
        is_paired = bool(one.flags & BATCH_PAIRED)
        starts = (one.weight_row, one.pair_row) if is_paired else (one.weight_row,)
        streams, num_rows = len(starts), one.num_rows // len(starts)
        row0 = one.row0 // streams
        count = min(one.num_units * UNIT_ROWS // streams, num_rows - row0)
        own = row0 + torch.arange(max(0, count))
        values = []
        for stream, start in enumerate(starts):
            y = (weights[start : start + len(own)] @ x * factor).T
            if one.bias != NOTHING:
                behind = stream * -(-num_rows // VECTOR_MULTIPLE) * VECTOR_MULTIPLE
                y = y + self.arena[one.bias + behind + own]
            values.append(y)
        for carry in (one.carry, one.carry2)[: epilogue.num_carried]:
            values.append(self.kept(carry, num_rows)[:, own])
        self.write(one, sm, own, _evaluate(epilogue.formula, values), num_rows, epilogue)

    def kept(self, first: int, num_rows: int) -> Tensor:
        return self.numbers[first : first + BATCH * num_rows].view(BATCH, num_rows)

    def write(
        self, one: BatchLinear | BatchEmbed, sm: int, own: Tensor, values: Tensor, num_rows: int,
        epilogue: BatchEpilogue,
    ) -> None:  # fmt: skip
        if epilogue.keeps:
            self.kept(one.keep, num_rows)[:, own] = values
        if epilogue.scaled:
            weight = self.arena[one.next_norm + own]
            self.x[one.dst // BATCH + own] = (values * weight).T
            self.squares[epilogue.slot, sm] = (values * values).sum(1)
        elif epilogue.publishes:
            self.x[one.dst // BATCH + own] = values.T

    def normalise(self, one: BatchNorm, sm: int) -> None:
        columns = torch.arange(one.num_rows)
        for b in range(sm, self.queues.batch, len(self.queues.queues)):
            y = self.kept(one.src, one.num_rows)[b]
            kind = NORM_KINDS[one.kind]
            if kind == "layer_norm":
                y = y - y.mean()
            if kind != "none":
                y = y * ((y * y).mean() + self.queues.eps).rsqrt()
            if one.weight != NOTHING:
                y = y * self.arena[one.weight + columns]
            if one.bias != NOTHING:
                y = y + self.arena[one.bias + columns]
            if one.keep != NOTHING:
                self.kept(one.keep, one.num_rows)[b] = y
            self.x[one.dst // BATCH + columns, b] = y
