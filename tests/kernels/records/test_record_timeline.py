"""The timeline of the kernel of records: spans of made-up stamps, and stamps of the kernel."""

import numpy as np
import pytest
import torch

from distmega.kernels.isa.encoding import unpack
from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.records.specs import find_specs
from distmega.kernels.records.timeline import NUM_STAMPS, record_spans
from distmega.kernels.whole import CopiedStates, TracedKernel
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.trace_file import Span
from tests.forked import run_module
from tests.kernels.programs import decoder
from tests.kernels.records.test_records import compiled

NUM_SMS = 4
START = 1_700_000_000_000_000_000
ENCODED = compile_megakernel(decoder(2), DeviceMesh(tp=1), num_sms=NUM_SMS).encoded


def made_up() -> list[list[list[int]]]:
    """Record i of any SM waits from i * 10 us on for 1 us, and works for 2.5 us."""
    longest = ENCODED.queues.shape[1]
    return [
        [[START + at * 10_000 + part for part in (0, 1000, 3500)] for at in range(longest)]
        for _ in range(NUM_SMS)
    ]


def test_a_record_has_a_span_and_its_parts():
    _, numbers = find_specs(ENCODED)
    spans = list(record_spans(ENCODED, numbers, made_up(), 3))
    tasks, waits, works = spans[::3], spans[1::3], spans[2::3]
    assert len(tasks) == len(waits) == len(works) == int(ENCODED.lengths.sum())
    assert {span.process for span in spans} == {"rank 3"}
    assert {span.track for span in spans} == {f"SM {sm}" for sm in range(NUM_SMS)}
    assert {span.duration_us for span in tasks} == {3.5}
    assert {(span.name, span.duration_us) for span in waits} == {("wait for events", 1.0)}
    assert {(span.name, span.duration_us) for span in works} == {("work", 2.5)}
    assert not any(part.args for part in waits + works)


def test_spans_begin_at_the_nanosecond():
    """A float of the microseconds since 1970, which GPUs count, steps by a quarter of one."""
    _, numbers = find_specs(ENCODED)
    stamps = [[[time + at for time in times] for at, times in enumerate(sm)] for sm in made_up()]
    tasks = list(record_spans(ENCODED, numbers, stamps, 0))[::3]
    starts = [span.start_us for span in tasks if span.track == "SM 0"]
    assert len(starts) > 2
    assert np.diff(starts) == pytest.approx(10.001, abs=5e-4)


def test_a_span_says_which_record_it_is():
    _, numbers = find_specs(ENCODED)
    tasks = list(record_spans(ENCODED, numbers, made_up(), 0))[::3]
    places = [(sm, at) for sm in range(NUM_SMS) for at in range(int(ENCODED.lengths[sm]))]
    for span, (sm, at) in zip(tasks, places, strict=True):
        header, instruction = unpack(ENCODED.queues[sm, at])
        assert span.track == f"SM {sm}"
        assert span.name == ENCODED.names[header.group]
        assert span.args == {
            "step": 0,
            "task": f"instruction {at}, {span.name}[{header.task}]",
            "opcode": type(instruction).__name__,
            "spec": numbers[sm, at],
        }


def test_stamps_are_taken_where_they_are_asked_for_alone(monkeypatch):
    plain = compiled("broadcast", "i32", monkeypatch)
    traced = compiled("broadcast", "i32", monkeypatch, traced=True)
    assert "globaltimer" in plain.ptx  # of waits
    assert traced.ptx.count("%globaltimer") == plain.ptx.count("%globaltimer") + NUM_STAMPS
    assert traced.stack_bytes == plain.stack_bytes


def test_an_interpreted_launch_has_a_timeline_and_gives_what_any_does():
    done = run_module("tests.kernels.records.trace_interpreted")
    *lines, same = done.stdout.splitlines()
    assert same == "True", done.stderr[-2000:]
    fields = [line.split("|") for line in lines]
    assert {(process, track) for process, track, *_ in fields} == {("rank 0", "SM 0")}
    ops = ("rms_norm_0", "linear_1", "linear_2", "pointwise_3", "linear_4", "pointwise_5")
    assert [name for _, _, name, task, *_ in fields if task] == [*ops]
    times = np.array([[float(start), float(last)] for *_, start, last in fields]).reshape(-1, 3, 2)
    starts, durations = times[..., 0], times[..., 1]
    assert (durations > 0.0).all()
    assert durations[:, 1:].sum(1) == pytest.approx(durations[:, 0])
    assert (np.diff(starts[:, 0]) >= durations[:-1, 0] - 1.0).all()


class Given:
    """A runner whose launch adds one to the state, and whose timeline is given."""

    replays = True

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans

    def launch(self, tensors: dict[str, torch.Tensor]) -> None:
        tensors["state"].add_(1.0)

    def trace_launch(self, tensors: dict[str, torch.Tensor]) -> list[Span]:
        self.launch(tensors)
        return self.spans

    def raise_hang(self) -> None:
        """Nothing waits."""


def test_a_traced_kernel_updates_the_states_of_its_caller_and_stands_in_no_graph():
    spans = list(record_spans(ENCODED, find_specs(ENCODED)[1], made_up(), 0))
    traced, state = TracedKernel(runner=Given(spans)), torch.zeros(2)
    kernel = CopiedStates(runner=traced, states={"state": torch.full((2,), 9.0)})
    assert not kernel.replays
    kernel.launch({"state": state})
    assert state.tolist() == [1.0, 1.0]
    assert traced.spans == spans
