"""A pipeline of two stages: host programs that send, signal and wait, proven together, then run.

    python examples/pipeline.py

Stage 0 has the first layers, stage 1 the rest. Rows come in four micro-batches: while stage 1 works
on one, stage 0 works on the next, and the event `free` keeps it from running further ahead. How the
program is cut: sharding/stages.py. How stages are linked: hostir/pipeline.py.
"""

from dataclasses import replace

import torch

from distmega.builder import ProgramBuilder
from distmega.errors import CheckError
from distmega.hostir.check import check_host
from distmega.hostir.comm import GlooCommunicator
from distmega.hostir.evaluator import Evaluator
from distmega.hostir.lower import lower_program
from distmega.hostir.nodes import HostProgram, WaitSignal
from distmega.hostir.passes import run_passes
from distmega.hostir.pipeline import Part, link_stage
from distmega.hostir.text import print_host
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import launch
from distmega.program import Program
from distmega.ranks import Emit, RankContext
from distmega.sharding.cost import CPU
from distmega.sharding.localize import localize
from distmega.sharding.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.sharding.stages import cut_places, split_stages

MESH = DeviceMesh(pp=2)
NUM_BATCHES, ROWS, HIDDEN, NUM_LAYERS = 4, 8, 64, 6

Values = dict[str, torch.Tensor]


def build_layers(num_rows: int) -> Program:
    """x = silu(x w') + x, NUM_LAYERS times."""
    p = ProgramBuilder("layers")
    x = p.input("x", (num_rows, HIDDEN))
    for layer in range(NUM_LAYERS):
        h = p.linear(x, p.weight(f"w{layer}", (HIDDEN, HIDDEN)), name=f"h{layer}")
        x = h.map("silu(a0) + a1", x, name="y" if layer == NUM_LAYERS - 1 else f"x{layer}")
    return p.build(x)


def make_stages() -> list[HostProgram]:
    """The host program of each stage."""
    program = build_layers(ROWS)
    hosts = []
    for stage in split_stages(program, cut_places(program, MESH.size("pp"))):
        plan = plan_program(stage.program, MESH.part("pp", stage.index), CPU)
        local = replace(localize(plan), mesh=MESH)
        host = lower_program(local, megakernel=False, peer_memory=False)
        part = Part(stage=stage, host=host, count=NUM_BATCHES)
        hosts.append(run_passes(link_stage([part], {"x": 0, "y": 0})))
    return hosts


def run_rank(context: RankContext, values: Values, emit: Emit) -> torch.Tensor:
    """What each rank does: its own stage, and in the end all have the result."""
    host = make_stages()[context.rank]
    return Evaluator(host, GlooCommunicator(MESH, context.rank), {}).run(values)["y"]


def main() -> None:
    """Prints and proves the stages, spoils one, runs them on two processes, and compares."""
    hosts = make_stages()
    check_host(hosts)
    for host in hosts:
        print(print_host(host))
    unbounded = tuple(node for node in hosts[0].body if not isinstance(node, WaitSignal))
    try:
        check_host([replace(hosts[0], body=unbounded), hosts[1]])
    except CheckError as error:
        print(f"without its waits for signals, stage 0 is refused: {error}\n")
    generator = torch.Generator().manual_seed(0)
    whole = build_layers(ROWS * NUM_BATCHES).tensors
    values = {
        t.name: torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5
        for t in whole
        if t.role in ("input", "weight")
    }
    *_, last = launch("pipeline:run_rank", values, LauncherOptions(num_ranks=2))
    expected = values["x"]
    for layer in range(NUM_LAYERS):
        hidden = expected @ values[f"w{layer}"].T
        expected = hidden * torch.sigmoid(hidden) + expected
    torch.testing.assert_close(last.value, expected)
    print(f"{NUM_BATCHES} micro-batches through {len(hosts)} stages: as plain torch has it")


if __name__ == "__main__":
    main()
