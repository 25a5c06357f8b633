"""The machine code of experts of one row for sm_90a, compiled without a GPU."""

import pytest

from distmega.kernels.hopper.plan.types import num_stages, padded_tiles_k
from distmega.kernels.hopper.plan.words import TILE_BYTES
from tests.kernels.hopper.expert_code import expert_code
from tests.kernels.hopper.one_row.test_decode_code import LOADER_REGISTERS, LOADER_WARPS
from tests.kernels.ptx import loads, plain_spins
from tests.kernels.sm90 import REGISTERS, SHARED_BYTES

CASES = (
    (768, 1, "softmax_chosen"),
    pytest.param(768, 2, "softmax_chosen", marks=pytest.mark.nightly),
    pytest.param(80, 1, "softmax", marks=pytest.mark.nightly),
    pytest.param(1024, 1, "softmax", marks=pytest.mark.nightly),
)
"""Width of an expert, ranks, what experts are weighed by: tiles in four parts, eight, eight with
zeros behind a slot, and one.
"""


@pytest.mark.parametrize(("width", "num_ranks", "weighing"), CASES)
def test_experts_fit_an_sm(width, num_ranks, weighing):
    code = expert_code(width, num_ranks, weighing)
    assert code.stack_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS
    assert plain_spins(code.ptx) == []
    assert loads(code.ptx) >= 5
    tiles_k = padded_tiles_k(-(-8 * width // num_ranks // 1024))
    first = num_stages(tiles_k) * TILE_BYTES
    ring = code.shared_addresses
    assert [at for at in ring if first <= at < first + 2048 * tiles_k] == [first]
