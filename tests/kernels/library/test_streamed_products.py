"""Streamed products: machine code for sm_90a; which ops are given to them. For results see
test_streamed_results.py and, on GPUs, tests/gpu/test_streamed_products.py.
"""

import re
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distmega.kernels.library import late, streamed_products
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.streamed_products import NUMBERS, compile_streamed, multiply_streamed
from distmega.kernels.library.streamed_tiles import StreamedProduct, StreamedTiles, make_tiles
from distmega.program import expr
from distmega.program.ops.parts import access_named, make_op
from distmega.program.types import Axis, Op
from tests.kernels.ptx import TMA, stored_bytes
from tests.kernels.sm90 import SHARED_BYTES, Machine, compile_kernel, descriptor

SILU = expr.parse("silu(a0) * a1")


def compiled(
    halves: int,
    width: int,
    parts: int = 1,
    formula: str = "",
    x_rows: int = 64,
    early: bool = True,
) -> Machine:
    tiles = make_tiles(halves, width, parts)
    types: dict[str, object] = dict.fromkeys(NUMBERS, "i32")
    types |= {"x": descriptor("bf16", (x_rows, 64)), "out": "*bf16" if parts == 1 else "*fp32"}
    for i, box in enumerate(tiles.boxes):
        types[f"w{i}"] = descriptor("bf16", (box, tiles.terms))
        if halves == 2:
            types[f"other{i}"] = types[f"w{i}"]
    if formula:
        types["bias"] = "*bf16"
    constants = {
        "boxes": tiles.boxes, "halves": halves, "terms": tiles.terms, "stages": tiles.stages,
        "x_rows": x_rows, "early": early,
        "mixes": SILU if halves == 2 else None, "formula": expr.parse(formula) if formula else None,
    }  # fmt: skip
    return compile_kernel(multiply_streamed, types, constants, 4, None)


@pytest.mark.parametrize(
    ("halves", "width", "parts", "formula"),
    [(2, 96, 1, ""), (2, 112, 1, ""), (1, 128, 4, ""), (1, 224, 1, ""), (1, 48, 1, "gelu(a0)")],
)
def test_weights_are_asked_for_before_the_wait_and_x_behind_it(
    halves: int, width: int, parts: int, formula: str
) -> None:
    tiles = make_tiles(halves, width, parts)
    code = compiled(halves, width, parts, formula, x_rows=32 if parts > 1 else 64)
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    assert "wgmma.mma_async" in code.ptx
    early, late = code.ptx.split("griddepcontrol.wait")
    assert early.count(TMA) == tiles.stages * halves * len(tiles.boxes)
    pieces_of_x = (tiles.stages + 1) * tiles.terms // 64
    assert late.count(TMA) == pieces_of_x + halves * len(tiles.boxes)
    assert not re.search(r"\b(?:ld|st)\.global", early)
    assert stored_bytes(late) == {16}


def test_where_nothing_is_read_early_all_is_read_behind_the_wait() -> None:
    before, behind = compiled(1, 64, early=False).ptx.split("griddepcontrol.wait")
    assert TMA not in before
    assert TMA in behind


def linear(rows: int, columns: int, depth: int) -> Op:
    axes = [
        Axis(name="m", extent=rows),
        Axis(name="n", extent=columns),
        Axis(name="k", extent=depth, role="reduce"),
    ]
    reads = [access_named("x", "m", "k"), access_named("w", "n", "k")]
    return make_op("y", "linear", axes, reads, [access_named("y", "m", "n")])


def split(rows: int, columns: int, depth: int) -> Op:
    whole = linear(rows, columns, depth)
    writes = [access_named(f"y{n}", "m", "n") for n in range(4)]
    return make_op("y", "split_linear", whole.axes, whole.reads, writes)


def mixed(rows: int, columns: int, depth: int) -> Op:
    whole = linear(rows, columns, depth)
    reads = [*whole.reads, access_named("v", "n", "k")]
    return make_op("y", "fused_linear", whole.axes, reads, whole.writes, expr=str(SILU))


def streamed_by_torch(
    x: Tensor, weights: Sequence[Tensor], tiles: StreamedTiles, **given: object
) -> Tensor:
    """As stream_product, of one weight whose sums are cut, or of two."""
    xs, ws = (each.float().chunk(tiles.parts, 1) for each in (x, weights[0]))
    if tiles.parts > 1:
        return torch.stack([a @ b.T for a, b in zip(xs, ws, strict=True)])
    first, second = (x.float() @ w.float().T for w in weights)
    return (torch.nn.functional.silu(first) * second).to(x.dtype)


@pytest.mark.parametrize("make", [split, mixed])
def test_large_weights_that_are_known_are_streamed(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_products, "is_measured", lambda product: True)
    monkeypatch.setattr(streamed_products, "_takes", lambda x, weights: True)
    monkeypatch.setattr(streamed_products, "num_sms", lambda index: 132)
    monkeypatch.setattr(streamed_products, "choose_streamed", lambda product, sms, parts: (
        make_tiles(product.halves, 64, *parts)))  # fmt: skip
    op = make(17, 24, 256)
    xs = [torch.randn(17, 256), *(torch.randn(24, 256) for _ in op.reads[1:])]
    expected = KernelOps().compile(op, {})(xs)
    with patch.object(streamed_products, "stream_product", side_effect=streamed_by_torch) as called:
        found = compile_streamed(op, lambda operands: ())(xs)
    called.assert_called_once()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [linear, split, mixed])
def test_only_weights_that_nobody_writes_are_read_early(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def note(op: Op, otherwise: object) -> object:
        given.append(op.name)
        return otherwise

    monkeypatch.setattr(late, "compile_streamed", note)
    op = make(32, 64, 256)
    for constants in ((), ("v",), ("x",)):
        KernelOps().compile(op, {}, constants)
    assert given == []
    KernelOps().compile(op, {}, {"w", "v"})
    assert given == ["y"]


@pytest.mark.parametrize(("make", "halves"), [(linear, 1), (split, 1), (mixed, 2)])
def test_products_that_were_not_measured_stay_the_librarys(
    make, halves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of them when they run."""
    asked: list[StreamedProduct] = []

    def is_measured(product: StreamedProduct) -> bool:
        asked.append(product)
        return False

    monkeypatch.setattr(streamed_products, "is_measured", is_measured)

    def otherwise(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return ()

    assert compile_streamed(make(32, 64, 256), otherwise) is otherwise
    assert asked == [StreamedProduct(rows=32, columns=64, depth=256, halves=halves)]


def test_operands_that_tma_does_not_address_go_the_librarys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight that would be copied is not known before; nor does a CPU have the kernel."""
    monkeypatch.setattr(streamed_products, "is_measured", lambda product: True)
    monkeypatch.setattr(streamed_products, "is_hopper", lambda index: True)
    op, told = linear(32, 64, 256), (torch.zeros(1),)
    run = compile_streamed(op, lambda operands: told)
    x = torch.zeros(32, 256, dtype=torch.bfloat16)
    for w in (torch.zeros(64, 256), torch.zeros(64, 256).bfloat16(), torch.zeros(256, 64).T):
        assert run([x, w]) is told
