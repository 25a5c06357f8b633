"""Library ops: the references of op kinds, or what torch does more quickly.

A kind's definition (distmega/program/ops/) says what it computes. Here stand contractions and
attention by torch's own kernels, and what runs each kind; beside this file formulas (pointwise.py),
norms.py, experts.py and operators of torch (opaque.py). `compile_op` binds an Op once
to a function of its operands; `run_op` is the same by tensor names. Sums are taken in fp32 or
wider, results have the operand's type and own their storage (kind `view` excepted). Used by
evaluator.py.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.errors import ProgramError
from distmega.hostir.library import experts, late
from distmega.hostir.library.heads import (
    attend_in_turn,
    compile_heads,
    compile_step,
    move_heads,
)
from distmega.hostir.library.matmuls import (
    compile_mixed,
    compile_shaped,
    compile_split,
    mixed_product,
    shaped_product,
)
from distmega.hostir.library.norms import compile_norm, normalise
from distmega.hostir.library.pointwise import OpFunction, compile_pointwise, evaluate_all
from distmega.hostir.library.rows import compile_rows, run_rows
from distmega.hostir.library.torch_types import operand_dtype, widen
from distmega.hostir.passes.fuse_attention import FUSED
from distmega.program import types as program
from distmega.program.kinds import Coordinate, kind_of, kinds
from distmega.program.ops.axis_views import (
    access_axes,
    fold_axes,
    is_plain,
    order_axes,
    unfold_axes,
)
from distmega.program.ops.lookups import require_ids
from distmega.program.types import Op, accesses, grouped_index


class Batch(NamedTuple):
    """The axes of matrix products side by side: the one that all operands have, those of rows, of
    columns and of sums, "" without.
    """

    each: str
    row: str
    column: str
    sum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Axis names of a contraction, one a dim. `bias` is empty without one."""

    x: tuple[str, ...]
    w: tuple[str, ...]
    bias: tuple[str, ...]
    out: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Leading dims of x that are rows of a plain matrix product, -1 where the axes are not so
        grouped.

        Grouped means x = rows + sums, w = columns + sums, out = rows + columns, bias = columns.
        """
        sums = tuple(name for name in self.x if name not in self.out)
        rows, columns = self.x[: len(self.x) - len(sums)], self.w[: len(self.w) - len(sums)]
        grouped = self.x == rows + sums and self.w == columns + sums and self.out == rows + columns
        return len(rows) if grouped and self.bias in ((), columns) else -1

    @property
    def batch(self) -> Batch | None:
        """Its axes as a batch of matrix products, None where it has two of a sort or none for all
        operands.
        """
        x, w, out = set(self.x), set(self.w), set(self.out)
        sorts = [x & w & out, (x & out) - w, (w & out) - x, (x & w) - out]
        alone = (x ^ w) - out or len(x) + len(w) < len(self.x) + len(self.w)
        if alone or len(sorts[0]) != 1 or max(map(len, sorts)) > 1:
            return None
        return Batch(*("".join(names) for names in sorts))


def linear_spec(op: Op) -> LinearSpec:
    """The contraction that an op of kind linear states by its access maps."""
    reads = [access_axes(access) for access in op.reads]
    bias = reads[2] if len(reads) == 3 else ()
    return LinearSpec(x=reads[0], w=reads[1], bias=bias, out=access_axes(op.writes[0]))


def is_matrix_product(op: Op) -> bool:
    """Whether an op of kind linear has rows of x and columns of w, each tensor as a whole."""
    spec = linear_spec(op)
    has_both = spec.num_rows > 0 and len(spec.out) > spec.num_rows
    return has_both and all(map(is_plain, accesses(op)))


def linear(x: Tensor, w: Tensor, bias: Tensor | None, spec: LinearSpec, num_rows: int) -> Tensor:
    """Sum of x * w over the axes missing from the output, plus bias; `num_rows` is spec.num_rows,
    asked once.
    """
    dtype = operand_dtype(x)
    wide = x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)
    out = _einsum(*wide, spec) if num_rows < 0 else _matmul(*wide, num_rows)
    return out.to(x.dtype)


def _matmul(x: Tensor, w: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    rows, columns = x.shape[:num_rows], w.shape[: w.dim() - x.dim() + num_rows]
    num_sums = math.prod(x.shape[num_rows:])  # 0 where a symbol says so
    flat_bias = None if bias is None else bias.reshape(-1)
    flat_x, flat_w = x.reshape(math.prod(rows), num_sums), w.reshape(math.prod(columns), num_sums)
    return F.linear(flat_x, flat_w, flat_bias).reshape(rows + columns)


def _einsum(x: Tensor, w: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    batch = spec.batch
    out = _batched(x, w, spec, batch) if batch else contract_axes(x, w, spec)
    return out if bias is None else out + order_axes(bias, spec.bias, spec.out)


def contract_axes(x: Tensor, w: Tensor, spec: LinearSpec) -> Tensor:
    """Sum of x * w over the axes missing from the output, by torch's einsum."""
    names = {name: n for n, name in enumerate(dict.fromkeys(spec.x + spec.w))}
    parts = spec.x, spec.w, spec.out
    x_axes, w_axes, out_axes = ([names[name] for name in part] for part in parts)
    return torch.einsum(x, x_axes, w, w_axes, out_axes)


def _batched(x: Tensor, w: Tensor, spec: LinearSpec, batch: Batch) -> Tensor:
    """Matrix products side by side, written where they belong: einsum would copy x and the result
    where the axis that all have is not the first.
    """
    extents = dict(zip(spec.x + spec.w, (*x.shape, *w.shape), strict=True))
    out = x.new_empty([extents[name] for name in spec.out])
    torch.bmm(
        _three_dims(x, spec.x, (batch.each, batch.row, batch.sum)),
        _three_dims(w, spec.w, (batch.each, batch.sum, batch.column)),
        out=_three_dims(out, spec.out, (batch.each, batch.row, batch.column)),
    )
    return out


def _three_dims(x: Tensor, names: Sequence[str], order: Sequence[str]) -> Tensor:
    """A view by named dims in an order, with a dim of one element for a name that is empty."""
    found = x.permute([names.index(name) for name in order if name])
    for dim, name in enumerate(order):
        found = found if name else found.unsqueeze(dim)
    return found


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of q [m, h, g, d] over caches [h, t, d] and [h, t, e], or over [m, h, t, d]
    and [m, h, t, e], a cache a row; only what some query sees is read.

    Query i sees t <= positions[i], and t > positions[i] - window where window > 0; one that sees
    nothing gives zeros. Softmax in fp32 or wider. softcap > 0: of softcap * tanh(score / softcap).
    """
    dtype, numbers = operand_dtype(q), positions.tolist()
    rows = q.to(dtype)
    if k_cache.dim() == 4:
        # a row at a time: what it does not see may be anything, also no number
        found = []
        for i, position in enumerate(numbers):
            span = _seen_span(k_cache.shape[-2], position, position, window)
            keys, values = (x[i : i + 1, :, span].to(dtype) for x in (k_cache, v_cache))
            found.append(_mixed(rows[i : i + 1], keys, values, None, scale, softcap))
        return torch.cat(found).to(q.dtype)
    span = _seen_span(k_cache.shape[-2], min(numbers), max(numbers), window)
    mask = _visible(span.start, span.stop, positions, window) if len(numbers) > 1 else None
    keys, values = (x[:, span].to(dtype).unsqueeze(1) for x in (k_cache, v_cache))
    keys, values = (x.expand(-1, q.shape[2], -1, -1) for x in (keys, values))
    out = _mixed(rows.permute(1, 2, 0, 3), keys, values, mask, scale, softcap)
    return out.permute(2, 0, 1, 3).contiguous().to(q.dtype)


def _seen_span(context: int, lowest: int, highest: int, window: int) -> slice:
    """Of the positions of a cache, those that some query at positions lowest to highest sees."""
    stop = min(max(0, highest + 1), context)
    return slice(min(max(0, lowest + 1 - window), stop) if window else 0, stop)


def _visible(start: int, stop: int, positions: Tensor, window: int) -> Tensor:
    """Which of the positions from start up to stop queries at `positions` see, [m, stop - start]:
    see attention.
    """
    seen, here = torch.arange(start, stop, device=positions.device), positions.unsqueeze(1)
    mask = seen <= here
    if window:
        mask &= seen > here - window
    return mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    order: Sequence[int] = (0, 1, 2, 3),
) -> Tensor:
    """Attention of q [b, h g, m, d] over k [b, h, t, d] and v [b, h, t, e] under a mask: bool, what
    may be seen, or floats, added. Rows that may see nothing are zero. Softmax in fp32 or wider.
    order: of the result's dims, of [b, h g, m, e].
    """
    dtype, group = operand_dtype(q), q.shape[1] // k.shape[1]
    rows, keys, values = (x.to(dtype) for x in (q, k, v))
    if group > 1:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    out = _mixed(rows, keys, values, mask, scale, softcap)
    if mask is not None and mask.dtype == torch.bool:
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out.permute(*order).contiguous().to(q.dtype)


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention of tensors of one type and of as many heads, with a soft cap if there is one; zeros
    where a mask of bools lets nothing be seen.
    """
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.tanh(widen(q @ k.transpose(-1, -2)) * (scale / softcap)) * softcap
    if mask is None or mask.dtype != torch.bool:
        scores = scores if mask is None else scores + mask
        return torch.softmax(scores, -1).to(q.dtype) @ v
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1).to(q.dtype)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ v


def packed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    sequences: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As attention, of q [m, h, g, d] whose row m sees cache sequences[m] of [s, h, t, d] and
    [s, h, t, e], or of the only one where there is no s. Asks the device which rows those are.
    RequestError for sequences on a CPU that have no cache.
    """
    require_ids(sequences, k_cache.shape[0] if k_cache.dim() == 4 else 1)
    if k_cache.dim() == 3:
        return attention(q, k_cache, v_cache, positions, scale, window, softcap)
    out = q.new_zeros(*q.shape[:3], v_cache.shape[-1])
    for sequence in torch.unique(sequences).tolist():
        rows = (sequences == sequence).nonzero().squeeze(1)
        own = k_cache[sequence], v_cache[sequence], positions[rows]
        out[rows] = attention(q[rows], *own, scale, window, softcap)
    return out


def is_packed(op: Op) -> bool:
    """Whether an op has all rows of an attention over packed sequences, as its `starts` say."""
    return op.get("packed", 0) == op.extents["m"]


def masked_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As attention, over whole caches under a mask: the host need not know positions."""
    num_rows, heads, group, _ = q.shape
    dtype = operand_dtype(q)
    mask = _visible(0, k_cache.shape[-2], positions, window)
    seen = mask[:, None, :, None] if k_cache.dim() == 4 else mask.any(0)[:, None]
    # what nobody sees may be anything, also no number
    keys, values = (x.to(dtype).masked_fill(~seen, 0) for x in (k_cache, v_cache))
    rows = q.to(dtype)
    if k_cache.dim() == 4:
        mask = mask[:, None, None]
        return _mixed(rows, keys, values, mask, scale, softcap).contiguous().to(q.dtype)
    rows = rows.permute(1, 2, 0, 3).reshape(1, heads, group * num_rows, -1)
    mask = mask.repeat(group, 1)
    out = _mixed(rows, keys.unsqueeze(0), values.unsqueeze(0), mask, scale, softcap)
    out = out.reshape(heads, group, num_rows, -1).permute(2, 0, 1, 3)
    return out.contiguous().to(q.dtype)


def attends_in_order(op: Op) -> bool:
    """Whether an op has all rows of an attention over one cache, at positions 0, 1, 2 ..."""
    rows, is_shared = op.extents["m"], len(op.reads[1].dims) == 3
    in_order = op.get("in_order", 0) == rows <= op.extents["t"]
    return in_order and is_shared and not op.get("softcap", 0)


def ordered_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int
) -> Tensor:
    """As attention, of q [m, h, g, d] over [h, t, d] and [h, t, e] at positions 0, 1, 2 ..."""
    num_rows, heads, group, dim = q.shape
    dtype = operand_dtype(q)
    rows = q.to(dtype).reshape(num_rows, heads * group, dim).transpose(0, 1)
    keys, values = k_cache[:, :num_rows], v_cache[:, :num_rows]
    q4, k4, v4 = (x.to(dtype).unsqueeze(0) for x in (rows, keys, values))
    mask = None
    if 0 < window < num_rows:
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device)
        mask = mask.tril().triu(1 - window)
    out = F.scaled_dot_product_attention(
        q4, k4, v4, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(num_rows, heads, group, -1).to(q.dtype)


def number(op: Op, name: str, default: float = 0.0) -> float:
    """An attribute of an op that is a number; ProgramError for another one."""
    value = op.get(name, default)
    if not isinstance(value, int | float):
        raise _unfit(op, f"{name}={value!r}", "a number")
    return value


def _compile_linear(op: Op, coordinate: Coordinate) -> OpFunction:
    spec, extents = linear_spec(op), op.extents
    num_rows = spec.num_rows
    bias_at = 2 if len(op.reads) == 3 else None
    if all(map(is_plain, accesses(op))):
        return lambda xs: (
            linear(xs[0], xs[1], None if bias_at is None else xs[bias_at], spec, num_rows),
        )

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        xs = [unfold_axes(x, read, extents) for x, read in zip(operands, op.reads, strict=True)]
        out = linear(xs[0], xs[1], None if bias_at is None else xs[bias_at], spec, num_rows)
        return (fold_axes(out, spec.out, op.writes[0], extents).contiguous(),)

    return run


def _compile_pointwise(op: Op, coordinate: Coordinate) -> OpFunction:
    if grouped_index(op) is not None:
        return experts.compile_grouped_pointwise(op, coordinate)
    return compile_pointwise(op, evaluate_all)


def result_order(op: Op) -> list[int]:
    """Which of [b, h g, m, e] each dim of the result of an op of kind attend is."""
    stated = [*op.reads[0].dims[:3], op.reads[2].dims[3]]
    return [stated.index(index) for index in op.writes[0].dims]


def _compile_attend(op: Op, coordinate: Coordinate) -> OpFunction:
    scale, softcap = number(op, "scale"), number(op, "softcap")
    masked, order = len(op.reads) == 4, result_order(op)
    return lambda xs: (
        attend(xs[0], xs[1], xs[2], xs[3] if masked else None, scale, softcap, order),
    )


def _compile_attention(op: Op, coordinate: Coordinate) -> OpFunction:
    scale, window = number(op, "scale"), int(number(op, "window"))
    softcap = number(op, "softcap")
    if op.get("packed", 0):
        return lambda xs: (
            packed_attention(xs[0], xs[1], xs[2], xs[3], xs[4], scale, window, softcap),
        )
    if attends_in_order(op):
        return lambda xs: (ordered_attention(xs[0], xs[1], xs[2], scale, window),)
    return lambda xs: (attention(xs[0], xs[1], xs[2], xs[3], scale, window, softcap),)


def compile_masked_attention(op: Op) -> OpFunction:
    """An op of kind attention or fused_attention, of rows at any positions, by masked_attention."""
    if op.kind == FUSED:
        return _compile_step(op, masked_attention)
    scale, window = number(op, "scale"), int(number(op, "window"))
    softcap = number(op, "softcap")
    return lambda xs: (masked_attention(xs[0], xs[1], xs[2], xs[3], scale, window, softcap),)


def _compile_step(op: Op, attends: Callable[..., Tensor]) -> OpFunction:
    """An op of kind fused_attention, whose attention is done as `attention` does it."""
    scale, window = number(op, "scale"), int(number(op, "window"))
    softcap = number(op, "softcap")

    def attend_rows(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        out.copy_(attends(q, k_cache, v_cache, positions, scale, window, softcap))

    return compile_step(op, lambda given: attend_in_turn(given, move_heads, attend_rows))


def _compile_concat(op: Op, coordinate: Coordinate) -> OpFunction:
    dim = int(number(op, "dim"))
    return lambda xs: (torch.cat(tuple(xs), dim),)


def _compile_norm(op: Op, coordinate: Coordinate) -> OpFunction:
    return compile_norm(op, normalise)


def _compile_reference(op: Op, coordinate: Coordinate) -> OpFunction:
    """What the kind's definition says."""
    reference = kind_of(op).reference
    assert reference is not None, f"kind {op.kind!r} has no reference"
    function = reference(op, coordinate)

    def run(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = function(*operands)
        return found if isinstance(found, tuple) else (found,)

    return run


QUICK: dict[str, Callable[[Op, Coordinate], OpFunction]] = {
    "linear": _compile_linear,
    "attention": _compile_attention,
    "attend": _compile_attend,
    "concat": _compile_concat,
    "grouped_linear": experts.compile_grouped_linear,
    **{kind.name: _compile_norm for kind in kinds() if kind.is_norm},
}
"""Kinds that torch does quicker than their references say -> as COMPILERS."""

COMPILERS: dict[str, Callable[[Op, Coordinate], OpFunction]] = {
    **QUICK,
    **{kind.name: _compile_pointwise for kind in kinds() if kind.is_elementwise},
    "fused_linear": lambda op, coordinate: compile_mixed(op, mixed_product),
    "fused_groups": experts.compile_grouped_mix,
    "fused_product": lambda op, coordinate: compile_shaped(op, shaped_product),
    "fused_heads": lambda op, coordinate: compile_heads(op, move_heads),
    FUSED: lambda op, coordinate: _compile_step(op, attention),
    "split_linear": lambda op, coordinate: compile_split(op),
    "fused_rows": lambda op, coordinate: compile_rows(op, run_rows),
    "opaque": lambda op, coordinate: late.compile_opaque(op),
}
"""Op kind -> binds an op at a rank's mesh coordinate; others are run by their references."""


def library_kinds() -> tuple[str, ...]:
    """Names of the kinds that are library ops."""
    stated = [kind.name for kind in kinds() if kind.reference is not None]
    return tuple(dict.fromkeys([*COMPILERS, *stated]))


def op_operands(op: Op) -> tuple[str, ...]:
    """Tensor names in the order in which a compiled op takes them: what it updates comes last."""
    names = tuple(access.tensor for access in op.reads)
    return names + tuple(a.tensor for a in op.writes) if kind_of(op).inplace else names


def compile_op(op: Op, coordinate: Coordinate) -> OpFunction:
    """The op bound to its attributes and to a rank's mesh coordinate; ProgramError for a kind that
    is no library op.
    """
    if op.kind not in COMPILERS and kind_of(op).reference is None:
        raise _unfit(op, f"kind {op.kind!r}", f"one of {', '.join(library_kinds())}")
    return COMPILERS.get(op.kind, _compile_reference)(op, coordinate)


def reads_host(op: Op) -> str:
    """What the host reads of the device each time a library op runs; empty if nothing."""
    what = kind_of(op).host_reads or str(op.get("host_reads", ""))
    in_order = op.get("in_order", 0) and attends_in_order(op)
    return f"the host reads {what}" if what and not in_order else ""


NO_TENSORS: Mapping[str, program.Tensor] = MappingProxyType({})


class DeviceOps(Protocol):
    """How a device does library ops."""

    def reads_host(self, op: Op, tensors: Mapping[str, program.Tensor] = NO_TENSORS) -> str:
        """As the function of that name, the way this device does the op; tensors: of the program,
        where they are known.
        """
        ...

    def compile(self, op: Op, coordinate: Coordinate, constants: Container[str] = ()) -> OpFunction:
        """As compile_op. constants: tensors that nobody writes while the program runs, so that what
        reads them need not wait for what stands in front of it.
        """
        ...

    def by_kernel(
        self, op: Op, coordinate: Coordinate, constants: Container[str] = ()
    ) -> OpFunction | None:
        """As compile, of an op whose kernels must be compiled before they run; None for others."""
        ...


class TorchOps:
    """All by torch."""

    def reads_host(self, op: Op, tensors: Mapping[str, program.Tensor] = NO_TENSORS) -> str:
        return reads_host(op)

    def compile(self, op: Op, coordinate: Coordinate, constants: Container[str] = ()) -> OpFunction:
        return compile_op(op, coordinate)

    def by_kernel(
        self, op: Op, coordinate: Coordinate, constants: Container[str] = ()
    ) -> OpFunction | None:
        return None


def run_op(op: Op, operands: Mapping[str, Tensor], coordinate: Coordinate) -> dict[str, Tensor]:
    """Results by tensor name of one op over operands by tensor name."""
    results = compile_op(op, coordinate)([operands[name] for name in op_operands(op)])
    return {access.tensor: result for access, result in zip(op.writes, results, strict=True)}


def _unfit(op: Op, found: str, expected: str) -> ProgramError:
    return ProgramError(
        f"op {op.name!r}: {found}", expected=expected, remedy="build it with ProgramBuilder"
    )
