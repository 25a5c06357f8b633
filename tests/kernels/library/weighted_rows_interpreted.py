"""Runs the kernel that adds weighted rows up under Triton's interpreter, in a process of its own:
the interpreter is chosen before Triton is imported. Prints how many results are not torch's.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch

from distmega.kernels.library import weighted_rows
from distmega.kernels.library.weighted_rows import add_weighted_rows
from distmega.program.ops.experts import GroupRange, route_values, scatter_values


def is_torchs(num_rows: int, choices: int, num_groups: int, n: int, first: int, stop: int) -> bool:
    """Rows of random groups, the last of them of none; whether all bits are the same."""
    torch.manual_seed(0)
    ids = torch.rand(num_rows, num_groups).argsort(dim=1)[:, :choices].int()
    used = torch.tensor([num_rows - 1], dtype=torch.int32)
    _, offsets, _, slots = route_values(ids, num_groups, used)
    y = torch.randn(num_rows * choices, n)
    weights = torch.rand(num_rows, choices)
    groups = GroupRange(first=first, stop=stop, num=num_groups)
    given = y, weights, slots, offsets, groups
    return torch.equal(add_weighted_rows(*given), scatter_values(*given))


CASES = (
    (5, 3, 8, 40, 0, 8),
    (5, 3, 8, 40, 2, 5),
    (3, 1, 1, 100, 0, 1),
    (2, 8, 9, 64, 4, 4),
)

if __name__ == "__main__":
    with (
        patch.object(weighted_rows, "_takes", lambda *_: True),
        patch.object(weighted_rows, "COLUMNS", 32),
    ):
        print(sum(not is_torchs(*case) for case in CASES))
