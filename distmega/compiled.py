"""A planned program, ready to run on one rank.

Comes in: a Plan and the rank's place in the job. Goes out: a CompiledProgram, called with this
rank's tensors. Ops are library ops, on a GPU with the kernels for pointwise ops, norms, softmax and
matmuls with a collective beside them; there the whole host program replays as one CUDA graph. Next:
hostir/lower/lower.py, then hostir/run/cuda_graph.py.
"""

import hashlib
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from distmega.arguments import require_switch, shown
from distmega.engine.kept_plans import keep_triton_key, open_plans
from distmega.engine.ranks.agreement import on_all_ranks, require_equal
from distmega.engine.ranks.communicators import open_communicator
from distmega.engine.ranks.context import RankContext
from distmega.engine.ranks.devices import find_device
from distmega.engine.ranks.own_process import OwnProcess, require_process
from distmega.errors import (
    DistmegaError,
    HangError,
    ProgramError,
    RankFailure,
    UnsupportedError,
    counted,
)
from distmega.hostir.check.check import prove_once
from distmega.hostir.comm.communicator import (
    Communicator,
    TeamCommunicator,
    require_communicator,
)
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import HostProgram, LaunchMegakernel, LibraryOp, walk_nodes
from distmega.hostir.ir.text import print_host
from distmega.hostir.ir.uses import storage_of, view_sources
from distmega.hostir.library.torch_types import (
    NO_MEMORY,
    check_mapping,
    empty_tensor,
    fits,
    is_plain,
    misfit,
    ordinary,
    ordinary_tensors,
    require_real_tensors,
)
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.cuda_graph import CapturedHost, capture_on_ranks, shared_memory
from distmega.hostir.run.deadline import Deadline
from distmega.hostir.run.evaluator import Evaluator, KernelRunner
from distmega.hostir.run.graph_breaks import tensor_breaks
from distmega.hostir.run.host_cost import explain_host
from distmega.hostir.run.timeline import Timeline
from distmega.kernels.gemm.host import PeerMatmuls
from distmega.kernels.hopper.batch_plan.words import BATCH, MAX_ROWS
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.library.sum_parts import choose_sum_parts
from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.compilations import num_compiled
from distmega.kernels.runtime.gpus import facts_of
from distmega.kernels.ugraphs.geometry import pays
from distmega.kernels.whole import WholePlan, fold_whole, open_whole, plan_whole, unfold_whole
from distmega.program import types as program
from distmega.program.kinds import FUSED_GRAPH, kind_of
from distmega.program.ops.lookups import bounded_inputs, require_ids
from distmega.sharding.localize import LocalProgram, localize, pair_for_library
from distmega.sharding.planner import Plan
from distmega.superopt.rewrite import explain_op, rules_of_ops
from distmega.superopt.rules import RewriteRule, shipped_rules
from distmega.trace_file import Span

logger = logging.getLogger(__name__)

Megakernels = Literal["auto"] | bool
"""Whether a program is one persistent kernel a rank."""

NOT_ASKED_FOR = "replay=False"
MOST_REBOUND = 3
"""Calls that may bring other weights or states before a program is no longer captured anew."""
AHEAD_CYCLES = 20_000_000
"""For which a GPU waits, some 10 ms, while the host queues the nodes that are traced."""


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


class CompiledProgram(OwnProcess):
    """A plan on one rank; all ranks of its mesh must make the same calls in the same order.

    The first call binds the weights and states that it is given, and captures the program as a CUDA
    graph where that can be done on all ranks; later calls replay it. host: what runs, as
    hostir.print_host shows it; proven before it runs. It is neither copied nor pickled, nor called
    in a fork of its process: another process calls compile_plan with a plan, which can be pickled.
    """

    how_to_remake = "pickle its plan, and call compile_plan in the other process"

    @ordinary_tensors()
    def __init__(
        self,
        plan: Plan,
        comm: Communicator,
        device: str = "cpu",
        *,
        replay: bool = True,
        warm: bool = False,
        megakernel: Megakernels = "auto",
        rules: Sequence[RewriteRule] | None = None,
        closes_comm: bool = False,
    ) -> None:
        """ProgramError for arguments of other types, MeshError for a communicator of another mesh,
        RequestError for a device that this machine hasn't; UnsupportedError, where a megakernel is
        asked for, names what no kernel does.

        Args:
            plan: What runs.
            comm: Of the plan's mesh.
            device: Where this rank's tensors are, "cpu" or "cuda:i".
            replay: False to run node by node in each call.
            warm: Captures now, with weights, states and inputs of its own, all zero, which
                `tensors` gives and `load` fills.
            megakernel: True for one persistent kernel a rank, which holds weights and states in
                memory of its own: weights are copied there when they are bound, states in each call
                and back, but for a program that is `warm`, whose states lie there. False for
                library ops. "auto" for a kernel on Hopper GPUs where one can do the whole program,
                not later than library ops as predicted, and has its states, if there are any.
            rules: Of superopt.rules.read_rules, by which ops are replaced: in a megakernel by
                others that it does faster, or at all, else by kernels of the rules' own; by default
                the shipped ones on GPUs, none on CPUs.
            closes_comm: Whether `close` closes the communicator too.
        """
        _require_plan(plan)
        require_communicator(comm, plan.mesh)
        _require_choices(megakernel, rules, replay=replay, warm=warm, closes_comm=closes_comm)
        self._closes_comm = closes_comm
        self.plan, self.comm, self.device = plan, comm, find_device(device)
        if plan.mesh.num_ranks > 1 and isinstance(comm, TeamCommunicator):
            asked = f"{megakernel} {replay} {warm} {self.device.type}"
            require_equal(comm, f"program {plan.program.name!r}", [asked])
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            warm_up.begin(self.device, keep_triton_key)
        shipped = shipped_rules() if on_gpu else ()
        self._rules = shipped if rules is None else tuple(rules)
        local = localize(plan)
        self._whole, self._no_kernel = self._plan_kernel(local, megakernel, warm=warm)
        if not self._whole and _reaches_peers(comm):
            local = pair_for_library(local, plan)
        self._pairs = () if self._whole else local.fused
        self.host = self._whole.host if self._whole else self._lower(local)
        prove_once(self.host)
        if plan.mesh.num_ranks > 1 and (isinstance(comm, TeamCommunicator) or self._whole):
            require_equal(comm, f"program {plan.program.name!r}", self._fingerprints())
        warm_up.finish()
        self._kernel = kernel = open_whole(self._whole, comm, self.device) if self._whole else None
        states = {tensor.name for tensor in local.program.with_role("state")}
        self._copied_states = states if kernel and not warm else set()
        lying = kernel.tensors if kernel else {}
        self._held = {name: x for name, x in lying.items() if name not in self._copied_states}
        self._domains, self._at = local.allocations, plan.mesh.coordinate(comm.rank)
        self._evaluator = self._make_evaluator()
        self._bound: dict[str, Tensor] = {}
        self._known: dict[str, _Binding] = {}
        """What changes nothing where a call brings it: what is bound, or was copied there."""
        self._unbound = frozenset(self._given)
        self._copied = self._inputs
        """Inputs that `bind` was not given: to memory of the graph, or of a warm program."""
        self._captured: CapturedHost | None = None
        self._reason = "" if replay else NOT_ASKED_FOR
        self._decided, self._replay = False, replay
        self._guard = _Guard(plan.program.name, bool(self._states))
        self._num_compilations = self._num_rebound = 0
        what = f"calls of program {plan.program.name!r} on rank {comm.rank}"
        watched = on_gpu and plan.mesh.num_ranks > 1
        self._deadline = Deadline(what, comm.timeout_s) if watched else None
        if warm:
            own = {n: empty_tensor(b, self.device).zero_() for n, b in self._given.items()}
            self.bind({**own, **self._held})
            self._copied = self._inputs
            self._decide({})

    def __call__(
        self, tensors: Mapping[str, Tensor], *, inplace: bool = False
    ) -> dict[str, Tensor]:
        """Outputs by name, this rank's part of each.

        tensors: the inputs that aren't bound and, in the first call, all weights and states that
        aren't, as `parts` gives them, by name. Inputs are copied, unless `bind` was given them;
        weights and states are bound, so that later calls may leave them out. Others take their
        place, on all ranks in the same call, and the graph's, which is captured anew. inplace:
        outputs lie in the memory of the graph, until the next call of any compiled program on this
        GPU. A state or a weight that is an output is that tensor itself, or of one made under
        torch.inference_mode() another in its memory; what is bound as an input lies where it was
        bound: one that shares a state's memory changes with it.

        Raises ProgramError for a tensor that is missing or does not fit, and for states that are
        void; RequestError for ids on a CPU that a table has no row for, and in a fork; RankFailure
        if a peer fails.
        """
        if torch.is_inference_mode_enabled():
            with ordinary_tensors():
                return self(tensors, inplace=inplace)
        check_mapping(tensors)
        with self._guard:
            if self._kernel:
                self._kernel.raise_hang()
            inputs = self._take(tensors)
            if not self._decided:
                self._decide(inputs)
            captured = self._captured
            if captured is None:
                outputs = self._run(inputs)
            else:
                self._guard.began = True
                outputs = captured.run(inputs, copy=not inplace)
            if self._deadline is not None:
                self._deadline.note(captured.stream if captured else None)
        return outputs

    def trace(self, tensors: Mapping[str, Tensor]) -> list[Span]:
        """The timeline of a call on this rank's GPU, for trace_file.py and trace_summary.py. It is
        a call, whose outputs are dropped: states are updated, and all ranks make it.

        Of a megakernel: a track an SM, on the GPU's clock, a span a task and its parts. Its stamps
        make it another kernel, which the first such call compiles, while other ranks wait inside
        theirs: take the second. Of library ops: a track a stream or mesh axis, and the host's, from
        where the host begins, well ahead of the GPU. UnsupportedError on a CPU; else as a call.
        """
        check_mapping(tensors)
        if self.device.type != "cuda":
            raise UnsupportedError(
                f"a timeline of program {self.plan.program.name!r} on {self.device}",
                expected="a GPU, whose clock stamps tasks",
                remedy="compile the program for a GPU",
            )
        with self._guard, ordinary_tensors():
            if self._kernel:
                self._kernel.raise_hang()
            inputs = self._take(tensors)
            torch.cuda.synchronize(self.device)
            self.comm.barrier()
            return self._trace_kernel(inputs) if self._kernel else self._trace_ops(inputs)

    def _trace_kernel(self, inputs: Mapping[str, Tensor]) -> list[Span]:
        assert self._kernel is not None
        traced = self._kernel.traced()
        kernel = self._kernel.with_copied(self._copied_states, traced)
        self._run(inputs, self._evaluator.watched(kernels={self.host.segments[0].name: kernel}))
        return traced.spans

    def _trace_ops(self, inputs: Mapping[str, Tensor]) -> list[Span]:
        line = Timeline(f"rank {self.comm.rank}")
        evaluator = self._evaluator.watched(line.watch)
        line.start()
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self._run(inputs, evaluator)
        return list(line.spans())

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Weights, states and inputs to be used where they are, by name, in place of those bound
        before: states are updated there, inputs read there in each call. All ranks make this call;
        the next one captures anew. After an error of a call that has begun to run, states are void
        until all of them are bound again. ProgramError for a tensor that does not fit.
        """
        check_mapping(tensors)
        self._guard.require_process()
        require_real_tensors()
        for name, x in tensors.items():
            self._check_given(name, x)
            if x.is_neg():
                raise _negated(name)
        self._check_apart({**self._bound, **tensors})
        held = {name: self._hold(name, ordinary(x)) for name, x in tensors.items()}
        if self._captured is not None:
            torch.cuda.synchronize(self.device)
            self._captured.release()
        self._captured, self._decided = None, False
        others = {name for name, x in held.items() if x is not self._bound.get(name)}
        self._copied = self._copied.difference(others)
        self._bound |= held
        self._known |= {name: _Binding(x) for name, x in tensors.items()}
        self._unbound = self._unbound.difference(held)
        if self._states <= held.keys():
            self._guard.fault = ""

    def _fingerprints(self) -> list[str]:
        """Hashes of all that the ranks must have decided alike."""
        host = hashlib.sha256(print_host(self.host).encode()).hexdigest()[:16]
        kernel = self._whole.fingerprint if self._whole else ""
        return [self.plan.fingerprint(), host, kernel]

    def _hold(self, name: str, x: Tensor) -> Tensor:
        """Where a tensor is from now on: in the kernel's memory, if it has it there."""
        held = self._held.get(name)
        if held is None or _Binding(held).has(x):
            return x
        if name in self._states:
            raise ProgramError(
                f"state {name!r} in memory of the caller",
                expected="the one in `tensors`, which a kernel of the whole program updates",
                remedy="fill it by load(), or compile with megakernel=False",
            )
        return held.copy_(x)

    def _lower(self, local: LocalProgram) -> HostProgram:
        """The program by library ops, on GPUs by the kernels of rules that pay too."""
        on_gpu, machine = self.device.type == "cuda", self.plan.machine
        host = lower_program(
            local,
            megakernel=False,
            peer_memory=isinstance(self.comm, NcclCommunicator),
            fuse=on_gpu,
            rules=self._rules,
            is_usable=pays if on_gpu else None,
            sum_parts=partial(choose_sum_parts, num_sms=machine.num_sms) if on_gpu else None,
        )
        return run_passes(host)

    def _make_evaluator(self) -> Evaluator:
        """What runs the host program, with the kernel if there is one."""
        on_gpu, kernels = self.device.type == "cuda", dict[str, KernelRunner]()
        if self._kernel:
            kernels[self.host.segments[0].name] = self._kernel.with_copied(self._copied_states)
        ops = None
        if on_gpu or self._rules:
            rules = self._rules  # of `self` it would make a circle that keeps all weights
            ops = KernelOps(masked=on_gpu, rules=lambda: rules, device=self.device)
        matmuls = PeerMatmuls(self.comm) if isinstance(self.comm, NcclCommunicator) else None
        return Evaluator(self.host, self.comm, kernels, str(self.device), ops=ops, matmuls=matmuls)

    def _plan_kernel(
        self, local: LocalProgram, megakernel: Megakernels, *, warm: bool
    ) -> tuple[WholePlan | None, str]:
        """What one kernel a rank does, on all ranks or none, and why there is none."""
        if megakernel is False:
            return None, "megakernel=False"
        if megakernel == "auto" and self.device.type != "cuda":
            return None, "a CPU"
        if megakernel == "auto" and not warm and local.program.with_role("state"):
            problem = UnsupportedError(
                "states in memory of the caller, which a kernel would copy in each call",
                expected="a program compiled with warm=True, which has its own",
                remedy="compile with warm=True, and fill states by load()",
            )
            return None, str(problem)
        try:
            plan = partial(
                _kept_kernel, local, self.comm, self.device, self._rules, forced=megakernel is True
            )
            return on_all_ranks(self.comm, plan), ""
        except UnsupportedError as error:
            if megakernel is True:
                raise
            return None, str(error)

    def load(self, wholes: Mapping[str, Tensor]) -> None:
        """Copies this rank's part of whole tensors into those that are bound, by name."""
        for name, part in self.parts(wholes).items():
            if name not in self._bound:
                raise _unbound(name)
            self._bound[name].detach().copy_(part)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is bound, by name."""
        return dict(self._bound)

    def wait(self) -> None:
        """Returns once all calls have ended on the GPU. HangError, after the communicator's limit,
        if a rank doesn't come, or a signal did not; the program's states are void then.
        """
        with self._guard:
            self._await_calls()

    def _await_calls(self) -> None:
        if self._deadline is not None:
            self._deadline.wait()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._kernel:
            self._kernel.raise_hang()
        self.comm.check_signals()

    def close(self) -> None:
        """Releases the program's graph, its kernel and the memory of these, lets go of what is
        bound, and closes the communicator if compile_plan has opened it. All ranks call it
        together; outputs of `inplace` calls mean nothing from then on, and other calls than this
        raise ProgramError. HangError and RankFailure as of `wait`; nothing is released then.
        """
        if self._guard.is_closed:
            return
        self._guard.require_process()
        self._await_calls()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # calls on other streams than the current one
        self.comm.barrier()  # peers may have written into this rank's memory until then
        self._guard.close()
        if self._captured is not None:
            self._captured.release()
        self._captured = self._kernel = None
        self._reason = "it is closed"
        del self._evaluator
        for held in (self._held, self._bound, self._known):
            held.clear()
        if self._closes_comm:
            self.comm.close()

    @property
    def stats(self) -> CompiledStats:
        """Counts, and whether calls replay a graph."""
        nodes = [*walk_nodes(self.host.body)]
        ops = [node.op for node in nodes if isinstance(node, LibraryOp) and not node.op.is_view]
        return CompiledStats(
            num_megakernels=sum(isinstance(node, LaunchMegakernel) for node in nodes),
            num_library_ops=len(ops) + sum(isinstance(node, FusedMatmul) for node in nodes),
            num_tasks=self._whole.num_tasks if self._whole else 0,
            num_events=self._whole.num_events if self._whole else 0,
            num_compilations=self._num_compilations,
            num_opaque_ops=sum(kind_of(op).calls_torch for op in ops),
            rules=(
                *(str(op.attr("rule")) for op in self._graph_ops()),
                *(used.partition("#")[0] for used in self._rules_of_kernel()),
            ),
            replayed=self._captured is not None,
            reason=self._why_not_replayed,
        )

    @property
    def _why_not_replayed(self) -> str:
        """Empty of a program that replays or, before that is decided, may."""
        return self._reason or next(iter(self._evaluator.graph_breaks), "")

    def explain(self) -> str:
        """The plan, what a run costs the host, and whether it replays as a CUDA graph."""
        if self._captured is not None:
            replaying = "replays as one CUDA graph"
        elif reason := self._why_not_replayed:
            replaying = f"runs node by node: {reason}"
        else:
            replaying = "will replay as one CUDA graph, if all ranks can capture it"
        lines = [self.plan.explain(), explain_host(self.host, self.plan.machine), replaying]
        if self._whole:
            whole = self._whole
            lines.append(
                f"one megakernel a rank of {counted(whole.num_tasks, 'task')},"
                f" {counted(whole.num_events, 'event')}"
            )
            if self._copied_states:
                lines.append("states are copied to it and back in each call; not with warm=True")
        else:
            lines.append(f"no megakernel: {self._no_kernel}")
        lines += [f"by peer memory: {choice}" for choice in self._pairs]
        known = {rule.name: rule for rule in self._rules}
        lines += [explain_op(op, known) for op in self._graph_ops()]
        lines += [
            f"ops {', '.join(names)} are made by rule {used.partition('#')[0]}"
            for used, names in self._rules_of_kernel().items()
        ]
        return "\n".join(lines) + "\n"

    def _rules_of_kernel(self) -> dict[str, list[str]]:
        """Rules that were used in a megakernel, once for each place, and the ops of each."""
        known = {rule.name: rule for rule in self._rules}
        return rules_of_ops(self._whole.segment, known) if self._whole else {}

    def _graph_ops(self) -> list[program.Op]:
        """Ops that rewrite rules made."""
        nodes = [node for node in walk_nodes(self.host.body) if isinstance(node, LibraryOp)]
        return [node.op for node in nodes if node.op.kind == FUSED_GRAPH]

    def _run(
        self, inputs: Mapping[str, Tensor], evaluator: Evaluator | None = None
    ) -> dict[str, Tensor]:
        before = num_compiled()
        if self.device.type == "cuda" and self._graph_ops():
            # A rule's kernel may read weights before the kernels ahead of it have ended. These are
            # this program's, which write none, once one that starts in turn lies in between.
            torch.zeros(1, device=self.device)
        for name in inputs.keys() & self._bound.keys():
            self._bound[name].copy_(inputs[name].detach())
        updated = {self._bound[name].untyped_storage().data_ptr() for name in self._states}
        inputs = {
            name: x.clone() if x.untyped_storage().data_ptr() in updated else x.resolve_neg()
            for name, x in inputs.items()
        }
        self._guard.began = True
        outputs = (evaluator or self._evaluator).run({**inputs, **self._bound})
        for name in self._shown.keys() & self._copied & self._bound.keys():
            outputs |= {out: outputs[out].clone() for out in self._shown[name]}
        given = {x.untyped_storage().data_ptr() for x in inputs.values()}
        outputs |= {
            name: x.clone()
            for name, x in outputs.items()
            if x.untyped_storage().data_ptr() in given
        }
        self._num_compilations += num_compiled() - before
        return outputs

    def _take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a call; binds what else it brings and isn't bound yet, or not so."""
        inputs: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, x in tensors.items():
            known = self._known.get(name)
            if known is not None and known.has(x):
                continue
            self._check_given(name, x)
            (inputs if name in self._copied else others)[name] = x
        if self._unbound and not self._unbound <= tensors.keys():
            raise _unbound(min(self._unbound - tensors.keys()))
        if others:
            self._num_rebound += not others.keys().isdisjoint(self._bound)
            self.bind(others)
        return inputs

    def _decide(self, inputs: Mapping[str, Tensor]) -> None:
        """Captures, on all ranks or none."""
        self._decided = True
        if not self._replay:
            return
        self._reason = next(iter(self._evaluator.graph_breaks), "")
        if self._num_rebound > MOST_REBOUND:
            self._reason = "calls bring weights or states of their own"
        if self._reason:
            self._tell()
            return
        given = {name: x.detach().clone() for name, x in inputs.items()} | self._bound
        before = num_compiled()
        self._captured, self._reason = capture_on_ranks(
            self.comm,
            next(tensor_breaks(self.host, self.device, given), ""),
            lambda: CapturedHost(self._evaluator, given, shared_memory(self.device)),
        )
        self._num_compilations += num_compiled() - before
        self._tell()

    def _tell(self) -> None:
        if self._reason and self.device.type == "cuda":
            name = self.plan.program.name
            logger.warning("program %r runs node by node: %s", name, self._reason)

    def slices(self, name: str) -> tuple[slice, ...]:
        """Where this rank's part of a tensor lies in the whole, a slice a dim."""
        if not isinstance(name, str) or name not in self._domains:
            raise ProgramError(
                f"tensor {shown(name)}",
                expected=f"one of program {self.plan.program.name!r}: {sorted(self._wholes)}",
                remedy="correct the name",
            )
        return self._domains[name].local_slices(self._at)

    def part(self, name: str, whole: Tensor, *, copy: bool = True) -> Tensor:
        """This rank's part of a whole input, weight or state, contiguous and on its device; with
        zeros behind it where ranks hold unequal parts.

        The part has memory of its own, so that a step which updates a state leaves `whole` as it
        is. copy=False: the part is a view of `whole`, which sees the updates of a state.
        ProgramError where no view can be that part: `whole` is on another device, the part isn't
        contiguous in it, or has zeros behind it.
        """
        self._check_whole(name, whole)
        require_switch("copy", copy, error=ProgramError)
        found = whole.detach()[self.slices(name)]
        buffer = self._given[name]
        if not copy:
            self._check_view(name, found, buffer)
            return found
        part = empty_tensor(buffer, self.device)
        if found.shape != buffer.shape:
            part.zero_()
        part[tuple(slice(extent) for extent in found.shape)].copy_(found)
        return part

    def parts(self, wholes: Mapping[str, Tensor], *, copy: bool = True) -> dict[str, Tensor]:
        """`part` of each, by name."""
        check_mapping(wholes)
        return {name: self.part(name, whole, copy=copy) for name, whole in wholes.items()}

    @cached_property
    def _wholes(self) -> Mapping[str, program.Tensor]:
        return self.plan.program.tensor_map()

    @cached_property
    def _states(self) -> frozenset[str]:
        return frozenset(n for n, buffer in self._given.items() if buffer.role == "state")

    @cached_property
    def _inputs(self) -> frozenset[str]:
        return frozenset(n for n, buffer in self._given.items() if buffer.role == "input")

    @cached_property
    def _bounded(self) -> Mapping[str, int]:
        return bounded_inputs(self.plan.program)

    @cached_property
    def _shown(self) -> Mapping[str, list[str]]:
        """Inputs that outputs are, or are views of, and these outputs."""
        found, sources = defaultdict[str, list[str]](list), view_sources(self.host.body)
        for out in self.host.outputs:
            if (name := storage_of(out, sources)) in self._inputs:
                found[name].append(out)
        return found

    @cached_property
    def _given(self) -> Mapping[str, program.Tensor]:
        return {buffer.name: buffer for buffer in self.host.buffers if buffer.role != "temp"}

    def _check_given(self, name: str, found: Tensor) -> None:
        """This rank's part of a tensor, as a call or `bind` is given it."""
        buffer = self._given.get(name) or self._refuse_name(name)
        if not fits(found, buffer):
            raise misfit(found, buffer)
        self._check_ids(name, found)

    def _check_ids(self, name: str, found: Tensor) -> None:
        if name in self._bounded:
            require_ids(found, self._bounded[name], name)

    def _check_apart(self, tensors: Mapping[str, Tensor]) -> None:
        """ProgramError for states of which an update would change other states, weights, or more of
        themselves.
        """
        kept = [name for name in tensors if self._given[name].role in ("state", "weight")]
        ends = {"state": (0, ""), "weight": (0, "")}  # how far those before reach, and which does
        for name in sorted(kept, key=lambda n: tensors[n].data_ptr()):
            x, role = tensors[name], self._given[name].role
            if not x.numel():
                continue
            is_state = role == "state"
            repeats = any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))
            stop, last = max(ends.values()) if is_state else ends["state"]
            if is_state and repeats:
                raise _shared_memory(name, name)
            if x.data_ptr() < stop:
                raise _shared_memory(*((name, last) if is_state else (last, name)))
            num_bytes = x.nbytes if x.is_contiguous() else x.element_size()
            ends[role] = max(ends[role], (x.data_ptr() + num_bytes, name))

    def _refuse_name(self, name: str) -> NoReturn:
        raise ProgramError(
            f"a value for {shown(name)}",
            expected=f"one of {sorted(self._given)}",
            remedy="give inputs, weights and states of the program by name",
        )

    def _check_whole(self, name: str, whole: Tensor) -> None:
        self._guard.require_process()
        require_real_tensors()
        if not isinstance(name, str) or name not in self._given:
            self._refuse_name(name)
        tensor = self._wholes[name]
        if not fits(whole, tensor):
            raise misfit(whole, tensor, ", the whole tensor", "correct its shape, or convert it")
        self._check_ids(name, whole)

    def _check_view(self, name: str, found: Tensor, buffer: program.Tensor) -> None:
        if found.device != self.device:
            problem = f"is on {found.device}, not on {self.device}"
        elif found.shape != buffer.shape:
            problem = f"is {list(found.shape)}, and has zeros behind it up to {list(buffer.shape)}"
        elif found.is_neg():
            problem = "lies there as its negative"
        elif not found.is_contiguous():
            problem = f"isn't contiguous in the whole: strides {list(found.stride())}"
        else:
            return
        raise ProgramError(
            f"the part of {name!r} on rank {self.comm.rank} {problem}",
            expected="a part that can be a view of the whole tensor",
            remedy="leave out copy=False",
        )


def _negated(name: str) -> ProgramError:
    return ProgramError(
        f"{name!r} in memory that has its negative",
        expected="memory of its values, which is read as it is",
        remedy="give x.resolve_neg()",
    )


def _shared_memory(state: str, other: str) -> ProgramError:
    return ProgramError(
        f"state {state!r} in memory that it shares with {other!r}",
        expected="memory of its own for every state",
        remedy="give each a tensor of its own",
    )


class _Guard:
    """Around what runs a program: refuses it in a fork of the process that compiled it, and while
    its states are void, which a fault makes them, and whatever ends a run that has begun, since
    some may be updated by then. began: whether the call has; fault: what made them void, empty
    while they are good, and not once the program is closed.
    """

    __slots__ = (
        "__weakref__", "_has_states", "_process", "_program", "began", "fault", "is_closed"
    )  # fmt: skip

    def __init__(self, program: str, has_states: bool) -> None:
        self._program, self._has_states, self.fault = program, has_states, ""
        self._process, self.began, self.is_closed = os.getpid(), False, False
        _guards.add(self)

    def close(self) -> None:
        """From now on nothing runs the program."""
        self.fault, self.is_closed = "its close()", True

    def __enter__(self) -> None:
        self.began = False
        if self.fault:
            self.require_process()
            raise ProgramError(
                f"states of program {self._program!r} that are void since {self.fault}",
                expected="states bound again after a fault, on all ranks",
                remedy="fill them anew and bind() them all",
            )

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        broken = isinstance(error, HangError | RankFailure) or (self.began and error is not None)
        if self._has_states and broken:
            what = error.found if isinstance(error, DistmegaError) else str(error)
            self.fault = f"{type(error).__name__}: {what}"
        if error is not None:
            require_real_tensors()  # tells more than what torch says of fake ones

    def require_process(self) -> None:
        """RequestError in a fork of the process that compiled the program, ProgramError once it is
        closed.
        """
        require_process(self._process, f"program {self._program!r}")
        if self.is_closed:
            raise ProgramError(
                f"a call of program {self._program!r} after its close()",
                expected="calls before",
                remedy="compile it again, on all ranks",
            )


_guards: "WeakSet[_Guard]" = WeakSet()


def _refuse_forks() -> None:
    """In a new process: so that calls need not ask in which one they are."""
    for guard in _guards:
        guard.fault = "a fork"


os.register_at_fork(after_in_child=_refuse_forks)


def _kept_kernel(
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


def _require_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise ProgramError(
            f"{type(plan).__name__} in place of a plan",
            expected="what plan_program gives",
            remedy="plan the program on a mesh first",
        )


def _require_choices(
    megakernel: object, rules: Sequence[object] | None, **switches: object
) -> None:
    """ProgramError for arguments of other types than CompiledProgram takes."""
    for name, value in switches.items():
        require_switch(name, value, error=ProgramError)
    if not isinstance(megakernel, bool | str) or megakernel not in (True, False, "auto"):
        raise ProgramError(
            f"megakernel={shown(megakernel)}",
            expected='True, False or "auto"',
            remedy="leave it out for a kernel where one can do the program",
        )
    listed = rules is None or (isinstance(rules, Sequence) and not isinstance(rules, str))
    if not listed or not all(isinstance(rule, RewriteRule) for rule in rules or ()):
        raise ProgramError(
            f"rules {shown(rules)}",
            expected="a sequence of RewriteRule",
            remedy="read them with read_rules of distmega.superopt.rules",
        )


def _reaches_peers(comm: Communicator) -> bool:
    """Whether all ranks are GPUs of one host; they ask together."""
    if not isinstance(comm, NcclCommunicator):
        return False
    return len({*comm.all_gather_object(socket.gethostname())}) == 1


class _Binding:
    """Where a tensor's values are, and how they lie there. Asked of each tensor that a call brings,
    though it is the one of the call before: its owner may have pointed it elsewhere since, by
    `x.data = y` or `x.t_()`, and a graph goes on to read where it was.
    """

    __slots__ = ("_address", "_alias", "_class", "_dtype", "_shape", "_strides")

    def __init__(self, x: Tensor) -> None:
        self._alias = x.detach()
        """Keeps the memory from others."""
        self._class = type(x)
        self._shape, self._strides, self._dtype = x.shape, x.stride(), x.dtype
        self._address = x.data_ptr()

    def has(self, x: object) -> bool:
        """Whether something given is a tensor of the same memory."""
        try:
            return (
                (type(x) is self._class or is_plain(x))  # the first is quick
                and x.data_ptr() == self._address
                and x.shape == self._shape
                and x.stride() == self._strides
                and x.dtype is self._dtype
                and not x.is_neg()
            )
        except NO_MEMORY:
            return False


def _unbound(name: str) -> ProgramError:
    return ProgramError(
        f"no tensor for {name!r}",
        expected="every input of this rank in each call, weights and states in the first",
        remedy="pass it by name, or bind() it before",
    )


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
    _require_plan(plan)
    _require_choices(megakernel, rules, replay=replay, warm=warm)
    comm = open_communicator(context, plan.mesh, native=True)
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
