"""A planned program, ready to run on one rank.

Comes in: a Plan and a communicator. Goes out: a CompiledProgram, called with this rank's tensors.
Ops are library ops, on a GPU with the kernels for pointwise ops, norms, softmax and matmuls with a
collective beside them; there the whole host program replays as one CUDA graph. Next: lowering.py
for what runs, running.py and replay.py for a call.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distmega.compiled.bindings import Bindings
from distmega.compiled.choices import Megakernels, require_choices, require_plan
from distmega.compiled.given import GivenTensors
from distmega.compiled.guard import CallGuard
from distmega.compiled.lowering import lower_plan
from distmega.compiled.parts import Parts
from distmega.compiled.replay import Replay
from distmega.compiled.report import CompiledStats, count_nodes, explain_program
from distmega.compiled.running import NodeByNode, make_evaluator
from distmega.engine.kept_plans import keep_triton_key
from distmega.engine.ranks.agreement import require_equal
from distmega.engine.ranks.devices import find_device
from distmega.engine.ranks.own_process import OwnProcess
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import (
    Communicator,
    TeamCommunicator,
    require_communicator,
)
from distmega.hostir.library.torch_types import (
    check_mapping,
    empty_tensor,
    ordinary_tensors,
    require_real_tensors,
)
from distmega.hostir.run.deadline import Deadline
from distmega.hostir.run.evaluator import Evaluator
from distmega.hostir.run.timeline import Timeline
from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.compilations import num_compiled
from distmega.kernels.runtime.gpus import made_current
from distmega.kernels.whole import open_whole
from distmega.sharding.planner import Plan
from distmega.superopt.rules import RewriteRule, shipped_rules
from distmega.trace_file import Span

TRACE_AHEAD_CYCLES = 20_000_000
"""For which a GPU waits, some 10 ms, while the host queues the nodes that are traced."""


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
        require_plan(plan)
        require_communicator(comm, plan.mesh)
        require_choices(megakernel, rules, replay=replay, warm=warm, closes_comm=closes_comm)
        self._closes_comm = closes_comm
        self.plan, self.comm, self.device = plan, comm, find_device(device)
        with made_current(self.device):
            self._open(rules, megakernel, replay=replay, warm=warm)

    def _open(
        self,
        rules: Sequence[RewriteRule] | None,
        megakernel: Megakernels,
        *,
        replay: bool,
        warm: bool,
    ) -> None:
        """All that the constructor does on the program's device."""
        plan, comm = self.plan, self.comm
        if plan.mesh.num_ranks > 1 and isinstance(comm, TeamCommunicator):
            asked = f"{megakernel} {replay} {warm} {self.device.type}"
            require_equal(comm, f"program {plan.program.name!r}", [asked])
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            warm_up.begin(self.device, keep_triton_key)
        shipped = shipped_rules() if on_gpu else ()
        chosen = shipped if rules is None else tuple(rules)
        self._lowered = lowered = lower_plan(plan, comm, self.device, chosen, megakernel, warm=warm)
        self.host, whole = lowered.host, lowered.whole
        warm_up.finish()
        self._kernel = kernel = open_whole(whole, comm, self.device) if whole else None
        self._given = given = GivenTensors(plan.program, self.host)
        self._copied_states = given.states if kernel and not warm else frozenset[str]()
        lying = kernel.tensors if kernel else {}
        held = {name: x for name, x in lying.items() if name not in self._copied_states}
        self._bindings = Bindings(given, held)
        self._parts = Parts(plan, lowered.allocations, given, comm.rank, self.device)
        self._guard = CallGuard(plan.program.name, bool(given.states), self.device.index)
        self._nodes = NodeByNode(lowered, given, self._bindings, self._guard, self.device)
        self._evaluator = make_evaluator(
            self.host, comm, self.device, chosen, kernel, self._copied_states
        )
        self._replay = Replay(plan.program.name, self.host, comm, self.device, wanted=replay)
        self._num_compilations = 0
        what = f"calls of program {plan.program.name!r} on rank {comm.rank}"
        watched = on_gpu and plan.mesh.num_ranks > 1
        self._deadline = Deadline(what, comm.timeout_s) if watched else None
        if warm:
            own = {n: empty_tensor(b, self.device).zero_() for n, b in given.buffers.items()}
            self.bind({**own, **held})
            self._bindings.copy_inputs()
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
        check_mapping(tensors)
        with self._guard:
            if self._kernel:
                self._kernel.raise_hang()
            inputs, others = self._bindings.sort(tensors)
            if others or not self._replay.is_decided:
                with ordinary_tensors():
                    if others:
                        self._bind_anew(others)
                    if not self._replay.is_decided:
                        self._decide(inputs)
            captured = self._replay.captured
            if captured is None:
                with ordinary_tensors():
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
            inputs, others = self._bindings.sort(tensors)
            if others:
                self._bind_anew(others)
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
        torch.cuda._sleep(TRACE_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
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
        with made_current(self.device):
            held = self._bindings.hold(tensors)
            self._replay.reset()
        self._bindings.adopt(tensors, held)
        if self._given.states <= held.keys():
            self._guard.fault = ""

    def load(self, wholes: Mapping[str, Tensor]) -> None:
        """Copies this rank's part of whole tensors into those that are bound, by name."""
        self._bindings.load(self.parts(wholes))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is bound, by name."""
        return dict(self._bindings.tensors)

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
        with made_current(self.device):
            self._end()

    def _end(self) -> None:
        """All that `close` does on the program's device."""
        self._await_calls()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # calls on other streams than the current one
        self.comm.barrier()  # peers may have written into this rank's memory until then
        self._guard.close()
        self._replay.close()
        self._kernel = None
        del self._evaluator
        self._bindings.clear()
        if self._closes_comm:
            self.comm.close()

    @property
    def stats(self) -> CompiledStats:
        """Counts, and whether calls replay a graph."""
        return count_nodes(
            self._lowered,
            num_compilations=self._num_compilations,
            replayed=self._replay.captured is not None,
            reason=self._why_not_replayed,
        )

    @property
    def _why_not_replayed(self) -> str:
        """Empty of a program that replays or, before that is decided, may."""
        return self._replay.reason or next(iter(self._evaluator.graph_breaks), "")

    def explain(self) -> str:
        """The plan, what a run costs the host, and whether it replays as a CUDA graph."""
        return explain_program(
            self.plan,
            self._lowered,
            replayed=self._replay.captured is not None,
            reason=self._why_not_replayed,
            copies_states=bool(self._copied_states),
        )

    def _run(
        self, inputs: Mapping[str, Tensor], evaluator: Evaluator | None = None
    ) -> dict[str, Tensor]:
        before = num_compiled()
        outputs = self._nodes.run(evaluator or self._evaluator, inputs)
        self._num_compilations += num_compiled() - before
        return outputs

    def _bind_anew(self, others: Mapping[str, Tensor]) -> None:
        """Binds what a call brings that isn't bound yet, or not so."""
        if not others.keys().isdisjoint(self._bindings.tensors):
            self._replay.count_rebound()
        self.bind(others)

    def _decide(self, inputs: Mapping[str, Tensor]) -> None:
        """Captures, on all ranks or none."""
        before = num_compiled()
        self._replay.decide(self._evaluator, inputs, self._bindings.tensors)
        self._num_compilations += num_compiled() - before

    def slices(self, name: str) -> tuple[slice, ...]:
        """Where this rank's part of a tensor lies in the whole, a slice a dim."""
        return self._parts.slices(name)

    def part(self, name: str, whole: Tensor, *, copy: bool = True) -> Tensor:
        """This rank's part of a whole input, weight or state, contiguous and on its device; with
        zeros behind it where ranks hold unequal parts.

        The part has memory of its own, so that a step which updates a state leaves `whole` as it
        is. copy=False: the part is a view of `whole`, which sees the updates of a state.
        ProgramError where no view can be that part: `whole` is on another device, the part isn't
        contiguous in it, or has zeros behind it.
        """
        self._guard.require_process()
        return self._parts.part(name, whole, copy=copy)

    def parts(self, wholes: Mapping[str, Tensor], *, copy: bool = True) -> dict[str, Tensor]:
        """`part` of each, by name."""
        check_mapping(wholes)
        return {name: self.part(name, whole, copy=copy) for name, whole in wholes.items()}
