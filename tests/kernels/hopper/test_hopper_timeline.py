"""The timeline of made-up stamps: a track an SM, tasks by name, parts inside their task."""

import re

from distmega.kernels.hopper.batch_plan.words import BATCH_STAMPS
from distmega.kernels.hopper.plan.words import STAMPS, RowAttention, RowCombine
from distmega.kernels.hopper.timeline import batch_spans, timeline_spans
from distmega.models.presets import PRESETS
from tests.kernels.hopper.batch_plan.test_batch_queues import queues_of as batch_queues_of
from tests.kernels.hopper.row_plan.test_hopper_queues import queues_of

QUEUES = queues_of(PRESETS["smollm2-135m"], num_sms=6)
LONGEST = max(map(len, QUEUES.queues))
START = 1_000_000_000_000


def made_up(num_steps: int) -> list[list[list[list[int]]]]:
    """Instruction i of any SM takes 4 us from i * 10 us on; a step takes 1 s. Combines and every
    third attention have no stamps in between.
    """
    stamps = []
    for step in range(num_steps):
        rows = []
        for queue in QUEUES.queues:
            row = []
            for i in range(LONGEST):
                begin = START + step * 10**9 + i * 10_000
                times = [begin, begin + 1000, begin + 2500, begin + 4000]
                one = queue[i] if i < len(queue) else None
                idle = isinstance(one, RowAttention) and one.split % 3 == 0
                if isinstance(one, RowCombine) or idle:
                    times[1] = times[2] = 0
                row.append(times if one else [0] * STAMPS)
            rows.append(row)
        stamps.append(rows)
    return stamps


def test_spans_of_made_up_stamps():
    spans = list(timeline_spans(QUEUES, made_up(2), 1))
    tasks = [span for span in spans if span.args]
    assert {span.process for span in spans} == {"rank 1"}
    assert {span.track for span in spans} == {f"SM {sm}" for sm in range(6)}
    assert len(tasks) == 2 * sum(map(len, QUEUES.queues))
    assert {span.duration_us for span in tasks} == {4.0}
    assert min(span.start_us for span in tasks) == START / 1e3
    assert {span.args["step"] for span in tasks} == {0, 1}
    kinds = {re.sub(r"^layers.\d+.", "", span.name) for span in tasks}
    assert kinds == {"q", "attention", "attn_sum", "ffn_mixed", "ffn_sum", "logits"}
    first = next(span for span in tasks if span.track == "SM 3")
    assert first.name == "layers.0.q"
    assert "layers.0.q, rows" in str(first.args["task"])


def test_parts_follow_their_task_and_fill_it_where_there_are_stamps():
    task, parts, full = None, [], 0
    for span in timeline_spans(QUEUES, made_up(1), 0):
        if span.args:
            task, parts = span, []
            continue
        assert task
        parts.append(span)
        if len(parts) == 3:
            full += 1
            assert parts[0].start_us == task.start_us
            assert [part.duration_us for part in parts] == [1.0, 1.5, 1.5]
            assert parts[0].name in ("wait for x", "wait for q, k, v")
    stamped = [
        one
        for queue in QUEUES.queues
        for one in queue
        if not isinstance(one, RowCombine)
        and not (isinstance(one, RowAttention) and one.split % 3 == 0)
    ]
    assert full == len(stamped)


def test_spans_of_several_rows_have_loads_on_tracks_of_their_own():
    queues = batch_queues_of(PRESETS["smollm2-135m"], batch=4, num_sms=6)
    num = len(queues.queues[0])
    stamps = []
    for step in range(2):
        begins = [START + step * 10**9 + i * 10_000 for i in range(num)]
        chosen = [at + 2000 if i == 1 else 0 for i, at in enumerate(begins)]
        rows = [
            [at, at + 1000, at_chosen, at + 4000, at + 3000]
            for at, at_chosen in zip(begins, chosen, strict=True)
        ]
        stamps.append([rows] * 6)
    spans = list(batch_spans(queues, stamps, 1))
    tasks = [span for span in spans if span.args]
    assert len(tasks) == 2 * 6 * num
    assert {span.duration_us for span in tasks} == {4.0}
    loads = [span for span in spans if span.track == "SM 2 loads"]
    assert len(loads) == 2 * num - 1  # of the first it is not known when they began
    assert loads[0].name == queues.queues[2][1].name
    assert (loads[0].start_us, loads[0].duration_us) == (START / 1e3 + 3.0, 10.0)
    parts = [span for span in spans if span.track == "SM 0" and not span.args]
    named = [(part.name, part.duration_us) for part in parts[:5]]
    wait = ("wait for all SMs", 1.0)
    assert named == [wait, ("work", 3.0), wait, ("choose experts", 1.0), ("work", 2.0)]


def test_an_instruction_without_stamps_has_no_span():
    queues = batch_queues_of(PRESETS["smollm2-135m"], batch=4, num_sms=6)
    num = len(queues.queues[0])
    stamps = [[[[START, START, 0, START + 500, START]] * (num - 1) + [[0] * BATCH_STAMPS]] * 6]
    spans = [span for span in batch_spans(queues, stamps, 0) if span.args]
    assert len(spans) == 6 * (num - 1)
