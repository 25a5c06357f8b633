"""Launches of the norm kernels: rows become tiles of a descriptor, a choice is made, and TMA or
plain Triton runs it.

In: CUDA tensors of float types, the last dim being the row. Out: results and sums, contiguous.
Next: api.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from distmega.kernels.pipelined.blocks import common_width, describe, padded_to
from distmega.kernels.pipelined.choices import Choice, Traffic, chunk_choices, row_choices
from distmega.kernels.pipelined.device import INT32, can_load, device_facts, has_tma, num_programs
from distmega.kernels.pipelined.long_norm_kernel import long_norm_kernel
from distmega.kernels.pipelined.norm_kernel import NormSpec, norm_kernel
from distmega.kernels.pipelined.triton_path import BLOCK, norm_any
from distmega.kernels.pipelined.tuning import pick

MAX_TILE = 16384
"""Longest row, padded, that one tile holds; longer ones come in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Operands of one call as matrices: x, residual, results [rows, columns], vectors contiguous.

    total is None without a residual.
    """

    op: str
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor
    total: Tensor | None
    eps: float

    @property
    def moved(self) -> tuple[Tensor, ...]:
        """What comes or leaves by TMA."""
        return tuple(t for t in (self.x, self.residual, self.y, self.total) if t is not None)


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, columns] with its last dim as columns: a view where its strides allow."""
    return x.reshape(-1, x.shape[-1])


def launch_norm(rows: Rows) -> None:
    """Writes y, and total where there is a residual."""
    if not rows.x.numel():
        return
    choices = norm_choices(rows)
    if not choices:
        run_any(rows)
        return

    def run(choice: Choice) -> None:
        run_tma(rows, choice)

    run(pick(shape_class(rows), choices, run))


def shape_class(rows: Rows) -> str:
    """Calls of one class share a measured choice: number of rows up to the next power of two."""
    vectors = {"weight": rows.weight, "bias": rows.bias}
    parts = "".join(f" {name}" for name, vector in vectors.items() if vector is not None)
    types = " ".join(str(t.dtype).removeprefix("torch.") for t in rows.moved)
    return f"{rows.op}{parts}, {types}, {padded_to(rows.x.shape[0])}x{rows.x.shape[1]}"


def norm_choices(rows: Rows) -> tuple[Choice, ...]:
    """Choices for the Gluon kernels, best first; none where they can't run."""
    count, columns = rows.x.shape
    if not has_tma(rows.x.device.index) or not common_width(_sizes(rows), columns):
        return ()
    if any(t.stride(1) != 1 or not can_load(t, t.stride(0)) for t in rows.moved):
        return ()
    return _choices(count, columns, _traffic(rows), rows.x.device.index)


def _sizes(rows: Rows) -> list[int]:
    return [t.element_size() for t in rows.moved]


def _traffic(rows: Rows) -> Traffic:
    arriving = [t.element_size() for t in (rows.x, rows.residual) if t is not None]
    return Traffic(
        in_bytes=sum(arriving),
        out_bytes=sum(_sizes(rows)) - sum(arriving),
        num_elements=rows.x.numel(),
    )


@lru_cache(maxsize=4096)
def _choices(count: int, columns: int, traffic: Traffic, index: int) -> tuple[Choice, ...]:
    padded = max(128, padded_to(columns))
    if count >= INT32:
        return ()
    facts = device_facts(index)
    whole = row_choices(count, padded, traffic, facts) if padded <= MAX_TILE else ()
    return whole or chunk_choices(count, columns, traffic, facts)


def run_tma(rows: Rows, choice: Choice) -> None:
    """The Gluon kernel for whole rows, or for rows in chunks where the choice's tile is shorter."""
    count, columns = rows.x.shape
    width = common_width(_sizes(rows), columns)
    tile = (choice.tile[0], choice.tile[1] // width, width)
    spec = NormSpec(
        op=rows.op,
        has_residual=rows.residual is not None,
        has_weight=rows.weight is not None,
        has_bias=rows.bias is not None,
        rows=tile[0],
        groups=tile[1],
        width=width,
        exact=choice.tile[1] == columns,
        stages=choice.stages,
        buffers=choice.buffers,
    )
    x, residual, y, total = (
        None if t is None
        else describe(t, (count, columns // width, width), (t.stride(0), width, 1), tile)
        for t in (rows.x, rows.residual, rows.y, rows.total)
    )  # fmt: skip
    operands = (x, residual, rows.weight, rows.bias, y, total, columns)
    options = {"num_warps": choice.num_warps, "maxnreg": choice.max_registers}
    if choice.tile[1] >= columns:
        num_tiles = -(-count // tile[0])
        grid = (num_programs(choice, num_tiles, rows.x),)
        norm_kernel[grid](*operands, num_tiles, choice.run, rows.eps, spec, **options)
    else:
        chunks = -(-columns // choice.tile[1])
        grid = (num_programs(choice, count, rows.x),)
        long_norm_kernel[grid](*operands, chunks, count, rows.eps, spec, **options)


def run_any(rows: Rows) -> None:
    """The plain Triton kernel."""
    count, columns = rows.x.shape
    residual_strides = (0, 0) if rows.residual is None else rows.residual.stride()
    norm_any[(count,)](
        rows.x, rows.residual, rows.weight, rows.bias, rows.y, rows.total, *rows.x.stride(),
        *residual_strides, columns, rows.eps, rows.op, rows.residual is not None,
        rows.weight is not None, rows.bias is not None, BLOCK,
    )  # fmt: skip


def make_rows(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Rows:
    """Operands of a call with results allocated."""
    flat = as_rows(x)
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    return Rows(
        op=op,
        x=flat,
        residual=None if residual is None else as_rows(residual),
        weight=None if weight is None else weight.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        y=y,
        total=None if residual is None else torch.empty_like(y),
        eps=eps,
    )
