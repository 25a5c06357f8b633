"""What both Hopper kernels compile to for a layer of Qwen3-30B-A3B with other extents, without a
GPU.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions, Experts
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.models.presets import PRESETS
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.hopper.one_row.test_decode_code import LoneTeam
from tests.kernels.offline import NUM_SMS, offline
from tests.kernels.sm90 import Machine


@cache
def expert_code(
    width: int,
    num_ranks: int,
    weighing: str,
    batch: int = 1,
    way: Experts = "tensor",
) -> Machine:
    """Of experts of this width, of which ranks have parts or whole ones. What they compile to does
    not depend on the number of layers.
    """
    config = replace(
        PRESETS["qwen3-30b-a3b"],
        num_layers=1,
        expert_ffn=width,
        norm_top=weighing == "softmax_chosen",
    )
    options = EngineOptions(max_context=256, batch=batch, experts=way)
    plan = plan_decode(config, DeviceMesh(tp=num_ranks), H200, options, "none")
    lowered = lower_decode(config, plan, options, peer_memory=True)
    (segment,) = lowered.host.segments
    one_row = batch == 1 and way == "tensor"
    build, runner = (build_queues, RowRunner) if one_row else (build_batch_queues, BatchRunner)
    queues = build(segment, lowered.weights, lowered.states, NUM_SMS)
    assert queues.experts is not None
    assert queues.experts.weighing == weighing
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        made = runner(
            segment,
            queues,
            weights=lowered.weights,
            weights_arena=torch.empty(lowered.weights.num_bytes, dtype=torch.uint8),
            state_arena=torch.empty(lowered.states.num_bytes, dtype=torch.uint8),
            team=LoneTeam(num_ranks) if num_ranks > 1 else None,
        )
        made.run_steps(1)
    (code,) = launched
    return code
