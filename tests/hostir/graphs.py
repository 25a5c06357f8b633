"""CUDA graphs on a CPU: what is captured is recorded op by op, and done again by each replay.

Streams order nothing here, and events are reached at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distmega.hostir.run import evaluator
from distmega.program.ops import attention, lookups


class Stream:
    """Whatever is asked of it has been done."""

    def wait_stream(self, other: "Stream") -> None:
        """It waits for nothing."""

    def wait_event(self, event: "Event") -> None:
        """It waits for nothing."""


MAIN = Stream()


class Event:
    """Reached as soon as it is recorded; counts how often it was."""

    made = 0

    def __init__(self, **options: bool) -> None:
        Event.made += 1
        self.num_recorded = 0

    def record(self, stream: Stream | None = None) -> None:
        self.num_recorded += 1

    def query(self) -> bool:
        return True


ASKING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.masked_select.default)
"""Operators by which the host asks the device for a number."""


class RecordedGraph(TorchDispatchMode):
    """Ops with their results; `replay` does them on the same memory."""

    made: list["RecordedGraph"] = []

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        self.num_replays = 0
        self.pool = -1
        RecordedGraph.made.append(self)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in ASKING:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.is_write:
                self.overwritten.append((x, x.clone()))
        results = func(*args, **(kwargs or {}))
        # a graph knows memory: what becomes of the tensors themselves it does not see
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))

        def again() -> None:
            found = func(*args, **(kwargs or {}))
            for old, new in zip(tree_leaves(results), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.steps.append(again)
        return results

    def end(self) -> None:
        """What was overwritten is as before: a capture runs nothing."""
        for x, before in reversed(self.overwritten):
            x.copy_(before)
        self.overwritten.clear()

    def replay(self) -> None:
        self.num_replays += 1
        with torch.no_grad():
            for step in self.steps:
                step()

    def reset(self) -> None:
        self.steps.clear()
        pools[self.pool] -= 1


pools: dict[int, int] = {}
"""How many graphs have a pool."""
in_capture: set[int] = set()
"""Pools in which torch puts what a capture allocates."""


def new_pool() -> int:
    pools[len(pools)] = -1
    return len(pools) - 1


@contextmanager
def recording(
    graph: RecordedGraph, pool: int, stream: Stream, *, capture_error_mode: str
) -> Iterator[None]:
    """In place of torch.cuda.graph, which takes no pool whose graphs have all ended while something
    in it is held, and, before torch 2.12, none in which a capture has failed.
    """
    if pool in in_capture:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    if not pools[pool]:
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
    graph.pool, pools[pool] = pool, max(pools[pool], 0) + 1
    in_capture.add(pool)
    with graph:
        yield
    in_capture.remove(pool)
    with torch.no_grad():
        graph.end()


def end_capture(device: int, pool: int) -> None:
    """In place of torch._C._cuda_endAllocateToPool."""
    if pool not in in_capture:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    in_capture.remove(pool)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Lets programs on the CPU be captured; the graphs, as they are made."""
    RecordedGraph.made, Event.made = [], 0
    for name, stand_in in {
        "CUDAGraph": RecordedGraph,
        "Event": Event,
        "Stream": Stream,
        "graph": recording,
        "graph_pool_handle": new_pool,
        "current_device": lambda: 0,
        "current_stream": lambda *device: MAIN,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda *device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name, stand_in in {
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_endAllocateToPool": end_capture,
    }.items():
        monkeypatch.setattr(torch._C, name, stand_in, raising=False)
    for looking in attention, lookups:  # on a GPU, nobody looks at ids
        monkeypatch.setattr(looking, "require_ids", lambda ids, num: None)
    monkeypatch.setattr(evaluator.Evaluator, "graph_breaks", ())
    return RecordedGraph.made
