"""Queues of the decode kernel: every row of every matrix once, the same bytes on every SM."""

from dataclasses import replace
from itertools import pairwise

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.plan.extents import matrix_columns
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import (
    FIELD_WORDS,
    MAX_SMS,
    NO_WINDOW,
    ROW_PAIRED,
    SAMPLE_CHUNK,
    UNIT_ROWS,
    WORDS,
    RowAttention,
    RowBarrier,
    RowCombine,
    RowLinear,
    RowSample,
    pack,
)
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.mode import Mode
from distmega.models.config import ModelConfig
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.models.sampling import GREEDY, Method
from tests.kernels.kinds import kind_of, of_kind
from tests.kernels.short_models import NUM_LAYERS, short_model

SUPPORTED = (
    "smollm2-135m",
    "llama-3.2-1b",
    "qwen3-0.6b",
    "qwen3-8b",
    pytest.param("qwen3-8b whole", marks=pytest.mark.nightly),
)


OPS = ({"qkv"}, {"attention", "combine"}, {"residual"}, {"gated"}, {"residual"})
"""Of a layer."""


def queues_of(
    config: ModelConfig, num_sms: int = 132, method: Method = GREEDY, mode: Mode = "overlap"
) -> RowQueues:
    program = build_decoder(config, 1, 256, dtype="bf16", method=method)
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    return build_queues(program, weights, states, num_sms, mode=mode)


def linears(queues: RowQueues, kind: str, layer: int) -> list[RowLinear]:
    found = of_kind(queues, kind)
    return [one for one in found if isinstance(one, RowLinear) and one.generation == layer]


def rows_read(task: RowLinear) -> list[int]:
    """Rows of its matrix in the order in which the loader brings them."""
    rows = []
    for unit in range(task.num_units):
        first = task.weight_row + unit * UNIT_ROWS
        if task.flags & ROW_PAIRED:
            first = (task.pair_row if unit % 2 else task.weight_row) + unit // 2 * UNIT_ROWS
        rows += range(first, first + UNIT_ROWS)
    return rows


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_weight_row_is_read_once(name):
    config = short_model(name)
    program = build_decoder(config, 1, 256, dtype="bf16")
    columns = matrix_columns(program)
    queues = queues_of(config)
    tensors = program.tensor_map()
    tasks = [one for queue in queues.queues for one in queue if isinstance(one, RowLinear)]
    for matrix, team_rank in enumerate(queues.matrices):
        rows = sorted(row for task in tasks if task.matrix == matrix for row in rows_read(task))
        names = [n for n, length in columns.items() if length == team_rank.columns]
        assert len(rows) == sum(tensors[n].num_elements // team_rank.columns for n in names)
        assert len(set(rows)) == len(rows)
        assert rows[-1] < team_rank.num_rows


@pytest.mark.parametrize("name", SUPPORTED)
def test_sms_share_each_op_evenly(name):
    queues = queues_of(short_model(name))
    for kind in ("qkv", "residual", "gated"):
        units = [task.num_units for task in linears(queues, kind, 0)]
        step = 2 if kind == "gated" else 1
        by_matrix = max(units) - min(units)
        assert by_matrix <= step or kind == "residual"
    head = linears(queues, "head", short_model(name).num_layers - 1)
    assert max(t.num_units for t in head) - min(t.num_units for t in head) <= 1
    assert len(head) == len(queues.queues)


def test_every_head_has_its_splits_and_one_combine():
    queues = queues_of(short_model("qwen3-0.6b"))
    found = [one for queue in queues.queues for one in queue]
    splits = [(o.generation, o.head, o.split) for o in found if isinstance(o, RowAttention)]
    shape = queues.attention
    assert shape is not None
    num_layers = short_model("qwen3-0.6b").num_layers
    max_splits = next(o.max_splits for o in found if isinstance(o, RowAttention))
    assert sorted(splits) == [
        (layer, head, split)
        for layer in range(num_layers)
        for head in range(shape.num_kv_heads)
        for split in range(max_splits)
    ]
    combined = sorted((o.generation, o.head) for o in found if isinstance(o, RowCombine))
    assert combined == [
        (layer, head) for layer in range(num_layers) for head in range(shape.num_heads)
    ]


def test_queues_are_in_program_order():
    config = short_model("llama-3.2-1b")
    program = build_decoder(config, 1, 256, dtype="bf16")
    ring = {op.name: team_rank for team_rank, op in enumerate(program.ops)}
    for queue in queues_of(config).queues:
        order = [(ring[one.name], isinstance(one, RowCombine)) for one in queue]
        assert order == sorted(order)
        assert len(order) >= 4 * config.num_layers + 1


@pytest.mark.parametrize("name", SUPPORTED)
def test_draws_have_room_for_all_logits_of_an_sm(name):
    greedy = queues_of(short_model(name))
    queues = queues_of(short_model(name), method=Method(kind="limited", num_candidates=64))
    rows = []
    for queue in queues.queues:
        head, sample = queue[-2:]
        assert isinstance(head, RowLinear)
        assert isinstance(sample, RowSample)
        assert kind_of(queues, head) == "head"
        last = min(head.row0 + head.num_units * UNIT_ROWS, head.num_rows)
        assert (sample.row0, sample.num_rows, sample.rank_logits) == (head.row0, last, 0)
        rows.append(last - head.row0)
    assert max(rows) == queues.sm_logits
    num_chunks = 1 + queues.sm_logits // SAMPLE_CHUNK + 1
    assert queues.best - queues.sample >= num_chunks * SAMPLE_CHUNK * MAX_SMS
    assert queues.num_words - queues.best >= 2 * len(queues.queues)
    assert greedy.sampler is None
    assert [queue[:-1] for queue in queues.queues] == [*greedy.queues]


def test_words_of_an_instruction():
    task = linears(queues_of(short_model("llama-3.2-1b")), "gated", 3)[7]
    words = pack(task)
    assert len(words) == WORDS
    assert {name: words[team_rank] for name, team_rank in FIELD_WORDS[RowLinear].items()} == {
        name: int(getattr(task, name)) for name in FIELD_WORDS[RowLinear]
    }
    for ring in FIELD_WORDS.values():
        assert len(set(ring.values())) == len(ring)
        assert max(ring.values()) < WORDS


def test_one_event_an_op_has_a_barrier_behind_each():
    """On every SM, whether it has work in the op or not, in words of its own in each layer."""
    config = replace(PRESETS["llama-3.2-1b"], num_layers=3)
    plain, barred = queues_of(config), queues_of(config, mode="op")
    for sm, queue in enumerate(barred.queues):
        kinds = [(one.opcode, one.name) for one in queue if not isinstance(one, RowBarrier)]
        assert kinds == [(one.opcode, one.name) for one in plain.queues[sm]]
        barriers = [i for i, one in enumerate(queue) if isinstance(one, RowBarrier)]
        assert len(barriers) == 3 * 5
        between = [queue[i:j] for i, j in pairwise([-1, *barriers])]
        for number, ops in enumerate(between):
            kinds = {kind_of(barred, one) for one in ops} - {"barrier"}
            assert kinds <= OPS[number % 5], (sm, number)
    first = [one for one in barred.queues[0] if isinstance(one, RowBarrier)]
    assert len({one.dst for one in first[:5]}) == 5
    assert [one.dst for one in first] == [one.dst for one in first[:5]] * 3


def test_windows_and_parts_of_groups():
    changes = {"windows": (64, 0) * (NUM_LAYERS // 2), "num_heads": 36, "num_kv_heads": 2}
    queues = queues_of(replace(short_model("llama-3.2-1b"), **changes))
    shape = queues.attention
    assert shape is not None
    assert (shape.group, shape.num_parts, shape.num_queries) == (18, 3, 6)
    tasks = [one for queue in queues.queues for one in queue if isinstance(one, RowAttention)]
    for layer in range(NUM_LAYERS):
        own = [one for one in tasks if one.generation == layer]
        assert {one.window for one in own} == {NO_WINDOW if layer % 2 else 64}
        for split in range(own[0].max_splits):
            heads = [one.query0 + i for one in own if one.split == split for i in range(6)]
            assert sorted(heads) == list(range(36))
        assert all(one.query0 // 18 == one.head for one in own)
    combines = [one for queue in queues.queues for one in queue if isinstance(one, RowCombine)]
    assert {(one.generation % 2, one.window) for one in combines} == {(0, 64), (1, NO_WINDOW)}


def test_the_last_part_of_a_group_overlaps_the_one_before():
    queues = queues_of(replace(short_model("llama-3.2-1b"), num_heads=22, num_kv_heads=2))
    first = [one for queue in queues.queues for one in queue if isinstance(one, RowAttention)]
    ring = {(one.head, one.query0) for one in first}
    assert ring == {(0, 0), (0, 5), (1, 11), (1, 16)}
    assert queues.attention is not None
    assert queues.attention.num_queries == 6


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"head_dim": 264}, "heads of 264"),
        ({"head_dim": 256, "ffn": 51200}, "heads of 256 beside a row of 51200"),
        ({"ffn": 8196}, "rows of"),
        ({"ffn": 131072}, "a row of 131072"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(changes, found):
    with pytest.raises(UnsupportedError, match=found):
        queues_of(replace(short_model("llama-3.2-1b"), **changes))
