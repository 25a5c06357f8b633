"""The megakernels of a decode step on a CPU, where the interpreter runs them.

In: a decode plan and the arenas of this rank. Out: a runner for each segment of the host program.
Next on the walk: kernels/megakernel.py.
"""

from torch import Tensor

from distmega.engine.decode_plan import DecodePlan
from distmega.hostir.comm.communicator import Communicator
from distmega.kernels.cpu.runner import CpuMegakernel, open_cpu
from distmega.kernels.megakernel import compile_megakernel


def open_kernels(
    plan: DecodePlan, comm: Communicator, weights: Tensor, states: Tensor
) -> dict[str, CpuMegakernel]:
    """Runners by the names of segments; all ranks of the mesh open them together. weights, states:
    arenas, uint8, as the plan lays them out.
    """
    return {
        segment.name: open_cpu(
            compile_megakernel(
                segment,
                plan.mesh,
                num_sms=plan.options.num_sms,
                weights=plan.weights,
                states=plan.states,
                mode=plan.options.events,
            ),
            comm,
            weights_arena=weights,
            state_arena=states,
            timeout_s=plan.options.timeout_s,
            seed=plan.options.interleave_seed or None,
        )
        for segment in plan.host.segments
    }
