"""Attention of packed prompts: results under Triton's interpreter, machine code for sm_90a."""

import pytest
import triton

from distmega.kernels.library.packed_attention import TILES, attend_rows
from tests.forked import run_module
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel


def test_interpreted_sequences_of_any_lengths_prefixes_and_windows_are_torchs() -> None:
    done = run_module("tests.kernels.library.packed_attention_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize(
    ("dim", "windowed"), [(64, False), (96, False), (128, False), (128, True), (256, False)]
)
def test_keys_come_by_tma_and_nothing_spills(dim: int, windowed: bool) -> None:
    padded = max(64, triton.next_power_of_2(dim))
    tiles = TILES[padded]
    block = f"tensordesc<bf16[{tiles.keys}, {padded}]>"
    types = {"q": "*bf16", "keys": block, "values": block, "out": "*bf16"}
    types |= {"starts": "*i64", "positions": "*i64", "scale": "fp32"}
    strides = ("row_stride", "head_stride")
    types |= dict.fromkeys(("num_sequences", "context", "kv_heads", "window", *strides), "i32")
    constants = {"group": 4, "dim": dim, "padded": padded, "windowed": windowed, "slots": 16}
    constants |= {"num_rows": tiles.rows, "num_keys": tiles.keys}
    code = compile_kernel(attend_rows, types, constants, tiles.warps, None, strides)
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    assert "wgmma.mma_async" in code.ptx
    assert "cp.async.bulk.tensor" in code.ptx
