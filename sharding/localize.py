"""One rank's program: local shapes, collectives as ops, the rank itself left symbolic.

Comes in: a Plan. Goes out: a LocalProgram, a Program like any other with the host loops that its
ops run in, which hostir/lower/lower.py cuts into segments. Shapes are those of a rank's whole part;
what is allocated per iteration of a loop says so in its allocation. Next: hostir/lower/lower.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distmega.collecting import gc_paused
from distmega.program.types import Program, Tensor, verify_program
from distmega.sharding.finalize import verify_allocations
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.local_ops import LocalOps
from distmega.sharding.overlap.pairs import BY_LIBRARY, OverlapChoice, choose_overlaps
from distmega.sharding.planner import Plan
from distmega.sharding.streams.host_loops import HostLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """What every rank of a mesh runs, and how its tensors are allocated, by local name.

    host_loops: runs of consecutive ops (views apart) that are iterations of one loop. fused: pairs
    that run as one kernel where ranks reach each other's memory.
    """

    program: Program
    mesh: DeviceMesh
    allocations: Mapping[str, AllocationDomain]
    host_loops: tuple[HostLoop, ...] = ()
    fused: tuple[OverlapChoice, ...] = ()


def _tensors(plan: Plan) -> list[Tensor]:
    """Tensors of the whole program in its order, each followed by its other forms."""
    wholes = plan.program.tensor_map()
    forms: dict[str, list[Tensor]] = {name: [] for name in wholes}
    for name, (whole, _) in plan.locals.items():
        tensor = wholes[whole]
        local = Tensor(
            name=name,
            shape=plan.allocations[name].local_shape,
            dtype=tensor.dtype,
            role=tensor.role if name == whole else "temp",
        )
        forms[whole].append(local)
    return [tensor for group in forms.values() for tensor in group]


@gc_paused
def localize(plan: Plan) -> LocalProgram:
    """The program every rank runs. VerifyError or ProgramError would be a bug of the planner."""
    ops = LocalOps(plan.program.tensor_map(), plan.mesh, plan.locals)
    program = Program(
        name=plan.program.name,
        tensors=tuple(_tensors(plan)),
        ops=tuple(ops.op(step) for step in plan.steps),
        outputs=plan.program.outputs,
    )
    verify_program(program)
    verify_allocations(program, plan.allocations)
    return LocalProgram(
        program=program,
        mesh=plan.mesh,
        allocations=plan.allocations,
        host_loops=plan.host_loops,
        fused=tuple(choice for choice in plan.overlaps if choice.way == "kernel"),
    )


def pair_for_library(local: LocalProgram, plan: Plan) -> LocalProgram:
    """The same for ranks that run it by library ops in each other's reach: a pair whose rows no
    kernel takes may be the library's matmul and a collective by peer memory, where that is expected
    to be faster. Pairs for which a user asked something stay as they are.
    """
    left = [c.pair for c in plan.overlaps if c.way == "sequential" and not c.forced]
    chosen = choose_overlaps(left, plan.machine, BY_LIBRARY)
    return replace(local, fused=(*local.fused, *(c for c in chosen if c.way == "kernel")))
