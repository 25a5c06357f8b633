"""Attention of a decode step with its heads: results in torch's stead of a GPU, machine code for
sm_90a, and what the kernel takes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distmega.hostir.library import heads as library_heads
from distmega.hostir.library import ops as library
from distmega.hostir.library.heads import Heads, StepHeads, attend_in_turn
from distmega.hostir.run.early_reads import early_reads
from distmega.kernels.library import step_attention
from distmega.kernels.library.heads import PartSpec, heads_at_once, move_rows
from distmega.kernels.library.step_attention import (
    NUMBERS,
    StepSpec,
    attend_appended,
    attend_appended_part,
    attend_step,
    takes,
    vector_of,
)
from tests.kernels.gluon_threads import named_arguments, run_kernel
from tests.kernels.ptx import unfenced_loads
from tests.kernels.sm90 import SHARED_BYTES, Machine, compile_kernel, descriptor

STRIDES = ("q_strides", "k_strides", "v_strides")


def run_launched(kernel: Any, grid: Sequence[int], *arguments: object, **options: Any) -> None:
    """As ahead.launch, of the kernel. What earlier steps wrote may be read early."""
    known = ("keys", "values", "positions") if options["spec"].early else ()
    run_kernel(kernel, grid, named_arguments(kernel, arguments, options), known)


def add_parts(parts: Tensor, maxima: Tensor, sums: Tensor, out: Tensor) -> None:
    """As row_attention.add_parts, in torch."""
    shares = torch.exp2(maxima - maxima.amax(0).clamp(min=-1e30))
    total = (sums * shares).sum(0)[:, None]
    joined = (parts * shares[..., None]).sum(0) / torch.where(total == 0, 1.0, total)
    out.view(joined.shape).copy_(joined)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Kernels run as Python."""
    monkeypatch.setattr(step_attention, "launch", run_launched)
    monkeypatch.setattr(step_attention, "add_parts", add_parts)
    monkeypatch.setattr(step_attention, "num_programs", lambda q: 1)
    return monkeypatch


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("group", "window", "softcap", "normed", "rotated"),
    [(4, 0, 0.0, True, True), (7, 40, 0.0, True, False), (1, 0, 5.0, False, True),
     (8, 3, 0.7, False, False), (2, 130, 0.0, False, True)],
)  # fmt: skip
def test_steps_are_torchs(
    simulated: pytest.MonkeyPatch, parts: int, group: int, window: int, softcap: float,
    normed: bool, rotated: bool,
):  # fmt: skip
    """Of rows at the first and the last place of a cache, and outside of it."""
    simulated.setattr(step_attention, "choose_parts", lambda *_: parts)
    torch.manual_seed(group)
    at = [0, 1, 31, 32, 63, 64, 150, 199, -1, 205]
    kv_heads, dim, context = 2, 64, 200
    wide = torch.randn(len(at), (group + 2) * kv_heads * dim + 8).bfloat16()[:, 8:]
    q, k, v = (
        x.unflatten(1, (kv_heads, -1, dim))
        for x in wide.split([n * kv_heads * dim for n in (group, 1, 1)], 1)
    )
    k, v = k.squeeze(2), v.squeeze(2)
    caches = [torch.randn(len(at), kv_heads, context, dim).bfloat16() for _ in range(2)]
    for sequence, position in enumerate(at):
        for cache in caches:
            cache[sequence, :, max(position, 0) :] = math.nan
            if position >= context:
                cache[sequence] = 0.5
            if window:
                cache[sequence, :, : max(position + 1 - window, 0)] = math.inf
    positions = torch.tensor(at)
    weights = [torch.randn(dim).bfloat16() if normed else None for _ in range(2)]
    table = torch.randn(250, dim) if rotated else None
    found_caches = [cache.clone() for cache in caches]
    given = q, k, v, *weights, 1e-5, positions, table
    found = attend_appended(*given, *found_caches, 0.2, window, softcap)

    turned = [torch.empty(x.shape) for x in (q, k)]
    heads = [
        Heads(x=x.float(), weight=None if weight is None else weight.float(), out=out,
              rotates=rotated, appends=False)
        for x, weight, out in zip((q, k), weights, turned, strict=True)
    ]  # fmt: skip
    library_heads.move_heads(heads, positions.clamp(min=0), table, None, 1e-5)
    for cache, new in zip(caches, (turned[1], v), strict=True):
        for sequence, position in enumerate(at):
            if 0 <= position < context:
                cache[sequence, :, position] = new[sequence].bfloat16()
    for one, other in zip(found_caches, caches, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    known = [cache.float() for cache in caches]
    rows = turned[0].bfloat16().float()
    expected = library.masked_attention(rows, *known, positions, 0.2, window, softcap)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [0, 1])
def test_rows_without_angles_are_no_numbers(simulated: pytest.MonkeyPatch, window: int):
    q, cache = torch.randn(1, 1, 2, 64).bfloat16(), torch.randn(1, 1, 40, 64).bfloat16()
    given = q, q[:, :, 0], q[:, :, 1], None, None, 0.0, torch.tensor([5]), torch.randn(5, 64)
    found = attend_appended(*given, cache, cache.clone(), 0.2, window)
    assert found.isnan().all()
    assert cache[0, 0, 5].isnan().all()


def step_heads(weight: Tensor | None = None) -> StepHeads:
    """Of three sequences, over caches of which one has no row yet."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 64).bfloat16().split([4, 1, 1], 2)
    caches = torch.randn(2, 3, 2, 40, 64).bfloat16()
    return StepHeads(
        q=q, k=k.squeeze(2), v=v.squeeze(2), q_weight=weight, k_weight=weight, eps=1e-5,
        positions=torch.tensor([7, 0, 39]), table=torch.randn(50, 64), k_cache=caches[0],
        v_cache=caches[1], out=torch.empty(3, 2, 4, 64).bfloat16(),
    )  # fmt: skip


def copied(given: StepHeads) -> StepHeads:
    return replace(
        given, k_cache=given.k_cache.clone(), v_cache=given.v_cache.clone(), out=given.out.clone()
    )


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("takes", [True, False])
def test_an_op_is_one_launch_or_heads_and_attention(
    simulated: pytest.MonkeyPatch, normed: bool, takes: bool
):
    launched: list[bool] = []

    def launch(*given: object, **options: object) -> None:
        launched.append(options["spec"].early)
        run_launched(*given, **options)

    simulated.setattr(step_attention, "launch", launch)
    simulated.setattr(step_attention, "_on_hopper", lambda q: takes)
    mine = step_heads(torch.randn(64).bfloat16() if normed else None)
    theirs = copied(mine)
    attend_step(mine, 0.2, 5, 3.0)
    with early_reads(states=True):
        attend_step(copied(mine), 0.2, 5, 3.0)
    assert launched == ([False, True] if takes else [])

    def attend(*given: Tensor) -> None:
        given[-1].copy_(library.masked_attention(*given[:-1], 0.2, 5, 3.0))

    attend_in_turn(theirs, library_heads.move_heads, attend)
    error = 2e-2 if takes else 0.0
    for name in ("out", "k_cache", "v_cache"):
        found, expected = getattr(mine, name), getattr(theirs, name)
        torch.testing.assert_close(found, expected, rtol=error, atol=error)


def compiled(
    dim: int,
    num_keys: int,
    dtype: str = "bf16",
    *,
    normed: bool = True,
    rotated: bool = True,
    windowed: bool = False,
    capped: bool = False,
    alone: bool = True,
    early: bool = True,
    kv_heads: int = 8,
) -> Machine:
    half, block = f"*{dtype}", descriptor(dtype, (num_keys, dim))
    types: dict[str, object] = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), half)
    types |= {"keys": block, "values": block, "positions": "*i64"}
    types |= {"out": half if alone else "*fp32", "maxima": "*fp32", "sums": "*fp32"}
    types |= dict.fromkeys(("eps", "scale", "cap"), "fp32") | dict.fromkeys(NUMBERS, "i32")
    types |= {name: ("i32",) * (3 if name == "q_strides" else 2) for name in STRIDES}
    types |= dict.fromkeys(("q_weight", "k_weight"), half) if normed else {}
    types |= {"table": "*fp32"} if rotated else {}
    spec = StepSpec(
        group=4, dim=dim, num_keys=num_keys, vector=vector_of(kv_heads, dim), windowed=windowed,
        capped=capped, alone=alone, early=early,
    )  # fmt: skip
    return compile_kernel(attend_appended_part, types, {"spec": spec}, 4, None, STRIDES)


@pytest.mark.parametrize(
    ("dim", "num_keys", "options"),
    [
        (64, 64, {}),
        (64, 64, {"normed": False, "windowed": True, "capped": True, "alone": False}),
        (128, 32, {}),
        (128, 32, {"dtype": "fp16", "normed": False, "rotated": False}),
        (128, 32, {"windowed": True, "capped": True, "alone": False, "kv_heads": 1}),
        (128, 64, {"windowed": True}),
        (256, 32, {}),
        (256, 64, {"windowed": True, "capped": True, "alone": False}),
        (256, 64, {"kv_heads": 1, "rotated": False}),
        (64, 64, {"kv_heads": 1}),
    ],
)
def test_caches_are_asked_for_before_the_wait_and_nothing_spills(dim, num_keys, options):
    """Four programs of heads of 128 have room on an SM."""
    code = compiled(dim, num_keys, **options)
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    if dim * num_keys <= 128 * 32:
        assert code.shared_bytes <= 56 * 1024
        assert code.registers <= 128
    early, late = code.ptx.split("griddepcontrol.wait")
    assert early.count("cp.async.bulk.tensor") == 6
    assert early.count("ld.global") == 1
    assert late.count("cp.async.bulk.tensor") == 2
    assert "mma.sync" in late
    assert "ldmatrix" in late
    assert "st.global" not in early


def test_nothing_is_read_before_the_wait_but_in_a_run_of_its_own():
    early, late = compiled(128, 32, early=False).ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in early
    assert "ld.global" not in early
    assert "cp.async.bulk" not in early
    assert late.count("cp.async.bulk.tensor") == 8


def test_all_of_the_step_is_under_way_before_anything_is_done_to_it():
    _, late = compiled(128, 32).ptx.split("griddepcontrol.wait")
    last = late.rindex("ld.global")
    assert all(last < late.index(word) for word in ("rsqrt", "bar.sync", "st.global"))


def squares_layout(code: Machine, rows: int, half: int) -> str:
    """How threads share out the squares of so many heads where they are summed."""
    text = code.cubin.with_suffix(".ttgir").read_text()
    name = re.findall(rf"\}}\) : \(tensor<{rows}x{half}xf32, (#\w+)>\) -> tensor", text)[-1]
    (found,) = re.findall(rf"^{name} = (.*)$", text, re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("dim", "kv_heads"), [(64, 1), (64, 8), (64, 32), (128, 1), (128, 8), (256, 1), (256, 8)]
)
def test_squares_of_keys_are_summed_in_the_order_of_the_other_kernel(dim: int, kv_heads: int):
    """So that a cache holds the same keys whichever kernel appended them."""
    parts = [
        PartSpec(heads=heads_at_once(heads, dim // 2), dim=dim, half=dim // 2, normed=part < 2,
                 rotated=part < 2, appended=part > 0)
        for part, heads in enumerate((4 * kv_heads, kv_heads, kv_heads))
    ]  # fmt: skip
    tuples = ("row_strides", "head_strides", "num_heads", "sequence_strides")
    types: dict[str, object] = dict.fromkeys((*tuples, "sequence_counts", "contexts"), ("i32",) * 3)
    types |= dict.fromkeys(("xs", "weights", "outs"), ("*bf16",) * 3)
    types |= {"positions": "*i64", "table": "*fp32", "sequences": "*i64", "eps": "fp32"}
    constants = {"several": False, "own": True, "parts": tuple(parts)}
    apart = compile_kernel(move_rows, types | {"num_angles": "i32"}, constants, 4, None, tuples)
    joined = compiled(dim, 64 if dim < 128 else 32, kv_heads=kv_heads)
    layouts = squares_layout(apart, parts[1].heads, dim // 2), squares_layout(joined, 1, dim // 2)
    assert layouts[0] == layouts[1]


def operands() -> dict[str, Tensor | None]:
    q = torch.empty(3, 2, 4, 64).bfloat16()
    caches = torch.empty(2, 3, 2, 40, 64).bfloat16()
    return {
        "q": q, "k": q[:, :, 0], "v": q[:, :, 1], "q_weight": None,
        "k_weight": torch.empty(64).bfloat16(), "positions": torch.arange(3),
        "table": torch.empty(50, 64),
        "k_cache": caches[0], "v_cache": caches[1],
    }  # fmt: skip


def test_only_what_the_kernel_knows_is_taken(monkeypatch: pytest.MonkeyPatch):
    assert not takes(**operands())
    monkeypatch.setattr(step_attention, "_on_hopper", lambda q: True)
    assert takes(**operands())
    one = operands()
    single = {name: x[:1] if name in "qkv" else x for name, x in one.items()}
    single |= {name: one[name][0] for name in ("k_cache", "v_cache")}
    assert takes(**single)
    for changes in (
        {"q": torch.empty(3, 2, 17, 64).bfloat16()},
        {"q": torch.empty(3, 2, 4, 64)},
        {name: one[name][:0] for name in ("q", "k", "v", "k_cache", "v_cache")},
        {"k": torch.empty(3, 2, 64).half()},
        {"v": torch.empty(3, 2, 64, 2).bfloat16()[..., 0]},
        {"v_cache": one["v_cache"].transpose(0, 1).contiguous().transpose(0, 1)},
        {"v_cache": one["v_cache"][:, :, 1:].contiguous()},
        {"positions": torch.arange(6)[::2]},
        {"table": torch.empty(50, 64).half()},
        {"k_weight": torch.empty(128).bfloat16()[::2]},
        {"k_cache": one["k_cache"][0], "v_cache": one["v_cache"][0]},
    ):
        assert not takes(**{**one, **changes}), list(changes)


@pytest.mark.parametrize(("programs", "stages"), [(17, 8), (132, 8), (256, 6), (512, 3), (2048, 3)])
def test_programs_have_an_equal_share_of_an_sm(programs: int, stages: int):
    """Of 132 SMs, with blocks of 32 keys and values of 128 elements."""
    block_bytes = 2 * 32 * 128 * 2
    assert step_attention.choose_stages(programs, 132, block_bytes) == stages


@pytest.mark.parametrize(("dim", "num_keys"), [(64, 64), (128, 32), (256, 64)])
def test_reads_of_a_slot_are_over_before_it_is_filled_again(dim: int, num_keys: int):
    behind = compiled(dim, num_keys).ptx.split("griddepcontrol.wait")[1]
    assert "mbarrier.arrive.expect_tx" in behind
    assert unfenced_loads(behind) == []
