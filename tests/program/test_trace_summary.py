"""The table of a made-up timeline: what each op adds to the step, and what a task's time is."""

import pytest

from distmega.engine.ranks.trace_summary import sum_tasks, summarise, summarise_sms
from distmega.trace_file import Span


def task(sm: int, name: str, start_us: float, *parts_us: float) -> list[Span]:
    spans = [
        Span(process="rank 0", track=f"SM {sm}", name=name, start_us=start_us,
             duration_us=sum(parts_us), args={"step": 0, "task": name})
    ]  # fmt: skip
    for part, duration_us in zip(("wait for x", "first group", "rest"), parts_us, strict=True):
        at = spans[-1].start_us + spans[-1].duration_us if len(spans) > 1 else start_us
        spans.append(Span(process="rank 0", track=f"SM {sm}", name=part, start_us=at,
                          duration_us=duration_us))  # fmt: skip
    return spans


def test_an_op_adds_the_time_since_the_one_before_it():
    spans = [
        *task(0, "qkv 0", 0.0, 1.0, 2.0, 1.0),
        *task(1, "qkv 0", 0.0, 1.0, 2.0, 3.0),
        *task(0, "o 0", 4.0, 4.0, 1.0, 1.0),
        *task(1, "o 0", 6.0, 1.5, 1.0, 1.0),
    ]
    lines = summarise(spans).splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert found == {"o": ["4.00", "2.00", "2.00", "|", "2.75", "1.00", "1.00"]}
    assert lines[-1].startswith("a step: 10.0 us")


def test_ops_of_equal_layers_share_a_row_and_loads_are_no_part():
    spans = []
    for layer in range(3):
        spans += task(0, f"layers.{layer}.q", 10.0 * layer, 1.0, 2.0, 1.0)[:3]
        spans.append(Span(process="rank 0", track="SM 0 loads", name="q", start_us=0.0,
                          duration_us=99.0))  # fmt: skip
    lines = summarise(spans).splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        ["layers.*.q", "20.00", "7.00", "3.00", "|", "1.00", "0.00", "2.00"]
    ]


def record(
    sm: int, name: str, opcode: str, spec: int, start_us: float, *parts_us: float
) -> list[Span]:
    """A record's span and its wait and work."""
    args = {"step": 0, "task": f"instruction 0, {name}[{sm}]", "opcode": opcode, "spec": spec}
    where = {"process": "rank 0", "track": f"SM {sm}"}
    wait_us, work_us = parts_us
    return [
        Span(**where, name=name, start_us=start_us, duration_us=wait_us + work_us, args=args),
        Span(**where, name="wait for events", start_us=start_us, duration_us=wait_us),
        Span(**where, name="work", start_us=start_us + wait_us, duration_us=work_us),
    ]


RECORDS = [
    *record(0, "layers.0.up", "Linear", 0, 10.0, 0.0, 4.0),
    *record(0, "layers.1.up", "Linear", 0, 15.0, 1.0, 2.0),
    *record(0, "down", "Linear", 0, 18.0, 0.5, 1.0),
    *record(1, "norm", "Norm", 1, 10.0, 5.0, 5.0),
]


def test_tasks_are_summed_by_op_and_by_sort():
    found = [(s.name, s.opcode, s.spec, s.num_tasks) for s in sum_tasks(RECORDS)]
    assert found == [
        ("layers.*.up", "Linear", 0, 2),
        ("norm", "Norm", 1, 1),
        ("down", "Linear", 0, 1),
    ]
    products, norm = sum_tasks(RECORDS, by_op=False)
    assert (products.opcode, norm.opcode) == ("Linear", "Norm")
    assert (products.num_tasks, products.wait_us, products.work_us) == (3, 1.5, 7.0)
    assert products.most_work_us == 4.0


def test_the_time_of_a_launch_is_shared_out():
    *rows, whole = summarise_sms(RECORDS).splitlines()
    cells = [row.split() for row in rows[1:]]
    assert cells[0] == ["*", "Linear", "0", "3", "1.50", "7.00", "4.00"]
    assert [row[0] for row in cells] == ["*", "*", "layers.*.up", "norm", "down"]
    assert whole.startswith(
        "a launch: 10.0 us (stamps included) on 2 SMs, which wait for 32% of it, "
    )
    assert "work for 60%" in whole
    assert whole.endswith(": 8%")


def test_tasks_of_decode_steps_are_summed_too():
    (sums,) = sum_tasks(task(0, "qkv 0", 0.0, 1.0, 2.0, 1.0))
    assert (sums.name, sums.opcode, sums.spec) == ("qkv", "", -1)
    assert (sums.wait_us, sums.work_us) == pytest.approx((1.0, 3.0))
