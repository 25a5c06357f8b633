"""Which matmuls run beside the collective before or after them, and how.

Comes in: the local ops of one rank in order, what a user asked for (`Overlap`), the machine's
model of overlap. Goes out: an OverlapChoice for each pair of a matmul and a collective: one after
the other, in chunks on streams, around a ring, or as one kernel. plan.py makes chunks and rings
host loops, as a user's `stream` would; lower.py makes kernels FusedMatmuls. products.py says what
the model is asked. Next: stream_plan.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from distmega.arguments import require_one_of, require_switch, require_whole, shown
from distmega.errors import PlanError, counted
from distmega.program.dtypes import item_bytes
from distmega.program.kinds import kind_of
from distmega.program.types import Access, Op, Tensor, accesses, contracts
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.products import Extents, Product, Way
from distmega.sharding.search.cost import Machine

PairKind = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
CHUNK_COUNTS = (2, 4, 8)
"""Numbers of chunks that the cost model looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What a user asks of a matmul and the collective beside it. PlanError for other ways, and for
    a number of chunks that does not go with the way.

    Attributes:
        way: How they run; "" for what the cost model expects to be fastest.
        num_chunks: Chunks on streams; 0 for a number that the cost model chooses.
        peer_copies: A pair of rows that no kernel takes may be the library's matmul and a
            collective by peer memory, for programs of library ops.
    """

    way: Way | Literal[""] = ""
    num_chunks: int = 0
    peer_copies: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.way, str) or self.way:
            require_one_of("overlap", self.way, get_args(Way), error=PlanError)
        require_whole("num_chunks", self.num_chunks, 0, error=PlanError)
        require_switch("peer_copies", self.peer_copies, error=PlanError)
        if self.num_chunks and (self.num_chunks < 2 or self.way != "chunks"):
            raise PlanError(
                f"{counted(self.num_chunks, 'chunk')} with overlap {self.way!r}",
                expected='at least 2, with overlap "chunks"',
                remedy="leave the number out",
            )
        if self.peer_copies and self.way:
            raise PlanError(
                f"exchanges with overlap {self.way!r}",
                expected="them where the cost model chooses",
                remedy="leave the way out",
            )


CHEAPEST = Overlap()
BY_LIBRARY = Overlap(peer_copies=True)
"""For a program whose matmuls are all the library's."""

OverlapRequest = Overlap | Way | Mapping[str, Overlap | Way]
"""For all pairs; or by the tensor that a pair's second op writes, the others being left to the cost
model.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A matmul and a collective of which one uses only the other's result. first, second: names of
    the ops in order; operand: what the matmul multiplies; between: the tensor that one op hands to
    the other; result: what leaves the second.
    """

    kind: PairKind
    mesh_axis: str
    first: str
    second: str
    operand: str
    between: str
    result: str
    num_rows: int
    product: Product


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapChoice:
    """How a pair runs. times_us: predicted, by way, of those that are possible; refused: why the
    others are not; forced: the user's choice.
    """

    pair: Pair
    way: Way
    num_chunks: int
    times_us: tuple[tuple[str, float], ...]
    refused: tuple[tuple[str, str], ...]
    forced: bool

    def __str__(self) -> str:
        ways = [f"{name} {time:.0f} us" for name, time in self.times_us]
        ways += [f"not {name}: {why}" for name, why in self.refused]
        chunks = f" of {self.num_chunks}" if self.num_chunks else ""
        why = "as asked" if self.forced else "cheapest"
        return (
            f"{self.pair.first} + {self.pair.second}: {self.way}{chunks}, {why} ({'; '.join(ways)})"
        )


def find_pairs(
    ops: Sequence[Op],
    tensors: Mapping[str, Tensor],
    is_whole: Callable[[str, str], bool],
    mesh: DeviceMesh,
    outputs: Sequence[str],
) -> list[Pair]:
    """Pairs in order, no op in two of them. tensors: of one rank, by local name. is_whole: whether
    a tensor is the same on all ranks of a mesh axis.
    """
    schedule = _Schedule(ops, tensors, mesh, outputs)
    pairs: list[Pair] = []
    taken: set[str] = set()
    for op in ops:
        num_rows = plain_rows(op)
        if not num_rows or any(tensors[a.tensor].role == "state" for a in accesses(op)):
            continue
        gather, total = schedule.gather_before(op), schedule.sum_behind(op)
        if gather is not None and gather.name not in taken:
            first, second, collective = gather, op, gather
        elif total is not None:
            first, second, collective = op, total, total
        else:
            continue
        if tensors[first.reads[0].tensor].role == "state":
            continue
        taken |= {first.name, second.name}
        axis, x = str(collective.attr("mesh_axis")), op.reads[0].tensor
        replicated = collective is gather and is_whole(op.writes[0].tensor, axis)
        size, kind = mesh.size(axis), collective.kind
        pairs.append(
            Pair(
                kind=_KINDS[kind],
                mesh_axis=axis,
                first=first.name,
                second=second.name,
                operand=x,
                between=first.writes[0].tensor,
                result=second.writes[0].tensor,
                num_rows=num_rows,
                product=_product(op, num_rows, tensors, size, kind, replicated=replicated),
            )
        )
    return pairs


class _Schedule:
    """Who reads and writes each tensor."""

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Mapping[str, Tensor],
        mesh: DeviceMesh,
        outputs: Sequence[str],
    ) -> None:
        self.tensors, self.mesh, self.outputs = tensors, mesh, outputs
        self.readers: dict[str, list[Op]] = {}
        self.writers: dict[str, list[Op]] = {}
        for op in ops:
            for access in op.reads:
                self.readers.setdefault(access.tensor, []).append(op)
            for access in op.writes:
                self.writers.setdefault(access.tensor, []).append(op)

    def gather_before(self, op: Op) -> Op | None:
        """The collective that gathers what a matmul multiplies, for it alone."""
        x = op.reads[0].tensor
        before = self.writers.get(x, [])
        if len(before) != 1 or len(self.readers[x]) != 1 or x in self.outputs:
            return None
        fits = kind_of(before[0]).gathers_all and _is_whole(before[0], self.tensors, self.mesh)
        return before[0] if fits else None

    def sum_behind(self, op: Op) -> Op | None:
        """The collective that sums what a matmul gives, and alone reads it."""
        out = op.writes[0].tensor
        after = self.readers.get(out, [])
        if len(after) != 1 or len(self.writers[out]) != 1 or out in self.outputs:
            return None
        fits = not kind_of(after[0]).gathers_all and _is_whole(after[0], self.tensors, self.mesh)
        return after[0] if fits else None


_KINDS: dict[str, PairKind] = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
}


def plain_rows(op: Op) -> int:
    """Dims of rows of a matmul x [rows, sums] w [columns, sums] -> [rows, columns] without a bias;
    0 for anything else.
    """
    if not contracts(op) or len(op.reads) != 2:
        return 0
    found = [_axes(access) for access in accesses(op)]
    if any(axes is None for axes in found):
        return 0
    x, w, out = (axes or () for axes in found)
    sums = tuple(name for name in x if name not in out)
    rows, columns = x[: len(x) - len(sums)], w[: len(w) - len(sums)]
    grouped = x == rows + sums and w == columns + sums and out == rows + columns
    return len(rows) if grouped and columns else 0


def _axes(access: Access) -> tuple[str, ...] | None:
    """The axes of an operand, one a dim; None where a dim is not just an axis."""
    if any(len(i.axes) != 1 or i.offset or i.stride != 1 for i in access.dims):
        return None
    return tuple(index.axes[0] for index in access.dims)


def _is_whole(op: Op, tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> bool:
    """Whether an op is a collective of one tensor in equal parts of dim 0, if it is cut at all."""
    if op.kind not in _KINDS or len(op.reads) != 1 or op.get("combine", "sum") != "sum":
        return False
    size = mesh.size(str(op.attr("mesh_axis")))
    given, made = (tensors[a.tensor].shape for a in (op.reads[0], op.writes[0]))
    few, many = (given, made) if kind_of(op).gathers_all else (made, given)
    if not kind_of(op).sums_all and (op.get("dim", 0) != 0 or few[0] * size != many[0]):
        return False
    return size > 1 and few[1:] == many[1:]


def _product(
    op: Op,
    num_rows: int,
    tensors: Mapping[str, Tensor],
    size: int,
    collective: str,
    *,
    replicated: bool,
) -> Product:
    def count(names: Sequence[str]) -> int:
        return math.prod(op.axis(name).extent for name in names)

    x, out = _axes(op.reads[0]) or (), _axes(op.writes[0]) or ()
    dtype = tensors[op.writes[0].tensor].dtype
    return Product(
        collective=collective,  # type: ignore[arg-type]
        extents=Extents(
            rows=count(x[:num_rows]),
            columns=count(out[num_rows:]),
            depth=count(x[num_rows:]),
            num_ranks=size,
            item_bytes=item_bytes(dtype),
            replicated=replicated,
        ),
        dtype=dtype,
    )


def choose_overlaps(
    pairs: Sequence[Pair], machine: Machine, asked: OverlapRequest = CHEAPEST
) -> list[OverlapChoice]:
    """A choice for each pair. PlanError where what the user asked for is impossible for one, or
    where a way other than "sequential" was asked for and there is no pair.
    """
    wanted = asked if isinstance(asked, Mapping) else {}
    default = CHEAPEST if isinstance(asked, Mapping) else asked
    missing = wanted.keys() - {pair.result for pair in pairs}
    if missing or (_as_overlap(default).way not in ("", "sequential") and not pairs):
        raise PlanError(
            f"overlap {shown(asked)}",
            expected="a matmul whose operand is gathered, or whose result is summed over ranks, "
            f"for it alone; there are {[pair.result for pair in pairs]}",
            remedy="leave overlap out",
        )
    asks = [_as_overlap(wanted.get(pair.result, default)) for pair in pairs]
    return [_choose(pair, machine, ask) for pair, ask in zip(pairs, asks, strict=True)]


def _as_overlap(asked: Overlap | Way) -> Overlap:
    return asked if isinstance(asked, Overlap) else Overlap(way=asked)


def fused_pairs(choices: Sequence[OverlapChoice]) -> tuple[Pair, ...]:
    """The pairs that run as one kernel."""
    return tuple(choice.pair for choice in choices if choice.way == "kernel")


def _choose(pair: Pair, machine: Machine, asked: Overlap) -> OverlapChoice:
    counts = (asked.num_chunks,) if asked.num_chunks else CHUNK_COUNTS
    times, refused = machine.overlap.way_times_us(
        pair.product, counts, peer_copies=asked.peer_copies
    )
    if asked.way and not any(way == asked.way for way, _ in times):
        raise PlanError(
            f"overlap {asked.way!r} of {pair.first!r} and {pair.second!r}",
            expected=dict(refused)[asked.way],
            remedy="ask for another way, or leave overlap out",
        )
    open_ways = {key: time for key, time in times.items() if asked.way in ("", key[0])}
    (way, num_chunks), _ = min(open_ways.items(), key=lambda item: item[1])
    ways = tuple((f"{w} of {n}" if n else w, time) for (w, n), time in times.items())
    return OverlapChoice(
        pair=pair,
        way=way,
        num_chunks=num_chunks,
        times_us=ways,
        refused=tuple(refused.items()),
        forced=bool(asked.way),
    )
