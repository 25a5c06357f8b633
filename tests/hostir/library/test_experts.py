"""Groups of rows by library ops: against loops over tokens, on one rank and on several, divided by
expert and by tensor.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distmega.errors import RequestError
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.kernels.machines import CPU, H200
from distmega.program.builder import ProgramBuilder
from distmega.program.ops import experts
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import Plan, plan_program
from distmega.sharding.resolve.resolve import PlacedOp
from distmega.sharding.search.cost import op_bytes, op_flops
from tests.hostir.programs import run_program
from tests.hostir.threads import run_mesh
from tests.program.experts import moe_block


def tensors_of(program: Program, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    given = [t for t in program.tensors if t.role != "temp"]
    return {t.name: torch.randn(t.shape, generator=generator) for t in given}


def expected(tensors: dict[str, Tensor], num: int) -> Tensor:
    """A loop over tokens and their experts, in float64."""
    x, router, gate, up, down = (
        tensors[n].double() for n in ("x", "router", "w_gate", "w_up", "w_down")
    )
    out = x.clone()
    for row in range(len(x)):
        probabilities = (router @ x[row]).softmax(0)
        for expert in probabilities.topk(num).indices.tolist():
            mixed = torch.nn.functional.silu(gate[expert] @ x[row]) * (up[expert] @ x[row])
            out[row] += probabilities[expert] * (down[expert] @ mixed)
    return out


def two_routings(*, of_other_ids: bool) -> Program:
    """Rows sorted by one routing, multiplied, and added up as another one says."""
    p = ProgramBuilder("twice")
    x = p.input("x", (5, 8))
    weights, ids = p.top_k(p.input("scores", (5, 4)), 2, name="chosen")
    _, others = p.top_k(p.input("other_scores", (5, 4)), 2, name="other")
    first, second = p.route(ids, 4), p.route(others if of_other_ids else ids, 4)
    y = p.grouped_linear(p.gather_rows(x, first), p.weight("w", (4, 6, 8)), first, name="y")
    return p.build(p.scatter_add(y, weights, second, name="added"))


@pytest.mark.parametrize("of_other_ids", [False, True])
def test_rows_sorted_by_other_groups_are_added_up_whole(*, of_other_ids: bool):
    """A rank has the rows of its groups as they were sorted; of equal ids these are the same."""
    program, mesh = two_routings(of_other_ids=of_other_ids), DeviceMesh(tp=2)
    plan = plan_program(program, mesh, CPU, annotations={"w": shard(0, "tp")})
    assert (divisions(plan).get("added") == "e") == (not of_other_ids)
    local, tensors = localize(plan), tensors_of(program, 1)
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    whole = run_program(program, tensors)["added"]
    for rank in run_mesh(host, local, tensors):
        torch.testing.assert_close(rank["added"], whole)


def divisions(plan: Plan) -> dict[str, str]:
    """Op -> the iteration axis that it is divided by."""
    return {
        step.op.name: option.axis
        for step in plan.steps
        if isinstance(step, PlacedOp)
        for _, option in step.splits
    }


@pytest.mark.parametrize(("rows", "num_experts", "num"), [(4, 6, 2), (1, 5, 3), (9, 4, 4)])
def test_one_rank(rows: int, num_experts: int, num: int):
    program = moe_block(rows, num_experts=num_experts, num=num)
    tensors = tensors_of(program)
    found = run_program(program, tensors)["y"]
    torch.testing.assert_close(found.double(), expected(tensors, num), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("way", ["expert", "tensor", "chosen"])
@pytest.mark.parametrize(("num_experts", "num"), [(6, 2), (5, 1)])
def test_ranks(num_ranks: int, way: str, num_experts: int, num: int):
    """5 and 6 experts over 4 ranks: the last one has padding, and one of none at all."""
    program = moe_block(num_experts=num_experts, num=num)
    dims: dict[str, Layout] = {
        "expert": {name: shard(0, "tp") for name in ("w_gate", "w_up", "w_down")},
        "tensor": {"w_gate": shard(1, "tp"), "w_up": shard(1, "tp"), "w_down": shard(2, "tp")},
        "chosen": {},
    }[way]
    plan = plan_program(program, DeviceMesh(tp=num_ranks), CPU, annotations=dims)
    axes = divisions(plan)
    if way == "expert":
        assert {axes[n] for n in ("gathered", "gate", "mixed", "down", "added")} == {"e"}
    if way == "tensor":
        assert (axes["gate"], axes["down"]) == ("n", "k")
        assert "added" not in axes
    local = localize(plan)
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    tensors = tensors_of(program)
    for rank in run_mesh(host, local, tensors):
        torch.testing.assert_close(rank["y"].double(), expected(tensors, num), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [0, 1])
def test_parts_are_summed_once_after_all_rows_are_added(way: int):
    """One collective of [rows, hidden], not of [rows * num, hidden]."""
    program = moe_block(rows=16, hidden=64, num_experts=8, num=4, ffn=64)
    plan = plan_program(program, DeviceMesh(tp=2), H200, annotations={"w_gate": shard(way, "tp")})
    behind = [step.name for step in plan.steps if not isinstance(step, PlacedOp)]
    assert [name for name in behind if not name.startswith(("scores", "x."))] == [
        "added.all_reduce"
    ]


def test_two_mesh_axes_divide_experts_and_each_expert():
    program = moe_block(num_experts=4)
    layouts = {"w_gate": shard(0, "ep") | shard(1, "tp"), "w_up": shard(0, "ep") | shard(1, "tp"),
               "w_down": shard(0, "ep") | shard(2, "tp")}  # fmt: skip
    local = localize(plan_program(program, DeviceMesh(ep=2, tp=2), CPU, annotations=layouts))
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    tensors = tensors_of(program)
    for rank in run_mesh(host, local, tensors):
        torch.testing.assert_close(rank["y"].double(), expected(tensors, 2), rtol=1e-5, atol=1e-5)


def test_rows_that_leave_are_divided_by_expert_and_column_too():
    """The rows as ranks have them by expert give the columns, not those that leave as a whole."""
    p = ProgramBuilder("rows")
    x, ids, weights = p.input("x", (5, 8)), p.input("ids", (5, 1), "i32"), p.input("w", (5, 1))
    routing = p.route(ids, 4)
    rows = p.gather_rows(x, routing, name="rows")
    made = p.grouped_linear(rows, p.weight("up", (4, 1, 8)), routing, name="made")
    down = p.grouped_linear(made, p.weight("down", (4, 8, 1)), routing)
    program = p.build(rows, p.scatter_add(down, weights, routing, name="y"))
    plan = plan_program(program, DeviceMesh(dp=2, tp=2), CPU)
    steps = [s for s in plan.steps if isinstance(s, PlacedOp) and s.op.name == "made"]
    assert {option.axis for _, option in steps[0].splits} == {"e", "k"}
    local = localize(plan)
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    tensors = tensors_of(program) | {"ids": torch.tensor([[1], [0], [3], [1], [1]]).int()}
    wanted = run_program(program, tensors)
    for found in run_mesh(host, local, tensors):
        for name in program.outputs:
            torch.testing.assert_close(found[name], wanted[name])


def test_rows_may_be_shared_out_too():
    """Tokens on different ranks (data parallel), experts on all of them."""
    program = moe_block(rows=8)
    layouts = {"x": shard(0, "dp"), "y": shard(0, "dp"), "w_gate": shard(0, "dp")}
    local = localize(plan_program(program, DeviceMesh(dp=2), CPU, annotations=layouts))
    host = run_passes(lower_program(local, megakernel=False, peer_memory=False))
    tensors = tensors_of(program)
    found = torch.cat([rank["y"] for rank in run_mesh(host, local, tensors)])
    torch.testing.assert_close(found.double(), expected(tensors, 2), rtol=1e-5, atol=1e-5)


def test_route_of_the_case():
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0]])
    counts, offsets, order, slots = experts.route_values(ids, 4)
    assert counts.tolist() == [4, 2, 1, 1]
    assert offsets.tolist() == [0, 4, 6, 7, 8]
    assert order.tolist() == [0, 2, 4, 7, 1, 5, 3, 6]
    assert slots.tolist() == [[0, 4], [1, 6], [2, 5], [7, 3]]


@given(st.integers(1, 9), st.integers(1, 6), st.data())
@settings(max_examples=50, deadline=None)
def test_route_is_a_stable_sort(rows: int, num_groups: int, data: st.DataObject):
    num = data.draw(st.integers(1, num_groups))
    drawn = [data.draw(st.permutations(range(num_groups)))[:num] for _ in range(rows)]
    ids = torch.tensor(drawn)
    counts, offsets, order, slots = experts.route_values(ids, num_groups)
    flat = ids.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda n: (flat[n], n))
    assert counts.tolist() == [flat.count(group) for group in range(num_groups)]
    assert offsets.diff().tolist() == counts.tolist()
    assert order[slots.flatten().long()].tolist() == list(range(len(flat)))


def test_ties_go_to_the_lower_column():
    weights, columns = experts.top_k_values(
        torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2, "softmax_chosen"
    )
    assert columns.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_named(bad: float):
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 1.0]])
    with pytest.raises(RequestError, match="router score of row 1 is not a number"):
        experts.top_k_values(scores, 2, "softmax")


def test_a_row_sent_nowhere_is_named():
    with pytest.raises(RequestError, match="a row sent to group 4; expected groups from 0 to 3"):
        experts.route_values(torch.tensor([[0, 4]]), 4)


def test_a_row_sent_twice_to_a_group_is_named():
    """A group would have more rows than there are, and tasks for no more than these."""
    ids = torch.tensor([[0, 1], [2, 2], [3, 3]])
    with pytest.raises(RequestError, match="row 1 sent to group 2 more than once"):
        experts.route_values(ids, 4)
    counts, *_ = experts.route_values(ids, 4, torch.tensor([1]))  # others are not in use
    assert counts.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("used", [-1, 3])
def test_more_rows_in_use_than_there_are_is_named(used: int):
    with pytest.raises(RequestError, match=f"{used} rows in use of 2 that are routed"):
        experts.route_values(torch.tensor([[0], [1]]), 4, torch.tensor([used]))


def test_one_token_is_read_faster_by_a_part_of_each_expert_than_by_whole_ones():
    """Of 8 experts on 2 ranks one has 5.1 in the mean, where half of each is 4."""
    program = moe_block(rows=1, hidden=2048, num_experts=128, num=8, ffn=768)
    axes = divisions(plan_program(program, DeviceMesh(tp=2), H200))
    assert (axes["gate"], axes["up"], axes["down"]) == ("n", "n", "k")
    (gate,) = (op for op in program.ops if op.name == "gate")
    tensors = program.tensor_map()
    parts = [op_bytes(gate, tensors, extents) for extents in ({"n": 384}, {"e": 64})]
    assert parts[1] / parts[0] == pytest.approx(5.1 / 4, rel=0.01)


def test_expected_cost():
    """16 rows, 8 of 128 experts each: 16 * 8 rows, of 128 experts 82."""
    program = moe_block(rows=16, hidden=64, num_experts=128, num=8, ffn=32)
    (gate,) = (op for op in program.ops if op.name == "gate")
    tensors = program.tensor_map()
    hit = 128 * (1 - (1 - 8 / 128) ** 16)
    rows = 128 * (64 + 32) * 4
    matrix, offsets = 64 * 32 * 4, 129 * 4
    assert op_bytes(gate, tensors) == pytest.approx(rows + hit * matrix + offsets, abs=16)
    assert op_flops(gate, tensors=tensors) == 2 * 128 * 64 * 32
    half = {"e": 64}
    most_rows = 64 + 0.564 * (128 * 0.5 * 0.5) ** 0.5
    assert op_flops(gate, half, tensors) == pytest.approx(2 * most_rows * 64 * 32, rel=1e-3)
    assert op_bytes(gate, tensors, half) < op_bytes(gate, tensors)


@pytest.mark.parametrize(
    "groups",
    [experts.GroupRange(first=0, stop=3, num=3), experts.GroupRange(first=0, stop=2, num=3)],
)
def test_rows_of_no_group_are_never_added(groups: experts.GroupRange):
    """Whatever stands in them: it differs where ranks share the groups out."""
    ids = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 2]])
    _, offsets, _, slots = experts.route_values(ids, 3, torch.tensor([2]))
    y, weights = torch.randn(8, 4), torch.rand(4, 2)
    expected = torch.stack(
        [(y[slots[row].long()] * weights[row].unsqueeze(1)).sum(0) for row in range(2)]
    )
    y[int(offsets[-1]) :] = torch.nan
    found = experts.scatter_values(y, weights, slots, offsets, groups)
    torch.testing.assert_close(found[:2], expected)
    assert not found[2:].any()
