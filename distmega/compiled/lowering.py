"""What a rank runs of a plan: one kernel of the whole program, or library ops; the same on all
ranks.

Comes in: a Plan, a communicator and what the caller chose. Goes out: a RankProgram, proven, which
all ranks have found alike. Next: hostir/lower/lower.py, and kernels/whole.py for the kernel.
"""

import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from distmega.compiled.choices import Megakernels
from distmega.engine.kept_plans import open_plans
from distmega.engine.ranks.agreement import on_all_ranks, require_equal
from distmega.errors import UnsupportedError
from distmega.hostir.check.check import prove_once
from distmega.hostir.comm.communicator import Communicator, TeamCommunicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import HostProgram, LibraryOp, walk_nodes
from distmega.hostir.ir.text import print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.hopper.batch_plan.words import BATCH, MAX_ROWS
from distmega.kernels.library.sum_parts import choose_sum_parts
from distmega.kernels.runtime.gpus import facts_of
from distmega.kernels.ugraphs.geometry import pays
from distmega.kernels.whole import WholePlan, fold_whole, plan_whole, unfold_whole
from distmega.program.kinds import FUSED_GRAPH
from distmega.program.types import Op
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sharding.localize import LocalProgram, localize, pair_for_library
from distmega.sharding.overlap.pairs import OverlapChoice
from distmega.sharding.planner import Plan
from distmega.superopt.rules import RewriteRule, shipped_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What a rank runs.

    host: proven. allocations: how its tensors are allocated, by local name. whole: the one kernel
    that it launches, None where library ops run; no_kernel: why. pairs: matmuls that run with a
    collective beside them, by peer memory. rules: by which ops may have been replaced.
    """

    host: HostProgram
    allocations: Mapping[str, AllocationDomain]
    whole: WholePlan | None
    no_kernel: str
    pairs: tuple[OverlapChoice, ...]
    rules: tuple[RewriteRule, ...]

    @property
    def graph_ops(self) -> list[Op]:
        """Ops that rewrite rules made, outside of the kernel."""
        nodes = [node for node in walk_nodes(self.host.body) if isinstance(node, LibraryOp)]
        return [node.op for node in nodes if node.op.kind == FUSED_GRAPH]


def lower_plan(
    plan: Plan,
    comm: Communicator,
    device: torch.device,
    rules: tuple[RewriteRule, ...],
    megakernel: Megakernels,
    *,
    warm: bool,
) -> RankProgram:
    """What this rank runs. All ranks call it; UnsupportedError and LaunchError are those of all."""
    local = localize(plan)
    whole, no_kernel = _plan_kernel(local, comm, device, rules, megakernel, warm=warm)
    if not whole and _reaches_peers(comm):
        local = pair_for_library(local, plan)
    host = whole.host if whole else _lower_to_library(local, plan, comm, device, rules)
    prove_once(host)
    if plan.mesh.num_ranks > 1 and (isinstance(comm, TeamCommunicator) or whole):
        require_equal(comm, f"program {plan.program.name!r}", _fingerprints(plan, host, whole))
    return RankProgram(
        host=host,
        allocations=local.allocations,
        whole=whole,
        no_kernel=no_kernel,
        pairs=() if whole else local.fused,
        rules=rules,
    )


def _fingerprints(plan: Plan, host: HostProgram, whole: WholePlan | None) -> list[str]:
    """Hashes of all that the ranks must have decided alike."""
    text = hashlib.sha256(print_host(host).encode()).hexdigest()[:16]
    return [plan.fingerprint(), text, whole.fingerprint if whole else ""]


def _lower_to_library(
    local: LocalProgram,
    plan: Plan,
    comm: Communicator,
    device: torch.device,
    rules: Sequence[RewriteRule],
) -> HostProgram:
    """The program by library ops, on GPUs by the kernels of rules that pay too."""
    on_gpu, machine = device.type == "cuda", plan.machine
    host = lower_program(
        local,
        megakernel=False,
        peer_memory=isinstance(comm, NcclCommunicator),
        fuse=on_gpu,
        rules=rules,
        is_usable=pays if on_gpu else None,
        sum_parts=partial(choose_sum_parts, num_sms=machine.num_sms) if on_gpu else None,
    )
    return run_passes(host)


def _plan_kernel(
    local: LocalProgram,
    comm: Communicator,
    device: torch.device,
    rules: Sequence[RewriteRule],
    megakernel: Megakernels,
    *,
    warm: bool,
) -> tuple[WholePlan | None, str]:
    """What one kernel a rank does, on all ranks or none, and why there is none."""
    if megakernel is False:
        return None, "megakernel=False"
    if megakernel == "auto" and device.type != "cuda":
        return None, "a CPU"
    if megakernel == "auto" and not warm and local.program.with_role("state"):
        problem = UnsupportedError(
            "states in memory of the caller, which a kernel would copy in each call",
            expected="a program compiled with warm=True, which has its own",
            remedy="compile with warm=True, and fill states by load()",
        )
        return None, str(problem)
    try:
        plan = partial(plan_kept_kernel, local, comm, device, rules, forced=megakernel is True)
        return on_all_ranks(comm, plan), ""
    except UnsupportedError as error:
        if megakernel is True:
            raise
        return None, str(error)


def plan_kept_kernel(
    local: LocalProgram,
    comm: Communicator,
    device: torch.device,
    rules: Sequence[RewriteRule],
    *,
    forced: bool,
) -> WholePlan:
    """What one kernel a rank does, as planned now or, for a GPU, by an earlier process."""
    most_rows = MAX_ROWS if forced else BATCH
    plan = partial(plan_whole, local, comm, device, rules, most_rows, forced=forced)
    if device.type != "cuda":
        return plan()
    kept = open_plans(facts_of(device), type(comm).__name__, comm.rank)
    known_rules = "shipped" if rules is shipped_rules() else rules
    key = (local, known_rules, most_rows, forced)
    found = kept.get_folded("kernel", key, plan, fold_whole, unfold_whole)
    kept.write()
    return found


def _reaches_peers(comm: Communicator) -> bool:
    """Whether all ranks are GPUs of one host; they ask together."""
    if not isinstance(comm, NcclCommunicator):
        return False
    return len({*comm.all_gather_object(socket.gethostname())}) == 1
