"""A pipeline of two stages: host programs that send, signal and wait, proven together, then run.

    python examples/pipeline.py      or      torchrun --nproc-per-node 2 examples/pipeline.py

Stage 0 has the first layers, stage 1 the rest. Rows come in four micro-batches: while stage 1 works
on one, stage 0 works on the next, and the event `free` keeps it from running further ahead. How the
program is cut: sharding/stages.py. How stages are linked: hostir/lower/pipeline.py.
"""

from dataclasses import replace

import torch

from distmega import CPU, DeviceMesh, Emit, Program, ProgramBuilder, RankContext, plan_program
from distmega.engine.ranks.communicators import open_communicator
from distmega.engine.ranks.context import DeviceKind
from distmega.errors import CheckError
from distmega.hostir import (
    Evaluator,
    HostProgram,
    NcclCommunicator,
    check_host,
    lower_program,
    print_host,
    run_passes,
)
from distmega.hostir.ir.nodes import FREE, WaitSignal
from distmega.hostir.lower.pipeline import StagePart, link_stage
from distmega.kernels.runtime.streams.signals import open_signals
from distmega.launch import LauncherOptions, Result, launch
from distmega.sharding.layout.mesh import STAGE_AXIS
from distmega.sharding.localize import localize
from distmega.sharding.stages import cut_positions, split_stages

MESH = DeviceMesh(pp=2)
TIMEOUT_S = 60.0
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


def make_stages(mesh: DeviceMesh = MESH) -> list[HostProgram]:
    """The host program of each stage."""
    program = build_layers(ROWS)
    hosts = []
    for stage in split_stages(program, cut_positions(program, mesh.size(STAGE_AXIS))):
        plan = plan_program(stage.program, mesh.part(STAGE_AXIS, stage.index), CPU)
        local = replace(localize(plan), mesh=mesh)
        host = lower_program(local, megakernel=False, peer_memory=False)
        part = StagePart(stage=stage, host=host, count=NUM_BATCHES)
        hosts.append(run_passes(link_stage([part], {"x": 0, "y": 0})))
    return hosts


def make_values() -> Values:
    """Rows of all micro-batches, and weights."""
    generator = torch.Generator().manual_seed(0)
    return {
        t.name: torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5
        for t in build_layers(ROWS * NUM_BATCHES).tensors
        if t.role in ("input", "weight")
    }


def expected_rows(values: Values) -> torch.Tensor:
    """What plain torch makes of them."""
    x = values["x"]
    for layer in range(NUM_LAYERS):
        hidden = x @ values[f"w{layer}"].T
        x = hidden * torch.sigmoid(hidden) + x
    return x


def run_rank(context: RankContext, values: Values, emit: Emit) -> torch.Tensor:
    """What each rank does: its own stage, and in the end all have the result. Between GPUs signals
    are counters in memory that they share, or go over NCCL.
    """
    comm = open_communicator(context, MESH)
    if isinstance(comm, NcclCommunicator):
        open_signals(comm, STAGE_AXIS, (FREE,), TIMEOUT_S, peer_memory=True)
    here = {name: x.to(context.device) for name, x in values.items()}
    evaluator = Evaluator(make_stages()[context.rank], comm, {}, context.device)
    return evaluator.run(here)["y"].cpu()


def main() -> None:
    """Prints and proves the stages, spoils one, runs them on two GPUs or processes, compares."""
    hosts = make_stages()
    check_host(hosts)
    for host in hosts:
        print(print_host(host))
    unbounded = tuple(node for node in hosts[0].body if not isinstance(node, WaitSignal))
    try:
        check_host([replace(hosts[0], body=unbounded), hosts[1]])
    except CheckError as error:
        print(f"without its waits for signals, stage 0 is refused: {error}\n")
    values = make_values()
    device: DeviceKind = "cuda" if torch.cuda.device_count() >= len(hosts) else "cpu"
    for event in launch(run_rank, values, LauncherOptions(num_ranks=2, device=device)):
        if isinstance(event, Result):
            torch.testing.assert_close(event.value, expected_rows(values))
            print(f"{NUM_BATCHES} micro-batches, {len(hosts)} stages on {device}: as torch has it")


if __name__ == "__main__":
    main()
