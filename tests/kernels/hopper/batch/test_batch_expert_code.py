"""The machine code of experts of 2 to 16 rows for sm_90a, compiled without a GPU."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from distmega.engine.decode_plan import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.machines import H200
from distmega.models.presets import PRESETS
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.hopper.one_row.test_decode_code import (
    LOADER_REGISTERS,
    LOADER_WARPS,
    LoneTeam,
)
from tests.kernels.offline import NUM_SMS, offline
from tests.kernels.ptx import bare_signals, plain_spins
from tests.kernels.sass import spills_in_products
from tests.kernels.sm90 import REGISTERS, SHARED_BYTES, Machine

CASES = (
    (768, 1, "softmax_chosen"),
    pytest.param(768, 2, "softmax_chosen", marks=pytest.mark.nightly),
    pytest.param(1408, 1, "softmax", marks=pytest.mark.nightly),
)
"""Width of an expert, ranks, what experts are weighed by."""


@cache
def expert_code(width: int, num_ranks: int, weighing: str) -> Machine:
    """Qwen3-30B-A3B's other extents; what it compiles to does not depend on the layers."""
    config = replace(
        PRESETS["qwen3-30b-a3b"],
        num_layers=1,
        expert_ffn=width,
        norm_top=weighing == "softmax_chosen",
    )
    options = EngineOptions(max_context=256, batch=16, experts="tensor")
    plan = plan_decode(config, DeviceMesh(tp=num_ranks), H200, options, "none")
    lowered = lower_decode(config, plan, options, peer_memory=True)
    (segment,) = lowered.host.segments
    queues = build_batch_queues(segment, lowered.weights, lowered.states, NUM_SMS)
    assert queues.experts is not None
    assert queues.experts.weighing == weighing
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        BatchRunner(
            segment,
            queues,
            weights=lowered.weights,
            weights_arena=torch.empty(lowered.weights.num_bytes, dtype=torch.uint8),
            state_arena=torch.empty(lowered.states.num_bytes, dtype=torch.uint8),
            team=LoneTeam(num_ranks) if num_ranks > 1 else None,
        ).decode(1)
    (code,) = launched
    return code


@pytest.mark.parametrize(("width", "num_ranks", "weighing"), CASES)
def test_experts_fit_an_sm(width, num_ranks, weighing):
    code = expert_code(width, num_ranks, weighing)
    assert spills_in_products(code.cubin) == []
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
