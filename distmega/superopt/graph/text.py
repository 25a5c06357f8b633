"""Printed form of uGraphs, and its parser: `parse_graph(print_graph(g)) == g`.

    ugraph lora
      axis k:4096
      input x: bf16[k]
      temp y: bf16[n]
      kernel k0 grid n:128 loop k:16
        load x = x(k) imap - fmap 0
        before p = map[k] 'a0 * 2.0' x
        body acc = contract[n] x w over k
        after y = map[n] 'silu(a0)' acc
        store y omap 0 fmap -
      return y

A dim of several axes joins them by `.`; one of extent 1 is `1`; `-` stands for no dim.
"""

import re
from collections.abc import Sequence
from typing import cast

from distmega.arguments import shown
from distmega.errors import ParseError
from distmega.superopt.graph.named import Dims
from distmega.superopt.graph.ugraph import BlockOp, GraphTensor, Kernel, Load, Stage, Store, UGraph
from distmega.superopt.graph.verify import verify_graph


def print_graph(graph: UGraph) -> str:
    """The readable form."""
    lines = [f"ugraph {graph.name}"]
    lines += [f"  axis {name}:{extent}" for name, extent in graph.extents]
    lines += [f"  {t.role} {t.name}: {t.dtype}[{_dims(t.dims)}]" for t in graph.tensors]
    for kernel in graph.kernels:
        lines.append(f"  kernel {kernel.name}{_parts('grid', kernel.grid)}{_loop(kernel)}")
        lines += [f"    {line}" for line in _kernel_lines(kernel)]
    lines.append(f"  return {', '.join(graph.outputs)}")
    return "\n".join(lines) + "\n"


def _kernel_lines(kernel: Kernel) -> list[str]:
    lines = [
        f"load {x.name} = {x.tensor}({_dims(x.dims)}) imap {_map(x.imap)} fmap {_map((x.fmap,))}"
        for x in kernel.loads
    ]
    lines += [print_op(op) for op in kernel.ops]
    lines += [f"store {s.name} omap {_map(s.omap)} fmap {_map((s.fmap,))}" for s in kernel.stores]
    return lines


def print_op(op: BlockOp) -> str:
    """An op on one line."""
    text = f"{op.stage} {op.name} = {op.kind}[{', '.join(op.axes)}]"
    text += f" '{op.expr}'" if op.kind == "map" else ""
    text += "".join(f" {arg}" for arg in op.args)
    text += f" over {', '.join(op.reduced)}" if op.reduced else ""
    return text + (f" as {op.joined}" if op.joined else "")


def _dims(dims: Dims) -> str:
    return ", ".join(".".join(dim) or "1" for dim in dims)


def _map(dims: Sequence[int]) -> str:
    return " ".join("-" if dim < 0 else str(dim) for dim in dims) or "none"


def _parts(word: str, parts: Sequence[tuple[str, int]]) -> str:
    return f" {word} " + " ".join(f"{axis}:{count}" for axis, count in parts) if parts else ""


def _loop(kernel: Kernel) -> str:
    return _parts("loop", [kernel.loop]) if kernel.loop else ""


_NAME = r"[\w./@#-]+"
_TENSOR = re.compile(rf"(input|weight|temp) ({_NAME}): (\w+)\[(.*)\]")
_KERNEL = re.compile(rf"kernel ({_NAME})(?: grid ((?:\w+:\d+ ?)+?))?(?: loop (\w+:\d+))?")
_LOAD = re.compile(rf"load ({_NAME}) = ({_NAME})\((.*)\) imap ([-\d ]+|none) fmap (-|\d+)")
_STORE = re.compile(rf"store ({_NAME}) omap ([-\d ]+|none) fmap (-|\d+)")
_OP = re.compile(
    rf"(before|body|after) ({_NAME}) = (\w+)\[([\w, ]*)\](?: '([^']*)')?((?: {_NAME})*?)"
    r"(?: over ([\w, ]+?))?(?: as (\w+))?"
)


def parse_graph(text: str) -> UGraph:
    """Reads the printed form back and verifies it. ParseError or VerifyError."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not lines[0].startswith("ugraph ") or not lines[-1].startswith("return "):
        raise _unreadable(lines[0] if lines else text)
    extents: list[tuple[str, int]] = []
    tensors: list[GraphTensor] = []
    kernels: list[list[str]] = []
    for line in lines[1:-1]:
        if line.startswith("kernel "):
            kernels.append([line])
        elif kernels:
            kernels[-1].append(line)
        elif match := re.fullmatch(r"axis (\w+):(\d+)", line):
            extents.append((match[1], _read_number(match[2])))
        elif match := _TENSOR.fullmatch(line):
            role = cast(str, match[1])
            assert role in ("input", "weight", "temp")
            tensors.append(
                GraphTensor(name=match[2], dtype=match[3], dims=_read_dims(match[4]), role=role)  # type: ignore[arg-type]
            )
        else:
            raise _unreadable(line)
    graph = UGraph(
        name=lines[0].removeprefix("ugraph "),
        extents=tuple(extents),
        tensors=tuple(tensors),
        kernels=tuple(map(_read_kernel, kernels)),
        outputs=_names(lines[-1].removeprefix("return ")),
    )
    return verify_graph(graph)


def _read_kernel(lines: Sequence[str]) -> Kernel:
    head = _KERNEL.fullmatch(lines[0])
    if not head:
        raise _unreadable(lines[0])
    loads: list[Load] = []
    ops: list[BlockOp] = []
    stores: list[Store] = []
    for line in lines[1:]:
        if match := _LOAD.fullmatch(line):
            name, tensor, dims, imap, fmap = match.groups()
            loads.append(
                Load(
                    name=name,
                    tensor=tensor,
                    dims=_read_dims(dims),
                    imap=_read_map(imap),
                    fmap=_read_map(fmap)[0],
                )
            )
        elif match := _STORE.fullmatch(line):
            stores.append(
                Store(name=match[1], omap=_read_map(match[2]), fmap=_read_map(match[3])[0])
            )
        else:
            ops.append(parse_op(line))
    return Kernel(
        name=head[1],
        grid=tuple(map(_read_part, (head[2] or "").split())),
        loop=_read_part(head[3]) if head[3] else None,
        loads=tuple(loads),
        ops=tuple(ops),
        stores=tuple(stores),
    )


def parse_op(line: str) -> BlockOp:
    """Reads `print_op` back; ParseError if the line is no op."""
    match = _OP.fullmatch(line)
    if not match:
        raise _unreadable(line)
    stage, name, kind, axes, text, args, reduced, joined = match.groups(default="")
    return BlockOp(
        name=name,
        kind=kind,
        args=tuple(args.split()),
        axes=_names(axes),
        stage=cast(Stage, stage),
        reduced=_names(reduced),
        expr=text,
        joined=joined,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(", ") if part)


def _read_dims(text: str) -> Dims:
    return tuple(() if part == "1" else tuple(part.split(".")) for part in _names(text))


def _read_map(text: str) -> tuple[int, ...]:
    words = (word for word in text.split() if word != "none")
    return tuple(-1 if word == "-" else _read_number(word) for word in words)


def _read_part(text: str) -> tuple[str, int]:
    axis, _, count = text.partition(":")
    return axis, _read_number(count)


def _read_number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _unreadable(text)
    return int(text)


def _unreadable(line: str) -> ParseError:
    return ParseError(
        f"cannot read {shown(line)}",
        expected="a line as print_graph writes it",
        remedy="see distmega/superopt/graph/text.py",
    )
