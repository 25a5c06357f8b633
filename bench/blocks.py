"""Blocks of a transformer as programs that the host IR runs, beside the same in plain torch.

`mlp_block` and `transformer_block` give Blocks, whose `calls` a benchmark times in turn; all ranks
of a mesh axis "tp" make them together. On GPUs calls replay CUDA graphs, on both sides. Rows of the
input and of the result are divided among the ranks, weights by columns and rows, so that each
matmul has a gather before or a reduce-scatter behind. `python -m bench.blocks --ranks 2` times both
on as many GPUs of one host.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.options import at_least, read_options, writable_file
from bench.ranks import ROUNDS, median_us, run_on_ranks
from bench.timing import captured
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.cuda_graph import CapturedHost, shared_memory
from distmega.hostir.run.evaluator import Evaluator, Watch
from distmega.hostir.run.timeline import HostClock, Timeline
from distmega.kernels.gemm.host import PeerMatmuls
from distmega.kernels.gemm.machine import measured
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import H200
from distmega.kernels.runtime.gpus import AHEAD_CYCLES
from distmega.kernels.runtime.streams.copy_engines import CopyCommunicator
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import Layout, shard
from distmega.sharding.localize import LocalProgram, localize
from distmega.sharding.overlap.pairs import CHEAPEST, OverlapRequest
from distmega.sharding.planner import Plan, plan_program
from distmega.sharding.search.cost import Machine
from distmega.trace_file import Span, write_trace

EPS = 1e-5
OURS, IN_TURN, TORCH = "ours", "ours, sequential", "torch and NCCL"
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a block. heads: of keys and values; group: query heads of each."""

    rows: int
    hidden: int
    inner: int
    heads: int = 8
    group: int = 8
    head_dim: int = 128


Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How plain torch multiplies x W' where ranks have rows of x each, `gathered`, and where they
    get rows of the sum over ranks, `scattered`.
    """

    gathered: Product
    scattered: Product


@dataclass(slots=True, kw_only=True)
class Block:
    """A block with this rank's tensors. plans, hosts: by the name of a call that runs a program.
    in_torch: the same in plain torch.
    """

    name: str
    tensors: dict[str, Tensor]
    in_torch: Callable[[Products], Tensor]
    calls: dict[str, Call] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    hosts: dict[str, HostProgram] = field(default_factory=dict)

    def evaluator(self, comm: Communicator, call: str, watch: Watch | None = None) -> Evaluator:
        """Runs a call's program with the kernels of the device that the tensors are on."""
        matmuls = PeerMatmuls(comm) if isinstance(comm, NcclCommunicator) else None
        device = self.tensors["x"].device.type
        host = self.hosts[call]
        return Evaluator(host, comm, {}, device, watch, ops=KernelOps(), matmuls=matmuls)


ROWS, COLUMNS = shard(0, "tp"), shard(1, "tp")
MARKS: dict[str, Layout] = {
    "x": ROWS, "normed0": ROWS, "wqkv": ROWS, "qkv": COLUMNS, "wo": COLUMNS, "out": ROWS,
    "mid": ROWS, "normed1": ROWS, "w_up": COLUMNS, "up": shard(2, "tp"), "w_down": shard(2, "tp"),
    "down": ROWS, "y": ROWS,
}  # fmt: skip
"""Rows divided between matmuls, heads and inner columns within."""

Ways = Mapping[str, OverlapRequest]
WAYS: Ways = {OURS: CHEAPEST, IN_TURN: "sequential"}
"""Name of a call -> how its matmuls and collectives run."""


def mlp_program(shape: Shape, dtype: str = "bf16") -> Program:
    """y = (silu(x w0') * (x w1')) w_down', with w_up [2, inner, hidden] holding w0 and w1."""
    p = ProgramBuilder("mlp")
    x = p.input("x", (shape.rows, shape.hidden), dtype)
    return p.build(_feed_forward(p, x, shape, dtype, name="y"))


def _feed_forward(p: ProgramBuilder, x: Handle, shape: Shape, dtype: str, name: str) -> Handle:
    w_up = p.weight("w_up", (2, shape.inner, shape.hidden), dtype)
    up = p.linear(x, w_up, spec="m k, e f k -> m e f", name="up")
    gate, other = (p.slice(up, 1, i, i + 1, view=True, name=f"up{i}") for i in range(2))
    w_down = p.weight("w_down", (shape.hidden, 1, shape.inner), dtype)
    act = gate.map("silu(a0) * a1", other, name="act")
    return p.linear(act, w_down, spec="m e f, n e f -> m n", name=name)


def transformer_program(shape: Shape, dtype: str = "bf16") -> Program:
    """mid = x + attention(norm(x)), y = mid + mlp(norm(mid)), for rows at positions 0, 1, 2 ..."""
    rows, hidden, heads, group, dim = (
        shape.rows, shape.hidden, shape.heads, shape.group, shape.head_dim,
    )  # fmt: skip
    p = ProgramBuilder("transformer")
    x = p.input("x", (rows, hidden), dtype)
    positions = p.input("positions", (rows,), "i64")
    table = p.weight("rope_table", (rows, dim), "f32")
    norms = [p.weight(name, (hidden,), dtype) for name in ("norm0", "norm1")]
    normed = p.rms_norm(x, norms[0], EPS, name="normed0")
    wqkv = p.weight("wqkv", (heads, group + 2, dim, hidden), dtype)
    qkv = p.linear(normed, wqkv, spec="m k, h g d k -> m h g d", name="qkv")
    q = p.slice(qkv, 2, 0, group, view=True, name="q")
    k = p.slice(qkv, 2, group, group + 1, view=True, name="k1")
    v = p.slice(qkv, 2, group + 1, group + 2, view=True, name="v1")
    turned_q = p.rope(q, positions, table, name="turned_q")
    turned_k = p.rope(k, positions, table, name="turned_k")
    k, v = (
        p.transpose(p.reshape(each, (rows, heads, dim), name=f"{name}_rows"), (1, 0, 2), name=name)
        for name, each in (("keys", turned_k), ("values", v))
    )
    mixed = p.attention(turned_q, k, v, positions, dim**-0.5, in_order=True, name="mixed")
    wo = p.weight("wo", (hidden, heads, group, dim), dtype)
    out = p.linear(mixed, wo, spec="m h g d, n h g d -> m n", name="out")
    mid = x.map("a0 + a1", out, name="mid")
    normed = p.rms_norm(mid, norms[1], EPS, name="normed1")
    down = _feed_forward(p, normed, shape, dtype, name="down")
    return p.build(mid.map("a0 + a1", down, name="y"))


def mlp_block(
    comm: Communicator, shape: Shape, machine: Machine = H200, ways: Ways = WAYS
) -> Block:
    """The feed-forward part alone. ways: name of a call -> how its matmuls and collectives run."""
    return _block("mlp", comm, shape, mlp_program(shape, machine.dtype), machine, ways)


def transformer_block(
    comm: Communicator, shape: Shape, machine: Machine = H200, ways: Ways = WAYS
) -> Block:
    """Attention and feed-forward with their norms and sums, causal, without a cache."""
    program = transformer_program(shape, machine.dtype)
    return _block("transformer", comm, shape, program, machine, ways)


def plan_block(program: Program, comm: Communicator, machine: Machine, way: OverlapRequest) -> Plan:
    """The plan of a block under MARKS."""
    names = program.tensor_map()
    marks = {name: layout for name, layout in MARKS.items() if name in names}
    return plan_program(program, comm.mesh, machine, marks, overlap=way)


def _block(
    name: str,
    comm: Communicator,
    shape: Shape,
    program: Program,
    machine: Machine,
    ways: Ways,
) -> Block:
    text = f"{name} M={shape.rows} hidden={shape.hidden} inner={shape.inner}"
    own: dict[str, Tensor] = {}
    torch_block = _torch_transformer if name == "transformer" else _torch_mlp
    block = Block(name=text, tensors=own, in_torch=lambda p: torch_block(own["x"], own, p))
    for call, way in ways.items():
        plan = block.plans[call] = plan_block(program, comm, machine, way)
        local = localize(plan)
        if not block.tensors:
            own |= _own_tensors(local, shape, comm)
        host = lower_program(local, megakernel=False, peer_memory=True, fuse=True)
        block.hosts[call] = run_passes(host)
        block.calls[call] = _runner(block.evaluator(comm, call), block.tensors)
    block.calls[TORCH] = lambda: block.in_torch(in_turn(comm))
    if block.tensors["x"].is_cuda:
        block.calls[TORCH] = _replayed(block.calls[TORCH])
    return block


def _runner(evaluator: Evaluator, tensors: Mapping[str, Tensor]) -> Call:
    """Replays the program as a CUDA graph; node by node on the CPU."""
    if evaluator.device.type == "cpu":
        return lambda: evaluator.run(tensors)["y"]
    graph = CapturedHost(evaluator, tensors, shared_memory(evaluator.device))
    return lambda: graph.run({})["y"]


def _replayed(call: Call) -> Call:
    """The same of a call in torch."""
    graph, result = captured(call)

    def replay() -> Tensor:
        graph.replay()
        assert isinstance(result, Tensor)
        return result

    return replay


def _own_tensors(local: LocalProgram, shape: Shape, comm: Communicator) -> dict[str, Tensor]:
    """This rank's part of random tensors, on the default device; positions and angles are right."""
    torch.manual_seed(comm.rank)
    tensors: dict[str, Tensor] = {}
    for tensor in local.program.tensors:
        if tensor.role in ("input", "weight") and tensor.dtype != "i64":
            x = torch.randn(tensor.shape, dtype=torch_dtype(tensor.dtype))
            tensors[tensor.name] = x if tensor.name == "x" else x.mul_(tensor.shape[-1] ** -0.5)
    if "rope_table" in tensors:
        halves = torch.arange(shape.head_dim // 2) * (-2 / shape.head_dim)
        angles = torch.arange(shape.rows)[:, None] * 1e4**halves
        tensors["rope_table"] = torch.cat((angles.cos(), angles.sin()), 1)
        tensors["positions"] = torch.arange(shape.rows)
        tensors |= {name: torch.ones_like(tensors[name]) for name in ("norm0", "norm1")}
    return tensors


def in_turn(comm: Communicator) -> Products:
    """Torch's matmuls and NCCL's collectives, one after the other."""
    size = comm.mesh.size("tp")

    def gathered(x: Tensor, w: Tensor) -> Tensor:
        full = x.new_empty(size * x.shape[0], x.shape[1])
        comm.all_gather("tp", x, full, 0).wait()
        return full @ w.T

    def scattered(x: Tensor, w: Tensor) -> Tensor:
        own = x.new_empty(x.shape[0] // size, w.shape[0])
        comm.reduce_scatter("tp", x @ w.T, own, 0, "sum").wait()
        return own

    return Products(gathered=gathered, scattered=scattered)


def fused(comm: NcclCommunicator) -> Products:
    """Torch's own overlapped matmuls."""
    name = comm.group("tp")[0].group_name
    ops = torch.ops.symm_mem
    return Products(
        gathered=lambda x, w: ops.fused_all_gather_matmul(x, [w.T], 0, name)[1][0],
        scattered=lambda x, w: ops.fused_matmul_reduce_scatter(x, w.T, "sum", 0, name),
    )


def alone(comm: Communicator) -> Products:
    """The matmuls without a collective: of whatever is in memory, and of partial results."""
    size = comm.mesh.size("tp")
    return Products(
        gathered=lambda x, w: x.new_empty(size * x.shape[0], x.shape[1]) @ w.T,
        scattered=lambda x, w: (x @ w.T)[: x.shape[0] // size],
    )


def _torch_mlp(x: Tensor, own: Mapping[str, Tensor], products: Products) -> Tensor:
    up = products.gathered(x, own["w_up"].flatten(0, 1))
    gate, other = up.chunk(2, 1)
    return products.scattered(F.silu(gate) * other, own["w_down"].flatten(1))


def _rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The rotation of kind rope, in few of torch's kernels."""
    half = x.shape[-1] // 2
    rows = table.index_select(0, positions).view(x.shape[0], 1, 1, 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    left, right = torch.split(x.float(), half, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def _torch_transformer(x: Tensor, own: Mapping[str, Tensor], products: Products) -> Tensor:
    weights = own["wqkv"]
    heads, kinds, dim, hidden = weights.shape
    normed = F.rms_norm(x, (hidden,), own["norm0"], EPS)
    qkv = products.gathered(normed, weights.view(-1, hidden)).view(-1, heads, kinds, dim)
    turned = _rotate(qkv[:, :, :-1], own["positions"], own["rope_table"])
    q, k = turned[:, :, :-1].flatten(1, 2), turned[:, :, -1]
    rows = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, qkv[:, :, -1]))
    mixed = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    flat = mixed[0].transpose(0, 1).flatten(1)
    mid = x + products.scattered(flat, own["wo"].flatten(1))
    return mid + _torch_mlp(F.rms_norm(mid, (hidden,), own["norm1"], EPS), own, products)


def host_times(block: Block, comm: Communicator, call: str) -> str:
    """What a run costs the host, by instruction; captured as a graph too."""
    clock = HostClock()
    evaluator = block.evaluator(comm, call, clock.watch)
    evaluator.run(block.tensors)
    for times in clock.times_us.values():
        times.clear()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        evaluator.run(block.tensors)
    rows = clock.report()
    total = sum(sum(times) for times in clock.times_us.values()) / ROUNDS
    parts = [f"{num // ROUNDS} {word} {us:.0f}" for word, num, us in rows]
    reported = f"{total:.0f} us in {sum(num for _, num, _ in rows) // ROUNDS} instructions"
    captured = CapturedHost(block.evaluator(comm, call), dict(block.tensors))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        captured.run({})
    reported += f", captured {1e6 * (time.perf_counter() - start) / ROUNDS:.0f} us"
    torch.cuda.synchronize()
    return f"{reported} ({', '.join(parts)})"


def trace_spans(block: Block, comm: Communicator, call: str) -> list[Span]:
    """Spans of one run of all ranks, each rank's clock at zero when its GPU begins to wait for the
    host, which runs ahead as it would in a longer program.
    """
    line = Timeline(f"{call}, rank {comm.rank}")
    evaluator = block.evaluator(comm, call, line.watch)
    for _ in range(2):
        evaluator.run(block.tensors)
    comm.barrier()
    line.start()
    torch.cuda._sleep(AHEAD_CYCLES)
    evaluator.run(block.tensors)
    everyone = comm.all_gather_object([asdict(span) for span in line.spans()])
    return [Span(**fields) for found in everyone for fields in found]


def run_rank(given: Communicator, rows: list[int], trace: Path | None) -> None:
    """Times both blocks; rank 0 prints."""
    torch.set_default_device("cuda")
    comm = CopyCommunicator(given.mesh, given.rank)
    machine = measured(comm)
    shapes = [Shape(rows=each, hidden=8192, inner=28672) for each in rows]
    for shape in sorted(shapes, key=lambda s: -s.rows):
        for make in (mlp_block, transformer_block):
            block = make(comm, shape, machine)
            found = {name: call().float() for name, call in block.calls.items()}
            scale = found[TORCH].abs().max()
            far = max(float((y - found[TORCH]).abs().max() / scale) for y in found.values())
            times = median_us(block.calls)
            hosts = {each: host_times(block, comm, each) for each in block.hosts}
            if comm.rank == 0:
                reported = ", ".join(f"{name} {us:.0f} us" for name, us in times.items())
                lines = [f"{block.name}: {reported}; furthest from torch {far:.4f}"]
                lines += [f"  host of {call}: {text}" for call, text in hosts.items()]
                print("\n".join(lines), flush=True)
    if trace is not None:
        block = mlp_block(comm, shapes[0], ways={OURS: "kernel", "ring": "ring"})
        spans = [span for call in block.hosts for span in trace_spans(block, comm, call)]
        if comm.rank == 0:
            write_trace(trace, spans)


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=at_least(2), default=2)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[1024, 4096, 8192])
    parser.add_argument(
        "--trace", type=writable_file, help="file for a timeline of the MLP at the first M"
    )
    options = read_options(parser, lambda given: given.ranks)
    run_on_ranks(run_rank, options.ranks, options.rows, options.trace)


if __name__ == "__main__":
    main()
