"""Experts of one row in the kernel of one row: what ops fuse to, which tiles the loader brings for
each choice, and what the check of slots finds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError
from distmega.hostir.ir.nodes import Allocate, Deallocate, LaunchMegakernel, LibraryOp, walk_nodes
from distmega.kernels.hopper.diagnosis import describe
from distmega.kernels.hopper.plan.experts import find_wrong_slot
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import (
    ROW_EXPERT_COLUMNS,
    ROW_EXPERT_ROWS,
    ROW_PAIRED,
    SLICE_K,
    SLICES,
    UNIT_ROWS,
    Instruction,
    RowLinear,
    RowRoute,
    pack,
)
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import (
    ExpertSlots,
    FusedContraction,
    FusedRouting,
    fuse_segment,
)
from distmega.models.presets import PRESETS
from distmega.program import expr
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.ops.experts import Weighing
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program

HIDDEN, NUM_EXPERTS, NUM_CHOSEN = 256, 12, 3
PARTS = {"g": 1, "u": 1, "d": 2}
"""Dims that ranks divide where each has a part of every expert."""
WHOLE = {"g": 0, "u": 0, "d": 0}
"""Where each has some experts whole."""


def experts(
    p: ProgramBuilder,
    x: Handle,
    name: str,
    width: int,
    *,
    gated: bool = True,
    chosen: int = NUM_CHOSEN,
    weighing: Weighing = "softmax_chosen",
) -> Handle:
    """Experts of a normalised row."""
    size = x.shape[-1]
    normed = p.rms_norm(x, p.weight(f"{name}n", (size,), "bf16"), 1e-5)
    scores = p.linear(normed, p.weight(f"{name}r", (NUM_EXPERTS, size), "bf16"))
    weights, ids = p.top_k(scores, chosen, weighing)
    routing = p.route(ids, NUM_EXPERTS)
    rows = p.gather_rows(normed, routing)
    parts = [
        p.grouped_linear(rows, p.weight(f"{name}{w}", (NUM_EXPERTS, width, size), "bf16"), routing)
        for w in ("gu" if gated else "g")
    ]
    formula = "silu(a0) * a1" if gated else "relu(a0)"
    mixed = p.grouped_pointwise(formula, *parts, routing=routing)
    down = p.weight(f"{name}d", (NUM_EXPERTS, size, width), "bf16")
    return p.scatter_add(p.grouped_linear(mixed, down, routing), weights, routing)


def layers(num: int = 3, width: int = 192, rows: int = 1, **kinds: Any) -> Program:
    """x of so many rows, then x + experts(x), num times."""
    p = ProgramBuilder("layers")
    x = p.input("x", (rows, HIDDEN), "bf16")
    for i in range(num):
        x = p.pointwise("a0 + a1", x, experts(p, x, f"l{i}", width, **kinds), name=f"x{i}")
    return p.build(x)


def expert_marks(program: Program, divided: Mapping[str, int] = PARTS) -> dict[str, Layout]:
    """How ranks divide weights: those of experts by the dim that stands by their last letter; every
    rank has the routers.
    """
    return {
        tensor.name: shard(divided[tensor.name[-1]], "tp")
        if len(tensor.shape) == 3
        else replicate()
        for tensor in program.with_role("weight")
    }


def local_part(program: Program, tp: int, divided: Mapping[str, int] = PARTS) -> Program:
    """What a rank has."""
    marks = expert_marks(program, divided) if tp > 1 else {}
    return localize(plan_program(program, DeviceMesh(tp=tp), H200, marks)).program


def queues_of(program: Program, tp: int = 1, num_sms: int = 16) -> RowQueues:
    local = local_part(program, tp)
    weights = layout_arena(Space.WEIGHT, order_weights(local))
    states = layout_arena(Space.STATE, local.with_role("state"))
    return build_queues(local, weights, states, num_sms)


@cache
def small(width: int = 192, tp: int = 1, gated: bool = True) -> RowQueues:
    return queues_of(layers(width=width, gated=gated), tp)


def of_kind(queues: RowQueues, flag: int) -> list[RowLinear]:
    return [
        one
        for queue in queues.queues
        for one in queue
        if isinstance(one, RowLinear) and one.flags & flag
    ]


def test_experts_fuse_to_a_choice_and_two_contractions():
    scores, routing, rows, total = fuse_segment(layers(1))
    assert isinstance(routing, FusedRouting)
    assert isinstance(scores, FusedContraction)
    assert isinstance(rows, FusedContraction)
    assert isinstance(total, FusedContraction)
    assert routing.scores == scores.outs[0]
    assert (routing.num_experts, routing.num_chosen) == (NUM_EXPERTS, NUM_CHOSEN)
    slots = ExpertSlots(
        routing=routing.name,
        by="rows",
        num_experts=NUM_EXPERTS,
        num_own=NUM_EXPERTS,
        num_chosen=NUM_CHOSEN,
    )
    assert (rows.experts, total.experts) == (slots, replace(slots, by="columns"))
    assert (rows.x, rows.norm) == (scores.x, scores.norm)
    assert rows.formula == expr.parse("a1 * silu(a0) * a2")
    assert [stream.weights for stream in rows.streams] == [("l0g",), ("l0u",)]
    assert (total.x, total.operands, total.outs) == (rows.outs[0], ("x",), ("x0",))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_decode_step_of_experts_is_one_launch(num_ranks):
    """With real extents, but for the number of layers."""
    config = replace(PRESETS["qwen3-30b-a3b"], num_layers=4)
    options = EngineOptions(max_context=256)
    plan = plan_decode(config, DeviceMesh(tp=num_ranks), H200, options, "none")
    lowered = lower_decode(config, plan, options, peer_memory=True)
    nodes = Counter(type(node) for node in walk_nodes(lowered.host.body))
    assert nodes[LaunchMegakernel] == 1
    assert not nodes[LibraryOp]
    assert nodes.keys() <= {LaunchMegakernel, LibraryOp, Allocate, Deallocate}
    (segment,) = lowered.host.segments
    queues = build_queues(segment, lowered.weights, lowered.states, 132)
    assert len(queues.queues) == 132
    assert queues.num_ranks == num_ranks
    shape = queues.experts
    assert shape is not None
    assert (shape.num_experts, shape.num_chosen) == (128, 8)
    assert shape.width * num_ranks == 768
    routes = [one for queue in queues.queues for one in queue if isinstance(one, RowRoute)]
    assert len(routes) == 132 * config.num_layers


CHOICES: dict[str, Callable[[int, int], Sequence[int]]] = {
    "first": lambda num, chosen: range(chosen),
    "last": lambda num, chosen: range(num - 1, num - 1 - chosen, -1),
    "apart": lambda num, chosen: [i * (num // chosen) for i in range(chosen)],
}


def rows_of_units(one: RowLinear, queues: RowQueues, chosen: Sequence[int]) -> list[int]:
    """First rows, in the order in which the loader brings units (loader.unit_row), but for those
    between an expert's last row and the next slot.
    """
    shape = queues.experts
    assert shape is not None
    found = []
    for unit in range(one.num_units):
        own, first = one.row0 // UNIT_ROWS + unit, one.weight_row
        if one.flags & ROW_PAIRED:
            first = one.pair_row if own % 2 else first
            own //= 2
        slot, own = divmod(own, shape.slot_units)
        if own * UNIT_ROWS < shape.width:
            found.append(first + chosen[slot] * shape.width + own * UNIT_ROWS)
    return found


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("width", "tp", "gated"), [(192, 1, True), (192, 2, True), (72, 1, False)])
def test_every_row_of_chosen_experts_is_brought_once(choice, width, tp, gated):
    """And no other counts, whichever are chosen."""
    queues = small(width, tp, gated)
    shape = queues.experts
    assert shape is not None
    chosen = CHOICES[choice](shape.num_experts, shape.num_chosen)
    of_all = of_kind(queues, ROW_EXPERT_ROWS)
    tasks = [one for one in of_all if one.name == of_all[-1].name]  # of one layer
    streams = 2 if gated else 1
    starts = [tasks[0].weight_row, *([tasks[0].pair_row] if gated else [])]
    rows = Counter(row for one in tasks for row in rows_of_units(one, queues, chosen))
    assert max(rows.values()) == 1
    wanted = {
        start + expert * shape.width + row
        for start in starts
        for expert in chosen
        for row in range(0, shape.width, UNIT_ROWS)
    }
    assert rows.keys() == wanted
    assert sum(one.num_units for one in tasks) == streams * shape.num_chosen * shape.slot_units
    assert shape.slot_units * UNIT_ROWS >= shape.width > (shape.slot_slices - 1) * SLICE_K


@pytest.mark.parametrize(("width", "tp"), [(192, 1), (192, 2), (72, 1), (1024, 1)])
def test_slices_of_the_last_matrices_meet_their_own_x(width, tp):
    """Slice number n of the tiles meets results n * 64 and on of all slots, whose words lie so."""
    queues = queues_of(layers(2, width), tp)
    shape = queues.experts
    assert shape is not None
    assert queues.expert_matrix is not None
    assert (shape.width, queues.expert_matrix.slices) == (width // tp, shape.copied_slices)
    assert SLICES % shape.copied_slices == shape.slot_slices % shape.copied_slices == 0
    first = of_kind(queues, ROW_EXPERT_ROWS)[0]
    for one in of_kind(queues, ROW_EXPERT_COLUMNS):
        assert 2 * one.num_src_words == shape.columns <= SLICES * SLICE_K * one.num_tiles_k
        assert one.num_tiles_k <= queues.max_tiles_k
        assert one.num_rows == HIDDEN
        assert one.weight_row % HIDDEN == one.row0
    per_slot = first.num_rows // 2 // shape.num_chosen
    assert per_slot == shape.slot_slices * SLICE_K


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_are_proven(tp):
    queues = small(192, tp)
    assert find_hazard(queues) == find_wrong_slot(queues) == ""
    for queue in queues.queues:
        for one in queue:
            assert len(pack(one)) == 16
            if isinstance(one, RowRoute):
                assert describe(one).startswith("choice of experts")


def changed(
    queues: RowQueues, change: Callable[[list[Instruction]], list[Instruction]]
) -> RowQueues:
    """The queues with the first one changed."""
    first, *others = queues.queues
    return replace(queues, queues=(tuple(change(list(first))), *others))


def without_route(queue: list[Instruction]) -> list[Instruction]:
    return queue[[isinstance(one, RowRoute) for one in queue].index(True) + 1 :]


def with_two_routes(queue: list[Instruction]) -> list[Instruction]:
    at = [isinstance(one, RowRoute) for one in queue].index(True)
    return [*queue[: at + 1], *queue[at:]]


def with_a_last_route(queue: list[Instruction]) -> list[Instruction]:
    return [*queue, next(one for one in queue if isinstance(one, RowRoute))]


def behind_the_matrix(queue: list[Instruction]) -> list[Instruction]:
    return [
        replace(one, weight_row=one.weight_row + 10**6)
        if isinstance(one, RowLinear) and one.flags & ROW_EXPERT_COLUMNS
        else one
        for one in queue
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (without_route, "that nobody chose"),
        (with_two_routes, "overwrites a choice that nobody has read"),
        (with_a_last_route, "is read by nobody"),
        (behind_the_matrix, "behind those of all experts"),
    ],
)
def test_a_wrong_slot_is_found(change, found):
    assert found in find_wrong_slot(changed(small(), change))


def test_scores_that_are_used_again_too_early_are_found():
    """Without what they publish behind it, nobody knows that the others have chosen."""
    queues = small()
    silent = tuple(
        replace(one, publishes="nothing") if one.weighted else one for one in queues.epilogues
    )
    assert find_hazard(replace(queues, epilogues=silent))
    late = tuple(
        tuple(
            replace(one, generation=one.generation + 1) if isinstance(one, RowRoute) else one
            for one in queue
        )
        for queue in queues.queues
    )
    assert "waits for ever" in find_hazard(replace(queues, queues=late))


def test_what_the_kernel_does_not_take_is_named():
    with pytest.raises(UnsupportedError, match="2 rows"):
        queues_of(layers(1, rows=2))
    p = ProgramBuilder("weights that leave")
    x = p.input("x", (2, HIDDEN), "bf16")
    weights, ids = p.top_k(p.linear(x, p.weight("r", (NUM_EXPERTS, HIDDEN), "bf16")), 2)
    p.route(ids, NUM_EXPERTS)
    with pytest.raises(UnsupportedError, match=r"of kind (top_k|route) does not fuse"):
        fuse_segment(p.build(weights))
    p = ProgramBuilder("shapes")
    x = p.input("x", (1, HIDDEN), "bf16")
    for i, width in enumerate((64, 128)):
        x = p.pointwise("a0 + a1", x, experts(p, x, f"l{i}", width))
    with pytest.raises(UnsupportedError, match="experts of several shapes"):
        queues_of(p.build(x))
    local = local_part(layers(1), 2, dict.fromkeys("gud", 0))
    with pytest.raises(UnsupportedError, match="one row of whole experts a rank"):
        queues_of(local)
