"""Queues of the batched decode kernel: what each SM reads, and in which order. The kernel's machine
code is in test_batch_code.py, which is run under two releases of Triton.
"""

from dataclasses import replace
from functools import cache

import pytest

from distmega.engine.requests import MAX_KERNEL_ROWS, EngineOptions
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    BATCH,
    BATCH_PAIRED,
    FIELD_WORDS,
    MAX_ROWS,
    NORMED,
    BatchAttention,
    BatchEmbed,
    BatchInstruction,
    BatchLinear,
    BatchLogits,
    BatchSample,
    pack,
)
from distmega.kernels.hopper.plan.extents import matrix_columns
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.plan.words import GROUP_UNITS, UNIT_ROWS, WORDS
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.models.config import ModelConfig
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method

MODELS = ("smollm2-135m", "llama-3.2-1b", "qwen3-0.6b", "qwen3-8b")
ARGMAX = Method()


@cache
def queues_of(
    config: ModelConfig, batch: int = 16, num_sms: int = 132, method: Method = ARGMAX
) -> BatchQueues:
    program = build_decoder(config, 1, 256, batch=batch, dtype="bf16", method=method)
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    return build_batch_queues(program, weights, states, num_sms)


def kind_of(one: BatchInstruction, queues: BatchQueues) -> str:
    """What an instruction of a decoder is."""
    match one:
        case BatchLinear():
            epilogue = queues.epilogues.each[one.opcode]
            if epilogue.num_streams == 2:
                return "gated"
            return "residual" if epilogue.num_carried else "qkv"
        case BatchAttention() | BatchEmbed() | BatchLogits() | BatchSample():
            return type(one).__name__.removeprefix("Batch").lower()
    raise AssertionError(one)


def rows_read(task: BatchLinear | BatchLogits) -> list[int]:
    """Rows of its matrix in the order in which the loader brings them, tile by tile along k."""
    rows = []
    for unit in range(task.num_units):
        first = task.weight_row + unit * UNIT_ROWS
        if task.flags & BATCH_PAIRED:
            first = (task.pair_row if unit % 2 else task.weight_row) + unit // 2 * UNIT_ROWS
        rows += range(first, first + UNIT_ROWS)
    return rows


def test_options_of_an_engine_have_the_kernels_rows():
    assert (EngineOptions().kernel_rows, MAX_KERNEL_ROWS) == (BATCH, MAX_ROWS)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_row_is_read_once(name: str):
    program = build_decoder(PRESETS[name], 1, 256, batch=16, dtype="bf16")
    columns, queues = matrix_columns(program), queues_of(PRESETS[name])
    tensors = program.tensor_map()
    linears = BatchLinear | BatchLogits
    tasks = [one for queue in queues.queues for one in queue if isinstance(one, linears)]
    for matrix, team_rank in enumerate(queues.matrices):
        own = [task for task in tasks if task.matrix == matrix and task.num_tiles_k]
        rows = sorted(row for task in own for row in rows_read(task))
        names = [n for n, length in columns.items() if length == team_rank.columns]
        assert len(rows) == sum(tensors[n].num_elements // team_rank.columns for n in names)
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", MODELS)
def test_all_sms_have_the_same_instructions(name: str):
    """So that an event counts every SM, with or without rows; and pairs stay within a round."""
    queues = queues_of(PRESETS[name])
    kinds = [kind_of(one, queues) for one in queues.queues[0]]
    num_layers = PRESETS[name].num_layers
    layer = ["qkv", "attention", "residual", "gated", "residual"]
    assert kinds == ["embed", *layer * num_layers, "logits"]
    for queue in queues.queues:
        assert [one.opcode for one in queue] == [one.opcode for one in queues.queues[0]]
        pairs = [one for one in queue if isinstance(one, BatchLinear) and one.flags & BATCH_PAIRED]
        assert len(pairs) == num_layers
        assert all(one.num_units % 2 == 0 for one in pairs)
    assert GROUP_UNITS % 2 == 0


def test_limits_are_looked_for_behind_the_event_of_the_logits():
    config = PRESETS["smollm2-135m"]
    for method, last in (
        (Method(kind="plain"), "logits"),
        (Method(kind="limited", num_candidates=64), "sample"),
        (Method(kind="limited"), "sample"),
    ):
        queues = queues_of(config, method=method)
        (queue, *_) = queues.queues
        assert kind_of(queue[-1], queues) == last
        assert queue[-1].num_rows == config.vocab


def test_the_residual_stream_of_a_row_stays_on_one_sm():
    queues = queues_of(PRESETS["llama-3.2-1b"])
    for queue in queues.queues:
        own = [one for one in queue if kind_of(one, queues) in ("embed", "residual")]
        assert len({(one.row0, one.num_units, one.keep) for one in own}) == 1


def test_norm_weights_go_to_whoever_writes_x():
    program = build_decoder(PRESETS["qwen3-0.6b"], 1, 256, batch=3, dtype="bf16")
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    queues = queues_of(PRESETS["qwen3-0.6b"], batch=3)
    (queue, *_) = queues.queues
    writers = [
        one for one in queue if isinstance(one, BatchLinear | BatchEmbed) and one.next_norm >= 0
    ]
    names = [f"layers.{i}.{part}_norm" for i in range(28) for part in ("attn", "ffn")] + ["norm"]
    assert [t.next_norm for t in writers] == [weights.offset(name) // 2 for name in names]
    linears = [one for one in queue if isinstance(one, BatchLinear | BatchLogits)]
    readers = [kind_of(one, queues) for one in linears if one.flags & NORMED]
    assert readers == ["qkv", "gated"] * 28 + ["logits"]


def test_words_of_an_instruction():
    (queue, *_) = queues_of(PRESETS["llama-3.2-1b"]).queues
    for task in queue[:6]:
        words, ring = pack(task), FIELD_WORDS[type(task)]
        assert len(words) == WORDS
        assert {n: words[at] for n, at in ring.items()} == {n: int(getattr(task, n)) for n in ring}
        assert len(set(ring.values())) == len(ring)


@pytest.mark.parametrize(
    ("changes", "batch", "found"),
    [
        ({"head_dim": 264}, 4, "heads of 264"),
        ({}, 17, "17 rows"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(changes: dict, batch: int, found: str):
    with pytest.raises(UnsupportedError, match=found):
        queues_of(replace(PRESETS["llama-3.2-1b"], **changes), batch)


def test_attention_has_the_rows_of_the_first_sequence_and_head():
    (queue, *_) = queues_of(PRESETS["llama-3.2-1b"], batch=2).queues
    shares = [one for one in queue if isinstance(one, BatchAttention)]
    cache_rows = 2 * 8 * 256
    assert [s.k_row for s in shares] == [2 * i * cache_rows for i in range(16)]
    assert [s.v_row for s in shares] == [(2 * i + 1) * cache_rows for i in range(16)]
