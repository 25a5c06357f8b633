"""Gives the buffers and handles of host nodes other names. Used by pipeline.py."""

from collections.abc import Callable
from dataclasses import replace

from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import (
    Allocate,
    Collective,
    Deallocate,
    EndCoalescing,
    ForLoop,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Recv,
    Send,
    SliceView,
    Wait,
)
from distmega.program.types import Access

Names = Callable[[str], str]


def rename_node(node: Node, buffers: Names, handles: Names) -> Node:
    """The node, and the nodes of its body, with every buffer and handle named anew."""
    match node:
        case Allocate(buffer=buffer) | Deallocate(buffer=buffer):
            return replace(node, buffer=buffers(buffer))
        case Send(buffer=buffer, handle=handle) | Recv(buffer=buffer, handle=handle):
            return replace(node, buffer=buffers(buffer), handle=handles(handle) if handle else "")
        case Wait(handle=handle) | EndCoalescing(handle=handle):
            return replace(node, handle=handles(handle))
        case SliceView(view=view, buffer=buffer):
            return replace(node, view=buffers(view), buffer=buffers(buffer))
        case ForLoop(body=body):
            return replace(node, body=tuple(rename_node(each, buffers, handles) for each in body))
        case Collective(ins=ins, outs=outs, handle=handle):
            return replace(
                node,
                ins=tuple(map(buffers, ins)),
                outs=tuple(map(buffers, outs)),
                handle=handles(handle),
            )
        case FusedMatmul(x=x, w=w, out=out, norm=norm):
            if norm is not None:
                norm = replace(
                    norm,
                    residual=buffers(norm.residual),
                    total=buffers(norm.total),
                    weight=buffers(norm.weight),
                    bias=buffers(norm.bias) if norm.bias else "",
                )
            return replace(node, x=buffers(x), w=buffers(w), out=buffers(out), norm=norm)
        case LaunchMegakernel(args=args):
            renamed = (replace(arg, buffer=buffers(arg.buffer)) for arg in args)
            return replace(node, args=tuple(renamed))
        case LibraryOp(op=op):
            reads, writes = (
                tuple(Access(tensor=buffers(a.tensor), dims=a.dims) for a in operands)
                for operands in (op.reads, op.writes)
            )
            return replace(node, op=replace(op, reads=reads, writes=writes))
    return node
