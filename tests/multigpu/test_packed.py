"""Prompts packed over several ranks: the logits of one rank, on all ranks the same tokens, as
programs and as graphs.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.hostir.ir.nodes import FusedMatmul
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.multigpu.ranks import ON_GPUS
from tests.multigpu.test_decode import relative_errors

HERE = "tests.multigpu.test_packed"
NUM_LAYERS = 4
LENGTHS = 700, 1, 333, 64, 900, 50
"""All in one pass, of wide layers, gathers and scatters run beside products; of some, sums do."""


def open_engine(comm: Communicator, model: str) -> Engine:
    source = open_model(model)
    source = replace(source, config=replace(source.config, num_layers=NUM_LAYERS))
    options = EngineOptions(max_context=1024, batch=8)
    device = str(torch.get_default_device())
    with torch.device("cpu"):
        return Engine(source, comm.mesh, comm, options, device=device, logits="last")


def last_logits(engine: Engine, prompts: list[list[int]]) -> Tensor:
    """Behind each prompt when they are packed: [prompts, vocab] of a step with token 7."""
    engine.prefill_all(prompts)
    return engine.decode_step([7] * len(prompts))["logits"][: len(prompts)].float().clone()


def packed_prompts_are_one_ranks(comm: Communicator, model: str) -> None:
    """Three times: a program's first run, the capture, a graph's replay."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    team = open_engine(comm, model)
    vocab = team.decode_plan.config.vocab
    prompts = [
        torch.randint(0, vocab, (n,), generator=generator, device="cpu").tolist() for n in LENGTHS
    ]
    lone = open_engine(SingleCommunicator(DeviceMesh(tp=1)), model)
    for chosen in (prompts, prompts[2:4]):
        expected = last_logits(lone, chosen)
        for _ in range(3):
            found = last_logits(team, chosen)
            error = float(relative_errors(found, expected).max())
            print(f"{model}, {len(chosen)} prompts: {error:.2e}")
            assert error < 3e-2
            tokens = tuple(team.prefill_all(chosen))
            assert len(set(comm.all_gather_object(tokens))) == 1
    programs = team._prefills._programs.values()
    fused = [
        {node.kind for node in program.evaluator.host.body if isinstance(node, FusedMatmul)}
        for program in programs
    ]
    assert fused[0]
    assert fused[1] == {"matmul_all_reduce"}
    if model == "qwen3-8b":
        assert fused[0] >= {"all_gather_matmul", "matmul_reduce_scatter"}
    assert all(program.graph for program in programs)


def programs_share_kernels(comm: Communicator) -> None:
    """Prompts of an octave each, planned one after the other: the later ones' kernels are those
    that ran before, and a rehearsal runs none, for no other rank comes to it.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    team = open_engine(comm, "qwen3-8b")
    lone = open_engine(SingleCommunicator(DeviceMesh(tp=1)), "qwen3-8b")
    for length in (500, 1000):
        prompts = [
            torch.randint(0, 1000, (length,), generator=generator, device="cpu").tolist()
            for _ in range(2)
        ]
        for _ in range(2):
            error = relative_errors(last_logits(team, prompts), last_logits(lone, prompts))
            assert float(error.max()) < 3e-2
    programs = team._prefills._programs.values()
    assert [program.rehearses for program in programs] == [True, True]


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_a_later_program_of_the_same_kernels(device: str, num_ranks: int, run_ranks):
    run_ranks(f"{HERE}:programs_share_kernels", device, num_ranks)


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-8b"])
@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_packed(device: str, num_ranks: int, model: str, run_ranks):
    run_ranks(f"{HERE}:packed_prompts_are_one_ranks", device, num_ranks, model)
