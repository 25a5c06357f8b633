"""What each process of a multi-rank test runs. An assertion that fails in one ends the test."""

import gc
import os
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import distmega
from distmega.compiled import CompiledProgram, compile_plan
from distmega.engine.engine import Engine
from distmega.engine.ranks.context import RankContext
from distmega.engine.ranks.jobs import open_engine
from distmega.engine.requests import EngineOptions
from distmega.errors import PlanError, ProgramError, RankFailure, RequestError, UnsupportedError
from distmega.hostir.check.check import check_host
from distmega.hostir.comm import communicator
from distmega.hostir.comm.communicator import Communicator, GlooCommunicator
from distmega.hostir.ir.text import parse_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import CPU
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import replicate, stream
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from distmega.sources.load import open_model
from tests.forked import forking
from tests.hostir.programs import (
    RING,
    STREAMED,
    SegmentRunner,
    attention_block,
    block_tensors,
    flipped,
    random_tensors,
    run_program,
    shard_tensors,
)
from tests.hostir.streams import SPLIT_SUM, gathered, lowered, row_parallel, small_integers


def spawn(function: str, num_ranks: int, folder: Path) -> None:
    """Runs a function of this module in `num_ranks` processes; raises what one of them raised."""
    forking()
    arguments = (function, num_ranks, str(folder / "store"))
    mp.start_processes(_enter, arguments, nprocs=num_ranks, start_method="forkserver")


def _enter(rank: int, function: str, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    globals()[function](rank, num_ranks)
    dist.destroy_process_group()


def assert_equal_on_all_ranks(comm: Communicator, x: Tensor) -> None:
    """Bit by bit."""
    found = comm.all_gather_object(bytes(x.flatten().view(torch.uint8).tolist()))
    assert len(set(found)) == 1


def assert_near(found: Tensor, expected: Tensor) -> None:
    """As near as torch.testing.assert_close wants f32, without the half second of imports that it
    costs each process.
    """
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1.3e-6, atol=1e-5)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank contributes; any rank can tell what another has."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank), device="cpu")
    return x.to(torch.get_default_device(), dtype)


def run_all_checks(rank: int, num_ranks: int) -> None:
    """Every kind of exchange, on all ranks as one team and as a grid, then whole programs."""
    comm = GlooCommunicator(DeviceMesh(tp=num_ranks), rank)
    check_values(comm)
    check_reductions(comm)
    check_movements(comm)
    check_point_to_point(comm)
    if num_ranks == 4:
        check_grid(rank)
    check_programs(comm)
    comm.barrier()


def open_often(rank: int, num_ranks: int) -> None:
    """Programs that are compiled and dropped leave no threads and no sockets; one that is kept
    runs on, whatever is closed beside it.
    """
    plan = plan_program(attention_block(5), DeviceMesh(tp=num_ranks), CPU)
    context = RankContext(
        rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks, node="here",
        backend="gloo", device="cpu",
    )  # fmt: skip
    wholes = block_tensors(5)
    kept = compile_plan(plan, context)
    parts = kept.parts(wholes)
    expected, *_ = kept(parts).values()
    used = []
    for number in range(40):
        step = compile_plan(plan, context)
        if number % 10 == rank:
            gc.collect()  # at other times on other ranks
        if number % 10 == 9:
            found, *_ = step(parts).values()
            assert torch.equal(found, expected)
            used.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
    found, *_ = kept(parts).values()
    assert torch.equal(found, expected)
    assert used[-1] <= used[0] + 3, used
    mesh = DeviceMesh(dp=num_ranks // 2, tp=2) if num_ranks > 2 else DeviceMesh(tp=2)
    for _ in range(3):
        comm = GlooCommunicator(mesh, rank)
        assert comm.all_gather_object(rank, "tp") == [*mesh.team("tp", rank)]


def close_often(rank: int, num_ranks: int) -> None:
    """What is closed leaves no threads and no sockets at once, though it is kept, nor does what no
    megakernel does; a program beside it runs on.
    """
    mesh = DeviceMesh(tp=num_ranks)
    plan = plan_program(attention_block(5), mesh, CPU)
    context = RankContext(
        rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks, node="here",
        backend="gloo", device="cpu",
    )  # fmt: skip
    kept = compile_plan(plan, context)
    parts = kept.parts(block_tensors(5))
    expected, *_ = kept(parts).values()
    source, options = open_model("tiny-llama"), EngineOptions(max_context=32)
    refused = plan_program(flipped(), mesh, CPU)
    closed: list[CompiledProgram | Engine | GlooCommunicator] = []
    refusals, used = [], []
    for _ in range(8):
        step = compile_plan(plan, context)
        found, *_ = step(parts).values()
        assert torch.equal(found, expected)
        engine = open_engine(context, source, num_ranks, options)
        engine.prefill([1, 2])
        mine = [step, engine, GlooCommunicator(mesh, rank)]
        for one in mine:
            one.close()
        closed += mine
        with pytest.raises(UnsupportedError, match="op 'turned'") as refusal:
            compile_plan(refused, context, megakernel=True)
        refusals.append(refusal)  # which keep what it was compiled with
        used.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
    assert used[-1] <= used[1] + 3, used
    for one in closed:
        one.close()
    with pytest.raises(ProgramError, match=f"of a communicator that rank {rank} has closed"):
        closed[-1].all_reduce("tp", [torch.ones(1)], [torch.ones(1)], "sum")
    found, *_ = kept(parts).values()
    assert torch.equal(found, expected)


def fail_often(rank: int, num_ranks: int) -> None:
    """An engine that fails as it opens leaves no threads once its ranks open another one, though
    the error is kept, which keeps its memory.
    """
    context = RankContext(
        rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks, node="here",
        backend="gloo", device="cpu",
    )  # fmt: skip

    def fail(done_bytes: int, all_bytes: int) -> None:
        raise ValueError("told enough")

    source, options = open_model("tiny-llama"), EngineOptions(max_context=32)
    failures, used = [], []
    for _ in range(6):
        with pytest.raises(ValueError, match="told enough") as failure:
            open_engine(context, source, num_ranks, options, progress=fail)
        failures.append(failure)
        used.append(len(os.listdir("/proc/self/task")))
    assert used[-1] <= used[1], used
    captured = distmega.capture(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    for _ in range(4):
        with pytest.raises(PlanError, match=r"nothing\.weight") as refusal:
            captured.compile(context, DeviceMesh(tp=num_ranks), {"nothing.weight": replicate()})
        failures.append(refusal)
        used.append(len(os.listdir("/proc/self/task")))
    assert used[-1] <= used[-3], used
    with pytest.raises(RequestError, match="logits='most'"):
        open_engine(context, source, num_ranks, options, "most")  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/task")) == used[-1], "found before anything opens"


def check_values(comm: GlooCommunicator) -> None:
    """Plain values, and bytes that mean nothing, which pickle would run; it is never asked."""
    size, rank = comm.mesh.num_ranks, comm.rank
    values = [{"rank": r, "parts": (b"x" * r, [None, 1.5, "y" * 9 * r])} for r in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dumps", "loads", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, None)
        patch.setattr(c10d, "_pickler", None)
        patch.setattr(c10d, "_unpickler", None)
        assert comm.all_gather_object(values[rank]) == values
        assert comm.all_gather_object(values[rank], "tp") == values
    with pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:
            patch.setattr(communicator, "encode_plain", pickle.dumps)
        with pytest.raises(RankFailure, match=f"rank {size - 1} told rank {rank} what it can't"):
            comm.all_gather_object("value")


def check_reductions(comm: Communicator) -> None:
    size = comm.mesh.num_ranks
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        parts = [values(r, 3, 5, dtype=dtype) for r in range(size)]
        mine, out = parts[comm.rank], torch.empty(3, 5, dtype=dtype)
        comm.all_reduce("tp", [mine], [out], "sum").wait()
        wide = [p.float() if dtype == torch.bfloat16 else p for p in parts]
        expected = wide[0]
        for part in wide[1:]:
            expected = expected + part
        assert torch.equal(out, expected.to(dtype))
        assert_equal_on_all_ranks(comm, out)
    for combine, best in (("max", torch.amax), ("min", torch.amin)):
        comm.all_reduce("tp", [mine], [out], combine).wait()
        assert torch.equal(out, best(torch.stack(parts), 0))
    # Row 0 ties on all ranks, row 1 has its largest value on the last rank.
    value = torch.tensor([1.0, float(comm.rank)])
    index = torch.tensor([10 * (size - comm.rank), comm.rank])
    outs = [torch.empty(2), torch.empty(2, dtype=torch.int64)]
    comm.all_reduce("tp", [value, index], outs, "argmax").wait()
    assert outs[0].tolist() == [1.0, size - 1.0]
    assert outs[1].tolist() == [10, size - 1]
    first, second = torch.empty(3), torch.empty(3)
    handles = [
        comm.all_reduce("tp", [torch.full((3,), 1.0)], [first], "sum"),
        comm.all_reduce("tp", [torch.full((3,), 2.0)], [second], "sum"),
    ]
    for handle in reversed(handles):
        handle.wait()
    assert (first[0].item(), second[0].item()) == (size, 2 * size)


def check_movements(comm: Communicator) -> None:
    size, rank = comm.mesh.num_ranks, comm.rank
    parts = [values(r, 2, 3, dtype=torch.bfloat16) for r in range(size)]
    for dim in (0, 1):
        joined = torch.cat(parts, dim)
        out = torch.empty_like(joined)
        comm.all_gather("tp", parts[rank], out, dim).wait()
        assert torch.equal(out, joined)
        short = joined.narrow(dim, 0, joined.shape[dim] - 1).contiguous()
        out = torch.empty(short.shape[::-1], dtype=short.dtype).T
        comm.all_gather("tp", parts[rank].T.contiguous().T, out, dim).wait()
        assert torch.equal(out, short)
        out = torch.empty_like(parts[0])
        comm.reduce_scatter("tp", short, out, dim, "max").wait()
        padded = torch.zeros_like(joined)
        padded.narrow(dim, 0, short.shape[dim]).copy_(short)
        assert torch.equal(out, padded.chunk(size, dim)[rank])
    wholes = [values(r, 2, 3 * size) for r in range(size)]
    out = torch.empty(2 * size, 3)
    comm.all_to_all("tp", wholes[rank], out, 0, 1).wait()
    assert torch.equal(out, torch.cat([whole.chunk(size, 1)[rank] for whole in wholes]))
    sums = torch.empty(2, 3)
    comm.reduce_scatter("tp", wholes[rank], sums, 1, "sum").wait()
    assert_near(sums, sum(wholes).chunk(size, 1)[rank])
    one = values(rank, 2, 3)[1:, ::3]
    out = torch.empty(size, 1)
    comm.all_gather("tp", one, out, 0).wait()
    assert torch.equal(out, torch.cat([values(r, 2, 3)[1:, ::3] for r in range(size)]))
    out = torch.empty(2, 3, dtype=torch.bfloat16)
    comm.broadcast("tp", parts[rank], out, size - 1).wait()
    assert torch.equal(out, parts[-1])


def check_point_to_point(comm: Communicator) -> None:
    size, rank = comm.mesh.num_ranks, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    outs = [torch.empty(3), torch.empty(3)]
    handles = [comm.send("tp", values(10 * n + rank, 3), right) for n in range(2)]
    handles += [comm.recv("tp", out, left) for out in outs]
    comm.signal("tp", "ready", right)
    comm.signal("tp", "done", right)
    comm.wait_signal("tp", "done", left)
    comm.wait_signal("tp", "ready", left)
    for handle in handles:
        handle.wait()
        handle.wait()
    assert all(torch.equal(out, values(10 * n + left, 3)) for n, out in enumerate(outs))
    assert comm.all_gather_object(f"rank {rank}") == [f"rank {r}" for r in range(size)]


def check_grid(rank: int) -> None:
    """Teams of a mesh whose ranks are in no particular order."""
    mesh = DeviceMesh.from_ranks([[3, 0], [1, 2]], ("dp", "tp"))
    comm = GlooCommunicator(mesh, rank)
    for axis in mesh.names:
        out = torch.empty(2, dtype=torch.int64)
        comm.all_gather(axis, torch.tensor([rank]), out, 0).wait()
        assert tuple(out.tolist()) == mesh.team(axis, rank)
    assert comm.all_gather_object(rank) == [3, 0, 1, 2]
    alone = GlooCommunicator(DeviceMesh(dp=1, tp=4), rank)
    out = torch.empty(3)
    alone.send("dp", values(rank, 3), 0).wait()
    alone.recv("dp", out, 0).wait()
    assert torch.equal(out, values(rank, 3))


def check_programs(comm: GlooCommunicator) -> None:
    """Sharded programs give what one rank gives, as library ops and as segments."""
    mesh, rank, tensors = comm.mesh, comm.rank, block_tensors(5)
    expected = run_program(attention_block(5), {k: v.clone() for k, v in tensors.items()})
    plan = plan_program(attention_block(5), mesh, CPU)
    local_block, coordinate = localize(plan), mesh.coordinate(rank)
    for options in (
        {"megakernel": False},
        {"megakernel": True},
        {"megakernel": True, "is_encodable": lambda op, *_: op.kind not in ("attention", "argmax")},
    ):
        host = run_passes(lower_program(local_block, peer_memory=False, **options))
        check_host(host)
        runners = {segment.name: SegmentRunner(segment, coordinate) for segment in host.segments}
        assert bool(runners) == options["megakernel"]
        given = shard_tensors(tensors, local_block, rank)
        found = Evaluator(host, comm, runners).run(given)
        assert torch.equal(found["next"], expected["next"])
        if found["logits"].shape == expected["logits"].shape:
            assert_near(found["logits"], expected["logits"])
        states = shard_tensors({"k_cache": expected["k_cache"]}, local_block, rank)
        assert_near(given["k_cache"], states["k_cache"])
        assert_equal_on_all_ranks(comm, found["next"])
    check_streams_and_rings(comm)
    check_streamed_plans(comm)


def check_streams_and_rings(comm: GlooCommunicator) -> None:
    size, rank = comm.mesh.num_ranks, comm.rank
    for swizzle in ("", " ring tp"):
        text = STREAMED.replace("tp=2", f"tp={size}").replace("by i\n", f"by i{swizzle}\n")
        host = parse_host(text)
        tensors = random_tensors(host)
        parts = [{**tensors, "w": values(r, 4, 4)} for r in range(size)]
        found = Evaluator(host, comm, {}).run(parts[rank])["y"]
        if not swizzle:
            assert_near(found, sum(p["x"] @ p["w"].T for p in parts))
    ring = parse_host(RING.replace("pp=3", f"tp={size}").replace("pp[", "tp["))
    for host in (ring, run_passes(ring)):
        found = Evaluator(host, comm, {}).run({"x": values(rank, 4)})["from_left"]
        assert torch.equal(found, values((rank - 1) % size, 4))


def check_streamed_plans(comm: GlooCommunicator) -> None:
    """Chunks of a linear and its all-reduce, and a gather in ring order, over real ranks."""
    ring, marks = gathered(comm.mesh.num_ranks)
    chunks = {**SPLIT_SUM, "y": stream(0, 3)}
    for program, given in ((row_parallel("f32"), chunks), (ring, marks)):
        _, local, host = lowered(program, comm.mesh, given)
        tensors = small_integers(program)
        mine = shard_tensors(tensors, local, comm.rank)
        found = Evaluator(host, comm, {}).run(mine)["y"]
        expected = {"y": run_program(program, tensors)["y"]}
        assert torch.equal(found, shard_tensors(expected, local, comm.rank)["y"])


def lose_a_peer(rank: int, num_ranks: int) -> None:
    """The last rank ends in the middle; the others learn it from the next exchange."""
    comm = GlooCommunicator(DeviceMesh(tp=num_ranks), rank, timeout_s=20)
    comm.barrier()
    if rank == num_ranks - 1:
        os._exit(0)
    team = ", ".join(map(str, range(num_ranks)))
    message = rf"over mesh axis 'tp', ranks \[{team}\], failed on rank {rank}"
    with pytest.raises(RankFailure, match=message):
        reduce_forever(comm)
    os._exit(0)


def reduce_forever(comm: GlooCommunicator) -> None:
    while True:
        comm.all_reduce("tp", [torch.ones(2)], [torch.empty(2)], "sum").wait()
