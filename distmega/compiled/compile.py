"""A plan on this rank of a job: opens the communicator that the program then closes.

Comes in: a Plan and the RankContext that a launcher gives. Goes out: a CompiledProgram. Next on the
walk: program.py.
"""

from collections.abc import Sequence

from distmega.compiled.choices import Megakernels, require_choices, require_plan
from distmega.compiled.program import CompiledProgram
from distmega.engine.ranks.communicators import left_on_failure, open_communicator
from distmega.engine.ranks.context import RankContext
from distmega.errors import UnsupportedError
from distmega.sharding.planner import Plan
from distmega.superopt.rules import RewriteRule


def compile_plan(
    plan: Plan,
    context: RankContext,
    *,
    replay: bool = True,
    warm: bool = False,
    megakernel: Megakernels = "auto",
    rules: Sequence[RewriteRule] | None = None,
) -> CompiledProgram:
    """The plan on this rank of a job, which must have as many ranks as the plan's mesh; replay,
    warm, megakernel, rules as in CompiledProgram.

    All ranks call it, at the same point. MeshError where the job has other ranks, ProgramError for
    what is no plan and no context, RequestError for a GPU that this machine hasn't;
    UnsupportedError as of CompiledProgram, on all ranks, after which nothing stays open.
    """
    require_plan(plan)
    require_choices(megakernel, rules, replay=replay, warm=warm)
    with left_on_failure(open_communicator(context, plan.mesh, native=True)) as comm:
        try:
            return CompiledProgram(
                plan,
                comm,
                context.device,
                replay=replay,
                warm=warm,
                megakernel=megakernel,
                rules=rules,
                closes_comm=True,
            )
        except UnsupportedError:  # which all ranks raise; peers may not come to close after others
            comm.close()
            raise
