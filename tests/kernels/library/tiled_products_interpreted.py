"""Runs the kernel of products by small tiles under Triton's interpreter, in a process of its own:
the interpreter is chosen before Triton is imported. Prints the largest error against torch.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from unittest.mock import patch

import torch
from triton.runtime import interpreter

from distmega.kernels.library import tiled_products
from distmega.kernels.library.small_tiles import SmallTiles
from distmega.kernels.library.tiled_products import TiledProduct
from distmega.program import expr
from tests.kernels.interpreting import patch_tensors

GELU = expr.parse("gelu(a0)")
CASES = [
    (rows, columns, depth, parts, turned)
    for rows, columns, depth in ((5, 24, 72), (33, 20, 100))
    for parts in (1, 3)
    for turned in (False, True)
]
"""Rows, columns, terms, parts of the sum, whether x lies the other way round."""


def error_of(rows: int, columns: int, depth: int, parts: int, turned: bool) -> float:
    torch.manual_seed(rows)
    x = torch.randn(depth, rows).T if turned else torch.randn(rows, depth)
    w, bias = torch.randn(columns, depth), torch.randn(columns, 2)[:, 1]
    tiles = SmallTiles(rows=16, columns=16, depth=32, warps=4, stages=1, parts=parts)
    errors = []
    for formula, shift in ((None, None), (GELU, bias)):
        product = TiledProduct(formula)
        for _ in range(2):  # the second finds what the first left
            found = product(x, w, shift, tiles)
            expected = torch.nn.functional.linear(x, w, shift)
            expected = expected if formula is None else torch.nn.functional.gelu(expected)
            errors.append(float((found - expected).abs().max()))
    same = x[:1].contiguous().expand(rows, depth)  # each row lies where the others do
    with patch.object(tiled_products, "TensorDescriptor", None):
        found = TiledProduct(None)(same, w, None, tiles)
    errors.append(float((found - torch.nn.functional.linear(same, w)).abs().max()))
    return max(errors)


if __name__ == "__main__":
    with (
        patch.object(tiled_products, "EARLY", False),
        patch.object(interpreter, "_patch_lang_tensor", patch_tensors),
    ):
        print(max(error_of(*case) for case in CASES))
