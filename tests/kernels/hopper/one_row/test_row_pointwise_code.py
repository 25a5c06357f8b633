"""The kernel of one row with pointwise work, compiled for sm_90a without a GPU."""

import pytest
import torch

from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.program.types import Program
from tests.kernels.offline import NUM_SMS, offline
from tests.kernels.ptx import bare_signals, plain_spins
from tests.kernels.row_programs import PROGRAMS, attending
from tests.kernels.sass import parted_at_barriers
from tests.kernels.sm90 import SHARED_BYTES, Machine

SPILLED_BYTES = 0
ATTENDING = {
    "capped": ({"softcap": 30.0}, 0),
    "of 256": ({"dim": 256, "heads": 1, "group": 8, "softcap": 50.0}, 0),
    "of 136": ({"dim": 136, "heads": 2, "window": 40}, 16),
    "attending": ({}, 0),
    "of 192": ({"dim": 192, "heads": 1, "group": 2}, 8),
    "of 200": ({"dim": 200, "heads": 1, "group": 7}, 24),
}
"""How layers attend, and bytes spilled at most: columns that are no power of two have a mask."""


def code_of(program: Program) -> Machine:
    layouts = [
        layout_arena(Space.WEIGHT, order_weights(program)),
        layout_arena(Space.STATE, program.with_role("state")),
    ]
    arenas = [torch.empty(max(layout.num_bytes, 2), dtype=torch.uint8) for layout in layouts]
    queues = build_queues(program, *layouts, NUM_SMS)
    with pytest.MonkeyPatch.context() as patch, offline(patch) as launched:
        runner = RowRunner(
            program, queues, weights=layouts[0], weights_arena=arenas[0], state_arena=arenas[1]
        )
        runner.run_steps(1)
    (machine,) = launched
    return machine


@pytest.mark.parametrize(
    "name",
    [
        "of 256",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ATTENDING if name != "of 256"),
        "plain_layer_norms",
        *(pytest.param(x, marks=pytest.mark.nightly) for x in PROGRAMS if x != "plain_layer_norms"),
    ],
)
def test_pointwise_work_fits_an_sm(name):
    options, spilled = ATTENDING.get(name, ({}, SPILLED_BYTES))
    code = code_of(PROGRAMS[name](1) if name in PROGRAMS else attending(**options))
    assert code.stack_bytes <= spilled
    assert code.shared_bytes <= SHARED_BYTES
    assert parted_at_barriers(code.cubin) == []
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
    assert code.ptx.count("SPIN:") == code.ptx.count("%globaltimer")
