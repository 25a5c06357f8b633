"""ProgramBuilder: write a tensor program a line an op; handles carry names and arithmetic
operators.

p = ProgramBuilder("mlp")
x = p.input("x", (8, 64))
h = p.linear(x, p.weight("w1", (256, 64))).map("silu(a0)")
program = p.build(p.linear(h, p.weight("w2", (64, 256))))
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distmega.arguments import is_list, require_switch, require_type, shown
from distmega.errors import ProgramError
from distmega.program.dtypes import short_dtype
from distmega.program.ops import attention, data_movement, experts, lookups, norms, opaque, sampling
from distmega.program.ops import compute as ops
from distmega.program.ops.parts import Built, bad_op
from distmega.program.types import (
    NAMES,
    Attr,
    Op,
    Program,
    Role,
    Tensor,
    packed_strides,
    verify_program,
    view_strides,
)


class OpFunction(Protocol):
    """What states an op: its name and tensors in, the op and what it writes out."""

    __name__: str

    def __call__(self, name: str, *operands: Tensor, **options: Any) -> Built: ...


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A tensor of a program under construction."""

    builder: "ProgramBuilder"
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def name(self) -> str:
        return self.tensor.name

    def map(self, text: str, *others: "Handle", name: str = "") -> "Handle":
        """Pointwise expression with this tensor as a0 and `others` as a1, a2, ..."""
        return self.builder.pointwise(text, self, *others, name=name)

    def __add__(self, other: "Handle | float") -> "Handle":
        return self._binary("a0 + {}", other)

    def __sub__(self, other: "Handle | float") -> "Handle":
        return self._binary("a0 - {}", other)

    def __mul__(self, other: "Handle | float") -> "Handle":
        return self._binary("a0 * {}", other)

    def __truediv__(self, other: "Handle | float") -> "Handle":
        return self._binary("a0 / {}", other)

    def __neg__(self) -> "Handle":
        return self.map("-a0")

    def __radd__(self, other: float) -> "Handle":
        return self._binary("{} + a0", other)

    def __rsub__(self, other: float) -> "Handle":
        return self._binary("{} - a0", other)

    def __rmul__(self, other: float) -> "Handle":
        return self._binary("{} * a0", other)

    def __rtruediv__(self, other: float) -> "Handle":
        return self._binary("{} / a0", other)

    def _binary(self, text: str, other: "Handle | float") -> "Handle":
        if isinstance(other, Handle):
            return self.map(text.format("a1"), other)
        if not isinstance(other, int | float):
            return NotImplemented
        if isinstance(other, int) and abs(other) > sys.float_info.max:
            raise ProgramError(
                f"{self.name!r} with a number {shown(other)}",
                expected=f"one of at most {sys.float_info.max}",
                remedy="scale the other operand",
            )
        return self.map(text.format(repr(other if type(other) is int else float(other))))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Rows sorted by the group that each was sent to; see experts.route for the tensors."""

    counts: Handle
    offsets: Handle
    order: Handle
    slots: Handle


class ProgramBuilder:
    """Collects tensors and ops; `build` checks and freezes them. Names are unique; ops without one
    get kind and number.

    Methods give the handle of what an op writes, of the first operand's dtype unless they say
    otherwise. Sums are taken in fp32 or wider. Every method raises ProgramError for operands of
    shapes, dtypes or another program that don't fit, and for a name that is taken.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tensors: dict[str, Tensor] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._ops: dict[str, Op] = {}
        self._parents = set[str]()
        """What stands before the last dot in names that are declared."""

    def is_taken(self, name: str) -> bool:
        """Whether a tensor or an op has a name, or a declared tensor one that an op of this name
        may want for one of several results, as "top.value".
        """
        return name in self._tensors or name in self._ops or name in self._parents

    def input(self, name: str, shape: Sequence[int], dtype: object = "f32") -> Handle:
        """A tensor given with each call. dtype: "f64", "f32", "bf16", "f16", "i64", "i32" or
        "bool", or one of torch.
        """
        return self._declare(name, shape, dtype, "input")

    def weight(self, name: str, shape: Sequence[int], dtype: object = "f32") -> Handle:
        """A tensor given once, before the first call. Declaring the same weight again gives the
        same handle (tying).
        """
        return self._declare(name, shape, dtype, "weight")

    def state(self, name: str, shape: Sequence[int], dtype: object = "f32") -> Handle:
        """A tensor that lives across calls, zero at first, updated in place."""
        return self._declare(name, shape, dtype, "state")

    def linear(
        self, x: Handle, w: Handle, bias: Handle | None = None, spec: str = "", name: str = ""
    ) -> Handle:
        """x [..., k] w' of w [n, k], plus a bias [n]: [..., n]. spec: another contraction, by named
        axes, as "m k, h d k -> m h d", or "m k, n k, n -> m n" with a bias.
        """
        operand = None if bias is None else self._own(bias)
        return self._add(
            ops.linear(self._name(name, "linear"), self._own(x), self._own(w), operand, spec)
        )

    def pointwise(self, text: str, *args: Handle, dtype: object = "", name: str = "") -> Handle:
        """An expression over a0, a1, ..., as "silu(a0) * a1", whose dims align from the right and
        broadcast where the extent is 1. dtype: of the result.
        """
        operands = (self._own(a) for a in args)
        name = self._name(name, "pointwise")
        result = "" if isinstance(dtype, str) and not dtype else short_dtype(dtype)
        return self._add(ops.pointwise(name, text, *operands, dtype=result))

    def reduce(self, x: Handle, dim: int, combine: str = "sum", name: str = "") -> Handle:
        """ "sum", "max" or "min" over one dim of x, which the result lacks."""
        return self._add(ops.reduce(self._name(name, "reduce"), self._own(x), dim, combine))

    def rms_norm(self, x: Handle, weight: Handle, eps: float, name: str = "") -> Handle:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim of x [..., d]; weight [d]."""
        return self._add(
            norms.rms_norm(self._name(name, "rms_norm"), self._own(x), self._own(weight), eps)
        )

    def layer_norm(
        self, x: Handle, weight: Handle | None, bias: Handle | None, eps: float, name: str = ""
    ) -> Handle:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim of x [..., d]; weight
        and bias [d], a bias only with a weight.
        """
        scale, shift = (None if each is None else self._own(each) for each in (weight, bias))
        name = self._name(name, "layer_norm")
        return self._add(norms.layer_norm(name, self._own(x), scale, shift, eps))

    def softmax(self, x: Handle, name: str = "") -> Handle:
        """exp(x) over its sum along the last dim of x [..., d]."""
        return self._add(norms.softmax(self._name(name, "softmax"), self._own(x)))

    def cumsum(self, x: Handle, name: str = "") -> Handle:
        """Sums of the elements up to each one along the last dim of x [..., d]."""
        return self._add(norms.cumsum(self._name(name, "cumsum"), self._own(x)))

    def op(self, state: OpFunction, *operands: Handle, name: str = "", **options: Attr) -> Handle:
        """An op stated by a function of ops/: the handle of what it writes, as
        p.op(norms.cumprod, x). options: its other arguments, by name.
        """
        name = self._name(name, state.__name__)
        return self._add(state(name, *map(self._own, operands), **options))

    def rope(self, x: Handle, positions: Handle, table: Handle, name: str = "") -> Handle:
        """Rotates pairs (i, i + d/2) of x [m, ..., d] at positions [m], integers, by angles of
        table [t, d], f32: cosines, then sines.
        """
        return self._add(
            attention.rope(
                self._name(name, "rope"), self._own(x), self._own(positions), self._own(table)
            )
        )

    def kv_append(
        self,
        cache: Handle,
        x: Handle,
        positions: Handle,
        sequences: Handle | None = None,
        name: str = "",
    ) -> None:
        """Writes x [m, h, d] into the state cache [h, t, d] at t = positions[m], in place. Of
        caches [m, h, t, d] each row has its own; row m goes to cache sequences[m] of [s, h, t, d].
        """
        chosen = None if sequences is None else self._own(sequences)
        op, _ = attention.kv_append(
            self._name(name, "kv_append"),
            self._own(cache),
            self._own(x),
            self._own(positions),
            chosen,
        )
        self._ops[op.name] = op

    def attention(
        self,
        q: Handle,
        k: Handle,
        v: Handle,
        positions: Handle,
        scale: float,
        window: int = 0,
        in_order: bool = False,
        packed: tuple[Handle, Handle] | None = None,
        softcap: float = 0.0,
        name: str = "",
    ) -> Handle:
        """Causal attention of q [m, h, g, d] over caches k [h, t, d] and v [h, t, e]: [m, h, g, e].
        Query i sees t <= positions[i], and t > positions[i] - window where window > 0. h: kv heads,
        g: query heads of each. scale: of scores; softcap, unless 0: softcap * tanh(score /
        softcap). in_order: positions are 0, 1, 2 ... packed: (sequences [m], starts [s + 1]) of
        caches [s, h, t, ...]; see attention.attention.
        """
        operands = (self._own(q), self._own(k), self._own(v), self._own(positions))
        name = self._name(name, "attention")
        data = None
        if packed is not None:
            sequences, starts = self._all(packed, 2)
            data = sequences, starts
        return self._add(
            attention.attention(name, *operands, scale, window, in_order, data, softcap)
        )

    def attend(
        self,
        q: Handle,
        k: Handle,
        v: Handle,
        mask: Handle | None,
        scale: float,
        softcap: float = 0.0,
        name: str = "",
    ) -> Handle:
        """softmax(scale * q k' + mask) v of q [b, h g, m, d], k [b, h, t, d] and v [b, h, t, e]:
        [b, h g, m, e]. mask: bool (what may be seen) or floats (added), of four dims, 1 or those of
        [b, h g, m, t]. softcap as of attention.
        """
        allowed = None if mask is None else self._own(mask)
        operands = self._own(q), self._own(k), self._own(v), allowed
        return self._add(attention.attend(self._name(name, "attend"), *operands, scale, softcap))

    def gather(self, x: Handle, ids: Handle, dim: int, name: str = "") -> Handle:
        """out[.., i, ..] = x[.., ids[.., i, ..], ..] along `dim`, of the shape of ids, integers;
        see ops/lookups.py for ids that x has no element for.
        """
        name = self._name(name, "gather")
        return self._add(lookups.gather(name, self._own(x), self._own(ids), dim))

    def topk(self, x: Handle, num_top: int, name: str = "") -> tuple[Handle, Handle]:
        """The num_top largest elements of the last dim, largest first, and their indices, i64."""
        built = lookups.topk(self._name(name, "topk"), self._own(x), num_top)
        self._add(built)
        values, chosen = (Handle(self, tensor) for tensor in built[1])
        return values, chosen

    def opaque(
        self,
        target: str,
        call: str,
        operands: Sequence[Handle],
        results: Sequence[tuple[tuple[int, ...], str]],
        name: str = "",
        host_reads: str = "",
    ) -> tuple[Handle, ...]:
        """An operator of torch, as "aten.convolution.default", or several, on whole tensors; call:
        arguments or a graph as JSON (hostir/library/opaque.py). results: shape and dtype of each.
        host_reads: what the host reads of the device each time, which no CUDA graph can.
        """
        name = self._name(name, "opaque")
        given = self._all(operands)
        built = opaque.opaque(name, target, call, given, results, host_reads)
        self._add(built)
        return tuple(Handle(self, tensor) for tensor in built[1])

    def embedding(self, ids: Handle, table: Handle, name: str = "") -> Handle:
        """Rows of table [v, ..., d] at ids [m], integers from 0 to v - 1: [m, ..., d], of the
        table's dtype. RequestError for another id that is on a CPU; on a GPU nobody looks, and what
        it looks up means nothing.
        """
        return self._add(
            lookups.embedding(self._name(name, "embedding"), self._own(ids), self._own(table))
        )

    def argmax(self, x: Handle, name: str = "") -> Handle:
        """Index of the largest element of the last dim, i64, the lowest on ties; see value_of."""
        return self._add(sampling.argmax(self._name(name, "argmax"), self._own(x)))

    def value_of(self, chosen: Handle) -> Handle:
        """The value at each index that argmax or sample gave; NaN where its row has one."""
        name = self._own(chosen).name
        if f"{name}.value" not in self._tensors:
            raise ProgramError(
                f"the value of {name!r}",
                expected="what argmax or sample gave",
                remedy="keep the handle that these give",
            )
        return Handle(self, self._tensors[f"{name}.value"])

    def top(self, x: Handle, num_top: int, name: str = "") -> Handle:
        """The num_top largest of each of s equal parts of rows x [m, v], largest first: [m, s,
        num_top]; s as of sampling.top.
        """
        return self._add(sampling.top(self._name(name, "top"), self._own(x), num_top))

    def cutoff(self, x: Handle, settings: Handle, name: str = "") -> Handle:
        """Limits [m, 2], f32: the temperature and the least logit that may be sampled, of logits x
        [m, ...] and settings [m, 3], f32: temperature, top_k (0: all), top_p.
        """
        built = sampling.cutoff(self._name(name, "cutoff"), self._own(x), self._own(settings))
        return self._add(built)

    def sample(
        self, x: Handle, limits: Handle, seeds: Handle, positions: Handle, name: str = ""
    ) -> Handle:
        """An index of each row of logits x [m, v], i64, sampled under limits [m, 2] of `cutoff`;
        seeds, positions: i64 [m]. See value_of.
        """
        operands = (self._own(x), self._own(limits), self._own(seeds), self._own(positions))
        return self._add(sampling.sample(self._name(name, "sample"), *operands))

    def top_k(
        self, x: Handle, num: int, weights: experts.Weighing = "softmax", name: str = ""
    ) -> tuple[Handle, Handle]:
        """The weights, f32, and the columns, i32, of the num largest of each row of x [m, e]: [m,
        num] each. weights: a column's "values", its "softmax" among all, or "softmax_chosen".
        """
        op, tensors = experts.top_k(self._name(name, "top_k"), self._own(x), num, weights)
        chosen = self._add((op, tensors))
        return Handle(self, tensors[0]), chosen

    def route(
        self, ids: Handle, num_groups: int, num_rows: Handle | None = None, name: str = ""
    ) -> Routing:
        """Pairs (row, choice) of ids [m, c], integers, sorted by the group that each names.
        num_rows: an integer [1], the rows in use; by default all. Pairs of others belong to no
        group: what ops on groups make of them is undefined, and differs where ranks share groups
        out; scatter_add takes none of it.
        """
        used = self._own(num_rows) if num_rows is not None else None
        op, tensors = experts.route(self._name(name, "route"), self._own(ids), num_groups, used)
        self._add((op, tensors))
        return Routing(*(Handle(self, tensor) for tensor in tensors))

    def gather_rows(self, x: Handle, routing: Routing, name: str = "") -> Handle:
        """Rows of x [m, ...], sorted by group: [m * c, ...]."""
        slots = self._own(_routing(routing).slots)
        name = self._name(name, "gather_rows")
        operands = (self._own(x), self._own(routing.order), self._own(routing.offsets))
        return self._add(experts.gather_rows(name, *operands, slots.shape))

    def grouped_linear(self, x: Handle, w: Handle, routing: Routing, name: str = "") -> Handle:
        """Each row of x [p, k], sorted by group, times the matrix of its group of w [e, n, k]: [p,
        n].
        """
        rows, name = self._group_rows(routing, x), self._name(name, "grouped_linear")
        operands = (self._own(x), self._own(w), self._own(routing.offsets))
        return self._add(experts.grouped_linear(name, *operands, rows))

    def grouped_pointwise(
        self, text: str, *args: Handle, routing: Routing, name: str = ""
    ) -> Handle:
        """As pointwise, of equal shapes [p, ...] whose rows are sorted by group."""
        rows, name = self._group_rows(routing, *args), self._name(name, "pointwise")
        operands = [self._own(each) for each in args]
        return self._add(
            experts.grouped_pointwise(name, text, operands, self._own(routing.offsets), rows)
        )

    def scatter_add(self, y: Handle, weights: Handle, routing: Routing, name: str = "") -> Handle:
        """Rows of y [m * c, n], sorted by group, each times its weight of weights [m, c], added up
        in the row that it came from: [m, n].
        """
        routing, name = _routing(routing), self._name(name, "scatter_add")
        operands = (y, weights, routing.slots, routing.offsets)
        return self._add(experts.scatter_add(name, *map(self._own, operands)))

    def set(self, x: Handle, into: Handle | None = None, name: str = "") -> Handle:
        """A copy of x; or overwrites `into`, a state or temporary of x's shape, and gives it."""
        built = data_movement.copy(
            self._name(name, "set"), self._own(x), None if into is None else self._own(into)
        )
        return self._add(built) if into is None else self._overwrite(built[0], into)

    def slice(
        self,
        x: Handle,
        dim: int,
        start: int,
        stop: int,
        step: int = 1,
        *,
        view: bool = False,
        name: str = "",
    ) -> Handle:
        """x[start:stop:step] along `dim`; view=True shares storage."""
        kind = _view_or("slice", view)
        return self._add(
            data_movement.slice_dim(
                self._name(name, kind), self._own(x), dim, start, stop, step, kind
            )
        )

    def concat(self, xs: Sequence[Handle], dim: int, name: str = "") -> Handle:
        """Joins tensors of one dtype along `dim`; other dims are equal."""
        return self._add(data_movement.concat(self._name(name, "concat"), self._all(xs), dim))

    def expand(self, x: Handle, shape: Sequence[int], name: str = "") -> Handle:
        """x repeated along dims of extent 1 and along new dims in front, to `shape`."""
        return self._add(data_movement.expand(self._name(name, "expand"), self._own(x), shape))

    def transpose(
        self, x: Handle, order: Sequence[int], *, view: bool = False, name: str = ""
    ) -> Handle:
        """Dims of x in a new order: dim i is x's dim order[i]; view=True shares storage."""
        kind = _view_or("transpose", view)
        return self._add(data_movement.transpose(self._name(name, kind), self._own(x), order, kind))

    def reshape(
        self, x: Handle, shape: Sequence[int], *, view: bool = False, name: str = ""
    ) -> Handle:
        """The same elements, row-major, under another shape; view=True shares storage."""
        kind = _view_or("reshape", view)
        return self._add(data_movement.reshape(self._name(name, kind), self._own(x), shape, kind))

    def is_view(self, x: Handle) -> bool:
        """Whether a tensor shows the storage of another."""
        return self._own(x).name in self._strides

    def num_choices(self, x: Handle) -> int:
        """Of how many elements of a row argmax or topk chose these indices, or those that this is a
        view of; 0 for what was not chosen so.
        """
        op = self._ops.get(self._own(x).name)
        while op is not None and op.is_view:
            op = self._ops.get(op.reads[0].tensor)
        if op is None or op.kind not in ("argmax", "topk"):
            return 0
        return next(axis.extent for axis in op.axes if axis.role == "reduce")

    def build(self, *outputs: Handle) -> Program:
        """The finished program; `outputs` leave it, in this order. Raises ProgramError if it is
        malformed.
        """
        names = tuple(self._own(handle).name for handle in outputs)
        program = Program(
            name=self.name,
            tensors=tuple(self._tensors.values()),
            ops=tuple(self._ops.values()),
            outputs=names,
        )
        return verify_program(program)

    def _declare(self, name: str, shape: Sequence[int], dtype: object, role: Role) -> Handle:
        require_type("name", name, str, NAMES, error=ProgramError)
        if not is_list(shape) or not all(type(extent) is int for extent in shape):
            raise ProgramError(
                f"{role} {shown(name)} of shape {shown(shape)}",
                expected="a list or tuple of whole numbers",
                remedy="give the extent of each dim",
            )
        tensor = Tensor(name=name, shape=tuple(shape), dtype=short_dtype(dtype), role=role)
        known = self._tensors.setdefault(name, tensor)
        if known != tensor or (role != "weight" and known is not tensor):
            raise ProgramError(
                f"{role} {name!r} of shape {tuple(shape)} declared as {known}",
                expected="one declaration",
                remedy="rename it",
            )
        self._parents.add(name.rpartition(".")[0])
        return Handle(self, known)

    def _name(self, name: str, kind: str) -> str:
        require_type("name", name, str, NAMES, error=ProgramError)
        name = name or f"{kind}_{len(self._ops)}"
        if name in self._tensors or name in self._ops:
            raise self._taken(name)
        return name

    def _taken(self, name: str) -> ProgramError:
        return ProgramError(
            f"name {name!r} is taken", expected="a new name", remedy="pass name=..."
        )

    def _own(self, handle: Handle) -> Tensor:
        if not isinstance(handle, Handle):
            raise ProgramError(
                f"an operand of type {type(handle).__name__} in program {self.name!r}",
                expected="a tensor of the program",
                remedy="declare values as inputs or weights, and give them when the program runs",
            )
        if handle.builder is not self:
            raise ProgramError(
                f"tensor {handle.name!r} of program {handle.builder.name!r} used in {self.name!r}",
                expected="tensors of one program",
                remedy="declare it with this builder",
            )
        return handle.tensor

    def _all(self, handles: object, num: int | None = None) -> list[Tensor]:
        """Several operands. num: how many there are to be."""
        if not is_list(handles) or num not in (None, len(handles)):
            raise ProgramError(
                f"operands in a {type(handles).__name__} in program {self.name!r}",
                expected=f"a list or tuple of {'' if num is None else f'{num} '}tensors",
                remedy="give the tensors in brackets",
            )
        return [self._own(handle) for handle in handles]

    def _group_rows(self, routing: Routing, *sorted_rows: Handle) -> int:
        """The most rows that a group can have. ProgramError where tensors sorted by group have
        another number of rows than were routed.
        """
        num, choices = _routing(routing).slots.shape
        for x in map(self._own, sorted_rows):
            if x.shape[:1] != (num * choices,):
                found = f"{x.name!r} of shape {x.shape} sorted by {routing.slots.name!r}"
                raise ProgramError(
                    found,
                    expected=f"{num * choices} rows, {choices} of each of {num} that are routed",
                    remedy="give what gather_rows or a grouped op of that routing made",
                )
        return num

    def _add(self, built: Built) -> Handle:
        op, tensors = built
        for tensor in tensors:
            if tensor.name in self._tensors:
                raise self._taken(tensor.name)
        if op.is_view:
            self._show(op)
        self._ops[op.name] = op
        self._tensors.update({tensor.name: tensor for tensor in tensors})
        return Handle(self, tensors[-1])

    def _show(self, view: Op) -> None:
        """Notes a view's strides. ProgramError if it can't share storage."""
        source = self._tensors[view.reads[0].tensor]
        strides = self._strides.get(source.name) or packed_strides(source.shape)
        found = view_strides(view, strides)
        if found is None:
            what = f"a view of {source.name!r} that joins dims which have gaps or are turned"
            raise bad_op(view.name, what, "dims that follow each other", "copy it, view=False")
        self._strides[view.writes[0].tensor] = found

    def _overwrite(self, op: Op, into: Handle) -> Handle:
        self._ops[op.name] = op
        return into


def _view_or(kind: str, view: object) -> str:
    """The kind of an op that copies, or may share storage."""
    require_switch("view", view, error=ProgramError)
    return "view" if view else kind


def _routing(found: object) -> Routing:
    """ProgramError for what route did not give."""
    if not isinstance(found, Routing):
        raise ProgramError(
            f"routing {shown(found)}, of type {type(found).__name__}",
            expected="what route gives",
            remedy="call it for the groups' ids first",
        )
    return found
