"""Measures what the cost model of overlap knows of a machine: OverlapRates, once, on its GPUs.

Comes in: the communicator of a mesh of GPUs, one axis of it. Goes out: rates, the same on all
ranks: every time is the slowest rank's. `distmega doctor --calibrate` calls this and keeps the
result; times/ways.py and matmul_ways.py use it, machine.py hands it to them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.torch_names import all_gather_single, reduce_scatter_single
from distmega.kernels.gemm import overlap, peer_collectives
from distmega.kernels.gemm.device.start import launch_matmul, plain_spec
from distmega.kernels.gemm.times.matmul_ways import STAGES, tiles_choice
from distmega.kernels.gemm.times.rates import H200_RATES, OverlapRates
from distmega.kernels.gemm.times.tile_times import GROUP, Tiles, gather_us, plan_sending, send_us
from distmega.kernels.gemm.workspace import workspace_of
from distmega.kernels.runtime.gpus import AHEAD_CYCLES, num_sms
from distmega.kernels.runtime.streams.stream_ops import copy_bytes
from distmega.sharding.overlap.products import Extents

ROUNDS = 7
MB = 2**20
SENT_MB = (1, 2, 8, 32, 128)
"""Tensors whose collectives are measured."""
DEPTH = 4096
WIDTH = 8192
TILE = 128
NUM_OPS = 200
"""Kernels of which the host's time is measured."""


@dataclass(slots=True)
class _Clock:
    """Times on the slowest rank of a group."""

    group: dist.ProcessGroup

    def times_us(self, *calls: Callable[[], object]) -> list[float]:
        """Median time of each call, all in turn in every round."""
        arrival = torch.zeros(1)
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        for number in range(ROUNDS + 2):
            for call, pairs in zip(calls, spans, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
                dist.all_reduce(arrival, group=self.group)
                start.record()
                call()
                end.record()
                if number > 1:
                    pairs.append((start, end))
        torch.cuda.synchronize()
        own = [sorted(a.elapsed_time(b) for a, b in pairs)[ROUNDS // 2] for pairs in spans]
        found = torch.tensor(own) * 1e3
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return [float(us) for us in found]


def measure_rates(comm: NcclCommunicator, axis: str) -> OverlapRates:
    """The machine's rates, with the kernel's needs as built in. Collective; about ten seconds.

    LaunchError where ranks do not reach each other's memory.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    group, _ = comm.group(axis)
    with torch.device(device):
        clock = _Clock(group)
        rates = replace(H200_RATES, num_sms=num_sms(device.index))
        for measure in (_matmuls, _collectives, _sends, _copies, _kernel, _fused, _host):
            rates = measure(rates, clock, comm, axis)
    return rates


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _line(small: float, large: float, few: float, many: float) -> tuple[float, float]:
    """Fixed time, and units a microsecond, of a line through two measurements."""
    rate = (many - few) / max(large - small, 0.1)
    return max(small - few / rate, 0.5), rate


def _matmuls(rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str) -> OverlapRates:
    sizes = ((1024, 2048), (2048, 4096), (4096, 8192))
    products = [partial(torch.mm, _random(m, DEPTH), _random(n, DEPTH).T) for m, n in sizes]
    little = _random(TILE, 64)
    source = torch.empty(256 * MB, dtype=torch.uint8)
    target = torch.empty_like(source)
    launch, copy, *times = clock.times_us(
        lambda: little @ little.T,
        lambda: target.copy_(source),
        *products,
    )
    found = [2 * m * n * DEPTH / (us - launch) for (m, n), us in zip(sizes, times, strict=True)]
    return replace(
        rates,
        launch_us=launch,
        library_flops_per_us=max(found),
        memory_bytes_per_us=2 * source.numel() / copy,
    )


def _collectives(
    rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str
) -> OverlapRates:
    size, group = comm.mesh.size(axis), clock.group
    own = {num: _random(num * MB // 2 // size) for num in SENT_MB}
    whole = {num: _random(num * MB // 2) for num in SENT_MB}
    calls: list[Callable[[], object]] = []
    for num in SENT_MB:
        calls += [
            partial(all_gather_single, whole[num], own[num], group=group),
            partial(reduce_scatter_single, own[num], whole[num], group=group),
            partial(dist.all_reduce, whole[num], group=group),
        ]
    a, b = _random(2048, 8192), _random(5120, 8192)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    middle = SENT_MB[-2]

    def beside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(whole[middle], group=group)
        a @ b.T
        torch.cuda.current_stream().wait_stream(side)

    *found, alone, both = clock.times_us(*calls, partial(torch.mm, a, b.T), beside)
    sent = [num * MB * (size - 1) / size for num in SENT_MB]
    parts = [(one + other) / 2 for one, other in zip(found[::3], found[1::3], strict=True)]
    reduced = found[2::3]
    return replace(
        rates,
        nccl_us=((0.0, parts[0]), *zip(sent, parts, strict=True)),
        nccl_reduce_us=(
            (0.0, reduced[0]),
            *((2 * x, us) for x, us in zip(sent, reduced, strict=True)),
        ),
        beside_factor=_factor(alone, reduced[-2], both),
    )


def _factor(one: float, other: float, both: float) -> float:
    """1 where two things side by side take as long as the longer, 2 where as long as both."""
    return 1 + max(both - max(one, other), 0.0) / min(one, other)


def _sends(rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str) -> OverlapRates:
    size, here = comm.mesh.size(axis), comm.mesh.coordinate(comm.rank)[axis]
    parts = {num: (_random(num * MB // 2), _random(num * MB // 2)) for num in (1, 32)}

    def start(num: int) -> Callable[[], None]:
        comm.begin_group()
        given, taken = parts[num]
        members = [
            comm.send(axis, given, (here - 1) % size),
            comm.recv(axis, taken, (here + 1) % size),
        ]
        return comm.end_group(members).wait

    a, b = _random(2048, 8192), _random(5120, 8192)

    def beside() -> None:
        wait = start(32)
        a @ b.T
        wait()

    small, large, alone, both = clock.times_us(
        lambda: start(1)(), lambda: start(32)(), lambda: a @ b.T, beside
    )
    fixed, rate = _line(small, large, MB, 32 * MB)
    factor = _factor(alone, large, both)
    return replace(rates, peer_us=fixed, peer_bytes_per_us=rate, ring_factor=factor)


def _copies(rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str) -> OverlapRates:
    """Copies to a peer alone, and collectives that are made of them."""
    workspace = workspace_of(comm, axis, 4 * WIDTH * WIDTH)
    size, peer = workspace.num_ranks, workspace.peers[0]
    own = torch.empty(32 * MB, dtype=torch.uint8)
    buffer, stream = workspace.symmetric_address(peer), torch.cuda.current_stream()
    few = _random(256, 1024)

    def reduce(rows: int) -> None:
        workspace.begin()
        workspace.sum(workspace.buffer((rows, 1024), few.dtype))

    small, large, gathered, low, high = clock.times_us(
        lambda: copy_bytes(buffer, own.data_ptr(), MB, stream),
        lambda: copy_bytes(buffer, own.data_ptr(), 32 * MB, stream),
        lambda: peer_collectives.all_gather(few, workspace),
        lambda: reduce(256),
        lambda: reduce(4096),
    )
    _, rate = _line(small, large, MB, 32 * MB)
    copied = gathered - (size - 1) * (few.nbytes / rate + rates.peer_copy_us)
    sent = 2 * few.nbytes * (size - 1) / size
    two_shot, two_shot_rate = _line(low, high, sent, 16 * sent)
    return replace(
        rates,
        copy_bytes_per_us=rate,
        peer_copies_us=max(copied, 0.0),
        two_shot_us=two_shot,
        two_shot_bytes_per_us=two_shot_rate,
    )


def _kernel(rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str) -> OverlapRates:
    """Four full waves of tiles of each width, at two depths."""
    waves, slices = 4, (32, 128)
    found, ends = [], []
    for width, stages in STAGES.items():
        spec = plain_spec(Tiles(tile_n=width, stages=stages))
        rows, columns = TILE * waves * 4, width * rates.num_sms // 4
        out = torch.empty(rows, columns, dtype=torch.bfloat16)
        calls = []
        for each in slices:
            a, b = _random(rows, 64 * each), _random(columns, 64 * each)
            calls.append(partial(launch_matmul, a, b, out, spec, GROUP))
        small, large = clock.times_us(*calls)
        slice_us = (large - small) / waves / (slices[1] - slices[0])
        found.append((width, slice_us))
        ends.append((small - rates.launch_us) / waves - slices[0] * slice_us)
    return replace(rates, slice_us=tuple(found), tile_us=max(ends[0], 0.0))


def _fused(rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str) -> OverlapRates:
    """What a launch with peers takes longer, and the end of pushing the last sums: by how much the
    kernel is slower than it would be without.
    """
    workspace = workspace_of(comm, axis, 4 * WIDTH * WIDTH)
    extents = Extents(rows=WIDTH, columns=WIDTH, depth=DEPTH, num_ranks=workspace.num_ranks)
    none = replace(rates, peers_us=0.0, push_us=0.0)
    gathers = tiles_choice("all_gather", extents, none)
    sums = tiles_choice("all_reduce", extents, none)
    assert gathers.tiles is not None
    assert sums.tiles is not None
    a, b = _random(WIDTH, DEPTH), _random(WIDTH, DEPTH)
    own = a[: WIDTH // workspace.num_ranks].contiguous()
    gathered, summed = clock.times_us(
        lambda: overlap.all_gather_matmul(own, b, workspace, gathers),
        lambda: overlap.matmul_all_reduce(a, b, workspace, sums),
    )
    alone_us = gather_us(extents, gathers.tiles, none, gathers.split)
    peers_us = max(gathered - alone_us, 0.0)
    plan = plan_sending(
        extents,
        sums.tiles,
        rates.num_sms,
        lag=sums.lag,
        parts=sums.parts,
        split=sums.split,
        shares=True,
    )
    ended = send_us(extents, plan, replace(none, peers_us=peers_us))
    return replace(rates, peers_us=peers_us, push_us=max(summed - ended, 0.0))


def _host(rates: OverlapRates, clock: _Clock, comm: NcclCommunicator, axis: str) -> OverlapRates:
    """The host's time of a library op, and of one in a captured graph."""
    x = torch.zeros(64)
    graph = torch.cuda.CUDAGraph()

    def run() -> None:
        for _ in range(NUM_OPS):
            x.add_(1.0)

    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    issued = time.perf_counter() - start
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    replayed = time.perf_counter() - start
    torch.cuda.synchronize()
    found = torch.tensor([issued, replayed]) * 1e6 / NUM_OPS
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=clock.group)
    return replace(rates, host_us=float(found[0]), replay_us=float(found[1]))
