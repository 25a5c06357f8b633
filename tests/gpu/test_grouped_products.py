"""Products of groups of rows on a GPU: those of float64 by both schedules, for any routing, and of
another routing when a captured graph is replayed.
"""

import pytest
import torch
from torch import Tensor

from distmega.hostir.library.experts import grouped_linear as by_torch
from distmega.kernels.library.grouped_products import Schedule, grouped_linear, mix_groups
from distmega.kernels.library.weighted_rows import add_weighted_rows
from distmega.program.expr import parse
from distmega.program.ops.experts import GroupRange, route_values, scatter_values
from tests.gpu.engines import open_engine, random_model

pytestmark = pytest.mark.gpu

ROUTINGS = ("random", "same", "one more")


def offsets_of(num_rows: int, choices: int, num_groups: int, how: str) -> Tensor:
    """Starts of groups, by ids that are random, or the same for all rows."""
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand(num_rows, num_groups, generator=generator)
    if how != "random":
        scores[:] = scores[0].clone()
    if how == "one more":
        scores[-1] = scores[-1].flip(0)
    ids = scores.argsort(dim=1)[:, :choices].int().cuda()
    return route_values(ids, num_groups)[1]


SHAPES = pytest.mark.parametrize(
    ("num_rows", "choices", "num_groups", "first", "stop", "n", "k"),
    [
        (1, 8, 128, 0, 128, 768, 2048),
        (33, 8, 128, 0, 128, 2048, 768),
        (33, 8, 128, 64, 128, 2048, 768),
        (300, 4, 60, 0, 60, 1408, 2048),
        (700, 2, 5, 0, 5, 80, 48),
        (700, 2, 5, 3, 5, 72, 200),
        (1500, 1, 4, 0, 2, 1000, 264),
        (4000, 2, 8, 2, 7, 768, 512),
    ],
)


@pytest.mark.parametrize("schedule", ["static", "drained", "auto"])
@SHAPES
def test_products_are_those_of_float64(
    schedule: Schedule, num_rows, choices, num_groups, first, stop, n, k
):
    torch.manual_seed(0)
    x = torch.randn(num_rows * choices, k, device="cuda").bfloat16()
    w = (torch.randn(stop - first, n, k, device="cuda") * k**-0.5).bfloat16()
    groups = GroupRange(first=first, stop=stop, num=num_groups)
    for how in ROUTINGS:
        offsets = offsets_of(num_rows, choices, num_groups, how)
        found = grouped_linear(x, w, offsets, groups, num_rows, schedule)
        exact = by_torch(x.double(), w.double(), offsets, groups)
        assert float((found.double() - exact).norm() / exact.norm().clamp(min=1e-9)) < 4e-3
        assert bool((found[exact.abs().sum(1) == 0] == 0).all())
        assert torch.equal(found, grouped_linear(x, w, offsets, groups, num_rows, schedule))


@pytest.mark.parametrize("schedule", ["drained", "auto"])
@SHAPES
def test_pairs_of_products_are_mixed(
    schedule: Schedule, num_rows, choices, num_groups, first, stop, n, k
):
    """One column of two: of the matmul kernel, its formula in f32, or of two products."""
    torch.manual_seed(0)
    x = torch.randn(num_rows * choices, k, device="cuda").bfloat16()
    upper, lower = (
        (torch.randn(stop - first, n, k, device="cuda") * k**-0.5).bfloat16() for _ in range(2)
    )
    groups = GroupRange(first=first, stop=stop, num=num_groups)
    formula = parse("silu(a0) * a1")
    for how in ROUTINGS:
        offsets = offsets_of(num_rows, choices, num_groups, how)
        given = x, upper, lower, offsets, groups, num_rows, formula, schedule
        found = mix_groups(*given)
        gate, up = (by_torch(x.double(), w.double(), offsets, groups) for w in (upper, lower))
        exact = torch.nn.functional.silu(gate) * up
        assert float((found.double() - exact).norm() / exact.norm().clamp(min=1e-9)) < 8e-3
        assert bool((found[gate.abs().sum(1) == 0] == 0).all())
        assert torch.equal(found, mix_groups(*given))


@pytest.mark.parametrize("schedule", ["static", "drained", "auto"])
def test_matrices_of_groups_that_nobody_has_are_not_read(schedule: Schedule):
    """Five groups on two ranks: the second has two, and memory for three."""
    torch.manual_seed(0)
    num_rows, k, n = 600, 256, 128
    x = torch.randn(num_rows, k, device="cuda").bfloat16()
    pair = [(torch.randn(3, n, k, device="cuda") * k**-0.5).bfloat16() for _ in range(2)]
    for w in pair:
        w[2] = float("nan")
    groups = GroupRange(first=3, stop=5, num=5)
    offsets = offsets_of(num_rows, 1, 5, "random")
    exact = [by_torch(x.double(), w[:2].double(), offsets, groups) for w in pair]
    found = grouped_linear(x, pair[0], offsets, groups, num_rows, schedule)
    assert float((found.double() - exact[0]).norm() / exact[0].norm()) < 4e-3
    given = x, *pair, offsets, groups, num_rows, parse("a0 + a1"), schedule
    assert float((mix_groups(*given).double() - sum(exact)).norm() / exact[0].norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "choices", "num_groups", "first", "stop", "n"),
    [(1, 8, 128, 0, 128, 2048), (700, 8, 128, 64, 128, 2048), (300, 3, 5, 0, 5, 1000)],
)
def test_weighted_sums_are_torchs_to_the_last_bit(
    num_rows, choices, num_groups, first, stop, n, dtype: torch.dtype
):
    torch.manual_seed(0)
    ids = torch.rand(num_rows, num_groups, device="cuda").argsort(dim=1)[:, :choices].int()
    _, offsets, _, slots = route_values(ids, num_groups)
    y = torch.randn(num_rows * choices, n, device="cuda", dtype=dtype)
    weights = torch.rand(num_rows, choices, device="cuda")
    given = y, weights, slots, offsets, GroupRange(first=first, stop=stop, num=num_groups)
    assert torch.equal(add_weighted_rows(*given), scatter_values(*given))


@pytest.mark.parametrize(("n", "k"), [(40, 8), (130, 72)])
def test_products_of_f32_and_of_short_rows(n: int, k: int):
    torch.manual_seed(0)
    offsets = offsets_of(50, 2, 6, "random")
    groups = GroupRange(first=0, stop=6, num=6)
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        x, w = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((100, k), (6, n, k)))
        found = grouped_linear(x, w, offsets, groups, 50, "drained")
        exact = by_torch(x.double(), w.double(), offsets, groups)
        assert float((found.double() - exact).norm() / exact.norm()) < most


@pytest.mark.parametrize("schedule", ["static", "drained", "auto"])
def test_a_captured_graph_serves_any_routing(schedule: Schedule):
    torch.manual_seed(0)
    num_rows, choices, num_groups = (900 if schedule == "auto" else 200), 4, 32
    x = torch.randn(num_rows * choices, 512, device="cuda").bfloat16()
    w = (torch.randn(num_groups, 384, 512, device="cuda") * 0.05).bfloat16()
    groups = GroupRange(first=0, stop=num_groups, num=num_groups)
    offsets = offsets_of(num_rows, choices, num_groups, "random").clone()
    grouped_linear(x, w, offsets, groups, num_rows, schedule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_linear(x, w, offsets, groups, num_rows, schedule)
    for how in (*ROUTINGS, "random"):
        offsets.copy_(offsets_of(num_rows, choices, num_groups, how))
        graph.replay()
        exact = by_torch(x.double(), w.double(), offsets, groups)
        assert float((found.double() - exact).norm() / exact.norm()) < 4e-3


def test_prompts_give_the_same_by_all_ways():
    """Short ones are CUDA graphs where the host reads nothing. Rounding may choose an expert."""
    model = random_model("qwen3-30b-a3b", num_layers=2, vocab=32000)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, 32000, (n,), generator=generator).tolist() for n in (5, 100, 100, 700)
    ]
    logits: dict[str, list[Tensor]] = {}
    for way in ("torch", "static", "drained", "auto"):
        engine = open_engine(model, expert_tiles=way)
        logits[way] = [engine.logits(prompt).float().cpu() for prompt in prompts]
        assert engine.prefill(prompts[1]) == engine.prefill(prompts[1])
    for way in ("static", "drained", "auto"):
        for found, expected in zip(logits[way], logits["torch"], strict=True):
            error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
            print(f"{way}: {len(found)} rows, median {error.median():.2e}, most {error.max():.2e}")
            assert float(error.median()) < 2e-2
    assert all(torch.equal(a, b) for a, b in zip(logits["static"], logits["drained"], strict=True))
