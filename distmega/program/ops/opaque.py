"""Kind `opaque`: an operator of torch that the other kinds don't state, run by torch on each rank.

As compute.py: names and tensors in, the Op and the tensors it writes out. Every axis is needed
whole, so no rank divides it. `hostir/library/opaque.py` runs it.
"""

from collections.abc import Sequence

from distmega.program.kinds import OpKind, define
from distmega.program.ops.parts import Built, access, axis_names, bad_op, make_op
from distmega.program.types import Access, Axis, AxisRole, Tensor


def opaque(
    name: str,
    target: str,
    call: str,
    operands: Sequence[Tensor],
    results: Sequence[tuple[tuple[int, ...], str]],
) -> Built:
    """target(...) of whole tensors. target: operator and overload, "aten.convolution.default".

    call: its arguments as JSON, tensors by their place among `operands` (see the library's
    opaque.py). results: shape and dtype of each; outputs are [name], [name].1, [name].2 ...
    """
    if not results or target.count(".") != 2:
        raise bad_op(name, f"{target!r} with {len(results)} results", "ns.operator.overload, one")
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
    return make_op(name, "opaque", axes, reads, writes, target=target, call=call), outs


define(OpKind(name="opaque", calls_torch=True))
