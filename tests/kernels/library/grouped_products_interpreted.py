"""Runs the kernel of products of groups under Triton's interpreter, in a process of its own: the
interpreter is chosen before Triton is imported. Prints the largest error against torch.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch
from triton.runtime import interpreter

from distmega.hostir.library import experts as library
from distmega.kernels.library import grouped_products
from distmega.kernels.library.grouped_products import ProductTiles, Schedule, grouped_linear
from distmega.program.ops.experts import GroupRange
from tests.kernels.interpreting import apart, patch_tensors

TILES = (
    ProductTiles(rows=4, columns=16, depth=16, warps=4, stages=1, programs=2),
    ProductTiles(rows=16, columns=16, depth=16, warps=4, stages=1, programs=1),
)

Case = tuple[tuple[int, ...], int, int, int, int, int]
"""Rows of each group, rows of no group behind them, columns, terms; the groups of the rank."""

CASES: tuple[Case, ...] = (
    ((4, 2, 1, 1), 0, 16, 16, 0, 4),
    ((0, 4, 4, 0), 0, 24, 40, 0, 4),
    ((8, 0, 0), 0, 16, 8, 0, 3),
    ((0, 0, 0, 0, 1), 0, 40, 32, 0, 5),
    ((1,), 0, 8, 16, 0, 1),
    ((5, 0, 9, 1, 0), 3, 17, 24, 0, 5),
    ((5, 2, 9, 1, 3), 0, 16, 24, 1, 3),
    ((5, 2, 9, 1, 3), 4, 16, 24, 3, 5),
    ((0, 3, 0, 6), 2, 16, 24, 0, 1),
    ((33, 20, 40), 0, 16, 16, 0, 3),
    ((2, 2), 0, 16, 16, 2, 2),
)


def error_of(case: Case, schedule: Schedule) -> float:
    counts, unused, columns, terms, first, stop = case
    generator = torch.Generator().manual_seed(sum(counts))
    total = sum(counts) + unused
    x = torch.randn(total, terms, generator=generator)
    x[sum(counts) :] = float("nan")
    w = torch.randn(stop - first, columns, terms, generator=generator)
    starts = [sum(counts[:n]) for n in range(len(counts) + 1)]
    offsets = apart(torch.tensor(starts, dtype=torch.int32))
    groups = GroupRange(first=first, stop=stop, num=len(counts))
    expected = library.grouped_linear(x, w, offsets, groups)
    found = grouped_linear(x, w, offsets, groups, max(*counts, 1), schedule)
    return float((found - expected).abs().max())


if __name__ == "__main__":
    schedules: tuple[Schedule, ...] = ("static", "drained", "auto")
    errors = []
    for tiles in TILES:
        with (
            patch.object(grouped_products, "_takes", lambda *_: True),
            patch.object(grouped_products, "WIDE_TILES", tiles),
            patch.object(grouped_products, "num_sms", lambda _: 3),
            patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
        ):
            errors += [error_of(case, schedule) for case in CASES for schedule in schedules]
    print(max(errors))
