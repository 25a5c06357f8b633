"""Runs the kernels that route rows to experts under Triton's interpreter, in a process of its own:
the interpreter is chosen before Triton is imported. Prints the cases whose results are not torch's.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import interpreter

from distmega.kernels.library import routing
from distmega.kernels.library.routing import choose, gather, sort_by_group
from distmega.program.ops.experts import route_values, top_k_values
from tests.kernels.interpreting import patch_tensors

WEIGHINGS = "values", "softmax", "softmax_chosen"
NAN, INF = float("nan"), float("inf")


def scores() -> Iterator[tuple[Tensor, int]]:
    """Rows and how many of each are chosen: ties, both zeros, infinities and what is no number."""
    torch.manual_seed(0)
    yield torch.randn(9, 128), 8
    yield torch.randn(1, 60), 4
    yield torch.randn(70, 8), 2
    yield torch.randn(3, 16), 16
    yield torch.randn(5, 1), 1
    yield torch.randn(2, 512), 10
    yield torch.randn(6, 40)[:, :37], 5
    yield torch.randint(-2, 3, (9, 37)).float(), 6
    yield torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0], [-0.0, -3.0, 0.0, -2.0, 0.0]]), 4
    odd = torch.randn(8, 20)
    odd[0], odd[1], odd[2], odd[3] = NAN, INF, -INF, 1.0
    odd[4, 3], odd[5, 3:6], odd[6, 7], odd[7, 1:] = NAN, NAN, INF, -INF
    odd[5, 9], odd[6, 2] = -torch.tensor(NAN), -INF
    yield odd, 7


def on_gpu(x: Tensor, num: int, weighing: str) -> tuple[Tensor, Tensor]:
    """As top_k_values on a GPU, where NaN is no error, but for weights in float64."""
    wide = x.float()
    ordered, columns = wide.sort(dim=-1, descending=True, stable=True)
    whole = wide.double().softmax(-1).gather(1, columns)[:, :num]
    chosen = ordered[:, :num].double()
    found = {"values": chosen, "softmax": whole, "softmax_chosen": chosen.softmax(-1)}
    return found[weighing].float(), columns[:, :num].int()


def chooses_wrongly() -> Iterator[str]:
    """Columns are torch's, weights but for rounding."""
    for number, (rows, num) in enumerate(scores()):
        for dtype, weighing in product((torch.float32, torch.bfloat16, torch.float16), WEIGHINGS):
            x = rows if dtype == torch.float32 else rows.to(dtype)
            expected = [on_gpu(x, num, weighing)]
            if x.isfinite().all():
                expected.append(top_k_values(x, num, weighing))
            weights, columns = choose(x, num, weighing)
            for weight, column in expected:
                close = torch.allclose(weights, weight, rtol=1e-6, atol=0, equal_nan=True)
                if not (close and same(columns, column)):
                    yield f"top_k {number} {dtype} {weighing}"


def distinct(num_rows: int, choices: int, num_groups: int) -> Tensor:
    """Random ids, no group twice in a row."""
    return torch.rand(num_rows, num_groups).argsort(dim=1)[:, :choices].int()


def ids() -> Iterator[tuple[Tensor, int]]:
    """Ids and the number of groups: some of no rows, all rows in one, one row, many."""
    torch.manual_seed(1)
    yield distinct(1, 8, 128), 128
    yield distinct(7, 2, 8), 8
    yield distinct(23, 3, 5), 5
    yield distinct(90, 8, 128), 128
    yield distinct(300, 2, 8), 8
    yield distinct(101, 6, 60), 512
    yield torch.full((130, 1), 4, dtype=torch.int32), 7
    yield torch.zeros(300, 1, dtype=torch.int32), 1
    yield distinct(5, 1, 3).long(), 3
    yield distinct(1, 4, 9).expand(97, 4), 9


def sorts_wrongly() -> Iterator[str]:
    """All results are torch's, of any number of rows in use."""
    for number, (given, num_groups) in enumerate(ids()):
        rows = len(given)
        for used in (None, 0, 1, rows // 2, rows - 1, rows):
            in_use = None if used is None else torch.tensor([used], dtype=given.dtype)
            expected = route_values(given, num_groups, in_use)
            found = sort_by_group(given, num_groups, in_use)
            if not all(map(same, found, expected)):
                yield f"route {number} {used}"


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found, expected) and found.dtype == expected.dtype


def strays() -> Iterator[str]:
    """Ids of no group come last, and are counted by none; more rows than there are, or fewer than
    none, are all and none.
    """
    given = distinct(200, 3, 9).long()
    given[5, 1], given[150, 2], given[77, 0] = -1, 9, 1 << 32
    counts, offsets, order, slots = sort_by_group(given, 9, None)
    flat = torch.where((given >= 0) & (given < 9), given, 9).flatten()
    expected = flat.sort(stable=True)[1].int()
    fits = torch.equal(order, expected) and torch.equal(counts, flat.bincount(minlength=9)[:9])
    back = torch.equal(slots.flatten()[order.long()], torch.arange(600))
    if not (fits and back and int(offsets[9]) == 597):
        yield "ids of no group"
    plain = distinct(50, 3, 9)
    for used, rows in ((-(1 << 40), 0), (51, 50), (1 << 40, 50)):
        found = sort_by_group(plain, 9, torch.tensor([used]))
        expected = route_values(plain, 9, torch.tensor([rows]))
        if not all(map(same, found, expected)):
            yield f"{used} rows in use"


def copies_wrongly() -> Iterator[str]:
    torch.manual_seed(2)
    for num_rows, choices, shape in ((1, 8, (40,)), (7, 2, (3, 16)), (33, 3, (100,)), (5, 1, ())):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(num_rows, *shape).to(dtype)
            order = torch.randperm(num_rows * choices).int()
            for numbers in (order, order.long()):
                expected = x.index_select(0, order.long() // choices)
                if not same(gather(x, numbers, choices), expected):
                    yield f"gather {num_rows} {choices} {shape} {dtype}"
    order = torch.tensor([1, -1, 9, 10, 1 << 29, 0])
    found = gather(torch.ones(5, 8), order, 2)
    if found[:, 0].tolist() != [1, 0, 1, 0, 0, 1]:
        yield "rows that are not there"


if __name__ == "__main__":
    with (
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
        patch.object(routing, "MOST_ALONE", 128),
        patch.object(routing, "BLOCKS", {400: 64, routing.MOST_PAIRS: 256}),
        patch.object(routing, "height_of", lambda block, bins: 4),
        patch.object(routing, "COPIED_BYTES", 64),
    ):
        for wrong in (chooses_wrongly, sorts_wrongly, strays, copies_wrongly):
            for case in wrong():
                print(case)
