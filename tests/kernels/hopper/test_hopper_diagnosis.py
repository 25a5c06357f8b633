"""The report that waits leave when they are given up, and what the host makes of it."""

from dataclasses import replace

import pytest

from distmega.errors import HangError
from distmega.kernels.hopper.batch_plan.words import BATCH_PAIRED, BatchLinear
from distmega.kernels.hopper.diagnosis import explain_batch_hang, explain_hang
from distmega.kernels.hopper.plan.types import RowQueues
from distmega.kernels.hopper.plan.words import RowAttention, RowLinear
from distmega.kernels.runtime.report import Report, read_report
from distmega.models.presets import PRESETS
from tests.kernels.hopper.batch_plan.test_batch_queues import queues_of as batch_queues_of
from tests.kernels.hopper.row_plan.test_hopper_queues import linears, queues_of
from tests.kernels.hopper.row_plan.test_hopper_sampling import PLAIN, SEARCHED, odd_queues
from tests.kernels.hopper.row_plan.test_hopper_team import team_queues

LAYERS = 8
QUEUES = queues_of(replace(PRESETS["qwen3-0.6b"], num_layers=LAYERS))


AT = "layers.0."
BUFFERS = {
    "qkv": f"{AT}q", "partial": f"partial {AT}attention", "attended": f"{AT}attention",
    "h": f"{AT}attn_sum", "ffn": f"{AT}ffn_mixed", "x": f"{AT}ffn_sum",
    "parts of h": f"parts of {AT}attn_sum", "parts of x": f"parts of {AT}ffn_sum",
}  # fmt: skip
"""Buffers by what a decoder has in them."""


def first_word(name: str, queues: RowQueues = QUEUES) -> int:
    return next(buffer.first for buffer in queues.buffers if buffer.name == BUFFERS.get(name, name))


def explain(sm: int, name: str, offset: int, step: int, layer: int) -> str:
    flag = step * LAYERS + layer + 1
    report = Report(last=sm, word=first_word(name) + offset, flag=flag)
    return str(explain_hang(QUEUES, report, limit_s=2.0))


def test_report_of_the_device():
    assert read_report(12 << 32 | 99 << 8 | 7) == Report(flag=12, word=99, last=7)
    high = (12 | 0xF0000000) << 32 | 99 << 8 | 200
    assert read_report(high - 2**64) == Report(flag=0xF000000C, word=99, last=200)


def test_buffers_lie_in_the_order_of_dataflow():
    """So the least (tag, word) of a report is the wait on which the others hang."""
    for queues in (QUEUES, *team_queues("smollm2-135m", 2), *odd_queues(SEARCHED, 2)):
        names = [buffer.name for buffer in queues.buffers if buffer.num_words]
        order = ["embedded", "qkv", "partial", "attended", "parts of h", "h", "ffn", "parts of x"]
        order += ["x", "logits", "sample", "best"]
        order = [BUFFERS.get(name, name) for name in order]
        assert names == [name for name in order if name in names]
        ends = [buffer.first + buffer.num_words for buffer in queues.buffers]
        firsts = [buffer.first for buffer in queues.buffers]
        assert all(end <= first for end, first in zip(ends, firsts[1:], strict=False))
        assert queues.num_words < 2**24


@pytest.mark.parametrize("name", ["x", "h", "attended", "ffn"])
def test_every_word_of_a_linear_input_has_a_waiter_and_a_debtor(name):
    size = next(b.num_words for b in QUEUES.buffers if b.name == BUFFERS[name])
    for offset in (0, size // 2, size - 1):
        text = explain(3, name, offset, step=2, layer=4)
        assert f"word {offset} of '{BUFFERS[name]}'" in text
        assert "rank 0, SM 3 (instruction" in text
        assert f"flag {2 * LAYERS + 4 + 1} (step 2, generation 4)" in text
        assert "owed by rank 0, SM" in text


def test_x_is_read_one_layer_later():
    assert "layers.5.q, rows" in explain(3, "x", 0, step=0, layer=4)
    text = explain(3, "x", 0, step=0, layer=LAYERS - 1)
    assert "logits, rows" in text or "layers.0.q" in text


def test_debtor_is_the_sm_that_writes_the_word():
    task = linears(QUEUES, "gated", 4)[9]
    sm = next(i for i, queue in enumerate(QUEUES.queues) if task in queue)
    text = explain(0, "ffn", task.row0 // 4, step=0, layer=4)
    assert f"SM {sm}, instruction {QUEUES.queues[sm].index(task)}, layers.4.ffn_mixed" in text


def test_attention_waits_for_qkv_and_owes_partials():
    sm, task = next(
        (i, one) for i, queue in enumerate(QUEUES.queues) for one in queue
        if isinstance(one, RowAttention) and one.generation == 6
    )  # fmt: skip
    head = f"layers.6.attention, kv head {task.head}, split {task.split}"
    assert head in explain(sm, "qkv", 10, step=0, layer=6)
    assert QUEUES.attention is not None
    stride = QUEUES.attention.head_dim + 4
    query = task.head * QUEUES.attention.group
    partial = (query * task.max_splits + task.split) * stride
    assert head in explain(0, "partial", partial, step=0, layer=6)


def test_next_token_waits_for_the_heads_maxima():
    text = explain(11, "best", 2 * 17, step=1, layer=LAYERS - 1)
    assert "SM 11 (the choice of the next id)" in text
    assert "owed by rank 0, SM 17" in text


def test_a_word_of_nobody():
    report = Report(last=0, word=10**9, flag=1)
    text = str(explain_hang(QUEUES, report, limit_s=2.0))
    assert "in no buffer" in text
    assert "nobody" in text


def named(queues: RowQueues, name: str) -> tuple[int, RowLinear]:
    """The first product of a name, with its SM."""
    return next(
        (sm, one)
        for sm, queue in enumerate(queues.queues)
        for one in queue
        if isinstance(one, RowLinear) and one.name == name
    )


def test_the_rank_that_owes_readers_a_part_is_named():
    mine = team_queues("llama-3.2-1b", 2)[0]
    sm, task = named(mine, "layers.3.attn_sum")
    word = task.dst + task.num_rows // 2 + task.row0 // 2
    error = explain_hang(mine, Report(last=7, word=word, flag=4), limit_s=60.0, rank=0)
    assert "rank 0, SM 7 (instruction" in error.found
    assert "layers.3.ffn_mixed" in error.found
    assert f"of '{AT}attn_sum'" in error.found
    assert f"owed by rank 1, SM {sm}, instruction" in error.remedy
    assert "layers.3.attn_sum" in error.remedy
    assert " or rank" not in error.remedy


def test_the_rank_that_owes_an_owner_a_part_is_named():
    mine = team_queues("qwen3-8b", 2)[0]
    sm, task = named(mine, "layers.3.attn_sum")
    word = task.dst - task.num_rows + task.row0
    report = Report(last=sm, word=word, flag=4)
    error = explain_hang(mine, report, limit_s=60.0, rank=0)
    assert f"rank 0, SM {sm} (instruction" in error.found
    assert f"'parts of {AT}attn_sum'" in error.found
    assert f"owed by rank 1, SM {sm}, instruction" in error.remedy
    assert "layers.3.attn_sum" in error.remedy
    best = first_word("best", mine) + 2 * (len(mine.queues) + 5)
    report = Report(last=0, word=best, flag=mine.num_generations)
    error = explain_hang(mine, report, limit_s=60.0, rank=0)
    assert "owed by rank 1, SM 5, instruction" in error.remedy


def explain_sampling(name: str, offset: int, sm: int, queues: RowQueues) -> HangError:
    """Rank 1's error, of the only layer's tag."""
    report = Report(last=sm, word=first_word(name, queues) + offset, flag=1)
    return explain_hang(queues, report, limit_s=60.0, rank=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_owes_logits_is_named(rank: int):
    """504 words of each rank, of which 502 and 501 are tokens: units of 8 rows an SM."""
    mine = odd_queues(SEARCHED, 2)[1]
    slot = 504 * rank + 40
    sm = next(
        sm for sm, queue in enumerate(mine.queues) if queue[-1].row0 <= slot < queue[-1].num_rows
    )
    error = explain_sampling("logits", slot, sm, mine)
    assert f"rank 1, SM {sm} (instruction" in error.found
    assert "next, slots" in error.found
    assert f"word {slot} of 'logits'" in error.found
    owes = next(i for i, queue in enumerate(mine.queues) if 0 <= 40 - queue[-2].row0 < 8)
    assert f"owed by rank {rank}, SM {owes}, instruction" in error.remedy
    assert "logits, rows" in error.remedy
    assert " or rank" not in error.remedy


def test_the_sm_that_owes_a_number_or_a_candidate_of_a_draw_is_named():
    error = explain_sampling("sample", 3 * 512 + 2 * 31 + 1, 4, odd_queues(SEARCHED, 2)[1])
    assert "SM 4 (instruction" in error.found
    assert "next, slots" in error.found
    assert "owed by rank 1, SM 31, instruction" in error.remedy
    error = explain_sampling("best", 2 * 31, 4, odd_queues(SEARCHED, 2)[1])
    assert "SM 4 (the choice of the next id)" in error.found
    assert "owed by rank 1, SM 31, instruction" in error.remedy
    assert "next, slots" in error.remedy
    plain = odd_queues(PLAIN, 2)[1]
    error = explain_sampling("best", 2 * 31, 4, plain)
    assert "owed by rank 0, SM 31, instruction" in error.remedy
    assert "next, rows" in error.remedy


def test_an_event_of_the_batched_kernel():
    queues = batch_queues_of(PRESETS["qwen3-0.6b"])
    gated = next(
        i
        for i, one in enumerate(queues.queues[0])
        if isinstance(one, BatchLinear) and one.flags & BATCH_PAIRED
    )
    report = Report(flag=3 * len(queues.queues), word=gated, last=2)
    text = str(explain_batch_hang(queues, report, 2.0))
    assert f"event {gated} (layers.0.ffn_mixed, instruction {gated})" in text
    assert "that of step 2" in text
    assert f"2 of {len(queues.queues)} SMs" in text
