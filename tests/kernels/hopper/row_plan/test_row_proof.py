"""Proof of the kernel of one row: it finds every reader that could come too late."""

from dataclasses import replace

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import FROM_EMBEDDING, ROW_PAIRED, RowEmbed, RowLinear
from distmega.kernels.hopper.row_plan import queues as builder
from distmega.kernels.hopper.row_plan.accesses import reads
from distmega.kernels.hopper.row_plan.periods import shorten
from distmega.kernels.hopper.row_plan.proof import find_hazard
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.models.presets import PRESETS
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import replicate, shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.kernels.hopper.emulator.emulating import Case, case_of
from tests.kernels.hopper.row_plan.test_hopper_queues import queues_of
from tests.kernels.hopper.row_plan.test_hopper_team import team_queues

SMALL = replace(PRESETS["llama-3.2-1b"], num_layers=5, vocab=4096)


def gated_mlp(layers: int = 4, hidden: int = 256, ffn: int = 1024) -> Program:
    """Layers of norm, gate, up, down, residual: one sum over ranks a layer."""
    p = ProgramBuilder("mlp")
    x = p.input("x", (1, hidden), "bf16")
    for i in range(layers):
        h = p.rms_norm(x, p.weight(f"n{i}", (hidden,), "bf16"), 1e-5, name=f"norm{i}")
        gate, up = (
            p.linear(h, p.weight(f"{w}{i}", (ffn, hidden), "bf16"), name=f"{w}h{i}") for w in "gu"
        )
        mixed = p.pointwise("silu(a0) * a1", gate, up, name=f"mixed{i}")
        out = p.linear(mixed, p.weight(f"d{i}", (hidden, ffn), "bf16"), name=f"dh{i}")
        x = p.pointwise("a0 + a1", x, out, name=f"x{i + 1}")
    return p.build(x)


def queues_of_program(program: Program, tp: int = 1) -> RowQueues:
    local = localize(plan_program(program, DeviceMesh(tp=tp), H200)).program
    weights = layout_arena(Space.WEIGHT, order_weights(local))
    states = layout_arena(Space.STATE, local.with_role("state"))
    return builder.build_queues(local, weights, states, 16)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_program_without_tokens_is_proven(tp):
    queues = queues_of_program(gated_mlp(), tp)
    assert find_hazard(queues) == ""
    assert queues.num_ranks == tp
    assert [kept.tensor for kept in queues.outputs] == ["x4"]


def test_one_sum_a_layer_takes_two_buffers_over_ranks(monkeypatch):
    """A rank could push its next part before a peer has read the last one."""
    alone, team = (queues_of_program(gated_mlp(), tp) for tp in (1, 2))
    assert not [buffer.name for buffer in alone.buffers if "#" in buffer.name]
    assert [buffer.name for buffer in team.buffers if buffer.name.endswith("#1")]
    monkeypatch.setattr(builder, "_ways", lambda fused, placed, num_sms: [(num_sms, 1, False)])
    with pytest.raises(UnsupportedError, match=r"overwrites word .* before .* has read it"):
        queues_of_program(gated_mlp(), 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_left_out_does_not_decide(tp):
    queues = queues_of_program(gated_mlp(10), tp)
    short = shorten(queues)
    assert sum(map(len, short.queues)) < sum(map(len, queues.queues))
    assert find_hazard(queues) == find_hazard(short) == ""


def change(queues: RowQueues, name: str, **fields: int) -> RowQueues:
    """The queues with fields of one op's linears set."""
    return replace(
        queues,
        queues=tuple(
            tuple(
                replace(one, **fields) if isinstance(one, RowLinear) and one.name == name else one
                for one in queue
            )
            for queue in queues.queues
        ),
    )


def test_a_tag_that_nobody_writes_is_waited_for_in_vain():
    assert "waits for ever" in find_hazard(change(queues_of(SMALL, 16), "layers.2.q", flag_delta=7))


def test_a_buffer_that_is_used_again_too_early_is_found():
    """The sum over ranks of one op of a layer in the buffer of the other one."""
    mine = team_queues("smollm2-135m", 2)[0]
    firsts = {buffer.name: buffer.first for buffer in mine.buffers}
    dst = firsts["layers.0.attn_sum"]
    assert find_hazard(mine) == ""
    moved = change(mine, "layers.2.ffn_sum", dst=dst)
    assert find_hazard(moved) != ""


def test_every_sm_has_to_read_what_orders_it():
    """SMs whose products take the given row instead of x know nothing of the step before."""
    queues = queues_of(SMALL, 16)
    for name in ("q", "attn_sum", "ffn_mixed", "ffn_sum"):
        paired = ROW_PAIRED if name == "ffn_mixed" else 0
        queues = change(queues, f"layers.1.{name}", flags=FROM_EMBEDDING | paired)
    assert "has read it" in find_hazard(queues)


def test_ranks_of_an_embedding_know_nothing_of_each_other_by_it():
    mine = team_queues("smollm2-135m", 2)[0]
    assert any(isinstance(one, RowEmbed) for queue in mine.queues for one in queue)
    assert find_hazard(mine) == ""


def few_rows(tp: int) -> Case:
    """Products of 32 rows and 160 logits, on at most 20 SMs."""
    p = ProgramBuilder("few_rows")
    table = p.weight("table", (160, 32), "bf16")
    x = p.embedding(p.input("ids", (1,), "i64"), table)
    marks = {"table": shard(0, "tp")}
    for i in range(4):
        x = p.linear(x, p.weight(f"w{i}", (32, 32), "bf16")).map("tanh(a0)")
        marks[f"w{i}"] = replicate()
    return case_of(p.build(p.argmax(p.linear(x, table))), tp, 20, marks)


def test_an_id_is_read_by_all_before_the_next_is_chosen(monkeypatch):
    """SMs that have logits alone could begin a step late, and nobody would know."""
    (queues,) = few_rows(1).queues
    assert queues.num_generations == 2
    assert len(queues.queues) == 4
    monkeypatch.setattr(builder, "_ways", lambda fused, placed, num_sms: [(num_sms, 2, False)])
    with pytest.raises(UnsupportedError, match=r"overwrites word .* before the next step on SM"):
        few_rows(1)


def test_ranks_that_meet_in_the_choice_of_an_id_alone_are_refused():
    """None knows whether others have read the last one."""
    with pytest.raises(UnsupportedError, match=r"overwrites word .* before the next step on SM"):
        few_rows(2)


def test_words_that_there_are_none_of_and_ops_in_two_orders_are_found():
    queues = queues_of_program(gated_mlp(layers=2))
    first = queues.queues[0]
    at = next(i for i, one in enumerate(first) if list(reads(one, queues)))
    assert isinstance(first[at], RowLinear)
    far = replace(first[at], src=queues.num_words + 16)
    stray = replace(queues, queues=((*first[:at], far, *first[at + 1 :]), *queues.queues[1:]))
    assert f"of {queues.num_words}" in find_hazard(stray)
    turned = (*first[:at], first[at + 1], first[at], *first[at + 2 :])
    assert first[at].name != first[at + 1].name
    swapped = replace(queues, queues=(turned, *queues.queues[1:]))
    assert find_hazard(swapped) == "SMs take the same ops in different orders"
