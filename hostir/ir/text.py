"""Printed form of host programs, and its parser: `parse_host(print_host(h)) == h`.

    host mlp on tp=2
      streams 1, events 0
      input x: f32[8, 64]
      temp h: f32[8, 64]
      body
        allocate h
        h = linear[...] x(m, k) w(n, k) -> h(m, n)
        all_reduce tp (h) -> (y) as y.done | combine='sum'
        wait y.done
      return y

A stream or event of a ring prints as `base + index % count`; a peer as `tp[1]` (coordinate) or
`tp[+1]` (ring). Segments stand before the body as print_program writes them. Ops are lines of
distmega/program/text.py. Next: verify.py.
"""

import re
from collections.abc import Callable, Sequence

from distmega.errors import ParseError
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm, SymmetricBuffer
from distmega.hostir.ir.nodes import (
    Allocate,
    Binding,
    Collective,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Peer,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Signal,
    SliceView,
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
    WaitSignal,
)
from distmega.program.text import (
    bounded_lines,
    parse_attrs,
    parse_names,
    parse_number,
    parse_op,
    parse_program,
    parse_tensor,
    print_attrs,
    print_op,
    print_program,
    print_tensor,
    unreadable,
)
from distmega.sharding.layout.mesh import DeviceMesh

MAX_LOOP_DEPTH = 16
_STEP = "  "
_SYMMETRIC = re.compile(r"symmetric buffer (\S+): (\d+) bytes")


def print_host(host: HostProgram) -> str:
    """The readable form; one line a buffer and a node, loop bodies indented."""
    lines = [f"host {host.name} on {host.mesh}"]
    lines.append(f"{_STEP}streams {host.num_streams}, events {host.num_events}")
    lines += [
        f"{_STEP}symmetric buffer {symmetric_buffer.mesh_axis}: {symmetric_buffer.num_bytes} bytes"
        for symmetric_buffer in host.symmetric_buffers
    ]
    lines += [_STEP + print_tensor(buffer) for buffer in host.buffers]
    for segment in host.segments:
        lines += [_STEP + line for line in print_program(segment).splitlines()]
    lines.append(f"{_STEP}body")
    lines += _print_body(host.body, 2 * _STEP)
    lines.append(f"{_STEP}return {', '.join(host.outputs)}".rstrip())
    return "\n".join(lines) + "\n"


def _print_body(body: Sequence[Node], indent: str) -> list[str]:
    lines = []
    for node in body:
        lines.append(indent + print_node(node))
        if isinstance(node, ForLoop):
            lines += _print_body(node.body, indent + _STEP)
    return lines


def print_node(node: Node) -> str:
    """A node on one line; of a loop, its head."""
    match node:
        case Allocate(buffer=buffer):
            return f"allocate {buffer}"
        case Deallocate(buffer=buffer):
            return f"free {buffer}"
        case ForLoop(index=index, extent=extent):
            return f"for {index} in {extent}:"
        case LaunchMegakernel(kernel=kernel, args=args):
            return f"launch {kernel}({', '.join(map(_arg, args))})"
        case LibraryOp(op=op):
            return print_op(op)
        case FusedMatmul():
            return _print_fused(node)
        case SliceView():
            return _print_slice(node)
        case SetStream() | RecordEvent() | WaitEvent() | Signal() | WaitSignal():
            return _print_order(node)
        case _:
            return _print_communication(node)


def _print_slice(node: SliceView) -> str:
    text = f"slice {node.view} of {node.buffer} dim {node.dim} by {node.index or 0}"
    text += f" + {node.shift}" if node.shift else ""
    text += f" step {node.step}" if node.step else ""
    return text + (f" ring {node.swizzle}" if node.swizzle else "")


def _print_fused(node: FusedMatmul) -> str:
    text = f"{node.kind} {node.mesh_axis} ({node.x}, {node.w}) -> {node.out} rows {node.num_rows}"
    return (
        text
        + " borrowed" * node.borrows
        + " replicated" * node.replicated
        + " forced" * node.forced
        + (f" mixes {node.mixes}" if node.mixes else "")
        + (_print_norm(node.norm) if node.norm else "")
    )


def _print_norm(norm: SumNorm) -> str:
    eps = print_attrs((("eps", norm.eps),))
    return f" {norm.kind} ({', '.join(norm.reads)}) -> {norm.total}{eps}"


def _print_order(node: SetStream | RecordEvent | WaitEvent | Signal | WaitSignal) -> str:
    match node:
        case SetStream(stream=stream):
            return f"stream {_slot(stream)}"
        case RecordEvent(event=event):
            return f"record event {_slot(event)}"
        case WaitEvent(event=event):
            return f"wait event {_slot(event)}"
        case Signal(name=name, peer=peer):
            return f"signal {name} to {_peer(peer)}"
        case WaitSignal(name=name, peer=peer):
            return f"wait signal {name} from {_peer(peer)}"


def _print_communication(
    node: Collective | Send | Recv | StartCoalescing | EndCoalescing | Wait,
) -> str:
    match node:
        case Collective(kind=kind, mesh_axis=axis, ins=ins, outs=outs, handle=handle):
            names = f"({', '.join(ins)}) -> ({', '.join(outs)})"
            return f"{kind} {axis} {names} as {handle}{print_attrs(node.attrs)}"
        case Send(buffer=buffer, peer=peer, handle=handle):
            return f"send {buffer} to {_peer(peer)}" + (f" as {handle}" if handle else "")
        case Recv(buffer=buffer, peer=peer, handle=handle):
            return f"recv {buffer} from {_peer(peer)}" + (f" as {handle}" if handle else "")
        case StartCoalescing():
            return "coalesce"
        case EndCoalescing(handle=handle):
            return f"end coalesce as {handle}"
        case Wait(handle=handle):
            return f"wait {handle}"


def _arg(arg: Binding) -> str:
    return arg.name if arg.name == arg.buffer else f"{arg.name}={arg.buffer}"


def _slot(slot: Slot) -> str:
    if not slot.index:
        return str(slot.base)
    index = f"({slot.index} + {slot.shift})" if slot.shift else slot.index
    return f"{slot.base} + {index} % {slot.count}"


def _peer(peer: Peer) -> str:
    return (
        f"{peer.mesh_axis}[{peer.offset:+d}]" if peer.ring else f"{peer.mesh_axis}[{peer.offset}]"
    )


def parse_host(text: str) -> HostProgram:
    """Reads the printed form back; ParseError names the line that does not fit."""
    lines = [line.rstrip() for line in bounded_lines(text)]
    name, mesh = _fields(r"host (.+) on (mesh\(.+)", lines[0] if lines else "")
    streams, events = _fields(r"streams (\d+), events (\d+)", "".join(lines[1:2]).strip())
    buffers, segments, symmetric_buffers, at = [], [], [], 2
    while at < len(lines) and lines[at].strip() != "body":
        if lines[at].lstrip().startswith("program "):
            end = next((i for i in range(at, len(lines)) if _is_return(lines[i])), at)
            segments.append(parse_program("\n".join(lines[at : end + 1])))
            at = end + 1
        elif match := _SYMMETRIC.fullmatch(lines[at].strip()):
            symmetric_buffers.append(
                SymmetricBuffer(mesh_axis=match[1], num_bytes=parse_number(match[2]))
            )
            at += 1
        elif buffer := parse_tensor(lines[at].strip()):
            buffers.append(buffer)
            at += 1
        else:
            raise _unreadable(lines[at])
    if at == len(lines) or not _is_return(lines[-1]):
        raise _unreadable(lines[-1])
    return HostProgram(
        name=name,
        mesh=DeviceMesh.parse(mesh),
        buffers=tuple(buffers),
        body=_parse_body(lines[at + 1 : -1], MAX_LOOP_DEPTH),
        outputs=parse_names(lines[-1].strip().removeprefix("return")),
        segments=tuple(segments),
        num_streams=parse_number(streams),
        num_events=parse_number(events),
        symmetric_buffers=tuple(symmetric_buffers),
    )


def _is_return(line: str) -> bool:
    return line.strip() == "return" or line.lstrip().startswith("return ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _parse_body(lines: Sequence[str], max_depth: int) -> tuple[Node, ...]:
    nodes: list[Node] = []
    at = 0
    while at < len(lines):
        line, depth = lines[at], _indent(lines[at])
        at += 1
        head = re.fullmatch(r"for (\S+) in (\d+):", line.strip())
        if head is None:
            nodes.append(parse_node(line.strip()))
            continue
        if not max_depth:
            raise ParseError(
                f"loops inside each other down to {line.strip()!r}",
                expected=f"at most {MAX_LOOP_DEPTH}",
                remedy="check where the text comes from",
            )
        end = next((i for i in range(at, len(lines)) if _indent(lines[i]) <= depth), len(lines))
        body = _parse_body(lines[at:end], max_depth - 1)
        nodes.append(ForLoop(index=head[1], extent=parse_number(head[2]), body=body))
        at = end
    return tuple(nodes)


def _parse_slot(text: str) -> Slot:
    pattern = r"(\d+)(?: \+ \(?([^\s()]+)(?: \+ (\d+)\))? % (\d+))?"
    base, index, shift, count = _fields(pattern, text)
    return Slot(
        base=parse_number(base),
        index=index,
        count=parse_number(count or "1"),
        shift=parse_number(shift or "0"),
    )


def _parse_peer(text: str) -> Peer:
    axis, offset = _fields(r"(\S+)\[([+-]?\d+)\]", text)
    return Peer(mesh_axis=axis, offset=parse_number(offset), ring=offset[0] in "+-")


def _parse_arg(text: str) -> Binding:
    name, _, buffer = text.partition("=")
    return Binding(name=name, buffer=buffer or name)


def _parse_slice(
    view: str, buffer: str, dim: str, index: str, shift: str, step: str, ring: str
) -> Node:
    return SliceView(
        view=view,
        buffer=buffer,
        dim=parse_number(dim),
        index=index,
        shift=parse_number(shift or "0"),
        step=parse_number(step or "0"),
        swizzle=ring,
    )


def _parse_fused(
    kind: str,
    axis: str,
    x: str,
    w: str,
    out: str,
    rows: str,
    borrowed: str,
    replicated: str,
    forced: str,
    norm: str,
    given: str,
    total: str,
    attrs: str,
    mixes: str,
) -> Node:
    return FusedMatmul(
        kind=kind,  # type: ignore[arg-type]
        mesh_axis=axis,
        x=x,
        w=w,
        out=out,
        num_rows=parse_number(rows),
        borrows=bool(borrowed),
        replicated=bool(replicated),
        forced=bool(forced),
        mixes=mixes,
        norm=_parse_norm(norm, given, total, attrs) if norm else None,
    )


def _parse_norm(kind: str, given: str, total: str, attrs: str) -> SumNorm:
    names, found = parse_names(given), dict(parse_attrs(attrs))
    eps = found.pop("eps", None)
    if not 2 <= len(names) <= 3 or found or not isinstance(eps, float):
        raise _unreadable(f"{kind} ({given}) -> {total} |{attrs}")
    return SumNorm(
        kind=kind,  # type: ignore[arg-type]
        eps=eps,
        residual=names[0],
        total=total,
        weight=names[1],
        bias=names[2] if len(names) == 3 else "",
    )


def _parse_collective(kind: str, axis: str, ins: str, outs: str, handle: str, attrs: str) -> Node:
    return Collective(
        kind=kind,  # type: ignore[arg-type]
        mesh_axis=axis,
        ins=parse_names(ins),
        outs=parse_names(outs),
        handle=handle,
        attrs=parse_attrs(attrs),
    )


_FORMS: tuple[tuple[str, Callable[..., Node]], ...] = (
    (r"allocate (\S+)", lambda b: Allocate(buffer=b)),
    (r"free (\S+)", lambda b: Deallocate(buffer=b)),
    (r"stream (\d.*)", lambda s: SetStream(stream=_parse_slot(s))),
    (r"record event (.+)", lambda e: RecordEvent(event=_parse_slot(e))),
    (r"wait event (.+)", lambda e: WaitEvent(event=_parse_slot(e))),
    (r"wait signal (\S+) from (\S+)", lambda n, p: WaitSignal(name=n, peer=_parse_peer(p))),
    (r"signal (\S+) to (\S+)", lambda n, p: Signal(name=n, peer=_parse_peer(p))),
    (r"wait (\S+)", lambda h: Wait(handle=h)),
    (
        r"launch (?!= \w+\[)(.+)\(([^()]*)\)",  # not an op that is called "launch"
        lambda k, a: LaunchMegakernel(kernel=k, args=tuple(map(_parse_arg, parse_names(a)))),
    ),
    (
        r"slice (\S+) of (\S+) dim (\d+) by (?:0|(\S+))(?: \+ (\d+))?"
        r"(?: step (\d+))?(?: ring (\S+))?",
        _parse_slice,
    ),
    (
        r"send (\S+) to (\S+)(?: as (\S+))?",
        lambda b, p, h: Send(buffer=b, peer=_parse_peer(p), handle=h),
    ),
    (
        r"recv (\S+) from (\S+)(?: as (\S+))?",
        lambda b, p, h: Recv(buffer=b, peer=_parse_peer(p), handle=h),
    ),
    (r"coalesce", lambda: StartCoalescing()),
    (r"end coalesce as (\S+)", lambda h: EndCoalescing(handle=h)),
    (
        r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast) (\S+)"
        r" \(([^()]*)\) -> \(([^()]*)\) as (\S+)(?: \|(.*))?",
        _parse_collective,
    ),
    (
        r"(all_gather_matmul|matmul_reduce_scatter|matmul_all_reduce) (\S+)"
        r" \((\S+), (\S+)\) -> (\S+) rows (\d+)( borrowed)?( replicated)?( forced)?"
        r"(?: (rms_norm|layer_norm) \(([^()]*)\) -> (\S+) \|(.*)|(?: mixes (.+))?)",
        _parse_fused,
    ),
)
"""Line pattern -> node of its groups; a line that fits none is a library op."""


def parse_node(line: str) -> Node:
    """Reads `print_node` back, for all but loops; ParseError names the line."""
    for pattern, build in _FORMS:
        if match := re.fullmatch(pattern, line):
            return build(*match.groups(default=""))
    return LibraryOp(op=parse_op(line))


def _fields(pattern: str, text: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise _unreadable(text)
    return match.groups(default="")


def _unreadable(line: str) -> ParseError:
    return unreadable(line, "the head of hostir/ir/text.py")
