"""Kind `opaque`: an operator of torch that the other kinds don't state, run by torch on each rank.

As compute.py: names and tensors in, the Op and the tensors it writes out. Every axis is needed
whole, so no rank divides it. `hostir/library/opaque.py` runs it.
"""

from collections.abc import Sequence

from distmega.arguments import is_list, shown
from distmega.errors import counted
from distmega.program.dtypes import short_dtype
from distmega.program.kinds import TEXT, OpKind, define
from distmega.program.ops.axis_views import access_axes
from distmega.program.ops.parts import (
    Built,
    access,
    as_stated,
    axis_names,
    bad_op,
    make_op,
    whole_number_list,
)
from distmega.program.types import Access, Axis, AxisRole, Op, Tensor


def opaque(
    name: str,
    target: str,
    call: str,
    operands: Sequence[Tensor],
    results: Sequence[tuple[tuple[int, ...], str]],
    host_reads: str = "",
) -> Built:
    """target(...) of whole tensors. target: operator and overload, "aten.convolution.default", or
    "higher_order.cond"; several, with a comma between them, for a graph of them.

    call: its arguments as JSON, tensors by their place among `operands`, or the graph (see the
    library's opaque.py). results: shape and dtype of each; outputs are [name], [name].1, ...
    host_reads: what the host reads of the device each time, "" for nothing.
    """
    for what, text in (("target", target), ("call", call), ("host_reads", host_reads)):
        if not isinstance(text, str):
            raise bad_op(name, f"{what} {shown(text)}", "a text")
    results = _results(name, results)
    if not results or any(not 1 <= each.count(".") <= 2 for each in target.split(", ")):
        found = f"{shown(target)} with {counted(len(results), 'result')}"
        raise bad_op(name, found, "ns.operator.overload, one")
    axes: list[Axis] = []

    def whole(tensor: Tensor, prefix: str, role: AxisRole) -> Access:
        names = axis_names(prefix, len(tensor.shape))
        sized = zip(names, tensor.shape, strict=True)
        axes.extend(Axis(name=axis, extent=extent, role=role) for axis, extent in sized)
        return access(tensor, *names)

    outs = tuple(
        Tensor(name=name if position == 0 else f"{name}.{position}", shape=shape, dtype=dtype)
        for position, (shape, dtype) in enumerate(results)
    )
    reads = [whole(x, f"r{position}_", "reduce") for position, x in enumerate(operands)]
    writes = [whole(y, f"w{position}_", "scatter") for position, y in enumerate(outs)]
    more = {"host_reads": host_reads} if host_reads else {}
    return make_op(name, "opaque", axes, reads, writes, target=target, call=call, **more), outs


def _results(name: str, given: object) -> list[tuple[tuple[int, ...], str]]:
    """The shape and the dtype of each; ProgramError for what is no sequence of both."""
    if not is_list(given) or not all(is_list(each) and len(each) == 2 for each in given):
        raise bad_op(name, f"results {shown(given)}", "the shape and the dtype of each")
    return [
        (tuple(whole_number_list(name, "extent", shape)), short_dtype(dtype))
        for shape, dtype in given
    ]


def _restated(op: Op, *operands: Tensor) -> Built:
    """With results of any type, which torch alone knows."""
    shapes = [tuple(op.extents[name] for name in access_axes(write)) for write in op.writes]
    target, call, host_reads = (str(op.get(key, "")) for key in ("target", "call", "host_reads"))
    results = [(shape, "f32") for shape in shapes]
    return opaque(op.name, target, call, operands, results, host_reads)[0], ()


define(
    OpKind(
        name="opaque",
        calls_torch=True,
        reads_whole=True,
        attrs={"target": TEXT, "call": TEXT, "host_reads": TEXT.optional()},
        misfit=as_stated(_restated),
    )
)
