"""How long a matmul and a collective take in each way of running them: a model of waves and links.

Comes in: a Product, the machine's OverlapRates, which `distmega doctor --calibrate` measures. Goes
out: predicted microseconds by way. overlap.py chooses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distmega.dtypes import item_bytes
from distmega.sharding.cost import Machine
from distmega.sharding.overlap_rates import OverlapRates

Way = Literal["sequential", "chunks", "ring", "kernel"]
"""One after the other; chunks on streams; parts around a ring of ranks; tiles of one kernel."""

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
TILE_ROWS = 128
SLICE = 64
"""Elements of the summed dim that a tile multiplies at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A [rows, depth] times [columns, depth] on each of num_ranks ranks, and its collective. rows:
    of all ranks together.
    """

    collective: Collective
    rows: int
    columns: int
    depth: int
    num_ranks: int
    dtype: str

    @property
    def num_flops(self) -> int:
        """On one rank."""
        return 2 * self.rows * self.columns * self.depth

    def room_bytes(self) -> int:
        """Peer memory of one fused matmul: the gathered operand, or partial results and sums."""
        width = self.depth if self.collective == "all_gather" else 2 * self.columns
        return self.rows * width * item_bytes(self.dtype)

    def sent_bytes(self) -> int:
        """That a rank sends, once around."""
        width = self.depth if self.collective == "all_gather" else self.columns
        whole = self.rows * width * item_bytes(self.dtype)
        part = whole * (self.num_ranks - 1) // self.num_ranks
        return 2 * part if self.collective == "all_reduce" else part


def way_times_us(
    product: Product, machine: Machine, chunk_counts: Sequence[int]
) -> tuple[dict[tuple[Way, int], float], dict[str, str]]:
    """Predicted time by way and chunks (0 where there are none), and why other ways can't be."""
    rates = machine.overlap
    times: dict[tuple[Way, int], float] = {("sequential", 0): sequential_us(product, rates)}
    refused: dict[str, str] = {}
    extent = product.columns if product.collective == "reduce_scatter" else product.rows
    counts = [count for count in chunk_counts if count <= extent]
    if product.collective == "all_gather":
        refused["chunks"] = "a sum over ranks; parts of a gather come around a ring"
        counts = []
    for count in counts:
        times["chunks", count] = chunks_us(product, rates, count)
    if not counts:
        refused.setdefault("chunks", f"at most {extent} chunks")
    if product.collective == "all_reduce":
        refused["ring"] = "an all-gather or a reduce-scatter"
    else:
        times["ring", product.num_ranks] = ring_us(product, rates)
    if reason := kernel_problem(product, rates):
        refused["kernel"] = reason
    else:
        times["kernel", 0] = kernel_us(product, rates)
    return times, refused


def matmul_us(rows: int, columns: int, depth: int, rates: OverlapRates) -> float:
    """Time of the library's matmul: flops at the rate of so many tiles, or memory traffic."""
    tiles = max(1, math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_ROWS))
    flops = 2 * rows * columns * depth
    moved = 2 * (rows * depth + columns * depth + rows * columns) / rates.memory_bytes_per_us
    return rates.launch_us + max(flops / rates.matmul_flops_per_us(tiles), moved)


def transfer_us(num_bytes: float, rates: OverlapRates) -> float:
    """Time of a collective of NCCL in which each rank sends so many bytes."""
    return rates.collective_us + num_bytes / rates.collective_bytes_per_us


def sequential_us(product: Product, rates: OverlapRates) -> float:
    """The matmul and the collective, one after the other."""
    matmul = matmul_us(product.rows, product.columns, product.depth, rates)
    return matmul + transfer_us(product.sent_bytes(), rates)


def chunks_us(product: Product, rates: OverlapRates, count: int) -> float:
    """Chunks on streams, of rows, or of columns where rows are scattered: a pipeline of two stages,
    which slow each other down.
    """
    rows, columns = product.rows, product.columns
    if product.collective == "reduce_scatter":
        columns = math.ceil(columns / count)
    else:
        rows = math.ceil(rows / count)
    part = matmul_us(rows, columns, product.depth, rates)
    moved = transfer_us(product.sent_bytes() / count, rates)
    both = _beside(part, moved, rates.beside_factor)
    return part + moved + (count - 1) * both


def ring_us(product: Product, rates: OverlapRates) -> float:
    """Each rank's part at a time, while the next comes from, or the last sum goes to, a neighbour.

    A gather begins with what is here and a scatter ends with it, so one part has no transfer
    beside it.
    """
    size = product.num_ranks
    part = matmul_us(product.rows // size, product.columns, product.depth, rates)
    moved = rates.peer_us + product.sent_bytes() / (size - 1) / rates.peer_bytes_per_us
    return part + (size - 1) * _beside(part, moved, rates.ring_factor)


def _beside(one: float, other: float, factor: float) -> float:
    """Time of two things side by side: the longer where the factor is 1, both in turn where 2."""
    return max(one, other) + (factor - 1) * min(one, other)


def kernel_problem(product: Product, rates: OverlapRates) -> str:
    """What a fused kernel would need that a product lacks; empty if nothing."""
    rows, columns, depth = rates.kernel_multiples
    columns = columns if product.collective != "all_gather" else depth
    if product.dtype not in rates.kernel_dtypes:
        return f"a type of {', '.join(rates.kernel_dtypes)}, not {product.dtype}"
    if product.rows % (rows * product.num_ranks) or product.columns % columns:
        return (
            f"rows a multiple of {rows * product.num_ranks} and columns of {columns}, not "
            f"{product.rows} x {product.columns}"
        )
    if product.depth % depth or product.num_ranks > rates.kernel_ranks:
        return f"a depth a multiple of {depth} and at most {rates.kernel_ranks} ranks"
    return ""


def kernel_us(product: Product, rates: OverlapRates) -> float:
    """One kernel with its collective beside it, or the library's matmul with copies by copy engine,
    whichever is quicker.

    A gather delays the first tiles of other ranks where this rank's own are too few to cover the
    copies; sending delays every wave a little, and the last tiles by a hop.
    """
    if not rates.slice_us:
        return sequential_us(product, rates)
    best, waves = min(_kernel_waves(product, width, rates) for width, _ in rates.slice_us)
    apart = matmul_us(product.rows, product.columns, product.depth, rates)
    link = rates.copy_us + product.sent_bytes() / rates.copy_bytes_per_us
    if product.collective == "all_gather":
        covered = product.rows > product.num_ranks * TILE_ROWS
        return min(max(best, link) + (rates.copy_us if covered else 2 * link), apart + link)
    last = rates.last_us[0 if product.collective == "reduce_scatter" else 1]
    return min(max(best + waves * rates.send_us, link) + last, apart + link)


def _kernel_waves(product: Product, width: int, rates: OverlapRates) -> tuple[float, int]:
    """Time of the kernel's matmul with tiles of `width` columns, and its waves of tiles."""
    tiles = math.ceil(product.rows / TILE_ROWS) * math.ceil(product.columns / width)
    waves = math.ceil(tiles / rates.num_sms)
    slices = math.ceil(product.depth / SLICE)
    busy = waves * (slices * dict(rates.slice_us)[width] + rates.tile_us)
    operands = product.depth * (product.rows + product.columns)
    moved = 2 * (operands + product.rows * product.columns) / rates.memory_bytes_per_us
    return rates.launch_us + max(busy, STREAMING * moved), waves


STREAMING = 1.1
"""How much longer than the library's the kernel takes where reading operands is all that counts."""
