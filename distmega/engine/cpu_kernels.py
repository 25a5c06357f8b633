"""The megakernels of a decode step on a CPU, where the interpreter runs them.

In: a decode plan and the arenas of this rank. Out: a runner for each segment of the host program.
Next on the walk: kernels/megakernel.py.
"""

from collections.abc import Sequence

from torch import Tensor

from distmega.engine.decode_plan import DecodePlan
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.plain import Plain
from distmega.kernels.cpu.runner import CpuMegakernel, gather_along, open_peers
from distmega.kernels.megakernel import Megakernel, compile_megakernel


def open_kernels(
    plan: DecodePlan, comm: Communicator, weights: Tensor, states: Tensor
) -> dict[str, CpuMegakernel]:
    """Runners by the names of segments; all ranks of the mesh open them together. weights, states:
    arenas, uint8, as the plan lays them out.
    """
    return {
        segment.name: _open(
            compile_megakernel(
                segment,
                plan.staged.mesh,
                num_sms=plan.options.num_sms,
                weights=plan.weights,
                states=plan.states,
                mode=plan.options.events,
            ),
            plan,
            comm,
            weights,
            states,
        )
        for segment in plan.host.segments
    }


def _open(
    kernel: Megakernel, plan: DecodePlan, comm: Communicator, weights: Tensor, states: Tensor
) -> CpuMegakernel:
    def gather(value: Plain) -> Sequence[object]:
        return gather_along(comm, kernel.team_axes, value)

    return CpuMegakernel(
        kernel,
        rank=comm.rank,
        weights_arena=weights,
        state_arena=states,
        peers=open_peers(kernel, comm.rank, gather),
        seed=plan.options.interleave_seed or None,
        timeout_s=plan.options.timeout_s,
    )
