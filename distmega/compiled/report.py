"""What a compiled program says of itself: counts, and what runs and why, as text.

Comes in: what a rank runs, as lowering.py has decided it. Used by program.py.
"""

from dataclasses import dataclass

from distmega.compiled.lowering import RankProgram
from distmega.errors import counted
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import LaunchMegakernel, LibraryOp, walk_nodes
from distmega.hostir.run.host_cost import explain_host
from distmega.program.kinds import kind_of
from distmega.sharding.planner import Plan
from distmega.superopt.rewrite import explain_op, rules_of_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStats:
    """What a program consists of on a rank, and how it runs.

    num_megakernels, num_library_ops: nodes of the host program, a fused matmul counted as a library
    op. num_tasks, num_events: of all megakernels together. num_compilations: kernels that its calls
    compiled, those in Triton's cache not counted. num_opaque_ops: operators that only torch knows.
    rules: names of the rewrite rules that made ops, once for each place. replayed: whether calls
    replay one CUDA graph; reason: why not, empty while nothing stands in the way.
    """

    num_megakernels: int
    num_library_ops: int
    num_tasks: int
    num_events: int
    num_compilations: int
    num_opaque_ops: int
    rules: tuple[str, ...]
    replayed: bool
    reason: str


def count_nodes(
    lowered: RankProgram, *, num_compilations: int, replayed: bool, reason: str
) -> CompiledStats:
    """The counts of a program."""
    nodes = [*walk_nodes(lowered.host.body)]
    ops = [node.op for node in nodes if isinstance(node, LibraryOp) and not node.op.is_view]
    return CompiledStats(
        num_megakernels=sum(isinstance(node, LaunchMegakernel) for node in nodes),
        num_library_ops=len(ops) + sum(isinstance(node, FusedMatmul) for node in nodes),
        num_tasks=lowered.whole.num_tasks if lowered.whole else 0,
        num_events=lowered.whole.num_events if lowered.whole else 0,
        num_compilations=num_compilations,
        num_opaque_ops=sum(kind_of(op).calls_torch for op in ops),
        rules=(
            *(str(op.attr("rule")) for op in lowered.graph_ops),
            *(used.partition("#")[0] for used in _rules_of_kernel(lowered)),
        ),
        replayed=replayed,
        reason=reason,
    )


def explain_program(
    plan: Plan, lowered: RankProgram, *, replayed: bool, reason: str, copies_states: bool
) -> str:
    """The plan, what a run costs the host, and whether it replays as a CUDA graph. copies_states:
    whether the kernel is given states in each call.
    """
    if replayed:
        replaying = "replays as one CUDA graph"
    elif reason:
        replaying = f"runs node by node: {reason}"
    else:
        replaying = "will replay as one CUDA graph, if all ranks can capture it"
    lines = [plan.explain(), explain_host(lowered.host, plan.machine), replaying]
    if lowered.whole:
        lines.append(
            f"one megakernel a rank of {counted(lowered.whole.num_tasks, 'task')},"
            f" {counted(lowered.whole.num_events, 'event')}"
        )
        if copies_states:
            lines.append("states are copied to it and back in each call; not with warm=True")
    else:
        lines.append(f"no megakernel: {lowered.no_kernel}")
    lines += [f"by peer memory: {choice}" for choice in lowered.pairs]
    known = {rule.name: rule for rule in lowered.rules}
    lines += [explain_op(op, known) for op in lowered.graph_ops]
    lines += [
        f"ops {', '.join(names)} are made by rule {used.partition('#')[0]}"
        for used, names in _rules_of_kernel(lowered).items()
    ]
    return "\n".join(lines) + "\n"


def _rules_of_kernel(lowered: RankProgram) -> dict[str, list[str]]:
    """Rules that were used in a megakernel, once for each place, and the ops of each."""
    known = {rule.name: rule for rule in lowered.rules}
    return rules_of_ops(lowered.whole.segment, known) if lowered.whole else {}
