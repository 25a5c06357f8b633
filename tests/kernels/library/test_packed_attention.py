"""Attention of packed prompts: results under Triton's interpreter, machine code for sm_90a."""

import pytest
import torch
import triton

from distmega.kernels.library import packed_attention
from distmega.kernels.library.packed_attention import LONG, TILES, attend_packed, attend_rows
from tests.forked import run_module
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel


def test_interpreted_sequences_of_any_lengths_prefixes_and_windows_are_torchs() -> None:
    done = run_module("tests.kernels.library.packed_attention_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize(
    ("dim", "windowed", "capped"),
    [(64, False, False), (96, False, False), (128, False, False), (128, True, False),
     (256, False, False), (256, True, True)],
)  # fmt: skip
def test_keys_come_by_tma_and_nothing_spills(dim: int, windowed: bool, capped: bool) -> None:
    padded = max(64, triton.next_power_of_2(dim))
    tiles = TILES[padded]
    block = f"tensordesc<bf16[{tiles.keys}, {padded}]>"
    types = {"q": "*bf16", "keys": block, "values": block, "out": "*bf16"}
    types |= {"starts": "*i64", "positions": "*i64", "scale": "fp32", "cap": "fp32"}
    strides = ("row_stride", "head_stride")
    types |= dict.fromkeys(("num_sequences", "context", "kv_heads", "window", *strides), "i32")
    constants = {"group": 4, "dim": dim, "padded": padded, "windowed": windowed, "slots": 16}
    constants |= {"num_rows": tiles.rows, "num_keys": tiles.keys, "capped": capped}
    code = compile_kernel(attend_rows, types, constants, tiles.warps, None, strides)
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    assert "wgmma.mma_async" in code.ptx
    assert "cp.async.bulk.tensor" in code.ptx


def test_long_sequences_go_to_two_warp_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is said; else by rows a sequence on average."""
    monkeypatch.setattr(packed_attention, "_takes", lambda *given: True)
    monkeypatch.setattr(packed_attention, "takes_groups", lambda q, scale: True)
    for name in ("attend_by_groups", "attend_by_tiles"):
        monkeypatch.setattr(packed_attention, name, lambda *given, name=name: name)
    q, cache = torch.zeros(LONG * 2, 1, 1, 8), torch.zeros(16, 1, 4, 8)
    rows, starts = torch.zeros(LONG * 2, dtype=torch.int64), torch.zeros(17, dtype=torch.int64)
    given = q, cache, cache, rows, rows
    ways = [attend_packed(*given, starts, 1.0, 0, is_long) for is_long in (None, False, True)]
    assert ways == ["attend_by_tiles", "attend_by_tiles", "attend_by_groups"]
    assert attend_packed(*given, starts[:3], 1.0) == "attend_by_groups"
    assert attend_packed(*given, starts[:4], 1.0) == "attend_by_tiles"
