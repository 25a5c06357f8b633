"""Attention of short sequences: results under Triton's interpreter, machine code for sm_90a, and
which attentions are short.
"""

import pytest

from distmega.kernels.library import late
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.short_attention import KEYS, ROWS, attend_rows
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Op
from tests.forked import run_module
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel


def test_interpreted_attention_is_torchs_in_any_order_of_dims() -> None:
    done = run_module("tests.kernels.library.short_attention_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize("dim", list(KEYS))
def test_scores_and_values_multiply_by_wgmma_and_nothing_spills(dim: int) -> None:
    types: dict[str, object] = dict.fromkeys(("q", "k", "v", "out"), "*bf16")
    strides = ("q_strides", "k_strides", "v_strides", "out_strides")
    types |= dict.fromkeys(strides, ("i32", "i32", "i32"))
    types |= {"scale": "fp32", **dict.fromkeys(("heads", "group", "m", "t"), "i32")}
    constants = {"d": dim, "e": dim, "rows": ROWS, "keys": KEYS[dim], "d_padded": dim}
    constants |= {"e_padded": dim}
    code = compile_kernel(attend_rows, types, constants, 4, None, strides)
    assert code.stack_bytes == 0
    assert "wgmma.mma_async" in code.ptx
    assert code.ptx.count("griddepcontrol.wait") == 1
    assert code.shared_bytes <= SHARED_BYTES


def attention(*, mask: bool = False, softcap: float = 0.0) -> Op:
    p = ProgramBuilder("attention")
    q, k, v = (p.input(name, (1, 3, 5, 8), "bf16") for name in "qkv")
    seen = p.input("seen", (1, 1, 5, 5), "bool") if mask else None
    program = p.build(p.attend(q, k, v, seen, 0.5, softcap=softcap))
    return program.ops[0]


def test_masks_and_caps_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(late, "compile_attend", lambda op, *_: asked.append(op.name))
    ops = KernelOps()
    ops._has_tiles = True
    for op in (attention(), attention(mask=True), attention(softcap=2.0)):
        ops.compile(op, {})
    assert len(asked) == 1
