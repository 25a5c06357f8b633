"""What an op kind is: one definition each, which all layers ask instead of comparing names.

Comes in: an OpKind a kind, defined beside the function in ops/ that states the op. Goes out:
`kind_of`, which gives an op's definition, and the names of kinds. The questions are those of
sharding (padding, splits), of costs, of verification and of the library that runs ops. Adding an op
is adding a function and its definition in a file of ops/. Next on the walk: ops/compute.py.
"""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from distmega.errors import ProgramError

FUSED_GRAPH = "fused_graph"
"""Kind of an op that a rewrite rule does: it reads the inputs of a graph, and names the rule."""


class StatedOp(Protocol):
    """What a definition may look at; types.Op is one."""

    @property
    def kind(self) -> str: ...

    @property
    def reads(self) -> Sequence[object]: ...

    @property
    def attrs(self) -> Sequence[tuple[str, object]]: ...

    def attr(self, name: str) -> object: ...

    def get(self, name: str, default: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class OpWork:
    """How much an op does. sizes: extents by axis; points: of its whole iteration space, without
    axes that look something up; written: of its parallel axes.
    """

    sizes: Mapping[str, int]
    points: int
    written: int


Flops = Callable[[StatedOp, OpWork], int]
Misfit = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[str, str] | None]
"""From an op of types.py, and the tensors that it reads and writes, to what does not fit, and what
was expected; None where all does.
"""
ZeroWhere = Callable[[StatedOp, Set[int], Set[int]], bool]
Coordinate = Mapping[str, int]
"""Where a rank stands along each mesh axis."""
Reference = Callable[[Any, Coordinate], Callable[..., Any]]
"""From an op of types.py, at a rank, to a function of tensors of torch."""


def no_flops(op: StatedOp, work: OpWork) -> int:
    """Of an op that only moves data."""
    return 0


def never_zero(op: StatedOp, holders: Set[int], zero: Set[int]) -> bool:
    """Nothing is known of what stands in padding."""
    return False


def always_finite(op: StatedOp, zero: Set[int]) -> bool:
    """Finite operands give finite results."""
    return True


def fits_always(op: Any, reads: Sequence[Any], writes: Sequence[Any]) -> tuple[str, str] | None:
    """Of an op whose attributes and accesses are right if each is by itself."""
    return None


def two_a_point(op: StatedOp, points: float) -> float:
    """A multiplication and an addition."""
    return 2 * points


@dataclass(frozen=True, slots=True)
class AttrRule:
    """What an attribute of an op may hold. fits: of a value, whether it may be that. expected: that
    in words. is_optional: an op may be without it.
    """

    fits: Callable[[object], bool]
    expected: str
    is_optional: bool = False

    def optional(self) -> "AttrRule":
        """The rule of one that may be missing."""
        return replace(self, is_optional=True)


def one_of(*texts: str) -> AttrRule:
    """One of some words."""
    return AttrRule(lambda value: value in texts, f"one of {', '.join(texts)}")


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


NUMBER = AttrRule(_is_finite, "a finite number")
POSITIVE_OR_ZERO = AttrRule(
    lambda value: _is_finite(value) and value >= 0,  # type: ignore[operator]
    "a finite number of at least 0",
)
COUNT = AttrRule(
    lambda value: type(value) is int and 0 <= value < 2**63, "a whole number of at least 0"
)
TEXT = AttrRule(lambda value: isinstance(value, str), "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """One kind of op.

    name: as ops and their printed form have it.
    origin: "user" where a user's program may hold it, "sharding" for what sharding puts into a
        rank's program, "internal" for what later passes make.
    in_megakernel: a persistent kernel has instructions for it (kernels/isa/) or takes it into a
        fused op (kernels/tasks/fuse/), of the sizes that these can do; a library op elsewhere.
    communicates: ranks of a mesh axis, attr `mesh_axis`, do it together.
    reaches_all: every rank gets the same of it, so a kernel's tasks may push their parts to all.
    sums_all: every rank gets the sum over ranks, or what else they combine by.
    gathers_all: every rank gets all of a dim of which each has a part.
    scatters_sums: each rank gets its part of a sum over ranks.
    writes_peers: its tasks write and signal on every rank of the team.
    inplace: writes into an operand.
    only_copies: elements, to other positions or under another shape.
    is_elementwise: one result each from elements at the same point, by formulas.
    contracts: sums products of operands 0 and 1 over axes that the result lacks.
    is_norm: of rows, done with their statistics in one kernel.
    scales_elements: a norm that then multiplies by a weight an element, so that its factor may move
        behind a contraction, and a sum before it into the same kernel.
    chooses_token: or finds what one is chosen from.
    picks_elements: of a row, one for each position of its axis `c`.
    calls_torch: an operator of torch that programs have no kind for.
    mixes_values: by a softmax of scores; operands 1 and 2 are keys and values.
    rotates: pairs of elements of a row by the angles of its position.
    appends: rows to a cache, each at its position.
    looks_up_rows: of operand 1, by numbers that operand 0 holds.
    reads_apart: may read one tensor in two ways at once, each a part of its own: a x a', by rows.
    reads_whole: looks at the shapes of operands alone, and so reads all of each.
    is_clipped: access maps may reach past a dim: an operand of a concat covers only its part of the
        output, and of a dim divided unevenly over ranks the positions past its end are padding.
    masks_padding: compares indices with the true extent, so that padding is never chosen.
    added_from: operands from this one on are added to a contraction instead of multiplied.
    linear_read: the operand in which the op is linear, its others being the same on every rank, so
        that parts of a sum may be summed after it.
    reads_positions: integer operands hold positions to look up.
    counts_rows: takes how many rows of operand 0 are in use as a further operand, or all are.
    host_reads: what the host reads of the device each time that a library op runs.
    zero_where: whether results are exactly zero in padding, where operands `holders` have padding
        and those of `zero` hold zeros there.
    finite_where: whether results are finite in padding where operands are, those of `zero` zero.
    combine: how values of an axis that it takes together are combined, a word of COMBINES of
        types.py; "" where the attribute `combine` says it, or else the axis alone.
    attrs: rules of attributes that its functions read, by name.
    misfit: what of an op that keeps these, and of the tensors that it reads and writes, does not
        fit together, and what was expected. `as_stated` of ops/parts.py for kinds whose ops are all
        as one function states them.
    restated_misfit: as misfit, of the ops of a kernel's segment too, which its passes restate in
        other forms (kernels/tasks/); None where they have none.
    flops: arithmetic, two a multiply-add. grouped_flops: as that of a number of points, where an op
        runs over groups of rows.
    reference: what it computes: from an op to a function of its operands, in the order of its reads
        and what it updates in place last, to its result or a tuple of these, in storage of their
        own. It calls methods of tensors alone, so that nothing here imports torch. Library ops run
        it, but for kinds that hostir/library/ops.py does in a quicker way of torch. None where a
        formula (pointwise), an operator of torch or the rank's program says it.
    torch_row_op: operator of torch, (self, dim), that computes it along any dim; `build` states
        the op on (name, x), along the last one.
    """

    name: str
    origin: Literal["user", "sharding", "internal"] = "user"
    in_megakernel: bool = False
    communicates: bool = False
    reaches_all: bool = False
    sums_all: bool = False
    gathers_all: bool = False
    scatters_sums: bool = False
    writes_peers: bool = False
    inplace: bool = False
    only_copies: bool = False
    is_elementwise: bool = False
    contracts: bool = False
    is_norm: bool = False
    scales_elements: bool = False
    chooses_token: bool = False
    picks_elements: bool = False
    calls_torch: bool = False
    mixes_values: bool = False
    rotates: bool = False
    appends: bool = False
    looks_up_rows: bool = False
    reads_apart: bool = False
    reads_whole: bool = False
    is_clipped: bool = False
    masks_padding: bool = False
    added_from: int | None = None
    linear_read: int | None = None
    reads_positions: bool = False
    counts_rows: bool = False
    host_reads: str = ""
    zero_where: ZeroWhere = never_zero
    finite_where: Callable[[StatedOp, Set[int]], bool] = always_finite
    combine: str = ""
    attrs: Mapping[str, AttrRule] = field(default_factory=dict, hash=False)
    misfit: Misfit = fits_always
    restated_misfit: Misfit | None = None
    flops: Flops = no_flops
    grouped_flops: Callable[[StatedOp, float], float] = two_a_point
    reference: Reference | None = None
    torch_row_op: str = ""
    build: Callable[..., Any] | None = None


RANK_PARTS = {
    "base_axis": TEXT.optional(),
    "base_stride": COUNT.optional(),
    "extent": COUNT.optional(),
    "group_axis": TEXT.optional(),
    "num_groups": COUNT.optional(),
}
"""Attributes that sharding gives ops of any kind: where a rank's part begins."""

RANK_AXES = (("base_axis", ("base_stride", "extent")), ("group_axis", ("num_groups",)))
"""Those of them that name a mesh axis, and what comes with each."""

_KINDS: dict[str, OpKind] = {}
_INTERNAL = OpKind(name="", origin="internal")


def define(kind: OpKind) -> OpKind:
    """Enters a kind, which has one definition. ProgramError for another one of its name, and for an
    operator of torch without a function that states it.
    """
    if kind.name in _KINDS:
        raise ProgramError(
            f"op kind {kind.name!r}, which is defined already",
            expected="a kind of another name",
            remedy="rename it",
        )
    if kind.torch_row_op and kind.build is None:
        raise ProgramError(
            f"op kind {kind.name!r} for operator {kind.torch_row_op!r} of torch, without build",
            expected="the function that states the op",
            remedy="give build=, or leave out torch_row_op",
        )
    _KINDS[kind.name] = kind
    return kind


def wrong_attr(op: StatedOp, *, is_restated: bool = False) -> tuple[str, str] | None:
    """What of an op's attributes breaks the rules of its kind, and what was expected; None for an
    op that keeps them. is_restated: by a pass of kernels, which may give it others too.
    """
    kind = kind_of(op)
    given = {name for name, _ in op.attrs}
    parts = RANK_PARTS.items() if not given.isdisjoint(RANK_PARTS) else ()
    for name, rule in (*kind.attrs.items(), *parts):
        value = op.get(name, None)
        if not (rule.is_optional if value is None else rule.fits(value)):
            found = f"no {name}" if value is None else f"{name}={value!r}"[:200]
            return found, f"{name}: {rule.expected}"
    for axis, others in RANK_AXES if parts else ():
        if op.get(axis, "") and (lost := [name for name in others if op.get(name, None) is None]):
            return f"{axis}={op.get(axis, '')!r} and no {lost[0]}", f"{', '.join(others)} with it"
    if kind.origin != "internal" and not is_restated:
        for name, value in op.attrs:
            if name not in kind.attrs and name not in RANK_PARTS:
                return f"{name}={value!r}"[:200], ", ".join(kind.attrs) or "no attributes"
    return None


def kind_of(op: StatedOp) -> OpKind:
    """The definition of an op's kind; a plain one for what passes make for themselves."""
    return _KINDS.get(op.kind, _INTERNAL)


def is_known(kind: str) -> bool:
    """Whether ops may be of that kind: one that is defined, or what rewrite rules make."""
    return kind in _KINDS or kind == FUSED_GRAPH


def attr_rules(kind: str) -> Mapping[str, AttrRule]:
    """Rules of attributes of ops of that kind, by name; none of a kind that is not defined."""
    return _KINDS.get(kind, _INTERNAL).attrs


def kinds() -> tuple[OpKind, ...]:
    """All that are defined, in the order of their definitions."""
    return tuple(_KINDS.values())


def user_kinds() -> tuple[str, ...]:
    """Names of kinds that a user's program may hold."""
    return tuple(kind.name for kind in kinds() if kind.origin == "user")


def collective_kinds() -> tuple[str, ...]:
    """Names of kinds that sharding puts into a rank's program."""
    return tuple(kind.name for kind in kinds() if kind.origin == "sharding")


def communicates(kind: str) -> bool:
    """Whether several ranks do ops of that kind together."""
    return kind in _KINDS and _KINDS[kind].communicates


def widen(x: Any) -> Any:
    """A tensor in the type in which it is summed: fp32 for half types, else its own."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def whole_numbers(like: Any, num: int) -> Any:
    """0, 1, 2 ... as integers where `like` is."""
    return like.new_ones(num).cumsum(0) - 1


def in_fp32(function: Callable[..., Any]) -> Reference:
    """The reference that calls `function` with operands of half types widened to fp32; the result
    gets the type of the first.
    """

    def run(*operands: Any) -> Any:
        return function(*map(widen, operands)).to(operands[0].dtype)

    return lambda op, coordinate: run


def local_base(op: Any, coordinate: Coordinate) -> int:
    """First global index of a rank's part of the index space that an op looks up; 0 where whole."""
    if not op.get("base_axis", ""):
        return 0
    return coordinate[str(op.attr("base_axis"))] * int(op.attr("base_stride"))


def has_positive_eps(op: StatedOp) -> bool:
    """Whether a row of zeros can be divided by its norm."""
    eps = op.get("eps", 0.0)
    return isinstance(eps, int | float) and eps > 0


def zero_if_all(op: StatedOp, holders: Set[int], zero: Set[int]) -> bool:
    """Of an op that moves or adds up elements."""
    return holders == zero


def zero_in(operand: int) -> ZeroWhere:
    """Zero where one operand is."""
    return lambda op, holders, zero: operand in zero


def flops_a_result(num: int) -> Flops:
    """So many for each element of the result."""
    return lambda op, work: num * work.written


def one_a_point(op: StatedOp, work: OpWork) -> int:
    """One for each point of the iteration space."""
    return work.points
