"""Pipelines over GPUs: signals order one rank's work after another's, stages give what one rank
gives.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from distmega.engine.decode_plan import model_mesh
from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.kept_plans import NOTHING_KEPT
from distmega.engine.opening import Arenas, Opener
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import Communicator, GlooCommunicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.nodes import FREE
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.machines import H200
from distmega.kernels.runtime.streams.signals import PeerSignals, open_signals
from distmega.kernels.runtime.symmetric import open_symmetric
from distmega.models.presets import PRESETS
from distmega.sharding.layout.mesh import STAGE_AXIS, DeviceMesh
from examples.pipeline import expected_rows, make_stages, make_values
from tests.multigpu.ranks import ON_EITHER, ON_GPUS, TIMEOUT_S
from tests.multigpu.test_decode import CASES, decode_as_exactly

HERE = "tests.multigpu.test_pipeline"
ROUNDS, NUM_WORDS = 2000, 1 << 16
TRANSPORTS = ("peer", "nccl")


def hand_on(comm: NcclCommunicator, transport: str) -> None:
    """Each round every rank writes into its right neighbour's memory, as soon as that has read what
    was there, and signals; hosts run ahead, only the GPUs wait.
    """
    open_signals(comm, "tp", ("empty", "full"), TIMEOUT_S, peer_memory=transport == "peer")
    assert isinstance(comm.signals, PeerSignals) == (transport == "peer")
    size, rank = comm.mesh.num_ranks, comm.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    memory = open_symmetric(comm, "tp", 4 * NUM_WORDS)
    mine, theirs = (memory.tensor(r, (NUM_WORDS,), torch.int32) for r in (rank, right))
    wrong = torch.zeros((), dtype=torch.int64)
    comm.signal("tp", "empty", left)
    for number in range(ROUNDS):
        comm.wait_signal("tp", "empty", right)
        theirs.fill_(number)
        comm.signal("tp", "full", right)
        comm.wait_signal("tp", "full", left)
        wrong += (mine != number).sum()
        comm.signal("tp", "empty", left)
    comm.wait_signal("tp", "empty", right)
    torch.cuda.synchronize()
    comm.check_signals()
    assert int(wrong) == 0


def run_stages(comm: Communicator) -> None:
    """The example's program, in as many stages as there are ranks, several times."""
    mesh = DeviceMesh(pp=comm.mesh.num_ranks)
    if not isinstance(comm, NcclCommunicator):
        run_on(GlooCommunicator(mesh, comm.rank, TIMEOUT_S))
        return
    for transport in TRANSPORTS:
        mine = NcclCommunicator(mesh, comm.rank, TIMEOUT_S)
        open_signals(mine, STAGE_AXIS, (FREE,), TIMEOUT_S, peer_memory=transport == "peer")
        run_on(mine)


def run_on(mine: Communicator) -> None:
    mesh, device = mine.mesh, torch.get_default_device()
    with torch.device("cpu"):
        host, values = make_stages(mesh)[mine.rank], make_values()
        expected = expected_rows(values)
    here = {name: x.to(device) for name, x in values.items()}
    evaluator = Evaluator(host, mine, {}, str(device))
    for _ in range(3):
        torch.testing.assert_close(evaluator.run(here)["y"].cpu(), expected)
    mine.check_signals()
    if mine.signals_on_device:
        captured = CapturedHost(evaluator, here)
        for _ in range(3):
            torch.testing.assert_close(captured.run({})["y"].cpu(), expected)
        mine.check_signals()
        captured.release()


def decode_in_stages(comm: Communicator, model: str) -> None:
    """Two stages, of half the ranks each."""
    mesh, kind = model_mesh(comm.mesh.num_ranks // 2, 2), type(comm)
    assert kind in (NcclCommunicator, GlooCommunicator)
    decode_as_exactly(kind(mesh, comm.rank, TIMEOUT_S), model)


def open_all_or_none(comm: Communicator) -> None:
    """Stages of one rank each, of which the last has another GPU, or a program in two segments."""
    mesh, options = model_mesh(1, comm.mesh.num_ranks), EngineOptions(max_context=64)
    is_last, config = comm.rank == comm.mesh.num_ranks - 1, PRESETS["smollm2-135m"]
    plan = plan_decode(config, mesh, H200, options, index=comm.rank)
    lowered = lower_decode(config, plan, options, peer_memory=True)
    two = replace(lowered.host, segments=lowered.host.segments * (1 + is_last))
    ranks = GlooCommunicator(mesh, comm.rank, TIMEOUT_S)
    cpu, memory = torch.device("cpu"), torch.empty(0)
    opener, in_two = (
        Opener(each, Arenas(each, memory, memory, {}, {}), ranks, cpu, NOTHING_KEPT)
        for each in (lowered, replace(lowered, host=two))
    )
    other = UnsupportedError("another GPU", expected="a Hopper GPU", remedy="use one")
    with (
        patch("distmega.engine.opening.open_hopper") as opened,
        patch("distmega.kernels.runners.require_hopper", return_value=132) as asked,
    ):
        assert opener.open_kernel() is opened.return_value
        opened.reset_mock()
        assert in_two.open_kernel() is None
        asked.side_effect = other if is_last else None
        with pytest.raises(
            UnsupportedError, match=r"rank 1: another GPU; expected a Hopper GPU; use"
        ):
            opener.open_kernel()
        opened.assert_not_called()


def test_all_stages_open_their_kernels_or_none_does(run_ranks):
    run_ranks(f"{HERE}:open_all_or_none", "cpu", 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_signals_order_work_on_different_gpus(
    transport: str, device: str, num_ranks: int, run_ranks
):
    run_ranks(f"{HERE}:hand_on", device, num_ranks, transport)


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_micro_batches_pass_through_the_stages(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:run_stages", device, num_ranks)


@pytest.mark.parametrize(
    ("device", "num_ranks", "model"), [case for case in CASES if "qwen3-8b" not in case.values]
)
def test_stages_decode_as_one_rank(device: str, num_ranks: int, model: str, run_ranks):
    run_ranks(f"{HERE}:decode_in_stages", device, num_ranks, model)
