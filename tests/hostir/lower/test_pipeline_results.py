"""Pipelines whose stages all make results, some of which later stages read, with chunks inside."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from distmega.errors import CheckError, PlanError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import (
    EndCoalescing,
    HostProgram,
    Node,
    Recv,
    Send,
    StartCoalescing,
    Wait,
)
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.lower.pipeline import StagePart, link_stage
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import CPU
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from distmega.sharding.stages import split_stages
from tests.hostir.programs import run_program
from tests.hostir.streams import small_integers
from tests.hostir.threads import ThreadCommunicator, Wires

MESH = DeviceMesh(pp=3)
ROWS, NUM_BATCHES = 2, 3


def rows_program(rows: int) -> Program:
    """a on the first stage; b, read by the last as well, and c on the second; d on the last."""
    p = ProgramBuilder("rows")
    x = p.input("x", (rows, 4))
    a = p.linear(x, p.weight("w", (6, 4)), name="a")
    b = a.map("a0 * 2", name="b")
    c = p.pointwise("relu(a0) + a1", a, b, name="c")
    return p.build(b.map("a0 - 1", name="d"), b, c)


def stages(marks: Mapping[str, Layout]) -> list[HostProgram]:
    hosts = []
    for index, stage in enumerate(split_stages(rows_program(ROWS), ("b", "d"))):
        mine = {name: layout for name, layout in marks.items() if name in stage.program.outputs}
        local = localize(plan_program(stage.program, MESH.part("pp", index), CPU, mine))
        host = lower_program(replace(local, mesh=MESH), megakernel=False, peer_memory=False)
        part = StagePart(stage=stage, host=host, count=NUM_BATCHES)
        hosts.append(run_passes(link_stage([part], dict.fromkeys("xbcd", 0))))
    return hosts


@pytest.mark.parametrize("marks", [{}, {"b": stream(1, 2), "c": stream(1, 3), "d": stream(1, 2)}])
def test_results_of_all_stages_reach_all_stages(marks: Mapping[str, Layout]):
    hosts = stages(marks)
    check_host(hosts)
    whole = rows_program(ROWS * NUM_BATCHES)
    tensors = small_integers(whole)
    expected = run_program(whole, {name: x.clone() for name, x in tensors.items()})
    wires = Wires(MESH)

    def run(rank: int) -> Mapping[str, torch.Tensor]:
        comm = ThreadCommunicator(MESH, rank, wires)
        return Evaluator(hosts[rank], comm, {}).run(tensors)

    with ThreadPoolExecutor(MESH.num_ranks) as pool:
        for found in pool.map(run, MESH.ranks):
            assert all(torch.equal(found[name], expected[name]) for name in "bcd")


def one_by_one(host: HostProgram) -> HostProgram:
    """The program with each member of its groups by itself, waited for before the next."""
    body: list[Node] = []
    groups: list[str] = []
    for at, node in enumerate(host.body):
        match node:
            case Send(handle="") | Recv(handle=""):
                body += [replace(node, handle=f"alone{at}"), Wait(handle=f"alone{at}")]
            case EndCoalescing(handle=handle):
                groups.append(handle)
            case Wait(handle=handle) if handle in groups:
                continue
            case StartCoalescing():
                continue
            case _:
                body.append(node)
    assert groups
    return replace(host, body=tuple(body))


def test_stages_that_give_each_other_results_do_so_at_once():
    """The second stage has c for the last one and wants its d."""
    first, second, last = stages({})
    with pytest.raises(CheckError, match="these wait for each other"):
        check_host([first, one_by_one(second), one_by_one(last)])


def test_programs_of_two_sizes_have_names_of_their_own():
    (stage,) = split_stages(rows_program(ROWS), ())
    local = localize(plan_program(stage.program, DeviceMesh(tp=1), CPU))
    host = lower_program(local, megakernel=False, peer_memory=False)
    with pytest.raises(PlanError, match=r"parts of a stage named \['rows', 'rows'\]"):
        link_stage([StagePart(stage=stage, host=host)] * 2, {"x": 0})
