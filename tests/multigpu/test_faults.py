"""What goes wrong between ranks ends in time, and the error names rank, task and event.

Faults are put into the queues of one rank, or into its process; the other ranks wait in the kernel.
"""

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import HangError
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.hopper.plan.words import pack
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.sources.load import open_model
from tests.multigpu.ranks import ON_GPUS, RanksFailed

HERE = "tests.multigpu.test_faults"
LIMIT_S = 1.0
SM = 5
AT = "layers.1."


def open_small(
    comm: NcclCommunicator, timeout_s: float = LIMIT_S, sampling: Sampling = MOST_LIKELY
) -> Engine:
    """Two layers of Llama-3.2-1B, after a first launch, which all ranks begin together: one may
    compile for longer than the limit.
    """
    source = open_model("llama-3.2-1b")
    source = replace(source, config=replace(source.config, num_layers=2))
    device = str(torch.get_default_device())
    options = EngineOptions(max_context=4096, collectives="kernel", timeout_s=timeout_s)
    with torch.device("cpu"):
        engine = Engine(source, comm.mesh, comm, options, device=device, sampling=sampling)
    assert engine.stepping is not None
    engine.stepping._launchers[False].await_prepared()
    comm.barrier()
    start(engine, 2)
    torch.cuda.synchronize()
    comm.barrier()
    return engine


def start(engine: Engine, num_steps: int) -> torch.Tensor:
    """Queues decode steps from an empty cache; their tokens."""
    assert engine.stepping is not None
    engine.stepping.start([1], [0], engine._sample_inputs)
    return engine.stepping.run_steps(num_steps)


def hang_of(engine: Engine) -> str:
    """The error that the launch under way ends with, in little more than the limit."""
    assert engine.stepping is not None
    since = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - since < LIMIT_S + 3
    with pytest.raises(HangError) as caught:
        engine.stepping.raise_hang()
    engine.comm.barrier()  # whose memory peers write into may not end before they do
    return str(caught.value)


def change(engine: Engine, op: str, **fields: int) -> int:
    """Overwrites fields of SM's instruction of that op; its number."""
    queue = engine.stepping.queues.queues[SM]
    number, one = next((i, one) for i, one in enumerate(queue) if one.name == op)
    words = torch.tensor(pack(replace(one, **fields)), dtype=torch.int32)
    engine.stepping._words[SM, number] = words.to(engine.stepping._words.device)
    return number


def drop_a_signal(comm: NcclCommunicator) -> None:
    """One SM of the last rank pushes none of its sums."""
    engine, last = open_small(comm), comm.mesh.num_ranks - 1
    if comm.rank == last:
        change(engine, f"{AT}attn_sum", num_units=0)
    start(engine, 1)
    found = hang_of(engine)
    assert f"rank {comm.rank}, SM" in found
    assert f"rank {last}, SM {SM}, instruction" in found, found
    assert re.search(r"layers.1.attn_sum, rows \d+ to \d+", found), found
    if any(epilogue.deferred for epilogue in engine.stepping.queues.epilogues):
        waits = rf"rank {comm.rank}, SM \d+ \(instruction \d+, layers.1.ffn_mixed"
        assert re.search(waits, found), found
        assert "of 'layers.0.attn_sum'" in found, found
    elif comm.rank != last:
        assert f"rank {comm.rank}, SM {SM} (instruction" in found, found
        assert "of 'parts of layers.0.attn_sum'" in found, found


def drop_logits(comm: NcclCommunicator) -> None:
    """One SM of the last rank pushes no logits, from which all ranks draw."""
    sampling = Sampling(temperature=1.0, top_k=50)
    engine, last = open_small(comm, sampling=sampling), comm.mesh.num_ranks - 1
    if comm.rank == last:
        change(engine, "logits", num_units=0)
    start(engine, 1)
    found = hang_of(engine)
    assert re.search(rf"rank {comm.rank}, SM \d+ \(instruction \d+, next, slots", found), found
    assert "of 'logits'" in found, found
    assert f"owed by rank {last}, SM {SM}, instruction" in found, found
    assert "logits, rows" in found, found


def wait_for_the_wrong_tag(comm: NcclCommunicator) -> None:
    """One SM of rank 0 waits for a layer that is far away, so nobody gets its rows."""
    engine = open_small(comm)
    if comm.rank == 0:
        change(engine, f"{AT}ffn_mixed", flag_delta=-1000)
    start(engine, 1)
    found = hang_of(engine)
    if comm.rank == 0:
        assert f"rank 0, SM {SM}, instruction" in found, found
        assert "layers.1.ffn_mixed, rows" in found, found
        assert "of 'layers.0.ffn_mixed'" in found, found
    else:
        assert "rank 0, SM" in found.partition("owed by")[2], found


def come_late(comm: NcclCommunicator) -> None:
    """A rank that is 5 s late is waited for if the limit allows. If not, the others name it, and it
    gets nothing from them either.
    """
    engine = open_small(comm, timeout_s=20.0)
    expected = start(engine, 8).tolist()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(5)
    assert start(engine, 8).tolist() == expected
    engine.stepping.raise_hang()
    comm.barrier()
    impatient = open_small(comm)
    if comm.rank == 0:
        time.sleep(LIMIT_S + 1)
    start(impatient, 8)
    found = hang_of(impatient)
    if comm.rank:
        assert "rank 0, SM" in found.partition("owed by")[2], found


def die(comm: NcclCommunicator) -> None:
    """The last rank is killed while all run, which takes the driver a part of a second."""
    engine = open_small(comm)
    for _ in range(2):
        start(engine, 4000)
    if comm.rank == comm.mesh.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.synchronize()
    engine.stepping.raise_hang()


def errors_of_survivors(body: str, device: str, num_ranks: int, run_ranks) -> str:
    """What all ranks say when `body` kills the last one: each other names it in time."""
    last = num_ranks - 1
    with pytest.raises(RanksFailed) as caught:
        run_ranks(body, device, num_ranks)
    found = str(caught.value)
    for rank in range(last):
        error = re.search(rf"HangError: rank {rank}, SM \d+ .* waited 1 s for .*", found)
        assert error, found
        assert f"rank {last}, SM" in error[0].partition("owed by")[2], found
    return found


@pytest.mark.parametrize(
    "body", ["drop_a_signal", "drop_logits", "wait_for_the_wrong_tag", "come_late"]
)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_fault_ends_in_time(body: str, device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:{body}", device, num_ranks)


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_killed_rank_is_named(device: str, num_ranks: int, run_ranks):
    found = errors_of_survivors(f"{HERE}:die", device, num_ranks, run_ranks)
    assert f"rank {num_ranks - 1}: died, exit code -9" in found
