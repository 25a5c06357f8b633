"""Programs of library ops: pairs of rows that no kernel takes go by peer memory where it pays."""

import pytest

from bench.models import gated_mlp
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import FusedMatmul, HostProgram
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import LocalProgram, localize, pair_for_library
from distmega.sharding.overlap.pairs import OverlapRequest
from distmega.sharding.planner import plan_program
from tests.hostir.threads import assert_bf16_values

TP = DeviceMesh(tp=2)


def paired(
    rows: int, overlap: OverlapRequest | None = None, hidden: int = 2048, inner: int = 8192
) -> tuple[LocalProgram, HostProgram]:
    model = gated_mlp(rows, 2, hidden, inner)
    asked = {} if overlap is None else {"overlap": overlap}
    plan = plan_program(model.program, TP, H200, model.marks, **asked)
    local = pair_for_library(localize(plan), plan)
    return local, run_passes(lower_program(local, megakernel=False, peer_memory=True))


def kinds(host: HostProgram) -> list[str]:
    return [node.kind for node in host.body if isinstance(node, FusedMatmul)]


@pytest.mark.parametrize("rows", [1, 16, 63, 64, 250])
def test_sums_of_few_rows_go_by_peer_memory(rows: int):
    _, host = paired(rows)
    assert kinds(host) == ["matmul_all_reduce"] * 2
    check_host(host)


def test_sums_of_rows_that_are_no_vectors_of_each_rank_stay():
    assert kinds(paired(64, hidden=2056)[1]) == []


def test_what_a_user_asked_for_stays():
    assert kinds(paired(64, "sequential")[1]) == []
    assert kinds(paired(256, "sequential")[1]) == []


def test_results_are_those_of_the_whole_program():
    local, host = paired(16, hidden=64, inner=128)
    assert kinds(host) == ["matmul_all_reduce"] * 2
    assert_bf16_values(gated_mlp(16, 2, 64, 128).program, local, host)
