"""What a replay does on the host, and that it gives what single nodes give; recorded on a CPU."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from bench.models import encoder, gated_mlp, mixer
from distmega import CPU, DeviceMesh, Program, ProgramBuilder, plan_program
from distmega.compiled import CompiledProgram
from distmega.hostir import SingleCommunicator
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.run.cuda_graph import GraphMemory
from distmega.hostir.run.deadline import Deadline
from tests.calls import num_calls
from tests.hostir.graphs import Event, RecordedGraph, Stream, in_capture, record_graphs
from tests.hostir.programs import inputs_of

ONE = DeviceMesh(tp=1)
MOST_CALLS = 40
"""Of Python and C functions in a call with one input, its copy and an output's, which needs 37
under Python 3.11."""
MOST_PER_INPUT = 12
MOST_CALLS_BOUND = 18
MOST_PER_BOUND = 6
"""In a call with inputs that are bound, and outputs in place; more for each that it brings."""
MOST_TO_LEAVE_MODE = 10
"""In a call under torch.inference_mode, whose outputs are ordinary tensors."""


def counting() -> Program:
    """y = 2 x, and what all calls gave, from one input to the next."""
    p = ProgramBuilder("counting")
    x, total, at = p.input("x", (1, 4)), p.state("total", (1, 4)), p.input("at", (1,), "i64")
    y = x.map("a0 * 2.0", name="y")
    p.set(p.pointwise("a0 + a1", total, y), into=total)
    p.kv_append(p.state("all", (1, 16, 4)), p.reshape(y, (1, 1, 4), view=True), at)
    return p.build(y, total)


PROGRAMS = {
    "counting": counting,
    "gated_mlp": lambda: gated_mlp(3, 2, 64, 128).program,
    "encoder": lambda: encoder(16, 2, 64, 4).program,
    "mixer": lambda: mixer(0, 2, 64, 24, 32).program,
}


def asking() -> CompiledProgram:
    """One with an operator of torch that asks the device for a number."""
    p = ProgramBuilder("asking")
    x, seen = p.input("x", (4, 4)), p.input("seen", (4, 4), "bool")
    call = '[[{"tensor": 0}, {"tensor": 1}], {}, [0]]'
    (same,) = p.opaque("aten.masked_select.default", call, [x, seen], [((16,), "f32")])
    return opened(p.build(same.map("a0 + 1.0")))


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    return record_graphs(monkeypatch)


def opened(program: Program, **options: bool) -> CompiledProgram:
    return CompiledProgram(plan_program(program, ONE, CPU), SingleCommunicator(ONE), **options)


def values(step: CompiledProgram, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        buffer.name: torch.tensor([seed % 16])
        if buffer.dtype == "i64"
        else (torch.randn(buffer.shape) * buffer.shape[-1] ** -0.5).to(torch_dtype(buffer.dtype))
        for buffer in step.host.buffers
        if buffer.role != "temp"
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_give_what_single_nodes_give(name: str, graphs: list[RecordedGraph]):
    program = PROGRAMS[name]()
    step, nodes = opened(program), opened(program, replay=False)
    ours = values(step, 0)
    theirs = {each: x.clone() for each, x in ours.items()}
    for number in range(5):
        new = inputs_of(step, values(step, number))
        found = step(new if number else ours | new, inplace=number % 2 == 1)
        expected = nodes(new if number else theirs | new)
        assert all(torch.equal(x, expected[each]) for each, x in found.items())
    (graph,) = graphs
    assert graph.num_replays == 5
    for buffer in step.host.buffers:
        if buffer.role == "state":
            assert torch.equal(ours[buffer.name], theirs[buffer.name]), "warm-up runs leave states"


def test_outputs_are_the_callers_unless_asked_for_in_place(graphs: list[RecordedGraph]):
    step = opened(PROGRAMS["mixer"]())
    (first,) = step(values(step, 0)).values()
    kept = first.clone()
    (there,) = step(inputs_of(step, values(step, 1)), inplace=True).values()
    assert torch.equal(first, kept)
    (again,) = step(inputs_of(step, values(step, 2)), inplace=True).values()
    assert again is there


def test_outputs_in_place_are_a_mapping_of_the_callers(graphs: list[RecordedGraph]):
    step = opened(PROGRAMS["counting"]())
    found = step(values(step, 0), inplace=True)
    names = set(found)
    found.clear()
    assert step({"x": torch.ones(1, 4), "at": torch.tensor([1])}, inplace=True).keys() == names


def test_outputs_of_any_shapes_and_types_are_copied(graphs: list[RecordedGraph]):
    """With those that lie in one another, and one of other strides."""
    p = ProgramBuilder("several")
    x, ids = p.input("x", (3, 4)), p.input("ids", (3,), "i64")
    y = x.map("a0 + 1.0")
    wide, twice = p.pointwise("a0", y, dtype="f64"), ids.map("a0 + a0")
    views = p.reshape(y, (12,), view=True), p.transpose(y, (1, 0), view=True)
    step = opened(p.build(y, wide, twice, *views))
    first = step({"x": torch.zeros(3, 4), "ids": torch.arange(3)})
    kept = {name: out.clone() for name, out in first.items()}
    again = step({"x": torch.ones(3, 4), "ids": torch.ones(3, dtype=torch.int64)})
    assert all(torch.equal(first[name], out) for name, out in kept.items())
    assert not any(torch.equal(again[name], out) for name, out in kept.items())


def test_an_input_that_a_warm_program_made_may_be_pointed_elsewhere(graphs: list[RecordedGraph]):
    step = opened(PROGRAMS["counting"](), warm=True)
    own = step.tensors["x"]
    own.data = torch.full((1, 4), 3.0)
    assert torch.equal(step({"x": own})["y"], torch.full((1, 4), 6.0))
    assert torch.equal(step({"x": torch.ones(1, 4)})["y"], torch.full((1, 4), 2.0))
    assert len(graphs) == 1


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("replay", [True, False])
def test_an_input_that_is_an_output_stays_what_it_was(
    replay: bool, warm: bool, graphs: list[RecordedGraph]
):
    """Also a view of one, though the program has memory that the next call's input is copied to."""
    p = ProgramBuilder("back")
    x = p.input("x", (2, 3))
    step = opened(p.build(x, p.reshape(x, (6,), view=True)), replay=replay, warm=warm)
    found = [step({"x": torch.full((2, 3), float(number))}) for number in range(3)]
    for number, outputs in enumerate(found):
        assert all(out.eq(number).all() for out in outputs.values())


@pytest.mark.parametrize("is_alone", [True, False])
def test_programs_are_captured_anew_while_outputs_in_place_are_held(
    is_alone: bool, graphs: list[RecordedGraph]
):
    step, other = opened(PROGRAMS["mixer"]()), opened(PROGRAMS["counting"]())
    given = values(step, 0)
    held = [step(given, inplace=True)]
    if not is_alone:
        other(values(other, 0))
    for number in range(3):
        step.bind(inputs_of(step, values(step, number)))
        held.append(step({}, inplace=True))
        assert step.stats.replayed, step.stats.reason
    assert len({graph.pool for graph in graphs}) == (4 if is_alone else 1)


def test_programs_share_the_memory_of_those_that_are_there(graphs: list[RecordedGraph]):
    first, second = opened(PROGRAMS["mixer"]()), opened(PROGRAMS["counting"]())
    first(values(first, 0))
    second(values(second, 0))
    assert graphs[0].pool == graphs[1].pool


def test_a_capture_that_fails_leaves_others_their_graphs(graphs: list[RecordedGraph]):
    """Torch before 2.12 does not end what it began, and takes no memory a second time then."""
    held = opened(PROGRAMS["mixer"]())
    held(values(held, 0))
    step = asking()
    given = {"x": torch.ones(4, 4), "seen": torch.ones(4, 4, dtype=torch.bool)}
    (y,) = step(given).values()
    assert torch.equal(y, torch.full((16,), 2.0))
    assert not step.stats.replayed
    assert "capturing" in step.stats.reason
    assert not in_capture
    other = opened(PROGRAMS["counting"]())
    other(values(other, 0))
    assert other.stats.replayed, other.stats.reason
    held.bind(inputs_of(held, values(held, 1)))
    held({})
    assert held.stats.replayed, held.stats.reason
    assert graphs[0].pool != graphs[-1].pool


def test_threads_capture_one_after_the_other(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
):
    inside, most = [], []
    record = torch.cuda.graph

    @contextmanager
    def slowly(graph: RecordedGraph, pool: int, stream: Stream, **options: str) -> Iterator[None]:
        inside.append(graph)
        most.append(len(inside))
        time.sleep(0.05)
        with record(graph, pool, stream, **options):  # type: ignore[arg-type]
            yield
        inside.remove(graph)

    monkeypatch.setattr(torch.cuda, "graph", slowly)
    steps = [opened(PROGRAMS["counting"]()) for _ in range(3)]
    with ThreadPoolExecutor(len(steps)) as pool:
        list(pool.map(lambda step: step(values(step, 0)), steps))
    assert most == [1, 1, 1]
    assert all(step.stats.replayed for step in steps), [step.stats.reason for step in steps]


def test_inputs_of_several_types_and_those_that_learn_are_copied(graphs: list[RecordedGraph]):
    p = ProgramBuilder("looking")
    table, ids = p.input("table", (8, 4)), p.input("ids", (3,), "i64")
    step = opened(p.build(p.embedding(ids, table).map("a0 * a1", p.input("scale", (3, 4)))))
    for number in range(4):
        given = {
            "table": torch.randn(8, 4, requires_grad=True),
            "ids": torch.tensor([number, 7, 0]),
            "scale": torch.randn(4, 3).T,
        }
        (found,) = step(given).values()
        assert torch.equal(found, given["table"][given["ids"]] * given["scale"])
        assert not found.requires_grad
    assert len(graphs) == 1


def host_calls(layers: int, num_inputs: int) -> int:
    """Of Python and C functions, in a call of a program that is watched as those of several ranks
    are. The launch is nothing, and so is what is queued.
    """
    p = ProgramBuilder("sums")
    x = p.input("x0", (4, 4))
    for number in range(1, num_inputs):
        x = x.map("a0 + a1", p.input(f"x{number}", (4, 4)))
    for layer in range(layers):
        x = p.linear(x, p.weight(f"w{layer}", (4, 4)))
    step = opened(p.build(x))
    step._deadline = Deadline("calls", 1e6)
    given = values(step, 0)
    step(given)
    new = inputs_of(step, given)
    step(new)
    return num_calls(lambda: step(new))


def test_a_call_costs_the_host_the_same_whatever_the_program_has(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(RecordedGraph, "replay", lambda graph: None)
    small = host_calls(1, 1)
    assert small <= MOST_CALLS
    assert host_calls(40, 1) == small
    assert host_calls(1, 5) <= small + 4 * MOST_PER_INPUT


def test_bound_inputs_cost_the_host_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RecordedGraph, "replay", lambda graph: None)
    step = opened(PROGRAMS["counting"](), warm=True)
    copied = num_calls(lambda: step({"x": torch.zeros(1, 4)}, inplace=True))
    assert num_calls(lambda: step({}, inplace=True)) < copied
    assert num_calls(lambda: step({}, inplace=True)) <= MOST_CALLS_BOUND
    bound = inputs_of(step, values(step, 0))
    step.bind(bound)
    step(bound)
    given = num_calls(lambda: step(bound, inplace=True))
    assert given <= MOST_CALLS_BOUND + len(bound) * MOST_PER_BOUND


def test_inference_mode_costs_the_host_next_to_nothing(monkeypatch: pytest.MonkeyPatch):
    """Twice a call on a GPU's host, 20 us for 9, when each call left the mode and came back."""
    monkeypatch.setattr(RecordedGraph, "replay", lambda graph: None)
    step = opened(PROGRAMS["counting"](), warm=True)
    step.bind(bound := inputs_of(step, values(step, 0)))
    step(bound)
    outside = num_calls(lambda: step(bound, inplace=True)), num_calls(lambda: step(bound))
    with torch.inference_mode():
        inside = num_calls(lambda: step(bound, inplace=True)), num_calls(lambda: step(bound))
        copied = step(bound)["y"]
    assert inside[0] == outside[0]
    assert inside[1] <= outside[1] + MOST_TO_LEAVE_MODE
    assert not copied.is_inference()


def test_calls_make_no_events(monkeypatch: pytest.MonkeyPatch):
    step = opened(PROGRAMS["mixer"]())
    step._deadline = Deadline("calls", 1e6)
    given = values(step, 0)
    step(given)
    made, marks = Event.made, step._deadline._events
    for _ in range(3):
        step(inputs_of(step, given))
    assert Event.made == made
    assert sum(mark.num_recorded for mark in marks) == 4


class LoggedStream(Stream):
    """Notes down what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits")


def take_turns(names: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What turns on streams queue, "0" being the default stream."""
    log: list[str] = []
    streams = {name: LoggedStream(name, log) for name in names}

    def record(event: Event, stream: LoggedStream) -> None:
        log.append(f"mark on {stream.name}")

    monkeypatch.setattr(Event, "record", record)
    memory = GraphMemory()
    for name in names:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device, at=name: int(at))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, at=name: streams[at])
        memory.begin()
        log.append(f"turn on {name}")
        memory.end()
    return log


def test_turns_on_the_default_stream_are_marked_when_another_comes(monkeypatch: pytest.MonkeyPatch):
    assert take_turns("00", monkeypatch) == ["turn on 0", "turn on 0"]
    assert take_turns("00100", monkeypatch) == [
        "turn on 0", "turn on 0", "mark on 0", "1 waits", "turn on 1", "mark on 1",
        "0 waits", "turn on 0", "mark on 0", "turn on 0", "mark on 0",
    ]  # fmt: skip


def test_turns_on_other_streams_are_marked_while_these_exist(monkeypatch: pytest.MonkeyPatch):
    assert take_turns("1122", monkeypatch) == [
        "turn on 1", "mark on 1", "turn on 1", "mark on 1",
        "2 waits", "turn on 2", "mark on 2", "turn on 2", "mark on 2",
    ]  # fmt: skip
