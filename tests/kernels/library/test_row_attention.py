"""Attention of decode steps: results under Triton's interpreter, machine code for sm_90a."""

import subprocess
import sys

import pytest
import torch

from distmega.kernels.library.row_attention import (
    attend_each,
    attend_part,
    choose_keys,
    choose_parts,
    join_parts,
)
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel


def test_interpreted_rows_at_any_positions_are_torchs() -> None:
    command = [sys.executable, "-m", "tests.kernels.library.row_attention_interpreted"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize(
    ("dim", "alone", "capped"), [(64, False, False), (128, True, False), (256, True, True)]
)
def test_keys_come_ahead_and_nothing_spills(dim: int, alone: bool, capped: bool) -> None:
    names = ("sequence_stride", "head_stride", "row_stride", "context", "window", "num_parts")
    types: dict[str, object] = {"q": "*bf16", "keys": "*bf16", "values": "*bf16"}
    types |= {"out": "*bf16" if alone else "*fp32", "maxima": "*fp32", "sums": "*fp32"}
    types |= {"positions": "*i64", "scale": "fp32", "cap": "fp32"} | dict.fromkeys(names, "i32")
    constants = {"group": 4, "rows": 16, "dim": dim, "padded": dim, "windowed": False}
    constants |= {"alone": alone, "capped": capped, "num_keys": 32 if dim > 128 else 64}
    code = compile_kernel(attend_part, types, constants, 4, None, names[:4])
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES // 2
    assert "mma.sync" in code.ptx
    assert "cp.async.cg.shared.global" in code.ptx


def test_parts_are_joined_without_a_spill() -> None:
    types: dict[str, object] = {"parts": "*fp32", "maxima": "*fp32", "sums": "*fp32"}
    types |= {"out": "*bf16", "num_parts": "i32"}
    code = compile_kernel(join_parts, types, {"dim": 96, "padded": 128}, 1, None)
    assert code.stack_bytes == 0


@pytest.mark.parametrize(
    ("num_heads", "seen", "expected"),
    [
        (512, 32768, 2),
        (8, 32768, 66),
        (8, 512, 2),
        (8, 100, 1),
        (512, 528, 1),
        (256, 528, 1),
        (250, 528, 2),
    ],
)
def test_parts_fill_the_gpu_and_are_not_short(num_heads: int, seen: int, expected: int) -> None:
    assert choose_parts(num_heads, seen, 4 * 132) == expected


@pytest.mark.parametrize(
    ("dim", "num", "expected"), [(128, 512, 32), (128, 256, 64), (64, 512, 64), (256, 1024, 32)]
)
def test_wide_heads_leave_room_for_other_programs(dim: int, num: int, expected: int) -> None:
    assert choose_keys(dim, num, 4 * 132) == expected


def test_what_the_kernels_do_not_take_torch_does() -> None:
    q, caches = torch.randn(1, 2, 1, 8), torch.randn(2, 2, 5, 8)
    found = attend_each(q, *caches, torch.tensor([3]), 1.0)
    weights = torch.softmax(q[0] @ caches[0][:, :4].transpose(1, 2), -1)
    torch.testing.assert_close(found[0], weights @ caches[1][:, :4])
