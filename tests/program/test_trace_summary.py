"""The table of a made-up timeline: what each op adds to the step, and what a task's time is."""

from distmega.engine.ranks.trace_summary import summarise
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
