"""Random programs under random device and stream annotations: exact, checked, peaks as reported."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import CheckError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.ir.nodes import Allocate, Collective, LibraryOp, walk_nodes
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.deallocations import peak_memory
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, shard, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.calls import num_calls
from tests.hostir.programs import wait_numbers, without
from tests.hostir.streams import MESHES, assert_exact, plan_marked, planned, small_integers
from tests.hostir.threads import HeldBytes, run_mesh
from tests.sharding.programs import decoder
from tests.sharding.random_programs import random_program
from tests.sharding.simulate import check_plan, random_arrays


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(MESHES), st.booleans())
def test_random_programs_are_exact(seed: int, mesh: DeviceMesh, megakernel: bool):
    plan, local, host = planned(seed, mesh, megakernel=megakernel)
    assert_exact(plan.program, local, host, seed=seed)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(MESHES))
def test_the_local_program_is_exact_in_its_new_order(seed: int, mesh: DeviceMesh):
    plan = plan_marked(random_program(seed), mesh, seed)
    check_plan(plan, random_arrays(plan.program, seed))


def test_reported_peaks_are_what_is_held(monkeypatch: pytest.MonkeyPatch):
    for seed in range(5000, 5080):
        plan, local, host = planned(seed, MESHES[seed % len(MESHES)])
        with monkeypatch.context() as patched:
            held = HeldBytes(patched)
            run_mesh(host, local, small_integers(plan.program, seed))
        kinds = {node.op.kind for node in walk_nodes(host.body) if isinstance(node, LibraryOp)}
        if kinds & {"fused_pointwise", "fused_norm"}:
            assert held.peak <= peak_memory(host), seed
        else:
            assert held.peak == peak_memory(host) == plan.memory.total_bytes, seed


def test_deleted_waits_are_caught():
    """But for a few where chunks of two loops happen to meet on one stream."""
    num = missed = 0
    for seed in range(130):
        _, _, host = planned(seed, MESHES[seed % len(MESHES)], live=True)
        for number in wait_numbers(host):
            num += 1
            try:
                check_host(without(host, number))
                missed += 1
            except (CheckError, VerifyError):
                continue
    assert num > 300
    assert missed <= num // 100


def test_full_allocations_turned_into_chunks_are_caught():
    num = 0
    for seed in range(60):
        _, local, host = planned(seed, MESHES[seed % len(MESHES)])
        for name in [node.buffer for node in host.body if isinstance(node, Allocate)]:
            domain = local.allocations[name]
            for dim, extent in enumerate(domain.local_shape):
                if extent == 1:
                    continue
                broken = {**local.allocations, name: domain.chunked(dim, -(-extent // 2))}
                changed = replace(local, allocations=broken)
                with pytest.raises((VerifyError, CheckError)):
                    check_host(
                        run_passes(lower_program(changed, megakernel=False, peer_memory=False))
                    )
                num += 1
    assert num > 300


PARALLEL = ("wq", "wk", "wv", "w_gate", "w_up", "mid", "out")


def sequence_parallel(layers: int) -> dict[str, Layout]:
    """Rows divided between blocks, weights inside of them; gathers and scatters as rings."""
    marks = {"x": shard(0, "tp")}
    for block in (f"layers.{i}" for i in range(layers)):
        marks |= {f"{block}.{name}": shard(0, "tp") for name in PARALLEL}
        marks |= {f"{block}.{name}": shard(1, "tp") for name in ("wo", "w_down")}
        marks[f"{block}.act"] = shard(1, "tp") | stream(0, 8, ring="tp")
        marks[f"{block}.down"] = shard(0, "tp") | stream(0, 8, ring="tp")
    return marks


def lower(layers: int) -> None:
    """Plans and lowers a transformer, tensor- and sequence-parallel over 8 ranks."""
    program = decoder(layers=layers, rows=512, hidden=1024, heads=8, group=8, head=128, ffn=4096)
    plan = plan_program(program, DeviceMesh(tp=8), H200, sequence_parallel(layers))
    raw = lower_program(localize(plan), megakernel=False, peer_memory=False, fuse=True)
    host = run_passes(raw)
    assert len(plan.host_loops) == 2 * layers
    kinds = [node.kind for node in walk_nodes(host.body) if isinstance(node, Collective)]
    assert kinds.count("reduce_scatter") == layers


def test_planning_and_lowering_grow_with_the_layers_alone():
    assert num_calls(lambda: lower(40)) < 4.4 * num_calls(lambda: lower(10))


@pytest.mark.nightly  # as the last, but for its size
def test_80_layers_are_planned_and_lowered_with_a_bounded_number_of_calls():
    """Two seconds of an idle core, where the number is what it was."""
    assert num_calls(lambda: lower(80)) < 11.6e6
