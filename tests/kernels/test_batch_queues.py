"""Queues of the batched decode kernel: what each SM reads, and in which order. The kernel's machine
code is in test_batch_code.py, which is run under two releases of Triton.
"""

from dataclasses import replace
from functools import cache

import pytest

from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_queues import BatchQueues, build_batch_queues
from distmega.kernels.hopper.batch_words import (
    GROUP_UNITS,
    PLACES,
    BatchAttention,
    BatchHead,
    BatchLinear,
    Opcode,
    pack,
)
from distmega.kernels.hopper.weight_order import matrix_columns, order_weights
from distmega.kernels.hopper.words import UNIT_ROWS, WORDS
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.models.config import ModelConfig
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method

MODELS = ("smollm2-135m", "llama-3.2-1b", "qwen3-0.6b", "qwen3-8b")
LIKELIEST = Method()


@cache
def queues_of(
    config: ModelConfig, batch: int = 16, num_sms: int = 132, method: Method = LIKELIEST
) -> BatchQueues:
    program = build_decoder(config, 1, 256, batch=batch, dtype="bf16", method=method)
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    return build_batch_queues(program, weights, states, num_sms)


def rows_read(task: BatchLinear | BatchHead) -> list[int]:
    """Rows of its matrix in the order in which the loader brings them, tile by tile along k."""
    rows = []
    for unit in range(task.num_units):
        first = task.weight_row + unit * UNIT_ROWS
        if isinstance(task, BatchLinear) and task.opcode is Opcode.GATED:
            first = (task.pair_row if unit % 2 else task.weight_row) + unit // 2 * UNIT_ROWS
        rows += range(first, first + UNIT_ROWS)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_row_is_read_once(name: str):
    program = build_decoder(PRESETS[name], 1, 256, batch=16, dtype="bf16")
    columns, queues = matrix_columns(program), queues_of(PRESETS[name])
    tensors = program.tensor_map()
    linears = BatchLinear | BatchHead
    tasks = [one for queue in queues.queues for one in queue if isinstance(one, linears)]
    for matrix, place in enumerate(queues.matrices):
        own = [task for task in tasks if task.matrix == matrix and task.num_tiles_k]
        rows = sorted(row for task in own for row in rows_read(task))
        names = [n for n, length in columns.items() if length == place.columns]
        assert len(rows) == sum(tensors[n].num_elements // place.columns for n in names)
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", MODELS)
def test_all_sms_have_the_same_instructions(name: str):
    """So that an event counts every SM, with or without rows; and pairs stay within a round."""
    queues = queues_of(PRESETS[name])
    kinds = [one.opcode for one in queues.queues[0]]
    num_layers = PRESETS[name].num_layers
    layer = [Opcode.QKV, Opcode.ATTENTION, Opcode.RESIDUAL, Opcode.GATED, Opcode.RESIDUAL]
    assert kinds == [Opcode.EMBED, *layer * num_layers, Opcode.HEAD]
    for queue in queues.queues:
        assert [one.opcode for one in queue] == kinds
        assert [one.event for one in queue] == list(range(len(queue)))
        assert all(t.num_units % 2 == 0 for t in queue if t.opcode is Opcode.GATED)
    assert GROUP_UNITS % 2 == 0


def test_limits_are_looked_for_behind_the_event_of_the_logits():
    config = PRESETS["smollm2-135m"]
    for method, last in (
        (Method(kind="plain"), Opcode.HEAD),
        (Method(kind="limited", num_candidates=64), Opcode.DRAW),
        (Method(kind="limited"), Opcode.DRAW),
    ):
        (queue, *_) = queues_of(config, method=method).queues
        assert queue[-1].opcode is last
        assert queue[-1].num_rows == config.vocab
        assert queue[-1].event == len(queue) - 1


@pytest.mark.parametrize("opcode", [Opcode.EMBED, Opcode.RESIDUAL])
def test_the_residual_stream_of_a_row_stays_on_one_sm(opcode: Opcode):
    for queue in queues_of(PRESETS["llama-3.2-1b"]).queues:
        own = [(t.row0, t.num_units) for t in queue if t.opcode in (Opcode.EMBED, opcode)]
        assert len(set(own)) == 1


def test_norm_weights_go_to_whoever_writes_x():
    program = build_decoder(PRESETS["qwen3-0.6b"], 1, 256, batch=3, dtype="bf16")
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    (queue, *_) = queues_of(PRESETS["qwen3-0.6b"], batch=3).queues
    writers = [t for t in queue if t.opcode in (Opcode.EMBED, Opcode.RESIDUAL)]
    names = [f"layers.{i}.{part}_norm" for i in range(28) for part in ("attn", "ffn")] + ["norm"]
    assert [t.next_norm for t in writers] == [weights.offset(name) // 2 for name in names]
    readers = [t.opcode for t in queue if isinstance(t, BatchLinear | BatchHead) and t.norm]
    assert readers == [Opcode.QKV, Opcode.GATED] * 28 + [Opcode.HEAD]


def test_words_of_an_instruction():
    (queue, *_) = queues_of(PRESETS["llama-3.2-1b"]).queues
    for task in queue[:6]:
        words, places = pack(task), PLACES[type(task)]
        assert len(words) == WORDS
        assert {n: words[at] for n, at in places.items()} == {
            n: int(getattr(task, n)) for n in places
        }
        assert len(set(places.values())) == len(places)


@pytest.mark.parametrize(
    ("changes", "batch", "found"),
    [
        ({"head_dim": 32}, 4, "heads of 32"),
        ({}, 17, "17 tokens"),
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
