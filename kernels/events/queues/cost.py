"""Whether a region that the data size is drained: when static queues end, and when drained ones do.

Comes in: tasks with their costs, which of them run under random routings, a number of SMs. Goes
out: which of the two is expected to end first. Costs are bytes that an SM could have read
meanwhile. Static queues wait for the SM that got most, draining pays for each task that it takes.
Used by assign.py for graphs, and for kernels on a GPU whose tiles are one op's.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distmega.kernels.events.graph import EventGraph, TaskGrid, task_group
from distmega.kernels.events.values import RunTime
from distmega.kernels.tasks.tile import task_bytes
from distmega.program.types import accesses, grouped_index

POP_BYTES = 24 * 1024
"""What taking a task off a list costs, in bytes that an SM could have read: an L2 atomic and the
record, one after the other, 0.8 us at 31 KB/us of an H200's SM."""

GUARD_BYTES = 2 * 1024
"""What passing over a task costs, likewise."""

NUM_SAMPLES = 16
"""Random routings over which the cost model averages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTiles:
    """Tiles of a product of groups of rows. rows: of which each goes to `choices` of `groups`;
    this rank has the groups `first` up to `stop`. columns, depth: of a group's matrix; row_tile,
    column_tile: of a tile of the result. item_bytes: of an element.
    """

    rows: int
    choices: int
    groups: int
    first: int
    stop: int
    columns: int
    depth: int
    row_tile: int
    column_tile: int
    item_bytes: int


def drains_faster(graph: EventGraph, grids: Sequence[TaskGrid], num_sms: int) -> bool:
    """Whether draining a region is expected to end earlier than static queues."""
    tensors = graph.tasks.tensor_map()
    costs = np.concatenate([task_bytes(task_group(graph, grid.op), tensors) for grid in grids])
    at = {grid.rows.mesh_axis: 0 for grid in grids if grid.rows}
    runs = []
    for counts in _graph_counts(graph, grids[0]):
        starts = [0, *np.cumsum(counts).tolist()]
        known = RunTime(symbols=graph.symbols, starts={grids[0].starts: starts}, at=at)
        runs.append([graph.runs((g.op, n), known) for g in grids for n in range(g.num_tasks)])
    return _drained_is_first(costs, np.array(runs), num_sms)


def drains_groups_faster(tiles: GroupTiles, num_sms: int) -> bool:
    """As drains_faster, of one op's tiles, those of a group and of its rows one after another."""
    columns, rows = (-(-a // b) for a, b in ((tiles.columns, tiles.column_tile),
                                             (tiles.rows, tiles.row_tile)))  # fmt: skip
    counts = random_counts(tiles.rows, tiles.choices, tiles.groups)[:, tiles.first : tiles.stop]
    first_row = np.arange(rows) * tiles.row_tile
    running = counts[:, :, None] > first_row
    runs = np.repeat(running.reshape(len(counts), -1), columns, axis=1)
    read = (tiles.row_tile + tiles.column_tile) * tiles.depth
    written = tiles.row_tile * tiles.column_tile
    costs = np.full(runs.shape[1], float((read + written) * tiles.item_bytes))
    return _drained_is_first(costs, runs, num_sms)


def random_counts(num_rows: int, choices: int, num_groups: int) -> npt.NDArray[np.int64]:
    """Rows of each group, [NUM_SAMPLES, groups], where each row goes to `choices` groups."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(NUM_SAMPLES):
        order = generator.random((num_rows, num_groups)).argsort(axis=1)[:, :choices]
        found.append(np.bincount(order.ravel(), minlength=num_groups))
    return np.array(found)


def _drained_is_first(
    costs: npt.NDArray[np.float64], runs: npt.NDArray[np.bool_], num_sms: int
) -> bool:
    """costs: of each task, in program order; runs: [samples, tasks], whether it has work."""
    queue = np.arange(len(costs)) % num_sms
    static = drained = 0.0
    for running in runs:
        queued = np.bincount(queue, np.where(running, costs, GUARD_BYTES), num_sms)
        static += queued.max()
        taken = [0.0] * num_sms
        for cost in costs[running].tolist():
            heapq.heapreplace(taken, taken[0] + cost + POP_BYTES)
        drained += max(taken)
    return bool(drained < static)


def _graph_counts(graph: EventGraph, grid: TaskGrid) -> npt.NDArray[np.int64]:
    """Rows of each group of an op of a graph."""
    assert grid.rows is not None
    (op,) = (each for each in graph.program.ops if each.name == grid.op)
    index = grouped_index(op)
    assert index is not None
    rows = op.extents[index.axes[1]]
    num_groups = int(str(op.get("num_groups", grid.rows.num_groups)))
    choices = max(1, total_rows(graph, grid.op) // rows)
    return random_counts(rows, min(choices, num_groups), num_groups)


def total_rows(graph: EventGraph, op: str) -> int:
    """Rows of all groups of an op together."""
    (stated,) = (each for each in graph.program.ops if each.name == op)
    tensors = graph.program.tensor_map()
    return max(
        tensors[access.tensor].shape[dim]
        for access in accesses(stated)
        for dim, index in enumerate(access.dims)
        if index.is_grouped
    )
