"""Runs the kernels that find the largest of rows under Triton's interpreter, in a process of its
own: the interpreter is chosen before Triton is imported. Prints how many results are not torch's.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch

from distmega.kernels.library import row_maxima
from distmega.kernels.library.row_maxima import find_largest
from distmega.program.ops.sampling import argmax_values


def is_torchs(x: torch.Tensor, n: int, base: int) -> bool:
    """Of the first n columns; whether values, as bits, and places are the same."""
    value, index = argmax_values(x[:, :n], base)
    found, place = find_largest(x[:, :n], base)
    same = torch.equal(place, index) and found.dtype == value.dtype
    return same and torch.equal(found.nan_to_num(7.0), value.nan_to_num(7.0))


def cases() -> list[torch.Tensor]:
    """Rows with ties, both zeros, numbers below zero alone, infinities and what is no number."""
    torch.manual_seed(0)
    plain = torch.randn(3, 100)
    ties = torch.randint(-3, 4, (5, 100)).float()
    negative = -torch.rand(2, 100) - 1.0
    zeros = torch.full((2, 100), -0.0)
    zeros[0, 40:], zeros[1, 70] = 0.0, 0.0
    least = torch.full((2, 100), float("-inf"))
    least[1, 90] = -1e30
    none = torch.randn(3, 100)
    none[0, 33], none[1, 99], none[1, 50], none[2, 2] = *[float("nan")] * 3, float("inf")
    return [plain, plain.half(), ties, negative, zeros, least, none]


if __name__ == "__main__":
    with patch.object(row_maxima, "COLUMNS", 32):
        found = [is_torchs(x, n, base) for x in cases() for n, base in ((100, 0), (97, 5))]
        print(len(found) - sum(found))
