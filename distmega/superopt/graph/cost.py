"""What a kernel takes on a machine, predicted for many grids at once.

Comes in: sizes per block and the DeviceRates of sharding/search/cost.py. Goes out: microseconds.
The same rates as for library ops, and what a grid adds: blocks come in waves, and what several
blocks read comes from the L2 cache. Next: schedule.py.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from distmega.program.dtypes import item_bytes
from distmega.program.types import Program
from distmega.sharding.search.cost import DeviceRates, op_time_us
from distmega.superopt.graph.arithmetic import Array
from distmega.superopt.graph.ugraph import Kernel, UGraph, joint_extents

CACHE_RATE = 1.5
"""How many times faster the L2 cache feeds an SM than memory feeds its share: about 6 of 4 TB/s."""

VECTOR_COST = 2.5
"""Instructions of a multiply-add that tensor cores don't do, with what widens its operands."""

SPLIT_COST = 100.0
"""Instructions an element of a product's operand that no 16-bit type holds: tensor cores take it as
the sum of two (kernels/ugraphs/block_ops.py), which come to them through shared memory. Measured,
16 rows times their norm's weight in each of 128 blocks took 20 of 29 us.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel does. Arrays have one element a grid.

    memory_bytes: of the tensors it reads and writes, each once. block_bytes: that one block reads
    and writes. products, functions: multiply-adds that tensor cores do, and instructions of all
    else, of one block. blocks: of the grid. rounds: iterations of the loop.
    """

    memory_bytes: int
    block_bytes: Array
    products: Array
    functions: Array
    blocks: Array
    rounds: int


def kernel_us(work: Work, machine: DeviceRates) -> Array:
    """Time of a launch for each grid: what takes longer of data movement and arithmetic, and of the
    other one the part that nothing goes on beside, one round of all that an SM does.
    """
    rate = machine.memory_bandwidth_bytes_per_us
    waves = np.ceil(work.blocks / machine.num_sms)
    share = CACHE_RATE * rate / machine.num_sms
    moved = np.maximum(work.memory_bytes / rate, waves * work.block_bytes / share)
    fast, slow = (machine.flops_rate(dtype) / machine.num_sms for dtype in ("bf16", "f32"))
    computed = waves * 2.0 * (work.products / fast + work.functions / slow)
    alone = np.minimum(moved, computed) / (work.rounds * waves)
    found = machine.launch_us + np.maximum(moved, computed) + alone
    return np.asarray(found, dtype=np.float64)


def graph_us(graph: UGraph, machine: DeviceRates) -> float:
    """Predicted time of all kernels of a graph, one after another."""
    return sum(float(kernel_us(work_of(graph, k), machine)[0]) for k in graph.kernels)


def work_of(graph: UGraph, kernel: Kernel) -> Work:
    """What a kernel of a finished graph does; arrays of one element."""
    extents, tensors = joint_extents(graph), graph.tensor_map()
    parts = dict(kernel.grid)
    tiles = {axis: extent // parts.get(axis, 1) for axis, extent in extents.items()}
    names = {load.tensor for load in kernel.loads} | {store.name for store in kernel.stores}
    total = sum(_elements(tensors[n].axes, extents) * item_bytes(tensors[n].dtype) for n in names)
    block = sum(
        _elements([a for dim in load.dims for a in dim], tiles)
        * item_bytes(tensors[load.tensor].dtype)
        for load in kernel.loads
    )
    block += sum(
        _elements(tensors[s.name].axes, tiles) * item_bytes(tensors[s.name].dtype)
        for s in kernel.stores
    )
    along = {load.name: {a for dim in load.dims for a in dim} for load in kernel.loads}
    along |= {op.name: set(op.axes) for op in kernel.ops}
    products = functions = 0.0
    exact = {x.name for x in kernel.loads if item_bytes(tensors[x.tensor].dtype) <= 2}
    own = (t.dtype for t in graph.tensors if t.role != "temp" or t.name in graph.outputs)
    split_cost = SPLIT_COST if are_halves(own) else 0.0
    for op in kernel.ops:
        elements = _elements({*op.axes, *op.reduced}, tiles)
        if op.kind == "contract" and are_matrices(*(along[arg] for arg in op.args)):
            products += elements
            split = (_elements(along[arg], tiles) for arg in op.args if arg not in exact)
            functions += split_cost * sum(split)
        elif op.kind == "contract":
            functions += VECTOR_COST * elements
        elif op.kind != "cat":
            functions += num_functions(op.kind, op.expr) * elements
    one = [np.array([float(x)]) for x in (block, products, functions, kernel.num_blocks)]
    return Work(total, one[0], one[1], one[2], one[3], kernel.loop[1] if kernel.loop else 1)


def are_matrices(a: AbstractSet[str], b: AbstractSet[str]) -> bool:
    """Whether operands along these axes both have rows of their own, as tensor cores need."""
    return bool(a - b) and bool(b - a)


def are_halves(dtypes: Iterable[str]) -> bool:
    """Whether a program with inputs and outputs of these types has its products in 16 bits."""
    return all(item_bytes(dtype) <= 2 for dtype in dtypes)


def num_functions(kind: str, text: str) -> int:
    """Functions an element of a map, by its expression's brackets; 1 of a reduction."""
    return max(text.count("("), 1) if kind == "map" else 1


def _elements(axes: Iterable[str], extents: Mapping[str, int]) -> int:
    return math.prod(extents[axis] for axis in axes)


def program_us(program: Program, machine: DeviceRates) -> float:
    """Predicted time of a program's ops, one library op after another."""
    tensors = program.tensor_map()
    return float(sum(op_time_us(op, tensors, machine) for op in program.ops))


def least_us(program: Program, machine: DeviceRates) -> float:
    """What no graph can be below: one launch, and inputs and outputs moved once."""
    used = {access.tensor for op in program.ops for access in op.reads} | set(program.outputs)
    moved = sum(
        t.num_bytes for t in program.tensors if t.name in used and (
            t.role != "temp" or t.name in program.outputs)
    )  # fmt: skip
    return float(machine.launch_us + moved / machine.memory_bandwidth_bytes_per_us)
