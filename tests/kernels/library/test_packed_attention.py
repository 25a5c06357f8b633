"""Attention of packed prompts: results under Triton's interpreter, machine code for sm_90a."""

import pytest
import torch
import triton

from distmega.kernels.library import packed_attention
from distmega.kernels.library.packed_attention import TILES, attend_packed, attend_rows
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


def test_passes_of_many_rows_go_to_two_warp_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """By items of 64 rows of two heads, or of 128 of one where heads do not share keys in pairs;
    however many slots there are, of which most may be empty.
    """
    monkeypatch.setattr(packed_attention, "_takes", lambda *given: True)
    monkeypatch.setattr(packed_attention, "takes_groups", lambda q, scale: True)
    monkeypatch.setattr(packed_attention, "num_sms", lambda index: 100)
    for name in ("attend_by_groups", "attend_by_tiles"):
        monkeypatch.setattr(packed_attention, name, lambda *given, name=name: name)

    def way(rows: int, kv_heads: int, group: int, softcap: float = 0.0, dim: int = 128) -> str:
        q, cache = torch.zeros(rows, kv_heads, group, dim), torch.zeros(32, kv_heads, 4, dim)
        index, starts = torch.zeros(rows, dtype=torch.int64), torch.zeros(33).long()
        found = attend_packed(q, cache, cache, index, index, starts, 1.0, 0, softcap)
        return str(found).removeprefix("attend_by_")

    assert [way(rows, 5, 2) for rows in (1919, 1920)] == ["tiles", "groups"]
    assert [way(rows, 5, 3) for rows in (1279, 1280)] == ["tiles", "groups"]
    assert [way(rows, 5, 2, dim=64) for rows in (2559, 2560)] == ["tiles", "groups"]
    assert way(8192, 5, 2, softcap=30.0) == "tiles"
