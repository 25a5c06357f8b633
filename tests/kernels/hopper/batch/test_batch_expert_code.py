"""The machine code of experts of 2 to 16 rows for sm_90a, compiled without a GPU."""

import pytest

from tests.kernels.hopper.expert_code import expert_code
from tests.kernels.hopper.one_row.test_decode_code import LOADER_REGISTERS, LOADER_WARPS
from tests.kernels.ptx import bare_signals, plain_spins, unfenced_loads
from tests.kernels.sass import parted_at_barriers, spills_in_products
from tests.kernels.sm90 import REGISTERS, SHARED_BYTES

CASES = (
    (768, 1, "softmax_chosen", 0),
    pytest.param(768, 2, "softmax_chosen", 8, marks=pytest.mark.nightly),
    pytest.param(1408, 1, "softmax", 0, marks=pytest.mark.nightly),
)
"""Width of an expert, ranks, what experts are weighed by, bytes that are spilled: of two ranks the
numbers of SM and lane, which an instruction reads again.
"""


@pytest.mark.parametrize(("width", "num_ranks", "weighing", "spilled"), CASES)
def test_experts_fit_an_sm(width, num_ranks, weighing, spilled):
    code = expert_code(width, num_ranks, weighing, batch=16)
    assert spills_in_products(code.cubin) == []
    assert parted_at_barriers(code.cubin) == []
    assert code.stack_bytes <= spilled
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []


@pytest.mark.nightly
def test_whole_experts_a_rank_fit_an_sm():
    code = expert_code(768, 2, "softmax_chosen", batch=16, way="expert")
    assert code.shared_bytes <= SHARED_BYTES
    assert 32 * (8 * code.registers + LOADER_WARPS * LOADER_REGISTERS) <= REGISTERS
    assert plain_spins(code.ptx) == []
    assert bare_signals(code.ptx) == []
    assert unfenced_loads(code.ptx) == []
