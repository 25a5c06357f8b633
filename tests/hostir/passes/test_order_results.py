"""Which attentions write in another order of dims, and that they give what both ops give."""

import pytest

from bench.models import encoder
from distmega.hostir.ir.nodes import LibraryOp, walk_nodes
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.hostir.passes.test_fuse import check, lowered


def turned(
    order: tuple[int, ...], *, group: int = 1, mask: bool = False, also: bool = False
) -> Program:
    p = ProgramBuilder("turned")
    q = p.input("q", (2, 3 * group, 5, 8))
    k, v = (p.input(name, (2, 3, 7, size)) for name, size in (("k", 8), ("v", 4)))
    seen = p.input("seen", (1, 1, 5, 7)) if mask else None
    mixed = p.attend(q, k, v, seen, 0.5, name="mixed")
    out = p.transpose(mixed, order, name="out")
    return p.build(out, *([mixed] if also else []))


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 1, 0, 3), (3, 0, 2, 1)])
@pytest.mark.parametrize("group", [1, 2])
def test_an_attention_writes_what_a_transpose_asks_for(
    order: tuple[int, ...], group: int, mask: bool
):
    assert check(turned(order, group=group, mask=mask)) == ["attend out"]


def test_a_result_that_others_read_is_not_reordered():
    assert check(turned((0, 2, 1, 3), also=True)) == ["attend mixed", "transpose out"]


def test_more_than_an_order_stays_apart():
    p = ProgramBuilder("sliced")
    q, k, v = (p.input(name, (1, 3, 5, 8)) for name in "qkv")
    mixed = p.attend(q, k, v, None, 0.5, name="mixed")
    assert check(p.build(p.slice(mixed, 2, 0, 4, name="out"))) == ["attend mixed", "slice out"]


def test_a_layer_of_an_encoder_is_seven_ops():
    host = lowered(encoder(rows=8, layers=1, hidden=48, heads=3).program)
    ops = [n.op for n in walk_nodes(host.body) if isinstance(n, LibraryOp) and not n.op.is_view]
    assert [op.kind for op in ops] == [
        "linear", "attend", "linear", "fused_norm", "fused_product", "linear", "fused_norm",
    ]  # fmt: skip
