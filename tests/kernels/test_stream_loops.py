"""Megakernels inside host loops, interpreted: chunk by chunk they give what the program does."""

import pytest
import torch

from distmega.hostir.evaluator import KernelRunner
from distmega.hostir.lower import lower_program
from distmega.hostir.nodes import ForLoop, HostProgram, LaunchMegakernel, walk_nodes
from distmega.hostir.passes import run_passes
from distmega.kernels.arena import ArenaLayout, Space, layout_arena
from distmega.kernels.cpu_megakernel import CpuMegakernel, open_peers
from distmega.kernels.lowering import is_encodable
from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.memory import allocate_arena, arena_views
from distmega.sharding.cost import CPU
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program
from tests.hostir.test_stream_sums import CASES as SUMS
from tests.hostir.test_streams import CASES, small_integers
from tests.hostir.threads import join, run_mesh


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


@pytest.mark.parametrize("name", [*CASES, *SUMS])
def test_kernels_in_loops_are_exact(name: str):
    program, mesh, marks = {**CASES, **SUMS}[name]
    local = localize(plan_program(program, mesh, CPU, marks))
    host = run_passes(
        lower_program(local, megakernel=True, peer_memory=False, is_encodable=is_encodable)
    )
    inside = [node for node in host.body if isinstance(node, ForLoop)]
    nodes = [each for loop in inside for each in walk_nodes(loop.body)]
    assert any(isinstance(node, LaunchMegakernel) for node in nodes)
    tensors = small_integers(program)
    expected = run_program(program, {k: v.clone() for k, v in tensors.items()})
    found = join(run_mesh(host, local, tensors, bind_kernels), local, program.outputs)
    for output in program.outputs:
        assert torch.equal(found[output], expected[output]), output
