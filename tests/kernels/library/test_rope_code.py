"""Machine code of the rotations, compiled for sm_90a without a GPU."""

import pytest

from distmega.kernels.library.rope import rotate_rows
from tests.kernels.sm90 import compile_kernel


@pytest.mark.parametrize(("half", "heads"), [(32, 32), (64, 32)])
def test_a_program_loads_in_words_and_spills_nothing(half: int, heads: int) -> None:
    types = {"x": "*bf16", "positions": "*i64", "table": "*fp32", "y": "*bf16"}
    numbers = {"row_stride": "i32", "head_stride": "i32", "num_heads": "i32"}
    constants = {"half": half, "heads": heads}
    code = compile_kernel(rotate_rows, types | numbers, constants, 4, None, tuple(numbers))
    assert code.stack_bytes == 0
    assert any("ld.global.v4.b32" in line for line in code.ptx.splitlines())
