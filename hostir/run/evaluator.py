"""Runs a host program: torch for library ops, a Communicator for the rest of the mesh, runners for
kernels, on a GPU its streams and events.

Comes in: a HostProgram and, with each call, tensors by name. Goes out: its outputs; states are
updated in place. Nodes become closures once, so that a call costs little more than its ops. On the
CPU streams and events order nothing, since the host runs nodes in program order, which any verified
program allows; check.py proves that for the device as well. Next: kernels/megakernel.py.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain, pairwise
from typing import Protocol

import torch
from torch import Tensor

from distmega.errors import DistmegaError, ProgramError, RankFailure
from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    Allocate,
    Collective,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Signal,
    SliceView,
    StartCoalescing,
    Wait,
    WaitEvent,
    WaitSignal,
    walk_nodes,
)
from distmega.hostir.ir.text import print_node
from distmega.hostir.ir.uses import (
    borrowed_results,
    named_buffers,
    node_writes,
    shown,
    storage_of,
    view_sources,
)
from distmega.hostir.library.matmuls import (
    Matmuls,
    SequentialMatmuls,
    StartCollective,
    compile_matmul,
)
from distmega.hostir.library.ops import DeviceOps, TorchOps, op_operands
from distmega.hostir.library.torch_types import (
    check_mapping,
    empty_tensor,
    fits,
    in_stated_types,
    misfit,
)
from distmega.hostir.run.graph_breaks import graph_breaks
from distmega.hostir.run.streams import CudaStreams
from distmega.program import types as program
from distmega.program.kinds import kind_of


class KernelRunner(Protocol):
    """A compiled segment on one rank. replays: whether a launch does the same each time, with all
    that changes in device memory, so that it may stand in a CUDA graph.
    """

    @property
    def replays(self) -> bool: ...

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        """Runs once. Tensors by their names in the segment; outputs are allocated, states updated
        in place.
        """
        ...


class Frame:
    """What one call of a program holds."""

    __slots__ = ("group", "handles", "indices", "tensors")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.handles: dict[str, CommHandle] = {}
        self.group: list[CommHandle] = []
        self.indices: dict[str, int] = {}


Step = Callable[[Frame], object]

Watch = Callable[[Node, Step], Step]
"""Puts something around a node's work, such as a clock; loops themselves are not watched."""


class Evaluator:
    """A host program bound to one rank: `run` it any number of times."""

    def __init__(
        self,
        host: HostProgram,
        comm: Communicator,
        kernels: Mapping[str, KernelRunner],
        device: str = "cpu",
        watch: Watch | None = None,
        ops: DeviceOps | None = None,
        matmuls: Matmuls | None = None,
    ) -> None:
        """kernels: a runner for each segment, by name. device: where tensors given to `run` are.
        watch: goes around each node. ops: how the device does library ops, by default in torch;
        matmuls: those with a collective, by default one after the other.

        ProgramError if a runner is missing.
        """
        self.host, self.comm, self.kernels = host, comm, kernels
        self.device, self.ops = torch.device(device), ops or TorchOps()
        missing = [segment.name for segment in host.segments if segment.name not in kernels]
        if missing:
            raise ProgramError(
                f"no kernels for segments {missing} of host program {host.name!r}",
                expected="a runner for every segment",
                remedy="compile each of host.segments, or lower with megakernel=False",
            )
        self._given = [buffer for buffer in host.buffers if buffer.role != "temp"]
        views = view_sources(host.body)
        self._shown = [name for name in host.outputs if name in views]
        """Outputs that are views, which may be turned: of what their storage holds at the end."""
        self.matmuls = matmuls or SequentialMatmuls(comm)
        self.matmuls.open_symmetric_buffers(host.symmetric_buffers)
        self._compile(watch)

    def _compile(self, watch: Watch | None) -> None:
        compiler = _Compiler(
            self.host, self.comm, self.kernels, self.device, watch, self.ops, self.matmuls
        )
        self._streams = compiler.streams
        self._run = compiler.block(self.host.body, 0)

    def watched(
        self, watch: Watch | None = None, kernels: Mapping[str, KernelRunner] | None = None
    ) -> "Evaluator":
        """Another one of the same ops and symmetric buffers. watch: as of the constructor; kernels:
        in place of this one's.
        """
        found = copy(self)
        found.kernels = self.kernels if kernels is None else kernels
        found._compile(watch)
        return found

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, in row-major order but for what was given. tensors: the inputs, weights
        and states of this rank, of their local shapes.

        Raises ProgramError for a tensor that is missing or does not fit, RankFailure if a node or a
        peer fails.
        """
        check_mapping(tensors)
        frame = Frame({buffer.name: _fitting(buffer, tensors) for buffer in self._given})
        with in_stated_types():
            if self._streams is None:
                self._run(frame)
            else:
                self._streams.begin()
                try:
                    self._run(frame)
                finally:
                    self._streams.end()
            outputs = {name: frame.tensors[name] for name in self.host.outputs}
            outputs |= {name: outputs[name].contiguous() for name in self._shown}
        return outputs

    def rehearse(self, tensors: Mapping[str, Tensor]) -> None:
        """Launches the kernels of a run, once for operands of one kind, on memory that nobody has
        computed: for a caller who sees to it that they are compiled and do not run. States keep
        their values but for what the run itself would write. Nothing is communicated.
        """
        frame = Frame({buffer.name: _fitting(buffer, tensors) for buffer in self._given})
        rehearsal = _Rehearsal(
            self.host, self.comm, self.kernels, self.device, None, self.ops, self.matmuls
        )
        with in_stated_types():
            rehearsal.block(self.host.body, 0)(frame)

    @property
    def graph_breaks(self) -> tuple[str, ...]:
        """Why the program can't be one CUDA graph; see graph_breaks.py."""
        breaks = graph_breaks(
            self.host,
            self.device,
            self.ops,
            signals_on_device=self.comm.signals_on_device,
            bound_kernels=[name for name, kernel in self.kernels.items() if not kernel.replays],
        )
        return tuple(breaks)


def allocated_names(body: Sequence[Node]) -> set[str]:
    """What a body allocates itself."""
    return {node.buffer for node in body if isinstance(node, Allocate)}


def awaited_at_once(body: Sequence[Node]) -> set[str]:
    """Handles of a body's collectives for which the next node waits."""
    return {
        node.handle
        for node, after in pairwise(body)
        if isinstance(node, Collective) and isinstance(after, Wait) and after.handle == node.handle
    }


def made_before_views(host: HostProgram, sources: Mapping[str, str]) -> set[str]:
    """Buffers that one library op outside of loops writes, before anything of theirs is viewed."""
    made: set[str] = set()
    again: set[str] = set()
    segments = host.segment_map()
    for node in host.body:
        written: set[str] = set()
        for each in walk_nodes([node]):
            if shown(each):
                again |= {storage_of(name, sources) for name in named_buffers(each)} - made
            elif not isinstance(each, ForLoop):
                written |= {storage_of(name, sources) for name in node_writes(each, segments)}
        again |= written & made
        if isinstance(node, LibraryOp | FusedMatmul):
            made |= written
        else:
            again |= written
    return made - again


def _fitting(buffer: program.Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    found = tensors.get(buffer.name)
    if fits(found, buffer):
        return found
    raise misfit(found, buffer)


class _Compiler:
    """Turns nodes into closures over a frame. One method a group of nodes."""

    def __init__(
        self,
        host: HostProgram,
        comm: Communicator,
        kernels: Mapping[str, KernelRunner],
        device: torch.device,
        watch: Watch | None,
        ops: DeviceOps,
        matmuls: Matmuls,
    ) -> None:
        self.ops, self.matmuls = ops, matmuls
        self.host, self.comm, self.kernels, self.device = host, comm, kernels, device
        self.watch = watch
        self.streams = (
            CudaStreams(device, host.num_streams, host.num_events)
            if device.type == "cuda" and host.num_streams > 1
            else None
        )
        self.buffers = host.buffer_map()
        self.coordinate = host.mesh.coordinate(comm.rank)
        self.sources = view_sources(host.body)
        self.views = defaultdict[str, list[str]](list)
        """Storage -> views of it."""
        for name in self.sources:
            self.views[storage_of(name, self.sources)].append(name)
        self.viewed = set(self.views)
        weights = {buffer.name for buffer in host.buffers if buffer.role == "weight"}
        self.constants = {*weights, *chain.from_iterable(self.views.get(n, ()) for n in weights)}
        """Weights and views of them, which no node writes."""
        self.packed = self.viewed | set(host.outputs) - set(self.sources)
        """Buffers whose elements lie in row-major order; others lie as an op left them, and views
        where what they show does, whatever is written there later.
        """
        given = {buffer.name for buffer in host.buffers if buffer.role != "temp"}
        segments = host.segment_map()
        looped = {
            name
            for node in host.body
            if isinstance(node, ForLoop) and host.num_streams > 1
            for name in set(node_writes(node, segments)) - allocated_names(node.body)
        }
        made = made_before_views(host, self.sources)
        self.final = set[str]()
        if host.num_streams == 1:
            kept = {storage_of(name, self.sources) for name in host.outputs}
            self.final = made - given - kept - borrowed_results(host.body)
        """Buffers whose memory nobody writes into again before its last reference is gone."""
        self.alone = set[str]() if host.num_streams > 1 else awaited_at_once(host.body)
        """Handles of collectives that nothing runs beside."""
        self.shared = (self.viewed - made) | given | set(self.sources) | looped
        """Buffers whose storage has another name or owner when an op writes it, or another stream
        than that op: it writes into them and doesn't replace them.
        """
        self.filled = {
            name
            for node in walk_nodes(host.body)
            if not isinstance(node, FusedMatmul | ForLoop)
            and (not isinstance(node, LibraryOp) or kind_of(node.op).inplace)
            for name in node_writes(node, segments)
        }
        """Buffers that kernels, communication and ops in place write: they must exist before."""

    def block(self, body: Sequence[Node], first: int) -> Step:
        """The nodes of a body, the first of which has index `first` in printed order."""
        steps: list[Step] = []
        positions: list[tuple[int, Node]] = []
        index = first
        for node in body:
            step = self.step(node, index)
            if step is not None:
                if self.watch is not None and not isinstance(node, ForLoop):
                    step = self.watch(node, step)
                steps.append(step)
                positions.append((index, node))
            index += sum(1 for _ in walk_nodes([node]))
        name, rank = self.host.name, self.comm.rank

        def run(frame: Frame) -> None:
            at = 0
            try:
                for at, step in enumerate(steps):  # noqa: B007  `at` tells where a step failed
                    step(frame)
            except Exception as error:
                if getattr(error, "__notes__", None):
                    raise
                number, node = positions[at]
                where = f"node {number} ({print_node(node)}) of host program {name!r}, rank {rank}"
                if isinstance(error, DistmegaError):
                    if isinstance(error, RankFailure):
                        error = error.at(where)
                    error.add_note(f"at {where}")
                    raise error
                failure = RankFailure(
                    f"{where} failed: {type(error).__name__}: {error}",
                    expected="every node to complete",
                    remedy="check the values given to the program",
                )
                failure.add_note(f"at {where}")
                raise failure from error

        return run

    def step(self, node: Node, index: int) -> Step | None:
        """The closure of a node; None for what needs no work."""
        match node:
            case LibraryOp():
                return self.library_op(node)
            case FusedMatmul():
                return self.fused(node)
            case LaunchMegakernel(kernel=kernel, args=args):
                launch = self.kernels[kernel].launch
                pairs = [(arg.name, arg.buffer) for arg in args]
                return lambda f: launch({name: f.tensors[buffer] for name, buffer in pairs})
            case Allocate() | Deallocate() | SliceView():
                return self.storage(node)
            case ForLoop(index=name, extent=extent, body=body):
                return self.loop(name, extent, self.block(body, index + 1))
            case SetStream() | RecordEvent() | WaitEvent():
                if self.streams is None:
                    return None
                order = self.streams.step(node)
                return lambda f: order(f.indices)
            case Collective():
                return self.collective(node)
            case _:
                return self.point_to_point(node)

    def loop(self, name: str, extent: int, block: Step) -> Step:
        def run(frame: Frame) -> None:
            for value in range(extent):
                frame.indices[name] = value
                block(frame)

        return run

    def storage(self, node: Allocate | Deallocate | SliceView) -> Step | None:
        match node:
            case Allocate(buffer=name):
                if name not in self.filled | self.shared:
                    return None
                buffer = self.buffers[name]
                return lambda f: f.tensors.update({name: empty_tensor(buffer, self.device)})
            case Deallocate(buffer=name):
                freed = name, *self.views[name]
                return lambda f: [f.tensors.pop(each, None) for each in freed]
            case SliceView(view=view, buffer=buffer, dim=dim):
                shapes = self.buffers[buffer].shape, self.buffers[view].shape

                def slice_view(f: Frame) -> None:
                    start = node.start(f.indices, self.coordinate, *shapes)
                    f.tensors[view] = f.tensors[buffer].narrow(dim, start, shapes[1][dim])

                return slice_view

    def library_op(self, node: LibraryOp) -> Step:
        op = node.op
        function = self.ops.compile(op, self.coordinate, self.constants)
        names = op_operands(op)
        outs = [access.tensor for access in op.writes]
        if kind_of(op).inplace:
            return lambda f: function([f.tensors[name] for name in names])
        if op.is_view or (len(outs) == 1 and outs[0] not in self.shared):
            out, packed = outs[0], outs[0] in self.packed

            def replace(f: Frame) -> None:
                tensors = f.tensors
                (found,) = function([tensors[name] for name in names])
                tensors[out] = found.contiguous() if packed else found

            return replace
        return self.writing(function, names, outs)

    def fused(self, node: FusedMatmul) -> Step:
        is_final = storage_of(node.x, self.sources) in self.final
        call = compile_matmul(node, self.buffers[node.out], self.matmuls, is_final=is_final)
        return self.writing(call, node.reads, node.writes)

    def writing(
        self,
        call: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        reads: Sequence[str],
        outs: Sequence[str],
    ) -> Step:
        """Calls with the tensors of `reads`; the results become those of `outs`, or are copied into
        memory that others hold too.
        """
        shared = [out in self.shared for out in outs]

        def write(f: Frame) -> None:
            results = call([f.tensors[name] for name in reads])
            for out, keep, result in zip(outs, shared, results, strict=True):
                if keep:
                    f.tensors[out].copy_(result)
                else:
                    f.tensors[out] = result.contiguous() if out in self.packed else result

        return write

    def collective(self, node: Collective) -> Step:
        start = self.starter(node)
        if node.handle in self.alone:
            start = self.matmuls.compile_collective(node, start)

        def run(f: Frame) -> None:
            ins = [f.tensors[name] for name in node.ins]
            f.handles[node.handle] = start(ins, [f.tensors[name] for name in node.outs])

        return run

    def starter(self, node: Collective) -> StartCollective:
        comm, axis = self.comm, node.mesh_axis
        dim, dst_dim, source = (_number(node, key) for key in ("dim", "dst_dim", "source"))
        combine = str(node.get("combine", "sum"))
        match node.kind:
            case "all_reduce":
                return lambda xs, outs: comm.all_reduce(axis, xs, outs, combine)
            case "all_gather":
                return lambda xs, outs: comm.all_gather(axis, xs[0], outs[0], dim)
            case "reduce_scatter":
                return lambda xs, outs: comm.reduce_scatter(axis, xs[0], outs[0], dim, combine)
            case "all_to_all":
                return lambda xs, outs: comm.all_to_all(axis, xs[0], outs[0], dim, dst_dim)
            case "broadcast":
                return lambda xs, outs: comm.broadcast(axis, xs[0], outs[0], source)

    def point_to_point(
        self, node: Send | Recv | StartCoalescing | EndCoalescing | Wait | Signal | WaitSignal
    ) -> Step:
        match node:
            case Send() | Recv():
                return self.transfer(node)
            case StartCoalescing():

                def open_group(f: Frame) -> None:
                    f.group.clear()
                    self.comm.begin_group()

                return open_group
            case EndCoalescing(handle=handle):

                def close(f: Frame) -> None:
                    members = tuple(f.group)
                    f.handles[handle] = self.comm.end_group(members)

                return close
            case Wait(handle=handle):
                return lambda f: f.handles.pop(handle).wait()
            case Signal(name=name, peer=peer) | WaitSignal(name=name, peer=peer):
                to = peer.of(self.coordinate, self.host.mesh)
                call = self.comm.signal if isinstance(node, Signal) else self.comm.wait_signal
                return lambda f: call(peer.mesh_axis, name, to)

    def transfer(self, node: Send | Recv) -> Step:
        axis, peer = node.peer.mesh_axis, node.peer.of(self.coordinate, self.host.mesh)
        call = self.comm.send if isinstance(node, Send) else self.comm.recv

        def run(f: Frame) -> None:
            handle = call(axis, f.tensors[node.buffer], peer)
            if node.handle:
                f.handles[node.handle] = handle
            else:
                f.group.append(handle)

        return run


class _Rehearsal(_Compiler):
    """See Evaluator.rehearse."""

    def step(self, node: Node, index: int) -> Step | None:
        match node:
            case LibraryOp(op=op):
                return self.library_op(node) if op.is_view else self.rehearsed(op)
            case FusedMatmul():
                return self.rehearsed_matmul(node)
            case Allocate(buffer=name):
                return self.allocating([name]) if name in self.filled | self.shared else None
            case Deallocate() | SliceView():
                return self.storage(node)
            case ForLoop(index=name, body=body):
                return self.loop(name, 1, self.block(body, index + 1))
            case Collective(handle=handle) if handle in self.alone:
                return self.rehearsed_collective(node)
            case _:
                return None

    @cached_property
    def stand_in(self) -> Matmuls | None:
        """Launches what the program's matmuls launch."""
        return self.matmuls.stand_in()

    def rehearsed_matmul(self, node: FusedMatmul) -> Step:
        out = self.buffers[node.out]
        call = None if self.stand_in is None else compile_matmul(node, out, self.stand_in)
        norm = node.norm and (node.norm.kind, node.norm.eps)
        way = node.kind, node.mesh_axis, node.num_rows, node.replicated, node.forced
        return self.once((*way, node.mixes, norm), call, node.reads, node.writes)

    def rehearsed_collective(self, node: Collective) -> Step | None:
        if self.stand_in is None:
            return None
        start = self.stand_in.compile_collective(node, lambda xs, outs: CommHandle(lambda: None))

        def rehearse(f: Frame) -> None:
            outs = [torch.empty_like(f.tensors[name]) for name in node.outs]
            start([f.tensors[name] for name in node.ins], outs)

        return rehearse

    def allocating(self, names: Sequence[str]) -> Step:
        """New memory for buffers; whole numbers are zeros, for some are places."""
        new = [self.buffers[name] for name in names]

        def allocate(f: Frame) -> None:
            for buffer in new:
                f.tensors[buffer.name] = made = empty_tensor(buffer, self.device)
                if not made.is_floating_point():
                    made.zero_()

        return allocate

    def rehearsed(self, op: program.Op) -> Step:
        """Calls an op's kernels unless they were called with such operands before."""
        function = self.ops.by_kernel(op, self.coordinate, self.constants)
        outs = [] if kind_of(op).inplace else [access.tensor for access in op.writes]
        known = tuple([read.tensor in self.constants for read in op.reads])
        return self.once((op.kind, op.attrs, op.axes, known), function, op_operands(op), outs)

    def once(
        self,
        key: tuple[object, ...],
        call: Callable[[Sequence[Tensor]], object] | None,
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> Step:
        """Calls with the tensors of `reads`, for operands of one kind once for all nodes of a key;
        then new memory for `writes`.
        """
        allocate = self.allocating([out for out in writes if out not in self.shared])

        def rehearse(f: Frame) -> None:
            if call is not None:
                xs = [f.tensors[name] for name in reads]
                kinds = [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in xs]
                if (*key, *kinds) not in self.known:
                    self.known.add((*key, *kinds))
                    call(xs)
            allocate(f)

        return rehearse

    @cached_property
    def known(self) -> set[tuple[object, ...]]:
        """What was called, and the kinds of its operands."""
        return set()


def _number(node: Collective, key: str) -> int:
    value = node.get(key, 0)
    assert isinstance(value, int), f"{key}={value!r} of a verified collective"
    return value
