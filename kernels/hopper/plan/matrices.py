"""Where the weights of a segment lie in their arena, as the persistent kernels address them.

In: a segment, the layout of its weights. Out: `Weights`: matrices of one row length as one block of
rows, a weight as rows of its block, a vector as an offset. Next on the walk: row_plan/queues.py.
"""

from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from distmega.kernels.hopper.plan.extents import matrix_columns
from distmega.kernels.hopper.plan.types import ITEM_BYTES, MAX_MATRICES, WeightMatrix, unfit
from distmega.kernels.hopper.plan.words import (
    NOTHING,
    SLICE_K,
    SLICES,
    TILE_K,
    UNIT_ROWS,
    VECTOR_MULTIPLE,
)
from distmega.kernels.runtime.arena import ArenaLayout, round_up
from distmega.kernels.tasks.fuse import Fused, FusedContraction, WeightStream, norms_of
from distmega.program.types import Program


class Weights:
    """Addresses of weights. columns: the row length of each matrix by name.

    UnsupportedError where matrices of one length do not lie together.
    """

    def __init__(
        self,
        segment: Program,
        layout: ArenaLayout,
        most: int = MAX_MATRICES,
        apart: Container[str] = (),
    ) -> None:
        """most: lengths of rows that the kernel takes. apart: weights that are in no matrix of
        `matrices`.
        """
        self.layout, self.most = layout, most
        self.columns = matrix_columns(segment)
        self.matrices = self._find_matrices([n for n in self.columns if n not in apart])

    def block_of(self, names: Sequence[str], columns: int, slices: int = SLICES) -> WeightMatrix:
        """All rows of one length from the first of these weights to the last."""
        starts = [self.layout.offset(name) for name in names]
        ends = [at + self.layout.tensors[n].num_bytes for at, n in zip(starts, names, strict=True)]
        num_rows = (max(ends) - min(starts)) // (columns * ITEM_BYTES)
        return WeightMatrix(columns=columns, offset=min(starts), num_rows=num_rows, slices=slices)

    def _find_matrices(self, names: Sequence[str]) -> tuple[WeightMatrix, ...]:
        if made := [name for name in names if name not in self.layout.tensors]:
            raise unfit(f"a product with {made[0]!r}, which is no weight")
        self.require_type("bf16", names)
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self.columns[name], []).append(name)
        matrices = tuple(self.block_of(same, length) for length, same in sorted(found.items()))
        overlap = any(
            a.offset + a.num_rows * a.columns * ITEM_BYTES > b.offset
            for a, b in pairwise(sorted(matrices, key=lambda m: m.offset))
        )
        if len(matrices) > self.most or overlap:
            raise unfit(f"an arena with matrices of {[m.columns for m in matrices]} columns")
        return matrices

    def rows_of(self, weight: str) -> int:
        tensor = self.layout.tensors[weight]
        return tensor.num_elements // self.columns[weight]

    def row_in(self, matrix: WeightMatrix, name: str) -> int:
        row, rest = divmod(self.layout.offset(name) - matrix.offset, matrix.columns * ITEM_BYTES)
        if rest:
            raise unfit(f"weight {name!r} between rows of its matrix")
        return row

    def vector(self, name: str) -> int:
        return self.layout.offset(name) // ITEM_BYTES

    def table(self, name: str, dtype: str = "bf16") -> int:
        """Where a table begins in the arena, in multiples of VECTOR_MULTIPLE bf16 elements."""
        self.require_type(dtype, [name])
        found, rest = divmod(self.layout.offset(name), ITEM_BYTES * VECTOR_MULTIPLE)
        assert not rest
        return found

    def starts(self, op: str, streams: Sequence[WeightStream], matrix: WeightMatrix) -> list[int]:
        """First row of each stream of an op in a matrix."""
        found = []
        sizes = set()
        for stream in streams:
            rows = [self.row_in(matrix, name) for name in stream.weights]
            self.require_adjacent(stream.weights, rows)
            self.require_biases(stream.biases)
            found.append(rows[0])
            sizes.add(sum(map(self.rows_of, stream.weights)))
        if len(sizes) > 1 or (len(found) > 1 and sizes.pop() % UNIT_ROWS):
            raise unfit(f"{op!r}, whose streams have other rows than whole units each")
        return found

    def bias(self, streams: Sequence[WeightStream], *, padded: bool = False) -> int:
        """Offset of the biases of all streams, which lie one behind the other, or NOTHING. padded:
        the second stream's at the next multiple of VECTOR_MULTIPLE.
        """
        biases = tuple(name for stream in streams for name in stream.biases)
        self.require_type("bf16", biases)
        if padded and all(biases) and len(streams) == len(biases) == 2:
            self.require_next(*biases)
        else:
            self.require_biases(biases)
        return self.vector(biases[0]) if any(biases) else NOTHING

    def require_type(self, dtype: str, names: Iterable[str]) -> None:
        """Refuses vectors and matrices of other elements; "" is no name."""
        for name in filter(None, names):
            if self.layout.tensors[name].dtype != dtype:
                raise unfit(f"{name!r} of {self.layout.tensors[name].dtype}, not {dtype}")

    def require_norms(self, dtype: str, fused: Iterable[Fused]) -> None:
        """Refuses norms whose weights or biases have other elements."""
        for op in fused:
            for norm in norms_of(op):
                self.require_type(dtype, (norm.weight, norm.bias))

    def has_wide_norms(self, fused: Iterable[Fused]) -> bool:
        """Whether the weights of norms are f32; all are, or none."""
        ops = tuple(fused)
        names = [norm.weight for op in ops for norm in norms_of(op) if norm.weight]
        dtype = "f32" if names and self.layout.tensors[names[0]].dtype == "f32" else "bf16"
        self.require_norms(dtype, ops)
        return dtype == "f32"

    def require_adjacent(self, names: tuple[str, ...], starts: list[int]) -> None:
        ends = [start + self.rows_of(name) for name, start in zip(names, starts, strict=True)]
        if starts[1:] != ends[:-1]:
            raise unfit(f"weights {names} apart from each other")

    def require_biases(self, biases: tuple[str, ...]) -> None:
        """Refuses biases that do not follow each other without a gap."""
        if any(biases) and not all(biases):
            raise unfit(f"biases {biases}")
        for one, following in pairwise(biases if all(biases) else ()):
            size = self.layout.tensors[one].num_bytes
            if self.layout.offset(one) + size != self.layout.offset(following):
                raise unfit(f"biases {biases} apart from each other")

    def require_next(self, one: str, following: str) -> None:
        """Refuses two vectors the second of which does not begin at the next multiple of
        VECTOR_MULTIPLE elements.
        """
        size = round_up(self.layout.tensors[one].num_bytes)
        if self.layout.offset(one) + size != self.layout.offset(following):
            raise unfit(f"vectors {one!r} and {following!r} apart from each other")


def tiles_k(columns: int) -> int:
    return -(-columns // TILE_K)


def rows_of(op: FusedContraction, placed: Weights) -> int:
    """Weight rows of all streams; of experts those of all slots, or of one expert where slots are
    columns.
    """
    rows = sum(placed.rows_of(name) for stream in op.streams for name in stream.weights)
    if op.experts is None:
        return rows
    width = rows // op.experts.num_own
    if op.experts.by == "columns":
        return width
    slot = -(-width // len(op.streams) // SLICE_K) * SLICE_K
    return op.experts.num_chosen * slot * len(op.streams)


def num_units(rows: int) -> int:
    """Of 8 rows each."""
    return -(-rows // UNIT_ROWS)


@lru_cache(maxsize=2**16)
def share(rows: int, step: int, sm: int, num_sms: int) -> tuple[int, int]:
    """First unit of an SM and of the next one; multiples of `step` units."""
    parts = num_units(rows) // step
    return parts * sm // num_sms * step, parts * (sm + 1) // num_sms * step


def sms_with_rows(rows: int, step: int, num_sms: int) -> set[int]:
    """SMs that share gives units to."""
    shares = (share(rows, step, sm, num_sms) for sm in range(num_sms))
    return {sm for sm, (first, last) in enumerate(shares) if first < last}


def input_columns(entry_columns: int, team_rank: int, num_ranks: int) -> range:
    """Of an input's row of `entry_columns` elements: those that a rank hands out to all, whole
    units.
    """
    first, last = share(entry_columns, 1, team_rank, num_ranks)
    return range(first * UNIT_ROWS, min(last * UNIT_ROWS, entry_columns))
