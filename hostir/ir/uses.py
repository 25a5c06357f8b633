"""What a node of a host program uses: buffers it reads, writes and names, storage behind views,
ranks that run it together, and peer memory that it uses too late.

Used by whoever orders nodes or checks their order: passes, verify.py, ../check/orders.py.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

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
    Recv,
    Send,
    SliceView,
    walk_nodes,
)
from distmega.program.ops.compute import communication_axis
from distmega.program.types import Access, Op, Program, accesses


def node_reads(node: Node, segments: dict[str, Program]) -> tuple[str, ...]:
    """Buffers whose contents a node reads, its body's for a loop; views are named as they are. What
    a kernel gives is not among them, even if it reads that again.
    """
    match node:
        case LibraryOp(op=op) if not op.is_view:
            return tuple(access.tensor for access in op.reads)
        case LaunchMegakernel(kernel=kernel, args=args):
            given = {t.name for t in segments[kernel].tensors if t.role != "temp"}
            read = given & _stored_names(segments[kernel], lambda op: op.reads)
            return tuple(arg.buffer for arg in args if arg.name in read)
        case Collective(ins=ins):
            return ins
        case FusedMatmul():
            return node.reads
        case Send(buffer=buffer):
            return (buffer,)
        case ForLoop(body=body):
            return tuple(name for inner in body for name in node_reads(inner, segments))
    return ()


def node_writes(node: Node, segments: dict[str, Program]) -> tuple[str, ...]:
    """Buffers whose contents a node changes, its body's for a loop; views are named as they are."""
    match node:
        case LibraryOp(op=op) if not op.is_view:
            return tuple(access.tensor for access in op.writes)
        case LaunchMegakernel(kernel=kernel, args=args):
            written = _stored_names(segments[kernel], lambda op: op.writes)
            return tuple(arg.buffer for arg in args if arg.name in written)
        case Collective(outs=outs):
            return outs
        case FusedMatmul():
            return node.writes
        case Recv(buffer=buffer):
            return (buffer,)
        case ForLoop(body=body):
            return tuple(name for inner in body for name in node_writes(inner, segments))
    return ()


def started_handle(node: Node) -> str:
    """The handle of the communication that a node starts; empty for another node, and for a
    transfer inside a group.
    """
    match node:
        case Collective() | Send() | Recv() | EndCoalescing():
            return node.handle
    return ""


def named_buffers(node: Node) -> tuple[str, ...]:
    """Buffers that a node names, of a loop none: its body's nodes come by themselves."""
    match node:
        case Allocate(buffer=buffer) | Deallocate(buffer=buffer):
            return (buffer,)
        case SliceView(view=view, buffer=buffer):
            return view, buffer
        case LibraryOp(op=op):
            return tuple(access.tensor for access in accesses(op))
        case LaunchMegakernel(args=args):
            return tuple(arg.buffer for arg in args)
        case ForLoop():
            return ()
    return node_reads(node, {}) + node_writes(node, {})


def _stored_names(segment: Program, operands: Callable[[Op], tuple[Access, ...]]) -> set[str]:
    """The tensors that own the storage of some operands of a segment's ops."""
    views = {op.writes[0].tensor: op.reads[0].tensor for op in segment.ops if op.is_view}
    used = {a.tensor for op in segment.ops if not op.is_view for a in operands(op)}
    return {storage_of(name, views) for name in used}


def shown(node: Node) -> tuple[str, str] | None:
    """The view that a node makes, and the buffer it is a view of; None for any other node."""
    match node:
        case SliceView(view=view, buffer=buffer):
            return view, buffer
        case LibraryOp(op=Op(is_view=True, reads=(read,), writes=(write,))):
            return write.tensor, read.tensor
    return None


def view_sources(body: Sequence[Node]) -> dict[str, str]:
    """Each view's name -> the buffer it is a view of (itself maybe a view)."""
    return dict(filter(None, map(shown, walk_nodes(body))))


def storage_of(name: str, sources: Mapping[str, str]) -> str:
    """The buffer that owns the storage of `name`, through `view_sources`."""
    while name in sources:
        name = sources[name]
    return name


def team_axes(node: Node, segments: Mapping[str, Program]) -> tuple[str, ...]:
    """Mesh axes whose ranks run a kernel together, which ends only when all have begun; none of
    another node.
    """
    match node:
        case FusedMatmul(mesh_axis=axis):
            return (axis,)
        case LaunchMegakernel(kernel=kernel):
            axes = (communication_axis(op) for op in segments[kernel].ops)
            return tuple(dict.fromkeys(axis for axis in axes if axis))
    return ()


def borrowed_results(body: Sequence[Node]) -> set[str]:
    """Results of fused matmuls that lie in memory which peers write into again."""
    matmuls = (node for node in walk_nodes(body) if isinstance(node, FusedMatmul))
    return {node.out for node in matmuls if node.borrows}


def late_uses(host: HostProgram, borrowed: Container[str]) -> Iterator[tuple[int, list[str]]]:
    """Uses of results after the next fused matmul of their axis has begun, if those in `borrowed`
    lie in its buffer: a node's index and names; -1 for outputs.
    """
    sources = view_sources(host.body)
    symmetric_buffers: dict[str, set[str]] = {}
    expired: set[str] = set()
    for index, node in enumerate(walk_nodes(host.body)):
        roots = {storage_of(name, sources) for name in named_buffers(node)}
        if isinstance(node, Allocate):
            expired -= roots
        if isinstance(node, FusedMatmul):
            expired |= symmetric_buffers.pop(node.mesh_axis, set())
            if node.out in borrowed:
                expired.discard(node.out)
                symmetric_buffers[node.mesh_axis] = {storage_of(node.out, sources)}
        if expired & roots and not isinstance(node, Deallocate):
            yield index, sorted(expired & roots)
    kept = {storage_of(name, sources) for name in host.outputs}
    left = kept & expired.union(*symmetric_buffers.values())
    if left:
        yield -1, sorted(left)
