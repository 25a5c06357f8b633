"""Products of groups of rows by tiles that programs find on the device: results under Triton's
interpreter by both schedules, machine code for sm_90a, and which schedule costs choose.
"""

from typing import Any

import pytest
import torch

from distmega.hostir.library.ops import compile_op
from distmega.kernels.events import GroupTiles
from distmega.kernels.library import grouped_products
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.grouped_products import (
    LEAST_DEPTH,
    TILES,
    WIDE_TILES,
    ProductTiles,
    choose_tiles,
    chosen,
    grouped_linear,
    mix_groups,
    multiply_groups,
)
from distmega.program.builder import ProgramBuilder
from distmega.program.expr import parse
from distmega.program.ops.experts import GroupRange
from distmega.program.types import Op, Tensor
from tests.forked import run_module
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel


def test_interpreted_groups_of_any_sizes_are_torchs_by_both_schedules() -> None:
    done = run_module("tests.kernels.library.grouped_products_interpreted")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "tiles", "depth"), [("bf16", TILES[16], LEAST_DEPTH), ("fp32", WIDE_TILES, 32)]
)
def test_short_sums_and_wide_numbers_compile(dtype: str, tiles: ProductTiles, depth: int) -> None:
    types = {"x": f"tensordesc<{dtype}[{tiles.rows}, {depth}]>", "out": f"*{dtype}"}
    types |= {"w": f"tensordesc<{dtype}[{tiles.columns}, {depth}]>"}
    types |= dict.fromkeys(("starts", "head"), "*i32")
    types |= dict.fromkeys(("num_groups", "all_rows", "n", "k", "row_tiles"), "i32")
    constants = {"slots": 1, "drained": True, "num_rows": tiles.rows}
    constants |= {"num_columns": tiles.columns, "depth": depth}
    assert compile_kernel(multiply_groups, types, constants, tiles.warps, None).stack_bytes == 0


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("rows", TILES)
def test_operands_come_by_tma_and_nothing_spills(rows: int, drained: bool) -> None:
    tiles = TILES[rows]
    types = {"x": f"tensordesc<bf16[{tiles.rows}, {tiles.depth}]>"}
    types |= {"w": f"tensordesc<bf16[{tiles.columns}, {tiles.depth}]>", "out": "*bf16"}
    types |= dict.fromkeys(("starts", "head"), "*i32")
    types |= dict.fromkeys(("num_groups", "all_rows", "n", "k", "row_tiles"), "i32")
    constants = {"slots": 128, "drained": drained, "num_rows": tiles.rows}
    constants |= {"num_columns": tiles.columns, "depth": tiles.depth}
    code = compile_kernel(multiply_groups, types, constants, tiles.warps, None, ("n", "k"))
    assert code.stack_bytes == 0
    assert code.shared_bytes * tiles.programs <= SHARED_BYTES
    assert code.registers * tiles.warps * 32 * tiles.programs <= 65536
    assert ("wgmma.mma_async" in code.ptx) == (tiles.rows >= 64)
    assert "cp.async.bulk.tensor" in code.ptx
    assert ("atom." in code.ptx) == drained


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "rows"), [(8, 128, 16), (512, 128, 16), (4096, 128, 64), (1, 8, 16),
                                         (57344, 128, 128), (130, 2, 128), (24, 1, 64)]
)  # fmt: skip
def test_tiles_are_as_high_as_groups_are_in_the_mean(num_rows: int, num_groups: int, rows: int):
    assert choose_tiles(num_rows, num_groups).rows == rows


def test_costs_choose():
    """Where each group has a tile or two of the same rows no list pays; of groups whose numbers of
    tiles differ the fullest queue is what static ones wait for.
    """
    few = GroupTiles(rows=32, choices=8, groups=128, first=0, stop=128, columns=768, depth=2048,
                     row_tile=16, column_tile=64, item_bytes=2)  # fmt: skip
    many = GroupTiles(rows=7168, choices=8, groups=128, first=0, stop=128, columns=768, depth=2048,
                      row_tile=128, column_tile=128, item_bytes=2)  # fmt: skip
    assert {chosen(few, 264), chosen(many, 132)} <= {"static", "drained"}
    assert chosen(many, 132) == "drained"


def grouped_op(terms: int) -> Op:
    p = ProgramBuilder("experts")
    x, w = p.input("x", (4, terms)), p.weight("w", (2, 6, terms))
    routing = p.route(p.input("ids", (4, 1), "i32"), 2)
    rows = p.grouped_linear(p.gather_rows(x, routing), w, routing, name="up")
    return next(op for op in p.build(rows).ops if op.name == "up")


@pytest.mark.parametrize(("terms", "told"), [(8, ""), (12, "the host reads where groups start")])
def test_the_host_reads_nothing_where_the_kernel_does_it(terms: int, told: str):
    op = grouped_op(terms)
    assert KernelOps(groups="torch").reads_host(op) == "the host reads where groups start"
    assert KernelOps().reads_host(op) == told


def test_the_host_reads_where_torch_multiplies(monkeypatch):
    """On a GPU that the kernel does not run on, and of types that it does not take."""
    op, told = grouped_op(8), "the host reads where groups start"
    gpu = torch.device("cuda", 0)
    for capability, expected in (((9, 0), ""), ((8, 9), told)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert KernelOps(device=gpu).reads_host(op) == expected
    assert KernelOps(device=torch.device("cpu")).reads_host(op) == told
    cases = (("bf16", "bf16", ""), ("f64", "f64", told), ("bf16", "f32", told))
    for *dtypes, expected in cases:
        names = zip(op.reads[:2], dtypes, strict=True)
        tensors = {a.tensor: Tensor(name=a.tensor, shape=(8,), dtype=d) for a, d in names}
        assert KernelOps().reads_host(op, tensors) == expected


def test_what_the_kernel_does_not_take_torch_does():
    """Tensors of a CPU, by every way."""
    op, generator = grouped_op(8), torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(2, 6, 8, generator=generator)
    offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    (expected,) = compile_op(op, {})([x, w, offsets])
    for groups in ("torch", "auto", "static", "drained"):
        (found,) = KernelOps(groups=groups).compile(op, {})([x, w, offsets])
        assert torch.equal(found, expected)
    assert torch.equal(
        grouped_linear(x, w, offsets, GroupRange(first=0, stop=2, num=2), 4), expected
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_the_matmul_kernel_is_told_how_many_groups_a_rank_has(
    mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five groups on two ranks: the second has two, and memory for three."""
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(grouped_products, "_takes", lambda *operands: True)
    monkeypatch.setattr(grouped_products, "_fits_matmul", lambda *operands: True)
    monkeypatch.setattr(grouped_products, "launch_groups", lambda *given: launched.append(given))
    x, w = torch.zeros(500, 16), torch.zeros(3, 8, 16)
    offsets = torch.tensor([0, 100, 200, 300, 400, 500], dtype=torch.int32)
    groups = GroupRange(first=3, stop=5, num=5)
    if mixed:
        mix_groups(x, w, w, offsets, groups, 500, parse("a0 * a1"))
    else:
        grouped_linear(x, w, offsets, groups, 500)
    ((_, matrices, out, starts, num_groups, spec),) = launched
    assert len(matrices) == 1 + mixed
    assert out.shape == (500, 8)
    assert (starts.tolist(), num_groups) == ([300, 400, 500], 2)
    assert (spec.tile_n, spec.is_mixed) == ((256, True) if mixed else (128, False))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float32])
def test_the_matmul_kernel_is_given_what_it_is_compiled_for(
    kind: torch.dtype, lower: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices of a group may be of two types; where groups start may be in wide numbers."""
    launched: list[int] = []
    monkeypatch.setattr(grouped_products, "has_tiles", lambda device: True)
    monkeypatch.setattr(grouped_products, "is_hopper", lambda index: True)
    monkeypatch.setattr(grouped_products, "launch_groups", lambda *given: launched.append(1))
    monkeypatch.setattr(
        grouped_products, "grouped_linear", lambda x, w, *given: torch.zeros(len(x), w.shape[1])
    )
    x, upper = torch.zeros(500, 16).bfloat16(), torch.zeros(2, 8, 16).bfloat16()
    offsets = torch.tensor([0, 200, 500], dtype=kind)
    groups = GroupRange(first=0, stop=2, num=2)
    mix_groups(x, upper, upper.to(lower), offsets, groups, 500, parse("a0 * a1"))
    assert bool(launched) == (kind == torch.int32 and lower == torch.bfloat16)


@pytest.mark.parametrize("num_rows", [20, 500])
def test_operands_that_tma_can_not_address_are_copied(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tiles of few rows, and by the matmul kernel."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(grouped_products, "has_tiles", lambda device: True)
    monkeypatch.setattr(grouped_products, "is_hopper", lambda index: True)
    monkeypatch.setattr(grouped_products, "num_sms", lambda index: 132)

    def launch(
        kernel: object, grid: object, x: Any, w: Any, *others: object, **more: object
    ) -> None:
        given.extend((x.base, w.base))

    def launch_groups(x: Any, matrices: Any, *others: object) -> None:
        given.extend((x, *matrices))

    for function in (launch, launch_groups):
        monkeypatch.setattr(grouped_products, function.__name__, function)
    x = torch.randn(num_rows * 16 + 1).bfloat16()[1:].view(num_rows, 16)
    w = torch.randn(2 * 8 * 16 + 1).bfloat16()[1:].view(2, 8, 16)
    offsets = torch.tensor([0, 7, num_rows], dtype=torch.int32)
    grouped_linear(x, w, offsets, GroupRange(first=0, stop=2, num=2), num_rows)
    assert [each.data_ptr() % 16 for each in given] == [0, 0]
    assert torch.equal(given[0], x)
    assert torch.equal(given[1].view(w.shape), w)
