"""Times calls on one GPU by its events. Used by the benchmarks of this folder; ranks.py takes the
slowest of several GPUs.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]


def elapsed_us(call: Call, num: int) -> float:
    """Time of `call` on the GPU divided by `num`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / num


@dataclass(frozen=True, slots=True)
class Captured:
    """Torch's own CUDA graph of a call. It keeps the call, whose weights and tokens a replay reads;
    a graph keeps none of them, so that their memory would be given to others.
    """

    call: Call
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


def captured(call: Call) -> tuple[Captured, Any]:
    """A call as CUDA graph, and what a replay gives; a few calls come first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()
    return Captured(call, graph), result


def copy_bytes_per_us() -> float:
    """Rate of a device copy of 1 GiB, reads and writes counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [elapsed_us(lambda: target.copy_(source), 1) for _ in range(20)]
    return 2 * source.numel() / statistics.median(times)


def flops_per_us() -> float:
    """Rate of a large bf16 matmul by cuBLAS."""
    x, w = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * 8192**3 / statistics.median(elapsed_us(lambda: x @ w, 1) for _ in range(20))


def in_turn(calls: Mapping[str, Call], rounds: int) -> Iterator[tuple[str, Call]]:
    """All calls in every round, in every other one backwards, so that none always follows the same
    one.
    """
    for number in range(rounds):
        yield from list(calls.items())[:: -1 if number % 2 else 1]


def alternating_us(calls: Mapping[str, Call], rounds: int, before: Call) -> dict[str, float]:
    """Median time on the GPU of each call, `in_turn`; each behind `before`, which is not timed and
    gives the host time to run ahead. Two calls of each come first.
    """
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for call in (*calls.values(), *calls.values()):
        call()
    for name, call in in_turn(calls, rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        call()
        end.record()
        spans[name].append((start, end))
    torch.cuda.synchronize()
    times = {name: sorted(s.elapsed_time(e) for s, e in pairs) for name, pairs in spans.items()}
    return {name: ms[rounds // 2] * 1e3 for name, ms in times.items()}
