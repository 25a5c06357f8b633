"""Rules on what nodes name: declared buffers, fitting shapes, loop indices in scope, roles
respected.

Each rule is a generator of violations over a host program; verify.py runs them with the rules on
order and lifetime.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distmega.errors import counted
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm, symmetric_bytes
from distmega.hostir.ir.nodes import (
    Allocate,
    Collective,
    Deallocate,
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
    WaitEvent,
    WaitSignal,
    segment_args,
)
from distmega.hostir.ir.uses import (
    borrowed_results,
    late_uses,
    named_buffers,
    node_writes,
    shown,
    storage_of,
    view_sources,
)
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.kinds import (
    AttrRule,
    attr_rules,
    is_known,
    kind_of,
    user_kinds,
    wrong_attr,
)
from distmega.program.types import (
    Access,
    Op,
    Program,
    SoundForms,
    Tensor,
    accesses,
    packed_strides,
    view_strides,
    wrong_access,
    wrong_axes,
    wrong_operands,
    wrong_roles,
)

Violation = tuple[int, str, str]
"""Node index (-1: the program as a whole), what was found, what was expected."""

Step = tuple[int, Node | None]
"""A node with its index, or None at the end of a loop's body."""


_sound = SoundForms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """A host program, and what rules look up in it. nodes: in printed order; steps: with their
    index, and the ends of loop bodies; sources: as view_sources gives them.
    """

    host: HostProgram
    nodes: list[Node]
    steps: list[Step]
    buffers: Mapping[str, Tensor]
    segments: dict[str, Program]
    sources: dict[str, str]

    @staticmethod
    def of(host: HostProgram) -> "Walked":
        """Walks through a program once for all rules."""
        found: list[Step] = []
        _walk(host.body, found, 0)
        return Walked(
            host=host,
            nodes=[node for _, node in found if node is not None],
            steps=found,
            buffers=host.buffer_map(),
            segments=host.segment_map(),
            sources=view_sources(host.body),
        )


def _walk(nodes: Sequence[Node], found: list[Step], index: int) -> int:
    """Adds the steps of a body whose first node has that index; gives the next index."""
    for node in nodes:
        found.append((index, node))
        index += 1
        if isinstance(node, ForLoop):
            index = _walk(node.body, found, index)
            found.append((index - 1, None))
    return index


def known_names(walked: Walked) -> Iterator[Violation]:
    """Buffers, segments and mesh axes are declared, once; a view shows one buffer as another, the
    same wherever it is stated.
    """
    host, buffers, segments = walked.host, walked.buffers, walked.segments
    shows: dict[str, str] = {}
    axes = host.mesh.names
    if len(buffers) != len(host.buffers) or len(segments) != len(host.segments):
        yield -1, "two buffers or two segments share a name", "unique names"
    for buffer in host.buffers:
        if buffer.dtype not in ITEM_BYTES or min(buffer.shape, default=1) < 1:
            found = f"{buffer.name!r} of shape {list(buffer.shape)} and dtype {buffer.dtype}"
            yield -1, found, f"dims of at least 1 and a dtype of {', '.join(ITEM_BYTES)}"
    for name in host.outputs:
        if name not in buffers:
            yield -1, f"output {name!r} is no buffer", "a declared buffer"
    for index, node in enumerate(walked.nodes):
        if isinstance(node, LaunchMegakernel) and node.kernel not in segments:
            yield index, f"kernel {node.kernel!r} has no segment", f"one of {list(segments)}"
            return
        for name in named_buffers(node):
            if name not in buffers:
                yield index, f"{name!r} is no buffer", "a declared buffer"
        for axis in _named_axes(node):
            if axis not in axes:
                yield index, f"mesh axis {axis!r}", f"one of {list(axes)}"
        if isinstance(node, LibraryOp) and node.op.is_view:
            counts = len(node.op.reads), len(node.op.writes)
            if counts != (1, 1):
                yield index, f"a view of {counts[0]} as {counted(counts[1], 'tensor')}", "one"
        view, source = shown(node) or ("", "")
        if source in walked.sources and source not in shows:
            yield index, f"{view!r} shows {source!r}, which shows nothing yet", "a view above"
        if view and (shows.setdefault(view, source) != source or buffers[view].role != "temp"):
            found = f"{buffers[view].role} {view!r} shows {source!r}"
            yield index, found, "a temp, which shows one buffer wherever it is stated"


def _named_axes(node: Node) -> tuple[str, ...]:
    match node:
        case Collective(mesh_axis=axis) | FusedMatmul(mesh_axis=axis):
            return (axis,)
        case Send(peer=peer) | Recv(peer=peer) | Signal(peer=peer) | WaitSignal(peer=peer):
            return (peer.mesh_axis,)
        case SliceView(swizzle=axis) if axis:
            return (axis,)
        case LibraryOp(op=op):
            named = (op.get(name, "") for name in ("mesh_axis", "base_axis", "group_axis"))
            return tuple(str(axis) for axis in named if axis)
    return ()


def fitting_operands(walked: Walked) -> Iterator[Violation]:
    """Kernel arguments are as the segment declares them, ops index all dims and are of kinds that
    libraries do, of operands that these can be computed of, peers exist.
    """
    host, buffers, segments = walked.host, walked.buffers, walked.segments
    ops = [node.op for node in walked.nodes if isinstance(node, LibraryOp)]
    new, is_sound = {id(op): op for op in _sound.new_ops(ops, buffers)}, True
    for index, node in enumerate(walked.nodes):
        match node:
            case LaunchMegakernel(kernel=kernel, args=args):
                wanted = [(t.name, t.shape, t.dtype) for t in segment_args(segments[kernel])]
                given = [(a.name, buffers[a.buffer].shape, buffers[a.buffer].dtype) for a in args]
                wrong = [pair for pair in zip(given, wanted, strict=False) if pair[0] != pair[1]]
                if wrong or len(given) != len(wanted):
                    found = str(wrong[0][0]) if wrong else counted(len(given), "argument")
                    yield (
                        index,
                        found,
                        str(wrong[0][1]) if wrong else counted(len(wanted), "argument"),
                    )
            case LibraryOp(op=op) if id(op) in new:
                for found, expected in _wrong_op(op, buffers):
                    is_sound = False
                    yield index, found, expected
            case LibraryOp(op=op):
                if broken := wrong_attr(op):
                    yield index, f"{op.name!r} with {broken[0]}", broken[1]
            case Send(peer=peer) | Recv(peer=peer) | Signal(peer=peer) | WaitSignal(peer=peer):
                size = host.mesh.size(peer.mesh_axis)
                if not peer.ring and not 0 <= peer.offset < size:
                    yield index, f"peer {peer.offset} of {size}", f"0 to {size - 1}"
    if is_sound:
        _sound.note(new.values(), buffers)


def _wrong_op(op: Op, buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """What of a library op breaks the rules, and what was expected."""
    if unknown_kind := _wrong_kind(op):
        yield unknown_kind
    if misuse := wrong_axes(op):
        yield f"{op.name!r} {misuse[0]}", misuse[1]
    if broken := wrong_attr(op):
        yield f"{op.name!r} with {broken[0]}", broken[1]
    extents = op.extents
    for access in accesses(op):
        shape = buffers[access.tensor].shape
        unknown = {name for each in access.dims for name in each.axes} - extents.keys()
        if unknown:
            found = f"{access.tensor!r} indexed by {', '.join(sorted(unknown))}"
            yield found, f"axes of {op.name!r}"
        elif len(access.dims) != len(shape):
            found = f"{access.tensor!r} indexed by {counted(len(access.dims), 'dim')}"
            yield found, counted(len(shape), "dim")
        elif not kind_of(op).is_clipped and not _reaches(extents, access, shape):
            found = f"{access.tensor!r} of {list(shape)} indexed beyond its ends"
            yield found, "positions that it has"
        elif misuse := wrong_access(op, access, shape):
            yield f"{op.name!r} {misuse[0]}", misuse[1]
    results = [access.tensor for access in op.writes]
    if len({*results}) < len(results):
        yield f"{op.name!r} writes {', '.join(results)}", "each result once"
    is_made = kind_of(op).origin == "internal"
    if misfit := (not is_made and wrong_roles(op)) or wrong_operands(op, buffers):
        yield f"{op.name!r} {misfit[0]}", misfit[1]


def _wrong_kind(op: Op) -> tuple[str, str] | None:
    kind = kind_of(op)
    if kind.communicates or kind.writes_peers:
        found = f"{op.name!r} of kind {op.kind}, which no library does"
        return found, "a collective, as 'all_reduce tp (x) -> (y) as handle'"
    return None if is_known(op.kind) else (f"kind {op.kind!r}", f"one of {', '.join(user_kinds())}")


def _reaches(extents: Mapping[str, int], access: Access, shape: Sequence[int]) -> bool:
    """Whether all that an op with axes of these extents indexes lies in a buffer: of groups, all
    rows that one may have, for all of them together have no more than the buffer.
    """
    for index, extent in zip(access.dims, shape, strict=True):
        count = 1
        for name in index.axes[1:] if index.is_grouped else index.axes:
            count *= extents[name]
        if index.offset < 0 or index.offset + index.stride * (count - 1) >= extent:
            return False
    return True


def fitting_views(walked: Walked) -> Iterator[Violation]:
    """Strides show each view in what it is a view of, whose elements lie row-major."""
    known: dict[str, tuple[int, ...]] = {}
    for index, node in enumerate(walked.nodes):
        view, source = shown(node) or ("", "")
        if not view:
            continue
        strides: tuple[int, ...] | None = known.get(source)
        strides = strides or packed_strides(walked.buffers[source].shape)
        if isinstance(node, LibraryOp):
            strides = view_strides(node.op, strides)
        if strides is None:
            found = f"a view of dims of {source!r} that have gaps or are turned"
            yield index, found, "dims that follow each other, or a copy"
            return
        known[view] = strides


def loop_indices(walked: Walked) -> Iterator[Violation]:
    """Loops run, their indices differ from enclosing ones, and what uses an index stands inside."""
    loops: dict[str, int] = {}
    buffers = walked.buffers
    for index, node in walked.steps:
        match node:
            case None:
                loops.popitem()
            case ForLoop(index=name, extent=extent):
                if name in loops or extent < 1:
                    yield index, f"index {name!r} of extent {extent}", "a new name, extent >= 1"
                loops[name] = extent
            case SliceView(index=name):
                if name and name not in loops:
                    yield index, f"index {name!r}", f"one of the loops around it, {list(loops)}"
                    return
                yield from _bad_slice(index, node, buffers, loops.get(name, 1))
            case SetStream(stream=slot) | RecordEvent(event=slot) | WaitEvent(event=slot):
                if slot.index and slot.index not in loops:
                    yield index, f"index {slot.index!r}", f"one of the loops, {list(loops)}"


def _bad_slice(
    index: int, node: SliceView, buffers: Mapping[str, Tensor], extent: int
) -> Iterator[Violation]:
    view, whole = buffers[node.view], buffers[node.buffer]
    found = f"{counted(extent, 'chunk')} {view.dtype}{list(view.shape)} along dim {node.dim}"
    expected = f"chunks that make up {whole.dtype}{list(whole.shape)}"
    is_part = 0 <= node.dim < len(view.shape) and min(node.shift, node.step) >= 0
    if len(view.shape) != len(whole.shape) or not is_part:
        yield index, found, expected
        return
    others = [
        a == b
        for d, (a, b) in enumerate(zip(view.shape, whole.shape, strict=True))
        if d != node.dim
    ]
    part, total = view.shape[node.dim], whole.shape[node.dim]
    step, last = node.step or part, extent - 1 + node.shift
    if node.swizzle:
        fits = part == step and total % step == 0 and extent <= total // step
    elif node.step:
        fits = part <= step and last * step + part <= total
    else:
        fits = extent * part == total and not node.shift
    if not fits or not all(others) or view.dtype != whole.dtype:
        yield index, found, expected


def fitting_collectives(walked: Walked) -> Iterator[Violation]:
    """Operand counts and shapes of collectives agree with their kind and the size of the team."""
    host, buffers = walked.host, walked.buffers
    for index, node in enumerate(walked.nodes):
        if not isinstance(node, Collective):
            continue
        num = 2 if node.get("combine", "") == "argmax" else 1
        if (len(node.ins), len(node.outs)) != (num, num):
            yield index, f"{len(node.ins)} ins, {len(node.outs)} outs", f"{num} of each"
            return
        size = host.mesh.size(node.mesh_axis)
        if wrong := _wrong_choice(node, len(buffers[node.ins[0]].shape), size):
            yield index, *wrong
            return
        for name, out in zip(node.ins, node.outs, strict=True):
            given, got = buffers[name], buffers[out]
            if given.dtype != got.dtype or not _fits(node, given.shape, got.shape, size):
                found = f"{given.dtype}{list(given.shape)} to {got.dtype}{list(got.shape)}"
                yield index, found, f"shapes as {node.kind} over {counted(size, 'rank')} makes them"


_COMBINES_NOTHING = AttrRule(lambda value: value == "", "none")


def _wrong_choice(node: Collective, num_dims: int, size: int) -> tuple[str, str] | None:
    """What a collective of operands of that many dims, over that many ranks, names that there is
    not, and what there is, by the rules of ops of its kind.
    """
    rules, given = attr_rules(node.kind), dict(node.attrs)
    combines = rules.get("combine", _COMBINES_NOTHING)
    if "combine" in given and not combines.fits(given["combine"]):
        return f"combine={given['combine']!r}", combines.expected
    dims = [name for name in ("dim", "dst_dim") if name in rules]
    numbers = [(name, num_dims, "dim of its operand") for name in dims]
    numbers += [("source", size, "rank")] if node.kind == "broadcast" else []
    for name, num, what in numbers:
        if type(value := given.get(name, "")) is not int or not 0 <= value < num:
            return f"{name}={value!r}", f"a {what}, from 0 to {num - 1}"
    return None


def fitting_matmuls(walked: Walked) -> Iterator[Violation]:
    """Shapes of fused matmuls agree with their kind and team, and fit into the symmetric buffer of
    their axis; what one borrows is used before the next.
    """
    host, buffers = walked.host, walked.buffers
    symmetric_buffers = {
        symmetric_buffer.mesh_axis: symmetric_buffer.num_bytes
        for symmetric_buffer in host.symmetric_buffers
    }
    for index, node in enumerate(walked.nodes):
        if isinstance(node, FusedMatmul):
            axis, size = node.mesh_axis, host.mesh.size(node.mesh_axis)
            if not _multiplies(node, buffers, size):
                shapes = " x ".join(str(list(buffers[n].shape)) for n in (node.x, node.w, node.out))
                yield (
                    index,
                    shapes,
                    f"shapes as {node.kind} over {counted(size, 'rank')} makes them",
                )
            if node.norm and not _normalises(node, node.norm, buffers):
                shapes = " x ".join(str(list(buffers[n].shape)) for n in node.norm.reads)
                yield index, f"a norm of {shapes}", "rows of a sum over ranks, and a vector as long"
            if (need := symmetric_bytes(node, buffers, size)) > symmetric_buffers.get(axis, 0):
                yield (
                    index,
                    f"a symmetric buffer of {symmetric_buffers.get(axis, 0)} bytes",
                    f"one of {need}",
                )
    borrowed = borrowed_results(host.body)
    for index, names in late_uses(host, borrowed) if borrowed else ():
        yield index, f"{names} in peer memory that is used again", "a use before, no output"


def _multiplies(node: FusedMatmul, buffers: Mapping[str, Tensor], size: int) -> bool:
    x, w, out = (buffers[name].shape for name in (node.x, node.w, node.out))
    rows, sums = x[: node.num_rows], x[node.num_rows :]
    columns = w[: len(w) - len(sums)]
    given, made = {"all_gather_matmul": (size, 1), "matmul_reduce_scatter": (1, size)}.get(
        node.kind, (1, 1)
    )
    fits = bool(rows) and w == columns + sums and len(out) == len(rows) + len(columns)
    if node.mixes:
        fits = fits and node.kind == "all_gather_matmul" and len(columns) == 1
        columns = (columns[0] // 2 if columns[0] % 2 == 0 else 0,)
    same = len({buffers[name].dtype for name in (node.x, node.w, node.out)}) == 1
    return same and fits and rows[0] * given == out[0] * made and out[1:] == rows[1:] + columns


def _normalises(node: FusedMatmul, norm: SumNorm, buffers: Mapping[str, Tensor]) -> bool:
    """Whether a norm is of rows of what an all-reduce sums."""
    out, vectors = buffers[node.out], [buffers[name] for name in norm.reads[1:]]
    rows = [buffers[name] for name in (norm.residual, norm.total)]
    plain = node.kind == "matmul_all_reduce" and not (node.borrows or node.forced or node.mixes)
    return (
        plain
        and len(out.shape) == node.num_rows + 1
        and all((each.shape, each.dtype) == (out.shape, out.dtype) for each in rows)
        and all(each.shape == out.shape[-1:] for each in vectors)
    )


def _fits(node: Collective, given: Sequence[int], got: Sequence[int], size: int) -> bool:
    """Equal extents, but along the gathered dim at most `size` times as much, and along the
    scattered one at least a part in `size`: the last ranks may be padded.
    """
    dim, dst_dim = (_as_dim(node, key) for key in ("dim", "dst_dim"))
    gathered = dim if node.kind in ("all_gather", "all_to_all") else -1
    scattered = {"reduce_scatter": dim, "all_to_all": dst_dim}.get(node.kind, -1)
    if len(given) != len(got):
        return False
    for at, (x, y) in enumerate(zip(given, got, strict=True)):
        few, many = (x, y) if at == gathered else (y, x)
        if at in (gathered, scattered):
            if not few <= many <= few * size:
                return False
        elif x != y:
            return False
    return True


def _as_dim(node: Collective, key: str) -> int:
    value = node.get(key, -1)
    return value if isinstance(value, int) else -1


def written_roles(walked: Walked) -> Iterator[Violation]:
    """Inputs and weights are only read; only temps are allocated and freed."""
    buffers, segments, sources = walked.buffers, walked.segments, walked.sources
    for index, node in enumerate(walked.nodes):
        if isinstance(node, Allocate | Deallocate):
            if buffers[node.buffer].role != "temp" or node.buffer in sources:
                yield index, f"{node.buffer!r} is a view or the caller's", "a temp with storage"
        elif not isinstance(node, ForLoop):
            for name in node_writes(node, segments):
                if buffers[storage_of(name, sources)].role in ("input", "weight"):
                    yield index, f"{name!r} is written", "inputs and weights are only read"
