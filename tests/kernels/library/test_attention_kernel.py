"""The kernel of packed attention for Hopper, its partitions run as threads: results are torch's."""

import math

import pytest
import torch

from distmega.hostir.library import ops as library
from distmega.kernels.library.attention_kernel import (
    GROUPS,
    KEYS,
    NUMBERS,
    ROWS,
    AttentionSpec,
    attend_kernel,
)
from distmega.kernels.library.packed_attention import STAGES
from tests.kernels.gluon_threads import Descriptor, run_kernel
from tests.kernels.ptx import stored_bytes
from tests.kernels.sass import innermost_loops, spills
from tests.kernels.sm90 import SHARED_BYTES, compile_kernel, descriptor


def error_of(
    lengths: tuple[int, ...],
    cached: tuple[int, ...],
    spec: AttentionSpec,
    *,
    window: int = 0,
    kv_heads: int = 1,
    num_programs: int = 2,
    context: int = 0,
) -> float:
    """Of the kernel's results, from those of torch in fp32. Sequences of so many rows behind so
    many positions in their caches, which need not lie in these if they are said to have `context`
    rows. What no row sees is no number.
    """
    torch.manual_seed(0)
    longest, num_rows = max(n + c for n, c in zip(lengths, cached, strict=True)), sum(lengths)
    context = context or longest + 3
    q = torch.randn(num_rows, kv_heads, spec.group, spec.dim).bfloat16()
    caches = [torch.randn(len(lengths), kv_heads, context, spec.dim).bfloat16() for _ in range(2)]
    spans = [range(start, start + num) for num, start in zip(lengths, cached, strict=True)]
    positions = torch.tensor([position for span in spans for position in span])
    sequences = torch.tensor([i for i, span in enumerate(spans) for _ in span])
    for cache in caches:
        for own, span in zip(cache, spans, strict=True):
            own[:, max(0, span.stop) :] = math.nan
            own[:, : max(0, span.start + 1 - window) if window else 0] = math.inf
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    out = torch.full((num_rows * kv_heads * spec.group * spec.dim,), torch.nan).bfloat16()
    run_kernel(
        attend_kernel,
        (num_programs,),
        {
            "q": Descriptor(q.view(num_rows, -1), ROWS.value),
            "keys": Descriptor(caches[0].view(-1, spec.dim), KEYS.value),
            "values": Descriptor(caches[1].view(-1, spec.dim), KEYS.value),
            "out": out,
            "taken": torch.zeros(1, dtype=torch.int32),
            "starts": starts,
            "positions": positions,
            "num_sequences": len(lengths),
            "context": context,
            "kv_heads": kv_heads,
            "window": window,
            "scale": spec.dim**-0.5 / math.log(2),
            "spec": spec,
        },
    )
    given = (q.float(), *(cache.float() for cache in caches), positions, sequences)
    expected = library.packed_attention(*given, spec.dim**-0.5, window)
    return float((out.view(q.shape).float() - expected).abs().max())


@pytest.mark.parametrize(
    ("lengths", "cached", "group", "window"),
    [
        ((300, 0, 1, 65), (0, 5, 130, 0), 2, 0),
        ((64, 200), (70, 0), 1, 0),
        ((130, 20), (200, 3), 2, 90),
    ],
)
def test_packed_rows_are_torchs(
    lengths: tuple[int, ...], cached: tuple[int, ...], group: int, window: int
):
    """Blocks that are masked, whole and in part; sequences without rows; prefixes; windows."""
    spec = AttentionSpec(dim=64, group=group, windowed=window > 0)
    assert error_of(lengths, cached, spec, window=window) < 0.02


@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("group", [1, 2])
def test_positions_may_lie_outside_of_the_cache(group: int, window: int):
    """Heads lie one behind the other: what is behind one's cache is another's."""
    spec = AttentionSpec(dim=64, group=group, windowed=window > 0)
    found = error_of((70, 200, 10), (90, -30, 500), spec, window=window, kv_heads=2, context=130)
    assert found < 0.02


@pytest.mark.parametrize(
    ("dim", "group", "windowed"),
    [
        pytest.param(128, 4, False, marks=pytest.mark.nightly),
        (64, 4, False),
        (128, 1, True),
    ],
)
def test_products_run_beside_exponentials(dim: int, group: int, windowed: bool):
    """Each warp group: the first scores, two products a block in a loop of masked ones and, unless
    a window bounds all, in another of whole ones, the last values. The wait for values stands
    behind the exponentials. Weights are packed where they are made, which moves no bytes. Heads of
    128 keep a few numbers of an item in local memory.
    """
    spec = AttentionSpec(dim=dim, group=group, windowed=windowed, stages=STAGES[dim])
    blocks = {"q": ROWS, "keys": KEYS, "values": KEYS}
    types: dict[str, object] = {
        name: descriptor("bf16", (rows.value, dim)) for name, rows in blocks.items()
    }
    types |= {
        "out": "*bf16",
        "taken": "*i32",
        "starts": "*i64",
        "positions": "*i64",
        "scale": "fp32",
    }
    types |= dict.fromkeys(NUMBERS, "i32")
    code = compile_kernel(attend_kernel, types, {"spec": spec}, 4, None)
    assert code.stack_bytes <= (0 if dim == 64 else 40)
    assert code.shared_bytes <= SHARED_BYTES
    scores, values = dim // 16, KEYS.value // 16
    assert code.ptx.count("wgmma.mma_async") == 2 * (3 - windowed) * (scores + values)
    assert code.ptx.count("cp.async.bulk.tensor") == dim // 64 * (GROUPS.value + 2)
    loop = code.ptx.split("wgmma.wait_group.sync.aligned 1;")[1]
    before = loop.split("wgmma.wait_group.sync.aligned 0;")[0]
    assert before.count("ex2.approx") == KEYS.value // 2 + 2
    assert "mbarrier.try_wait" in before
    assert stored_bytes(code.ptx) == {16}
    loops = innermost_loops(code.cubin, "HGMMA", scores + values)
    assert len(loops) == GROUPS.value * (2 - windowed)
    assert not any("PRMT" in line for loop in loops for line in loop)
    assert all(len(spills(loop)) <= (2 if windowed and dim == 128 else 0) for loop in loops)
