"""An op of a written host program that has lost an operand or a result, or has one twice, is
refused by name, or runs: of all kinds that passes make, and of those around them.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from distmega.errors import CheckError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import HostProgram, LibraryOp
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.library.ops import library_kinds
from distmega.hostir.run.evaluator import Evaluator
from distmega.program.builder import ProgramBuilder
from distmega.program.kinds import kinds
from distmega.program.types import Op, Program
from tests.hostir.passes import (
    test_fuse_attention,
    test_fuse_heads,
    test_mix_columns,
    test_split_sums,
)
from tests.hostir.passes.test_fuse import lowered
from tests.hostir.programs import random_tensors


def normed(kind: str) -> Program:
    p = ProgramBuilder("normed")
    total = p.input("x", (5, 8)).map("a0 + a1", p.input("y", (5, 8)), name="total")
    scale, shift = p.weight("scale", (8,)), p.weight("shift", (8,))
    if kind == "rms_norm":
        made = p.rms_norm(total, scale, 1e-5, name="n")
    else:
        made = p.layer_norm(total, scale, shift, 1e-5, name="n")
    return p.build(total, p.linear(made, p.weight("w", (3, 8))))


def heads(*, several: bool) -> Program:
    b = test_fuse_heads.Block(several=several)
    q, k = (b.rope(b.norm(x, name), name) for x, name in ((b.q, "q"), (b.k, "k")))
    b.append(0, k)
    b.append(1, b.v)
    return b.p.build(b.attend(q))


def chain() -> Program:
    p = ProgramBuilder("chain")
    made = p.input("x", (6, 8)).map("silu(a0) * a1", p.weight("row", (8,)), name="a")
    return p.build(made.map("a0 - a1 * a0", p.weight("column", (6, 1)), name="y"))


def shaped() -> Program:
    p = ProgramBuilder("shaped")
    made = p.linear(p.input("x", (5, 8)), p.weight("w", (6, 8)), p.weight("b", (6,)))
    made = made.map("gelu(a0)", name="y")
    return p.build(p.linear(made, p.weight("v", (3, 6)), name="z"))


def step(**options: object) -> Program:
    return test_fuse_attention.whole_step(test_fuse_attention.Case(**options))


HOSTS = {
    "rms": lowered(normed("rms_norm")),
    "layer": lowered(normed("layer_norm")),
    "heads": lowered(heads(several=False)),
    "heads of several": lowered(heads(several=True)),
    "attention": lowered(step(norms="qk")),
    "attention of a row": lowered(step(rows=1, single=True)),
    "chain": lowered(chain()),
    "shaped": lowered(shaped()),
    "gated": lowered(test_mix_columns.gated("silu(a0) * a1")),
    "experts": lowered(test_mix_columns.experts("silu(a0) * a1")),
    "parts": lowered(test_split_sums.block(test_split_sums.rms), sum_parts=test_split_sums.two),
}


def test_all_kinds_that_passes_make_are_above():
    made = {kind.name for kind in kinds() if kind.origin == "internal"} & {*library_kinds()}
    found = {n.op.kind for host in HOSTS.values() for n in host.body if isinstance(n, LibraryOp)}
    assert made <= found


def changed(op: Op) -> Iterator[Op]:
    for name in ("reads", "writes"):
        given = getattr(op, name)
        for at in range(len(given)):
            yield replace(op, **{name: given[:at] + given[at + 1 :]})
            yield replace(op, **{name: given[: at + 1] + given[at:]})
            yield replace(op, **{name: (*given[:at], given[at - 1], *given[at + 1 :])})


def programs(host: HostProgram) -> Iterator[HostProgram]:
    for at, node in enumerate(host.body):
        if isinstance(node, LibraryOp) and not node.op.is_view:
            for op in changed(node.op):
                body = (*host.body[:at], replace(node, op=op), *host.body[at + 1 :])
                yield replace(host, body=body)


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_not_refused_runs(name: str):
    num_refused = 0
    generator = torch.Generator().manual_seed(0)
    tensors = random_tensors(HOSTS[name])
    for x in tensors.values():
        if not x.is_floating_point():
            x.copy_(torch.randint(0, 3, x.shape, generator=generator))
    for host in programs(HOSTS[name]):
        try:
            check_host(verify_host(host))
        except (VerifyError, CheckError):
            num_refused += 1
            continue
        given = {each: x.clone() for each, x in tensors.items()}
        Evaluator(host, SingleCommunicator(host.mesh), {}).run(given)
    assert num_refused > 0
