"""Rows sent to experts on a GPU, beside what torch does there: the same columns, positions and
rows, and weights but for rounding; also when a captured graph is replayed with other operands.
"""

import pytest
import torch
from torch import Tensor

from distmega.kernels.library.routing import (
    choose,
    gather,
    sort_by_group,
    takes_ids,
    takes_rows,
    takes_scores,
)
from distmega.program.ops.experts import route_values, top_k_values

pytestmark = pytest.mark.gpu

EXPERTS = [(128, 8), (8, 2)]
NUM_ROWS = [1, 7, 448, 3584, 8192]
WEIGHINGS = ["values", "softmax", "softmax_chosen"]


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def check_choice(x: Tensor, num: int, weighing: str) -> Tensor:
    """Weights and columns are torch's; returns the columns."""
    assert takes_scores(x, num)
    weights, columns = choose(x, num, weighing)
    expected, known = top_k_values(x, num, weighing)
    assert same(columns, known)
    torch.testing.assert_close(weights, expected, rtol=5e-6, atol=1e-12, equal_nan=True)
    return columns


def check_sort(ids: Tensor, num_groups: int, num_rows: Tensor | None) -> Tensor:
    """All four results are torch's, and the same again; returns the order."""
    assert takes_ids(ids, num_groups, num_rows)
    expected = route_values(ids, num_groups, num_rows)
    for _ in range(2):
        found = sort_by_group(ids, num_groups, num_rows)
        assert all(map(same, found, expected))
    return found[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_experts", "num"), [*EXPERTS, (60, 4), (512, 10)])
def test_choices_are_torchs(num_experts, num, num_rows, dtype):
    """Of half types many scores of a row are the same."""
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, num_experts, device="cuda").to(dtype)
    for weighing in WEIGHINGS:
        check_choice(x, num, weighing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighing", WEIGHINGS)
def test_choices_of_ties_infinities_and_no_numbers_are_torchs(weighing, dtype):
    torch.manual_seed(0)
    nan, inf = float("nan"), float("inf")
    x = torch.randn(12, 128, device="cuda")
    x[0], x[1], x[2], x[3], x[4] = nan, inf, -inf, 1.0, 0.0
    x[4, ::3] = -0.0
    x[5, 90], x[6, 5:30], x[7, 3], x[8, 2:], x[9, :9] = nan, nan, inf, -inf, -inf
    x[10] = torch.randint(-2, 3, (128,), device="cuda")
    columns = check_choice(x.to(dtype), 8, weighing).long()
    assert bool(((columns >= 0) & (columns < 128)).all())
    assert all(len(row.unique()) == 8 for row in columns)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_experts", "num"), EXPERTS)
def test_pairs_are_sorted_as_torch_sorts_them(num_experts, num, num_rows):
    """Random ids, those of one row for all, and all of one group; all rows in use, or fewer."""
    torch.manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts, device="cuda").argsort(dim=1)[:, :num].int()
    one = torch.full_like(ids, num_experts - 1)
    for given in (ids, ids.long(), ids[:1].expand_as(ids), one):
        check_sort(given, num_experts, None)
        for used in sorted({0, 1, num_rows // 2, num_rows}):
            rows = torch.tensor([used], device="cuda", dtype=given.dtype)
            check_sort(given, num_experts, rows)


@pytest.mark.parametrize(("num_rows", "num", "num_groups"), [(40000, 8, 512), (65536, 8, 3)])
def test_many_pairs_and_groups_are_sorted(num_rows, num, num_groups):
    torch.manual_seed(0)
    ids = torch.randint(0, num_groups, (num_rows, num), device="cuda", dtype=torch.int32)
    check_sort(ids, num_groups, torch.tensor([num_rows - 77], device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_experts", "num"), EXPERTS)
def test_rows_are_copied(num_experts, num, num_rows, dtype):
    torch.manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts, device="cuda").argsort(dim=1)[:, :num].int()
    order = check_sort(ids, num_experts, None)
    for n in (2048, 100):
        x = torch.randn(num_rows, n, device="cuda").to(dtype)
        assert takes_rows(x, order)
        assert same(gather(x, order, num), x.index_select(0, order.long() // num))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_experts", "num"), EXPERTS)
def test_a_captured_graph_routes_whatever_comes(num_experts, num, num_rows):
    torch.manual_seed(0)
    scores = torch.zeros(num_rows, num_experts, device="cuda", dtype=torch.bfloat16)
    rows = torch.zeros(num_rows, 256, device="cuda", dtype=torch.bfloat16)
    used = torch.zeros(1, device="cuda", dtype=torch.int32)

    def routed() -> list[Tensor]:
        weights, columns = choose(scores, num, "softmax")
        sorted_pairs = sort_by_group(columns, num_experts, used)
        return [weights, columns, *sorted_pairs, gather(rows, sorted_pairs[2], num)]

    routed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = routed()
    for in_use in sorted({num_rows // 2, num_rows}):
        scores.normal_()
        rows.normal_()
        used.fill_(in_use)
        graph.replay()
        weights, columns = top_k_values(scores, num, "softmax")
        expected = route_values(columns, num_experts, used)
        gathered = rows.index_select(0, expected[2].long() // num)
        torch.testing.assert_close(found[0], weights, rtol=5e-6, atol=1e-12)
        assert all(map(same, found[1:], [columns, *expected, gathered]))
