"""Experts of 2 to 16 rows in one kernel: which tiles SMs have however many experts are hit, and
what the proof finds where a queue is another.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.requests import EngineOptions
from distmega.errors import UnsupportedError
from distmega.hostir.ir.nodes import LaunchMegakernel, LibraryOp, walk_nodes
from distmega.kernels import runners
from distmega.kernels.hopper.batch_plan.experts import NUM_ZERO_CHUNKS, share_of_hits
from distmega.kernels.hopper.batch_plan.proof import CHUNK, find_batch_hazard
from distmega.kernels.hopper.batch_plan.queues import apart, build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH_EXPERT_COLUMNS,
    BatchExperts,
    BatchInstruction,
    BatchLinear,
    pack,
)
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import UNIT_ROWS
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import Fused, fuse_segment
from distmega.models.presets import PRESETS
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.kernels.hopper.row_plan.test_expert_queues import (
    NUM_CHOSEN,
    NUM_EXPERTS,
    WHOLE,
    layers,
    local_part,
)


def build(program: Program, num_sms: int = 16) -> BatchQueues:
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    return build_batch_queues(program, weights, layout_arena(Space.STATE, ()), num_sms)


@cache
def small() -> tuple[BatchQueues, tuple[Fused, ...]]:
    """Queues of three layers of 4 rows, and the fused ops that they are for."""
    program = layers(3, 192, rows=4)
    return build(program), tuple(apart(fuse_segment(program)))


@pytest.mark.parametrize(("batch", "num_ranks"), [(2, 1), (8, 1), (16, 1), (16, 2)])
def test_a_decode_step_of_experts_is_one_launch(batch: int, num_ranks: int):
    """With real extents, but for the number of layers; six waits for all SMs a layer."""
    config = replace(PRESETS["qwen3-30b-a3b"], num_layers=4)
    options = EngineOptions(max_context=256, batch=batch, experts="tensor")
    plan = plan_decode(config, DeviceMesh(tp=num_ranks), H200, options, "none")
    lowered = lower_decode(config, plan, options, peer_memory=True)
    nodes = Counter(type(node) for node in walk_nodes(lowered.host.body))
    assert nodes[LaunchMegakernel] == 1
    assert not nodes[LibraryOp]
    (segment,) = lowered.host.segments
    queues = build_batch_queues(segment, lowered.weights, lowered.states, 132)
    assert len(queues.queues[0]) == 1 + 6 * config.num_layers + 1
    assert queues.max_hits == min(128, 8 * batch)
    choices = [one for one in queues.queues[0] if isinstance(one, BatchExperts)]
    assert [one.choice for one in choices] == list(range(config.num_layers))
    assert {one.num_rows * num_ranks for one in choices} == {2 * 768}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_of_whole_experts_a_rank_is_one_launch(batch: int):
    """By the kernel of several rows, whose caches need no dim for one sequence."""
    config = replace(PRESETS["qwen3-30b-a3b"], num_layers=2, vocab=4096)
    options = EngineOptions(max_context=256, batch=batch, experts="expert")
    plan = plan_decode(config, DeviceMesh(tp=2), H200, options, "none")
    lowered = lower_decode(config, plan, options, peer_memory=True)
    nodes = Counter(type(node) for node in walk_nodes(lowered.host.body))
    assert nodes[LaunchMegakernel] == 1
    assert not nodes[LibraryOp]
    (segment,) = lowered.host.segments
    for rank in range(2):
        queues = build_batch_queues(segment, lowered.weights, lowered.states, 132, rank)
        assert queues.max_hits == min(64, 8 * batch)


@pytest.mark.parametrize("num_sms", [5, 132])
def test_every_unit_of_experts_that_are_hit_is_one_sms(num_sms: int):
    """However many they are, and no SM has more than one pair of units above another."""
    queues = build(layers(1, 192, rows=4), num_sms)
    (one,) = (one for one in queues.queues[0] if isinstance(one, BatchExperts))
    shape = queues.experts
    assert shape is not None
    assert queues.max_hits == NUM_EXPERTS == 4 * NUM_CHOSEN
    for num_hits in range(1, queues.max_hits + 1):
        shares = [share_of_hits(one, shape, num_hits, sm, num_sms) for sm in range(num_sms)]
        units = [unit for share in shares for unit in share]
        assert units == list(range(num_hits * 2 * shape.width // UNIT_ROWS))
        assert max(map(len, shares)) - min(map(len, shares)) <= 2


def test_results_of_experts_lie_behind_zeros_and_beside_nothing():
    queues, _ = small()
    chunks = [
        range(one.dst // CHUNK, one.dst // CHUNK + queues.max_hits)
        for one in queues.queues[0]
        if isinstance(one, BatchExperts)
    ]
    assert len(set(chunks)) == 1  # layers take them in turn
    assert min(chunks[0]) >= NUM_ZERO_CHUNKS
    assert max(chunks[0]) < queues.num_chunks
    for one in queues.queues[0]:
        assert len(pack(one)) == 16


def changed(queues: BatchQueues, kind: Callable[[BatchInstruction], bool], **fields: int):
    """With fields of the last such instruction of all SMs set."""
    at = max(i for i, one in enumerate(queues.queues[0]) if kind(one))
    return replace(
        queues,
        queues=tuple(
            (*queue[:at], replace(queue[at], **fields), *queue[at + 1 :]) for queue in queues.queues
        ),
    )


def is_choice(one: BatchInstruction) -> bool:
    return isinstance(one, BatchExperts)


def is_of_columns(one: BatchInstruction) -> bool:
    return isinstance(one, BatchLinear) and bool(one.flags & BATCH_EXPERT_COLUMNS)


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        (is_choice, {"scores": 0}, "reads"),
        (is_choice, {"src": 1 + NUM_ZERO_CHUNKS}, "reads"),
        (is_choice, {"dst": 0}, "where zeros are to stay"),
        (is_choice, {"dst": NUM_ZERO_CHUNKS * CHUNK}, "while other SMs read it"),
        (is_choice, {"choice": 0}, "is choice 0 of 3"),
        (is_choice, {"num_rows": 64}, "rows of an expert of 192"),
        (is_choice, {"weight_row": 10**6}, "behind those of all experts"),
        (is_choice, {"pair_row": -1}, "in front of those of all experts"),
        (is_choice, {"first_own": 13}, "behind those of all experts"),
        (is_of_columns, {"weight_row": 10**6}, "behind those of all experts"),
        (is_of_columns, {"src": 0}, "reads"),
    ],
)
def test_a_changed_queue_is_not_proven(kind, fields, found):
    queues, fused = small()
    assert find_batch_hazard(queues, fused) == ""
    assert found in find_batch_hazard(changed(queues, kind, **fields), fused)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_ranks_take_tiles_of_their_own_experts(num_ranks: int):
    """Also where the last rank has fewer, or none: rows from the first own expert on are blocks of
    the rank's matrix, one behind the other.
    """
    program = local_part(layers(2, 192, rows=4), num_ranks, WHOLE)
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    num_own = -(-NUM_EXPERTS // num_ranks)
    for rank in range(num_ranks):
        queues = build_batch_queues(program, weights, layout_arena(Space.STATE, ()), 16, rank)
        assert queues.experts is not None
        assert (queues.experts.num_own, queues.experts.num_experts) == (num_own, NUM_EXPERTS)
        assert queues.max_hits == num_own
        own = rank * num_own
        choices = [one for one in queues.queues[0] if isinstance(one, BatchExperts)]
        assert {one.first_own for one in choices} == {own}
        rows = queues.matrices[choices[0].matrix].num_rows
        firsts = [row for one in choices for row in (one.weight_row, one.pair_row)]
        blocks = [*sorted(row + own * 192 for row in firsts), rows]
        assert all(b - a >= num_own * 192 for a, b in pairwise(blocks))
        assert blocks[0] >= 0


def test_one_row_of_whole_experts_a_rank_is_done_by_the_kernel_of_several(monkeypatch):
    """One of what no kernel takes is refused in the words of that of one row."""
    monkeypatch.setattr(runners, "require_hopper", lambda device: 16)

    def plan(program: Program) -> object:
        weights = layout_arena(Space.WEIGHT, order_weights(program))
        states = layout_arena(Space.STATE, ())
        team = SimpleNamespace(team_rank=1, size=2) if program.name.endswith(".0") else None
        return runners.plan_hopper(
            program, weights=weights, states=states, device=torch.device("cpu"), team=team
        )

    queues = plan(replace(local_part(layers(1, 192), 2, WHOLE), name="part.0"))
    assert isinstance(queues, BatchQueues)
    assert (queues.batch, queues.max_hits) == (1, NUM_CHOSEN)
    assert isinstance(plan(layers(1, 192)), RowQueues)
    p = ProgramBuilder("sums")
    x = p.linear(p.input("x", (1, 256), "bf16"), p.weight("w", (256, 256), "bf16"))
    with pytest.raises(UnsupportedError, match="sums"):
        plan(p.build(p.cumsum(x, name="sums")))


def test_tiles_of_another_choice_are_found():
    """The last matrices of a layer behind the choice of the next one, or of none."""
    queues, fused = small()
    at = [i for i, one in enumerate(queues.queues[0]) if is_choice(one)]
    for order in (
        lambda queue: [*queue[: at[0]], *queue[at[0] + 1 :]],
        lambda queue: [*queue[: at[2]], *queue[at[2] + 1 :], queue[at[2]]],
    ):
        other = replace(queues, queues=tuple(tuple(order(queue)) for queue in queues.queues))
        assert find_batch_hazard(other, fused)


def test_what_the_kernel_does_not_take_is_named():
    with pytest.raises(UnsupportedError, match="17 rows"):
        build(layers(1, 192, rows=17))
    p = ProgramBuilder("many")
    x = p.input("x", (2, 256), "bf16")
    weights, ids = p.top_k(p.linear(x, p.weight("r", (130, 256), "bf16")), 2)
    routing = p.route(ids, 130)
    rows = p.gather_rows(x, routing)
    h = p.grouped_linear(rows, p.weight("g", (130, 64, 256), "bf16"), routing)
    y = p.grouped_linear(h, p.weight("d", (130, 256, 64), "bf16"), routing)
    with pytest.raises(UnsupportedError, match="2 of 130 experts"):
        build(p.build(p.scatter_add(y, weights, routing)))
