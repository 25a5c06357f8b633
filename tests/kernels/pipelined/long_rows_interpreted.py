"""Runs the kernels of rows longer than a tile under Triton's interpreter, in a process of its own:
the interpreter is chosen before Triton is imported. Prints each case whose results are not those of
float64. Arguments: types.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import interpreter

from distmega.hostir.library.norms import normalise
from distmega.kernels.pipelined.choices import KernelChoice
from distmega.kernels.pipelined.families import Launch
from distmega.kernels.pipelined.norms import norms
from tests.kernels.interpreting import patch_tensors
from tests.kernels.pipelined.test_pipelined import H200

TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Relative; the interpreter cuts off what bf16 can't hold."""
ROOM = 16
UNTOUCHED = 777.0
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """x and residual: rows. start: element of aligned memory at which results begin."""

    name: str
    op: str
    x: Tensor
    residual: Tensor | None = None
    start: int = 0


def choices(columns: int) -> Iterator[KernelChoice]:
    """A program a row, of several tiles, and programs that share one, of which the last has none of
    its chunks.
    """
    warps = next((n for n in (2, 8) if columns < 4096 * n), 32)
    elements = 512 * warps
    for parts in (1, -(-columns // elements) + 1):
        yield KernelChoice(tile=(1, elements), num_warps=warps, stages=0, buffers=0,
                           programs_per_sm=1, run=1, parts=parts)  # fmt: skip


def run_interpreted(launch: Launch, tensors: Sequence[Tensor | None]) -> None:
    """In place of Launch's call, which needs compiled code."""
    launch.kernel[(launch.grid,)](*launch._arguments(tensors), *launch.rest)


def is_right(case: Case, choice: KernelChoice) -> bool:
    """Results and sums, and that nothing around them is written."""
    x, residual = case.x, case.residual
    columns = x.shape[1]
    weight, bias = torch.randn(2, columns).to(x.dtype)
    rooms = [aligned(x.numel() + ROOM, x.dtype).fill_(UNTOUCHED) for _ in range(2)]
    y, total = (room[case.start : case.start + x.numel()].view(x.shape) for room in rooms)
    operands = (
        x,
        residual,
        None if case.op == "softmax" else weight,
        bias if case.op == "layer_norm" else None,
        y,
        None if residual is None else total,
    )
    family = norms.family_of(case.op, EPS, operands)
    assert family is not None
    family.launch(choice)(operands)
    summed = x.double()
    if residual is not None:
        summed = summed + residual.double()
        assert close(total, summed, x.dtype)
        summed = total.double()
    expected = normalise(case.op, summed, None, *map(wide, operands[2:4]), EPS)[0]
    outside = sum(int((room == UNTOUCHED).sum()) for room in rooms)
    written = x.numel() * (1 if residual is None else 2)
    return close(y, expected, x.dtype) and outside == sum(map(len, rooms)) - written


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(
        found.double(), expected, rtol=TOLERANCE[dtype], atol=2e-5, equal_nan=True
    )


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """Memory that begins at a multiple of 16 bytes, as a GPU's does."""
    flat = torch.empty(count + ROOM, dtype=dtype)
    return flat[-flat.data_ptr() % 16 // dtype.itemsize :][:count]


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: float = 0.0) -> Tensor:
    flat = aligned(shape[0] * shape[1], dtype)
    return flat.view(shape).copy_(torch.randn(shape) * 2 + offset)


def special_rows() -> Tensor:
    """Rows of minus infinity in part and as a whole, of plus infinity, of what is no number."""
    x = rows(6, 1029)
    x[0], x[1, 5:], x[2, :1020] = [float("-inf")] * 3
    x[3, 700], x[4, 1028], x[5] = float("nan"), float("inf"), 3e38
    return x


def plain_cases(dtype: torch.dtype) -> Iterator[Case]:
    for columns in (1, 2, 8193, 50257):
        yield Case(name="softmax", op="softmax", x=rows(2, columns, dtype=dtype))
    x = rows(2, 1029, dtype=dtype, offset=5)
    yield Case(name="layer_norm", op="layer_norm", x=x, residual=rows(2, 1029, dtype=dtype))
    yield Case(name="rms_norm", op="rms_norm", x=x, residual=x, start=3)


def special_cases() -> Iterator[Case]:
    yield Case(name="even", op="layer_norm", x=rows(2, 2048))
    yield Case(name="special", op="softmax", x=special_rows())
    yield Case(name="padded", op="softmax", x=rows(2, 1040)[:, :1029])
    yield Case(name="begins odd", op="softmax", x=rows(2, 1030)[:, 1:])
    yield Case(name="columns apart", op="layer_norm", x=rows(1029, 2).t())
    yield Case(
        name="mixed", op="rms_norm", x=rows(2, 1029), residual=rows(2, 1029, dtype=torch.float32)
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    with (
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
        patch.object(norms, "device_facts", lambda index: H200),
        patch.object(norms, "is_hopper", lambda index: False),
        patch.object(Launch, "__call__", run_interpreted),
    ):
        plain = (plain_cases(getattr(torch, name)) for name in sys.argv[1:])
        for case in chain(special_cases(), *plain):
            for choice in choices(case.x.shape[1]):
                if not is_right(case, choice):
                    print(f"{case.name} {case.op} {list(case.x.shape)} {case.x.dtype} {choice}")
