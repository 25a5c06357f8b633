"""Machine code of the matmul kernel over groups of rows, compiled for sm_90a without a GPU: wgmma
fed by TMA, nothing spilled, shared memory within a CTA's.
"""

import pytest

from distmega.kernels.gemm.device.groups import EXTENTS, grouped_kernel
from distmega.kernels.gemm.device.spec import MatmulSpec
from distmega.kernels.gemm.times.matmul_ways import STAGES
from distmega.program.expr import parse
from tests.kernels.gemm.test_gemm_code import check_products, count
from tests.kernels.sm90 import Machine, compile_kernel, descriptor


def code_of(tile_n: int, mixes: str = "") -> Machine:
    formula = parse(mixes) if mixes else None
    spec = MatmulSpec(
        tile_n=tile_n, stages=STAGES[tile_n], mixes=formula, apart=formula is not None
    )
    block, matrix = descriptor("bf16", (64, 64)), descriptor("bf16", (spec.columns, 64))
    types: dict[str, object] = {"a": block, "out": block, "b": matrix}
    types |= {"other": matrix} if mixes else {}
    types |= {"result": "*bf16", "starts": "*i32", **dict.fromkeys(EXTENTS, "i32")}
    return compile_kernel(grouped_kernel, types, {"spec": spec}, 4, None)


@pytest.mark.parametrize(
    ("tile_n", "mixes"), [(128, ""), (256, ""), (256, "silu(a0) * a1"), (256, "gelu(a0) * a1")]
)
def test_groups(tile_n: int, mixes: str) -> None:
    code = code_of(tile_n, mixes)
    check_products(code, tile_n)
    assert code.stack_bytes == 0
    num_blocks = 2 * tile_n // 64 // (2 if mixes else 1)
    assert count(code, "cp.async.bulk.tensor", ".bulk_group") == num_blocks
    assert count(code, "cp.async.bulk.tensor", "mbarrier::complete_tx") == (4 if mixes else 3)
    assert count(code, "st.global") > 0, "of a group's last rows, and of rows of none"
    assert count(code, "st.global") == count(code, "st.global.v4.b32")
    assert not count(code, ".sys")
