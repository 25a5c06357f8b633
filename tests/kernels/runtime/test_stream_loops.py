"""Megakernels inside host loops, interpreted: chunk by chunk they give what the program does."""

import pytest
import torch

from distmega.hostir.ir.nodes import ForLoop, HostProgram, LaunchMegakernel, LibraryOp, walk_nodes
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import KernelRunner
from distmega.kernels.cpu.runner import CpuMegakernel, open_peers
from distmega.kernels.isa.lowering import is_encodable
from distmega.kernels.machines import CPU
from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.runtime.arena import ArenaLayout, Space, layout_arena
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.placements import Layout, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import Plan, plan_program
from tests.hostir.passes.test_stream_sums import CASES as SUMS
from tests.hostir.streams import CASES, MESHES, ONE, assert_exact, plan_marked, without_dead_ops
from tests.sharding.random_programs import random_program


def bind_kernels(
    host: HostProgram, rank: int, given: dict[str, torch.Tensor]
) -> dict[str, KernelRunner]:
    """Compiles a rank's segments over one arena of weights and one of states."""
    arenas: list[tuple[ArenaLayout, torch.Tensor]] = []
    for space, role in ((Space.WEIGHT, "weight"), (Space.STATE, "state")):
        layout = layout_arena(space, [b for b in host.buffers if b.role == role])
        arenas.append((layout, allocate_arena(layout)))
        for name, view in arena_views(*arenas[-1]).items():
            given[name] = view.copy_(given[name])
    (weights, weights_arena), (states, state_arena) = arenas
    runners: dict[str, KernelRunner] = {}
    for segment in host.segments:
        kernel = compile_megakernel(segment, host.mesh, num_sms=3, weights=weights, states=states)
        runners[segment.name] = CpuMegakernel(
            kernel,
            rank=rank,
            weights_arena=weights_arena,
            state_arena=state_arena,
            peers=open_peers(kernel, rank, lambda own: [own]),
            seed=rank,
            timeout_s=10,
            poison=True,
        )
    return runners


def check(plan: Plan, seed: int = 0) -> HostProgram:
    local = localize(plan)
    options = {"megakernel": True, "peer_memory": False, "is_encodable": is_encodable}
    host = run_passes(lower_program(local, **options))
    assert_exact(plan.program, local, host, seed=seed, bind=bind_kernels)
    return host


@pytest.mark.parametrize("name", [*CASES, *SUMS])
def test_kernels_in_loops_are_exact(name: str):
    program, mesh, marks = {**CASES, **SUMS}[name]
    host = check(plan_program(program, mesh, CPU, marks))
    loops = [node for node in host.body if isinstance(node, ForLoop)]
    inside = [each for loop in loops for each in walk_nodes(loop.body)]
    assert any(isinstance(node, LaunchMegakernel) for node in inside)


def test_what_a_loop_made_is_overwritten_by_the_host():
    """A kernel changes nothing outside of its arenas."""
    p = ProgramBuilder("overwritten")
    base = p.set(p.input("x", (4, 3)), name="base")
    part = p.slice(base, 0, 0, 3, view=True, name="part")
    p.set(part.map("a0 + 1", name="more"), into=part, name="again")
    program = p.build(base)
    host = check(plan_program(program, ONE, CPU, {"x": stream(0, 2)}))
    assert any("again" in str(node) for node in host.body if isinstance(node, LibraryOp))


@pytest.mark.parametrize("marks", [{}, {"y": stream(0, 2)}])
def test_sums_over_several_dims_of_a_view_with_gaps_are_exact(marks: dict[str, Layout]):
    """In kernels: dims that do not merge into one are summed one in the other."""
    p = ProgramBuilder("gaps")
    x = p.input("x", (4, 8, 7)).map("a0 + 1", name="a")
    v = p.slice(x, 2, 0, 6, 2, view=True, name="v")
    whole = p.slice(v, 0, 0, 4, view=True, name="whole")
    w = p.weight("w", (8, 3))
    y = p.linear(whole, w, spec="m a b, a b -> m", name="y")
    z = p.linear(p.set(whole, name="copy"), w, spec="m a b, a b -> m", name="z")
    program = p.build(y, z)
    host = check(plan_program(program, ONE, CPU, marks))
    nodes = [*walk_nodes(host.body)]
    assert not any(isinstance(node, LibraryOp) for node in nodes)
    assert any(isinstance(node, LaunchMegakernel) for node in nodes)


@pytest.mark.parametrize("seed", range(75, 87))
def test_random_programs_with_kernels_are_exact(seed: int):
    program = without_dead_ops(random_program(seed, num_ops=7))
    plan = plan_marked(program, MESHES[seed % 3], seed)
    check(plan, seed)
