"""The matmul kernel's machine code, compiled for sm_90a without a GPU: wgmma fed by TMA, nothing
spilled beside the products, shared memory within a CTA's, waits and signals at scope sys.
"""

import pytest

from distmega.kernels.gemm.device.arguments import MatmulMemory
from distmega.kernels.gemm.device.kernel import EXTENTS, matmul_kernel
from distmega.kernels.gemm.device.spec import MatmulSpec
from distmega.kernels.gemm.times.matmul_ways import STAGES
from distmega.program.expr import parse
from tests.kernels.sm90 import Machine, compile_kernel, descriptor

SHARED_BYTES = 232448
"""Largest shared memory of a CTA on sm_90."""
RELEASE = ".global.sys.release.add"


def code_of(tile_n: int = 256, **options: object) -> Machine:
    spec = MatmulSpec(tile_n=tile_n, stages=STAGES[tile_n], **options)
    block = descriptor("bf16", (64, 64))
    types: dict[str, object] = dict.fromkeys(("a", "own", "out", "home"), block)
    types |= {
        "b": descriptor("bf16", (spec.columns, 64)),
        "partials": descriptor("bf16", (64, tile_n)),
    }
    if spec.apart:
        types["other"] = types["b"]
    types |= dict.fromkeys(EXTENTS, "i32")
    if spec.sends == "push":
        types |= {f"away{n}": block for n in range(spec.num_ranks - 1)}
    types["memory"] = MatmulMemory(
        arrivals="*i32", counts="*i32", buffers="*i64", words="*i64", stuck="*i32"
    )
    return compile_kernel(matmul_kernel, types, {"spec": spec}, 4, None)


def count(code: Machine, *words: str) -> int:
    """Lines of PTX that have all words."""
    return sum(all(word in line for word in words) for line in code.ptx.splitlines())


def check_products(code: Machine, tile_n: int, num_loops: int = 1) -> None:
    """Two warp groups, four steps of 16 along a slice of K each, and nothing narrower."""
    products = 8 * num_loops
    assert count(code, "wgmma.mma_async", f"m64n{tile_n}k16", "bf16.bf16") == products
    assert count(code, "wgmma.mma_async") == products
    assert code.shared_bytes <= SHARED_BYTES
    assert count(code, "setmaxnreg.inc") >= 2


@pytest.mark.parametrize("tile_n", [128, 256])
def test_plain(tile_n):
    code = code_of(tile_n)
    check_products(code, tile_n)
    assert code.stack_bytes == 0
    assert count(code, "cp.async.bulk.tensor", "mbarrier::complete_tx") == 3
    assert count(code, "cp.async.bulk.tensor", ".bulk_group") == 2 * tile_n // 64
    assert count(code, "stmatrix") == 2 * tile_n // 16
    assert not count(code, "ld.global")
    assert not count(code, ".sys")


@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_gathering(debug):
    code = code_of(num_ranks=2, gathers=True, debug=debug)
    check_products(code, 256, num_loops=2)
    assert code.stack_bytes == 0
    print(count(code, ".acquire"), count(code, "fence.proxy.async.global"), count(code, RELEASE))
    assert count(code, ".acquire") >= 4, "of rows, and of what helpers computed"
    assert count(code, "fence.proxy.async.global") >= 2
    assert count(code, RELEASE) == 1
    assert (count(code, "st.global") > 0) == debug, "of a wait that was given up"


@pytest.mark.parametrize(("tile_n", "gathers"), [(128, False), (256, False), (256, True)])
def test_mixing(tile_n, gathers):
    """Half as many columns leave, weights come in two halves, the products are those of always."""
    code = code_of(tile_n, num_ranks=1 + gathers, gathers=gathers, mixes=parse("silu(a0) * a1"))
    check_products(code, tile_n, num_loops=1 + gathers)
    assert code.stack_bytes == 0
    whole = 2 * tile_n // 16
    assert count(code, "stmatrix") == whole // 2 + gathers * 2 * whole, (
        "helpers store what is whole"
    )
    assert count(code, "ex2.approx") == tile_n // 2, "one for each result of a thread"
    if not gathers:
        assert count(code, "cp.async.bulk.tensor", "mbarrier::complete_tx") == 4


def test_mixing_two_weights():
    """The second half of a slice comes by a descriptor of its own; nothing else is another."""
    formula = parse("silu(a0) * a1")
    one, two = (code_of(mixes=formula, apart=apart) for apart in (False, True))
    check_products(two, 256)
    assert two.stack_bytes == 0
    for code, descriptors in ((one, 6), (two, 7)):
        assert count(code, ".param", ".align 64 .b8") == descriptors
        assert count(code, "cp.async.bulk.tensor", "mbarrier::complete_tx") == 4


@pytest.mark.parametrize(
    ("sends", "num_ranks"),
    [
        ("scatter", 8),
        ("push", 2),
        ("all", 2),
        *(
            pytest.param(sends, num_ranks, marks=pytest.mark.nightly)
            for sends, num_ranks in (
                ("scatter", 2),
                ("scatter", 4),
                ("push", 4),
                ("all", 4),
                ("all", 8),
            )
        ),
    ],
)
def test_sending(sends, num_ranks):
    tile_n = 128 if sends == "push" else 256
    code = code_of(tile_n, num_ranks=num_ranks, sends=sends)
    check_products(code, tile_n, num_loops=2)
    assert code.stack_bytes <= (64 if num_ranks == 8 else 0), "addresses of seven peers"
    assert count(code, "ldmatrix") == 2 * tile_n // 16, "partial results come through shared memory"
    waits = 3 if sends == "push" else 2  # the first word that is pushed is behind one
    assert count(code, ".sys.acquire.") == 2 * waits
    if sends != "all":
        assert not count(code, "st.global"), "data leaves by TMA and copy engines alone"
        assert count(code, RELEASE) == 2, "of parts, and of what a program has helped with"
    else:
        assert count(code, "st.global.v4") == count(code, "st.global"), (
            "tiles are pushed by vectors"
        )
        assert count(code, RELEASE) >= 3
    assert count(code, "cp.async.bulk.wait_group 0") > 0
