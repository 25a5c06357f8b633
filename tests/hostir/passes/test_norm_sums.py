"""Which sums over ranks are normalised by the node that sums them, and that results stay."""

from dataclasses import replace

import pytest

from bench.models import gated_mlp
from distmega.errors import ParseError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import FusedMatmul, HostProgram, LibraryOp
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.passes.resize import resize_inputs
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, shard
from distmega.sharding.localize import LocalProgram, localize, pair_for_library
from distmega.sharding.overlap.pairs import CHEAPEST, OverlapRequest
from distmega.sharding.planner import plan_program
from tests.hostir.threads import assert_bf16_values

TP = DeviceMesh(tp=2)


def lowered(
    program: Program, marks: dict[str, Layout], overlap: OverlapRequest = CHEAPEST
) -> tuple[LocalProgram, HostProgram]:
    plan = plan_program(program, TP, H200, marks, overlap=overlap)
    local = pair_for_library(localize(plan), plan)
    host = lower_program(local, megakernel=False, peer_memory=True, fuse=True)
    return local, run_passes(host)


def normed(host: HostProgram) -> list[FusedMatmul]:
    return [node for node in host.body if isinstance(node, FusedMatmul) and node.norm]


def num_norms(host: HostProgram) -> int:
    ops = (node.op for node in host.body if isinstance(node, LibraryOp))
    return sum("norm" in op.kind for op in ops)


def block(
    norm: str = "layer_norm", *, seen: bool = False, rows: int = 16, width: int = 64
) -> tuple[Program, dict[str, Layout]]:
    """y + x and its norm behind a product whose sums ranks share. seen: the sum is an output."""
    p = ProgramBuilder("block")
    x, h = (p.input(name, (rows, width), "bf16") for name in "xh")
    y = p.linear(h, p.weight("w", (width, width), "bf16"), name="y")
    total = x.map("a0 + a1", y)
    weight, bias = (p.weight(name, (width,), "bf16") for name in ("scale", "shift"))
    made = (
        p.rms_norm(total, weight, 1e-5)
        if norm == "rms_norm"
        else p.layer_norm(total, weight, bias, 1e-5)
    )
    return p.build(made, total, *([y] if seen else [])), {"w": shard(1, "tp"), "h": shard(1, "tp")}


def assert_same(program: Program, local: LocalProgram, host: HostProgram) -> None:
    check_host(host)
    assert parse_host(print_host(host)) == host
    assert_bf16_values(program, local, host)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_sum_is_normalised_where_it_is_made(norm: str):
    program, marks = block(norm)
    local, host = lowered(program, marks)
    (node,) = normed(host)
    assert node.norm is not None
    assert (node.norm.kind, bool(node.norm.bias)) == (norm, norm == "layer_norm")
    assert num_norms(host) == 0
    assert_same(program, local, host)


def test_layers_of_one_behind_the_other():
    model = gated_mlp(16, 3, 64, 128)
    local, host = lowered(model.program, model.marks)
    assert len(normed(host)) == 2, "behind the last sum is no norm"
    assert num_norms(host) == 1, "of what comes in"
    assert_same(model.program, local, host)
    resized = resize_inputs(host, {"x": (32, 64)}, "resized")
    assert {host.buffer_map()[n].shape for each in normed(host) for n in each.writes} == {(16, 64)}
    shapes = {resized.buffer_map()[n].shape for each in normed(resized) for n in each.writes}
    assert shapes == {(32, 64)}


def test_a_sum_that_others_read_stays():
    program, marks = block(seen=True)
    local, host = lowered(program, marks)
    assert not normed(host)
    assert_same(program, local, host)


def test_a_kernel_that_was_asked_for_stays():
    program, marks = block(rows=512, width=128)
    assert normed(lowered(program, marks)[1])
    assert not normed(lowered(program, marks, "kernel")[1])


def test_rules_of_the_node():
    program, marks = block()
    _, host = lowered(program, marks)
    (node,) = normed(host)

    def changed(**fields: object) -> HostProgram:
        new = replace(node, **fields)  # type: ignore[arg-type]
        return replace(host, body=tuple(new if each is node else each for each in host.body))

    assert node.norm is not None
    with pytest.raises(VerifyError, match="rows of a sum over ranks"):
        verify_host(changed(norm=replace(node.norm, weight=node.w)))
    with pytest.raises(VerifyError, match="rows of a sum over ranks"):
        verify_host(changed(forced=True))
    text = print_host(host)
    assert "eps=1e-05" in text
    for wrong in ("eps='1'", "eps=1e-05 more=1"):
        with pytest.raises(ParseError):
            parse_host(text.replace("eps=1e-05", wrong))
