"""What is done to heads: results under Triton's interpreter, machine code for sm_90a."""

import pytest

from distmega.kernels.library.heads import PartSpec, move_rows
from tests.forked import run_module
from tests.kernels.sm90 import compile_kernel


def test_interpreted_parts_are_torchs() -> None:
    done = run_module("tests.kernels.library.heads_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


def part(heads: int, dim: int, steps: str) -> PartSpec:
    return PartSpec(
        heads=heads,
        dim=dim,
        half=dim // 2,
        normed="norm" in steps,
        rotated="rope" in steps,
        appended="append" in steps,
    )


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        (part(32, 128, "norm rope"), part(8, 128, "norm rope append"), part(8, 128, "append")),
        (part(32, 64, "rope"), part(8, 64, "rope append"), part(8, 64, "append")),
        (part(8, 128, "append"),),
    ],
    ids=["qwen3", "llama", "append"],
)
def test_a_program_moves_words_and_spills_nothing(
    parts: tuple[PartSpec, ...], several: bool
) -> None:
    num = len(parts)
    tuples = ("row_strides", "head_strides", "num_heads", "sequence_strides")
    tuples += "sequence_counts", "contexts"
    types: dict[str, object] = dict.fromkeys(tuples, ("i32",) * num)
    types |= {"xs": ("*bf16",) * num, "weights": ("*bf16",) * num, "outs": ("*bf16",) * num}
    types |= {"positions": "*i64", "table": "*fp32", "sequences": "*i64", "eps": "fp32"}
    types["num_angles"] = "i32"
    constants = {"several": several, "own": False, "parts": parts}
    code = compile_kernel(move_rows, types, constants, 4, None, tuples)
    lines = code.ptx.splitlines()
    assert code.stack_bytes == code.shared_bytes == 0
    for access in ("ld.global", "st.global"):
        assert any(f"{access}.v{width}.b32" in line for line in lines for width in (2, 4))
        assert not any(f"{access}.b16" in line for line in lines)
