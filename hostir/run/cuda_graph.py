"""A whole host program as one CUDA graph: no host time an instruction, the same result.

Comes in: an Evaluator on a GPU and the tensors to bind. Goes out: a CapturedHost whose `run` copies
inputs to where the graph reads them and replays it. Streams and events become the graph's edges,
NCCL's collectives its nodes; graph_breaks.py says what can't be captured. All ranks of a mesh
capture or none does: `capture_on_ranks`.
"""

import atexit
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from distmega.errors import ProgramError
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.passes.fuse_attention import appends_once
from distmega.hostir.run.early_reads import early_reads
from distmega.hostir.run.evaluator import Evaluator
from distmega.hostir.run.graph_breaks import tensor_breaks

DEFAULT_STREAM = 0
"""Address of torch's default stream, which is never destroyed."""
NUM_WARM_UPS = 2
"""Runs before the capture: libraries choose and load their kernels, communicators connect."""


_one_capture = threading.Lock()
"""Torch takes one capture at a time in a process, whatever threads there are."""


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Around a capture: cuBLAS takes a new workspace, of the graph's memory, and leaves it to the
    graph. Torch keeps the one of a stream until someone asks it to free them, as torch.compile
    does, and a graph that used it would then write into memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def one_run(host: HostProgram) -> AbstractContextManager[None]:
    """Around a run of a host program, its capture or its rehearsal, where all work that was queued
    before is done when the run, or a replay, begins: what its kernels may read early.
    """
    return early_reads(states=appends_once(host.body))


class GraphMemory:
    """Memory for what graphs hold while they run, shared by those that take turns: one replay at a
    time, whatever streams they are on. What a graph gives lasts until the next replay of any.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._device = torch.cuda.current_device()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.stream: torch.cuda.Stream | None = None
        """Of the last turn."""
        self._raw_stream = -1
        self._marks_ends = False
        """Whether each turn ends with an event. On the default stream nobody needs one before
        another stream comes, and a call has one thing less to queue.
        """

    def begin(self) -> None:
        """What is queued on the current stream from here on comes after the turn before."""
        # asked for by its address, which takes a twentieth of the time that torch's object takes
        raw_stream: int = torch._C._cuda_getCurrentRawStream(self._device)
        if raw_stream != self._raw_stream:
            self._change_stream(raw_stream)

    def _change_stream(self, raw_stream: int) -> None:
        stream, before = torch.cuda.current_stream(self._device), self.stream
        if before is not None:
            if not self._marks_ends:
                self._done.record(before)
            stream.wait_event(self._done)
        # another stream may be destroyed before the next one comes; and where streams take turns,
        # one waits for the turn alone, not for all that the other was given since
        self._marks_ends = before is not None or raw_stream != DEFAULT_STREAM
        self.stream, self._raw_stream = stream, raw_stream

    def end(self) -> None:
        """The turn ends with what the current stream has been given."""
        if self._marks_ends:
            self._done.record(self.stream)

    def renew(self) -> None:
        """After a capture that failed: torch before 2.12 does not end what the capture began. It
        then takes the memory for no other capture, and frees nothing that several streams use.
        Graphs that are there keep theirs.
        """
        with suppress(RuntimeError):  # torch has ended it
            torch._C._cuda_endAllocateToPool(self._device, self.pool)
        self.pool = torch.cuda.graph_pool_handle()


_shared: "WeakValueDictionary[int, GraphMemory]" = WeakValueDictionary()


def shared_memory(device: torch.device) -> GraphMemory:
    """The memory that compiled programs of a GPU share. It lasts as long as one of them has it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _shared.get(index)
    if found is None:
        found = _shared[index] = GraphMemory()
    return found


class CapturedHost:
    """A host program bound to tensors: weights, states and inputs stay where they were given."""

    def __init__(
        self,
        evaluator: Evaluator,
        tensors: Mapping[str, Tensor],
        memory: GraphMemory | None = None,
        *,
        copy_states: bool = True,
        before: Callable[[], None] | None = None,
        after: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """Runs the program a few times, on copies of its states, then captures it once, so that no
        graph holds two runs. memory: by default its own. copy_states: False where extra runs do no
        harm. before, after: queue what each replay does first and, with the program's outputs,
        last; the graph keeps it.

        Every rank of the mesh captures at the same point of its program. ProgramError for what
        can't be captured.
        """
        _require_capturable(evaluator, tensors)
        buffers = evaluator.host.buffers
        self._given, self._matmuls = dict(tensors), evaluator.matmuls
        self._comm = evaluator.comm
        """Kept, since NCCL does not end before graphs that hold its collectives."""
        self._before, self._after = before, after
        inputs = [b.name for b in buffers if b.role == "input" and b.name in tensors]
        self._inputs = {name: tensors[name].detach() for name in inputs}
        """Where the graph reads them, though their owner may point those tensors elsewhere."""
        self._memory = memory or GraphMemory()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        states = {b.name for b in buffers if b.role == "state"} if copy_states else set()
        self._warm_up(evaluator, side, states)
        self._graph = torch.cuda.CUDAGraph()
        self._outputs = self._capture(evaluator, side)
        kept = self._given.keys() - self._inputs.keys()
        self._made = {n: x for n, x in self._outputs.items() if n not in kept}
        _ALIVE.add(self)

    def _warm_up(
        self, evaluator: Evaluator, side: torch.cuda.Stream, copied: Collection[str]
    ) -> None:
        """Runs the program on a stream of its own, to its end. copied: tensors that these runs may
        not change.
        """
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm = {n: x.clone() if n in copied else x for n, x in self._given.items()}
            for _ in range(NUM_WARM_UPS):
                torch.cuda.synchronize()  # as a replay, each begins when all before it is done
                with self._one_run(evaluator):
                    evaluator.run(warm)
            self._matmuls.settle()
            del warm
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def _one_run(self, evaluator: Evaluator) -> AbstractContextManager[None]:
        """Around a run. What `before` queues may write states, and positions."""
        return one_run(evaluator.host) if self._before is None else early_reads(states=False)

    def _capture(self, evaluator: Evaluator, side: torch.cuda.Stream) -> dict[str, Tensor]:
        """Captures a run into the graph; its outputs, which each replay overwrites."""
        with _one_capture:
            try:
                with (
                    _own_workspaces(),
                    torch.cuda.stream(torch.cuda.current_stream()),  # restored if the capture fails
                    torch.cuda.graph(
                        self._graph, self._memory.pool, side, capture_error_mode="thread_local"
                    ),
                ):
                    if self._before is not None:
                        self._before()
                    with self._one_run(evaluator):
                        outputs = evaluator.run(self._given)
                    self._matmuls.settle()
                    if self._after is not None:
                        self._after(outputs)
            except BaseException:
                self._matmuls.rewind()
                self._memory.renew()
                raise
        return outputs

    def run(self, inputs: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Tensor]:
        """Outputs by name, overwritten by the next run unless copied; weights and states that it
        gives back are never copied. inputs: those to change since the last.
        """
        self._memory.begin()
        if inputs:
            self._copy(inputs)
        self._matmuls.settle()
        self._graph.replay()
        outputs = self._outputs.copy()
        if copy and not torch.is_inference_mode_enabled():
            outputs |= _copies(self._made)
        elif copy:
            with torch.inference_mode(False):  # takes a third of the time of `ordinary_tensors`
                outputs |= _copies(self._made)
        self._memory.end()
        return outputs

    def _copy(self, inputs: Mapping[str, Tensor]) -> None:
        """To where the graph reads them, in one launch where types and devices allow that."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, x in inputs.items():
            if (mine := self._inputs.get(name)) is not None:
                targets.append(mine)
                sources.append(x.detach() if x.requires_grad else x)
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(targets, sources)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where the last run was queued."""
        return self._memory.stream

    def release(self) -> None:
        """Frees the graph; there are no more runs."""
        self._graph.reset()


def _require_capturable(evaluator: Evaluator, tensors: Mapping[str, Tensor]) -> None:
    host = evaluator.host
    problems = [*evaluator.graph_breaks, *tensor_breaks(host, evaluator.device, tensors)]
    if problems:
        raise ProgramError(
            f"host program {host.name!r}: {problems[0]}",
            expected="nodes that only queue work on the GPU, the same each time",
            remedy="run it without capture",
        )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In new memory, in one launch where types and devices allow that."""
    if len(tensors) == 1:
        return {name: x.clone() for name, x in tensors.items()}
    copies = {name: torch.empty_like(x) for name, x in tensors.items()}
    if copies:
        torch._foreach_copy_([*copies.values()], [*tensors.values()])
    return copies


Capture = Callable[[], CapturedHost]


def capture_on_ranks(
    comm: Communicator, problem: str, capture: Capture
) -> tuple[CapturedHost | None, str]:
    """What `capture` gives, or why not: on all ranks of the mesh or on none, since NCCL may prepare
    captured collectives unlike others. Every rank calls it. problem: what this rank knows to stand
    in the way; empty if nothing.
    """
    if found := _first_problem(comm, problem):
        return None, found
    captured = None
    try:
        captured = capture()
    except (RuntimeError, ProgramError) as error:
        # where a capture has failed, ending it fails too
        problem = str(error.__context__ or error).partition("\n")[0] or type(error).__name__
    found = _first_problem(comm, problem)
    if found and captured is not None:
        captured.release()
        captured = None
    return captured, found


def _first_problem(comm: Communicator, problem: str) -> str:
    """The first that a rank of the mesh has; it names the rank where others have another."""
    problems = comm.all_gather_object(problem)
    rank, first = next(
        ((rank, each) for rank, each in zip(comm.mesh.ranks, problems, strict=True) if each),
        (0, ""),
    )
    return first if len({*problems}) == 1 else f"rank {rank}: {first}"


_ALIVE: WeakSet[CapturedHost] = WeakSet()


def release_graphs() -> None:
    """Frees all graphs. Before torch.distributed ends: NCCL then waits for graphs that hold its
    collectives, without limit.
    """
    for captured in list(_ALIVE):
        captured.release()
    _ALIVE.clear()


atexit.register(release_graphs)
