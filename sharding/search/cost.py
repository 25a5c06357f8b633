"""What an op and a collective cost on a machine: bytes, flops and microseconds.

Comes in: an Op (of the whole program or of one rank's), tensors, a Machine. Goes out: numbers that
planner.py compares and explain prints. All of it follows from access maps; what overlap costs is
asked of the machine's model. kernels/machines.py has machines. Next: options.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distmega.program.dtypes import item_bytes
from distmega.program.kinds import OpWork, communicates, kind_of
from distmega.program.types import Access, Op, Program, Tensor, accesses
from distmega.sharding.overlap.products import OverlapModel
from distmega.sharding.search.groups import GroupLoad, group_load


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Rates of one rank's device and of the link between ranks; see Machine."""

    name: str
    dtype: str
    memory_bandwidth_bytes_per_us: float
    flops_per_us: tuple[tuple[str, float], ...]
    num_sms: int
    link_bandwidth_bytes_per_us: float
    collective_us: float
    launch_us: float

    def flops_rate(self, dtype: str) -> float:
        """Flops per microsecond on operands of a dtype; the slowest rate for a dtype not listed."""
        rates = dict(self.flops_per_us)
        return rates.get(dtype, min(rates.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(DeviceRates):
    """Rates of one rank's device and of the link between ranks; bytes and flops per microsecond.

    Attributes:
        name: What a user types.
        dtype: What models run in there.
        memory_bandwidth_bytes_per_us: Rate at which an op reads and writes.
        flops_per_us: Rate of arithmetic, by dtype.
        num_sms: Workers of a persistent kernel.
        link_bandwidth_bytes_per_us: Rate at which a rank sends.
        collective_us: Fixed time of one collective.
        launch_us: Fixed time of one op.
        overlap: Says what running matmuls beside collectives takes.
    """

    overlap: OverlapModel


CPU_DEVICE = DeviceRates(
    name="cpu",
    dtype="f32",
    memory_bandwidth_bytes_per_us=1.0e4,
    flops_per_us=(("f32", 5.0e4), ("bf16", 2.5e4), ("f64", 2.5e4)),
    num_sms=8,
    link_bandwidth_bytes_per_us=1.0e3,
    collective_us=150.0,
    launch_us=10.0,
)
"""A core or two of a server, ranks joined by gloo over the loopback."""

H200_DEVICE = DeviceRates(
    name="h200",
    dtype="bf16",
    memory_bandwidth_bytes_per_us=4.12e6,
    flops_per_us=(("bf16", 6.8e8), ("f16", 6.8e8), ("f32", 6.0e7), ("f64", 3.0e7)),
    num_sms=132,
    link_bandwidth_bytes_per_us=3.15e5,
    collective_us=6.4,
    launch_us=2.0,
)
"""One H200 of a node joined by NVLink; measured copy bandwidth, one-shot all-reduce, peer reads."""

H100_DEVICE = replace(H200_DEVICE, name="h100", memory_bandwidth_bytes_per_us=2.96e6)
"""An H100 joined alike, by its memory; nothing else was measured on one."""

DEVICES = {device.name: device for device in (CPU_DEVICE, H100_DEVICE, H200_DEVICE)}
"""Devices by the name a user types. kernels/machines.py makes Machines of them."""


def op_bytes(
    op: Op,
    tensors: Mapping[str, Tensor],
    extents: Mapping[str, int] | None = None,
) -> int:
    """Bytes an op moves between memory and cores: every element it touches, each tensor once.

    extents: axes whose extent differs from the op's (one rank's part); by default none. Where the
    data decide, what is expected.
    """
    sizes = {**op.extents, **(extents or {})}
    load = group_load(op, tensors, sizes)
    touched: dict[str, int] = {}
    for access in accesses(op):
        elements = _touched(op, access, tensors, sizes, load)
        touched[access.tensor] = max(touched.get(access.tensor, 0), elements)
    return sum(count * item_bytes(tensors[name].dtype) for name, count in touched.items())


def _touched(
    op: Op,
    access: Access,
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    load: GroupLoad | None,
) -> int:
    """Elements an access touches: a lookup axis counts once per index operand's element, groups
    where they have rows.
    """
    if load is not None:
        return _touched_groups(op, access, tensors, sizes, load)
    lookups = {axis.name for axis in op.axes if axis.lookup}
    count, looked_up = 1, False
    for index, extent in zip(access.dims, tensors[access.tensor].shape, strict=True):
        if lookups.intersection(index.axes):
            looked_up = True
        else:
            count *= min(math.prod(sizes[name] for name in index.axes), extent)
    if not looked_up:
        return count
    used = {name for index in access.dims for name in index.axes}
    rows = {n for a in op.reads if is_index(op, a, tensors) for i in a.dims for n in i.axes}
    table = math.prod(sizes[name] for name in lookups & used)
    return count * min(math.prod(sizes[name] for name in rows - used), table)


def _touched_groups(
    op: Op,
    access: Access,
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    load: GroupLoad,
) -> int:
    """As _touched; of what is looked up, at most as many positions as there are rows."""
    count = 1.0
    for index, extent in zip(access.dims, tensors[access.tensor].shape, strict=True):
        if index.is_grouped:
            count *= load.num_rows
        elif any(op.axis(name).lookup for name in index.axes):
            count *= min(load.num_rows, extent)
        elif load.axis in index.axes:
            count *= load.num_groups
        else:
            count *= min(math.prod(sizes[name] for name in index.axes), extent)
    return math.ceil(count)


def is_index(op: Op, access: Access, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operand holds positions to look up rather than values."""
    looks_up = kind_of(op).reads_positions or any(axis.lookup for axis in op.axes)
    return looks_up and tensors[access.tensor].dtype in ("i32", "i64")


def op_flops(
    op: Op,
    extents: Mapping[str, int] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> int:
    """Arithmetic of an op: two a multiply-add of a contraction, a few an element elsewhere.

    tensors: needed of an op that runs over groups of rows.
    """
    sizes = {**op.extents, **(extents or {})}
    load = group_load(op, tensors, sizes) if tensors else None
    if load is not None:
        return _grouped_flops(op, sizes, load)
    points = math.prod(sizes[axis.name] for axis in op.axes if not axis.lookup)
    written = math.prod(sizes[a.name] for a in op.axes if a.role == "parallel")
    return kind_of(op).flops(op, OpWork(sizes=sizes, points=points, written=written))


def _grouped_flops(op: Op, sizes: Mapping[str, int], load: GroupLoad) -> int:
    """As op_flops, of the rows that groups have."""
    inside = {
        name
        for access in accesses(op)
        if any(index.is_grouped for index in access.dims)
        for index in access.dims
        if not index.is_grouped
        for name in index.axes
    }
    points = load.num_rows * math.prod(sizes[name] for name in inside)
    return round(kind_of(op).grouped_flops(op, points))


def op_time_us(
    op: Op,
    tensors: Mapping[str, Tensor],
    machine: DeviceRates,
    extents: Mapping[str, int] | None = None,
) -> float:
    """Time of an op on one rank: its launch, then bytes or flops, whichever takes longer.

    A view moves nothing and takes no time.
    """
    if op.is_view:
        return 0.0
    moved = op_bytes(op, tensors, extents) / machine.memory_bandwidth_bytes_per_us
    rate = machine.flops_rate(tensors[next(accesses(op)).tensor].dtype)
    return machine.launch_us + max(moved, op_flops(op, extents, tensors) / rate)


def collective_bytes(kind: str, num_bytes: int, num_ranks: int) -> int:
    """Bytes that one rank sends. num_bytes: the whole tensor, as one coordinate sees it."""
    part = num_bytes * (num_ranks - 1) // num_ranks
    match kind:
        case "all_reduce":
            return 2 * part
        case "all_gather" | "reduce_scatter":
            return part
        case "all_to_all":
            return part // num_ranks
    return 0


def collective_time_us(kind: str, num_bytes: int, num_ranks: int, machine: DeviceRates) -> float:
    """Time of a collective over the whole tensor's bytes; take_shard is a local copy."""
    if not communicates(kind):
        copied = 2 * num_bytes / num_ranks
        return machine.launch_us + copied / machine.memory_bandwidth_bytes_per_us
    sent = collective_bytes(kind, num_bytes, num_ranks)
    return machine.collective_us + sent / machine.link_bandwidth_bytes_per_us


def copy_time_us(num_bytes: int, machine: DeviceRates) -> float:
    """Time to read and write bytes once in local memory, without a launch."""
    return 2 * num_bytes / machine.memory_bandwidth_bytes_per_us


RESIDENCY_REDUCTIONS = 3
"""All-reduces at whose time a matrix or state held whole is priced, for each op that uses it."""


def residency_prices_us(program: Program, machine: DeviceRates) -> dict[str, float]:
    """What holding a weight or state whole on every rank costs, in the currency of time.

    Ranks are asked for so that each holds its share: a matrix or state is priced at three
    all-reduces of the largest value beside it for every op that uses it, a share of it at that
    share. So a matrix is divided even where a collective takes longer than reading it whole, but
    not at the price of a collective more where its heads come out uneven. Vectors are free.
    """
    tensors = program.tensor_map()
    prices: dict[str, float] = {}
    for op in program.ops:
        operands = {access.tensor: tensors[access.tensor] for access in accesses(op)}
        beside = [t.num_bytes for t in operands.values() if t.role in ("temp", "input")]
        for tensor in operands.values():
            matrix = tensor.role == "weight" and len(tensor.shape) > 1
            if matrix or tensor.role == "state":
                time = collective_time_us("all_reduce", max(beside, default=0), 2, machine)
                price = prices.get(tensor.name, 0.0)
                prices[tensor.name] = price + RESIDENCY_REDUCTIONS * time
    return prices
