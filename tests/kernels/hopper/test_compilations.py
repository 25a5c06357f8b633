"""Two compilations of the Hopper kernels serve one model: one for a row, one for 2 to 16 rows."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.models.presets import PRESETS
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.offline import NUM_SMS, offline

MOST_ROWS = 16


def launch(name: str, rows: int, max_context: int) -> None:
    """Steps of a layer of a preset, from any position on."""
    config = replace(PRESETS[name], num_layers=1, vocab=4096)
    options = EngineOptions(max_context=max_context, batch=rows)
    plan = plan_decode(config, DeviceMesh(tp=1), H200, options, "none")
    lowered = lower_decode(config, plan, options, peer_memory=True)
    (segment,) = lowered.host.segments
    arenas = {
        "weights": lowered.weights,
        "weights_arena": torch.empty(lowered.weights.num_bytes, dtype=torch.uint8),
        "state_arena": torch.empty(lowered.states.num_bytes, dtype=torch.uint8),
    }
    given = segment, lowered.weights, lowered.states, NUM_SMS
    runner = (
        RowRunner(segment, build_queues(*given), **arenas)
        if rows == 1
        else BatchRunner(segment, build_batch_queues(*given), **arenas)
    )
    for position in (0, 1, max_context - 2):
        runner.start([1] * rows, [position] * rows)
        runner.run_steps(1)
        runner.run_steps(2)


@pytest.mark.parametrize(
    ("name", "rows", "most"),
    [
        ("llama-3.2-1b", (1, 2, 3, MOST_ROWS), 2),
        ("qwen3-30b-a3b", (1,), 1),
        pytest.param("llama-3.2-1b", range(1, MOST_ROWS + 1), 2, marks=pytest.mark.nightly),
        pytest.param("qwen3-0.6b", range(1, MOST_ROWS + 1), 2, marks=pytest.mark.nightly),
        pytest.param("qwen3-30b-a3b", range(1, MOST_ROWS + 1), 2, marks=pytest.mark.nightly),
    ],
)
def test_rows_and_contexts_share_compilations(name, rows, most):
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        for num, max_context in product(rows, (64, 300, 8192)):
            launch(name, num, max_context)
    assert len({code.cubin.parent for code in launched}) == most
