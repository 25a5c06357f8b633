"""The machine code of the sampling phase, compiled for sm_90a without a GPU."""

import pytest

from distmega.kernels.hopper.plan.words import LIMITED, SAMPLED, SEARCHED
from tests.gpu.sample_kernel import sample
from tests.kernels.sm90 import compile_kernel

POINTERS = {"logits": "*fp32", "sampling": "*fp32", "seeds": "*i64", "symmetric": "*i64"}
TYPES = {**POINTERS, "queues": "*i32", "tokens": "*i32"} | dict.fromkeys(
    ("first_id", "num_steps", "epoch0", "sample_words"), "i32"
)
COMPUTE_REGISTERS = 168
"""What the decode kernel's compute warps have."""


@pytest.mark.parametrize("kind", [SAMPLED, LIMITED, SEARCHED])
@pytest.mark.parametrize(
    ("rows", "num_ranks"),
    [
        (256, 1),
        (2048, 4),
        *(
            pytest.param(*sizes, marks=pytest.mark.nightly)
            for sizes in ((1024, 1), (2048, 1), (512, 2))
        ),
    ],
)
def test_nothing_spills_and_the_decode_kernel_has_the_registers(kind, rows, num_ranks):
    constants = {"KIND": kind, "ROWS": rows, "RANKS": num_ranks}
    code = compile_kernel(sample, TYPES, constants, 8, COMPUTE_REGISTERS)
    assert code.stack_bytes == 0
    assert code.registers <= COMPUTE_REGISTERS
    assert code.shared_bytes <= 1024
    assert "mul.hi.u32" in code.ptx
    assert "ld.relaxed.gpu" in code.ptx
    assert ("ld.relaxed.sys" in code.ptx) == (num_ranks > 1 and kind != SAMPLED)
