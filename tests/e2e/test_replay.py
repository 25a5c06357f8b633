"""Compiled programs between calls: what is bound, what ends a graph, who decides, what a fault
makes void. A stand-in for the graph runs the program, so that all of it runs on the CPU.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import distmega
from distmega.compiled import CompiledProgram
from distmega.compiled.replay import MOST_REBOUND
from distmega.errors import CheckError, HangError, ProgramError, RequestError
from distmega.hostir import SingleCommunicator
from distmega.hostir.check.check import prove_once
from distmega.hostir.run import cuda_graph, evaluator
from distmega.kernels.whole import WholeKernel
from tests.hostir.threads import ThreadCommunicator, Wires

ONE = distmega.DeviceMesh(tp=1)
TWO = distmega.DeviceMesh(tp=2)


def counter() -> distmega.Program:
    """y = x w', s += x, with s a result too."""
    p = distmega.ProgramBuilder("counter")
    x, s = p.input("x", (2, 4)), p.state("s", (2, 4))
    y = p.linear(x, p.weight("w", (4, 4)), name="y")
    p.set(p.pointwise("a0 + a1", s, x), into=s)
    return p.build(y, s)


def compile_counter(**options: bool) -> CompiledProgram:
    plan = distmega.plan_program(counter(), ONE, distmega.CPU)
    return CompiledProgram(plan, SingleCommunicator(ONE), **options)


def given() -> dict[str, Tensor]:
    return {"x": torch.ones(2, 4), "w": torch.eye(4), "s": torch.zeros(2, 4)}


class Graph:
    """In place of a CapturedHost: runs the program on what is bound, and counts."""

    made: list["Graph"] = []

    def __init__(self, runs: evaluator.Evaluator, tensors: Mapping[str, Tensor], memory: object):
        self.runs, self.tensors, self.num_runs, self.released = runs, dict(tensors), 0, False
        Graph.made.append(self)

    def run(self, inputs: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        self.num_runs += 1
        for name, x in inputs.items():
            self.tensors[name].copy_(x)
        return self.runs.run(self.tensors)

    def release(self) -> None:
        self.released = True


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Lets programs on the CPU be captured; gives the graphs made so far."""
    Graph.made = []
    monkeypatch.setattr("distmega.compiled.replay.CapturedHost", Graph)
    monkeypatch.setattr("distmega.compiled.replay.shared_memory", lambda device: None)
    monkeypatch.setattr(evaluator.Evaluator, "graph_breaks", ())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    return Graph.made


def test_weights_and_states_are_bound_once_and_inputs_copied(graphs: list[Graph]):
    step, tensors = compile_counter(), given()
    assert (step.stats.replayed, step.stats.reason) == (False, "")
    first = step(tensors)
    assert torch.equal(first["y"], torch.ones(2, 4))
    assert step({"x": torch.full((2, 4), 2.0)})["y"][0, 0] == 2
    assert step({"x": torch.full((2, 4), 3.0), "w": tensors["w"]})["y"][0, 0] == 3
    assert torch.equal(tensors["s"], torch.full((2, 4), 6.0))
    assert torch.equal(tensors["x"], torch.ones(2, 4))
    (graph,) = graphs
    assert graph.num_runs == 3
    assert graph.tensors["s"] is tensors["s"]
    assert graph.tensors["x"] is not tensors["x"]
    assert step.stats.replayed
    assert "replays as one CUDA graph" in step.explain()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: step({}), "no tensor for 'x'; expected every input of this rank in each"),
        (lambda step: step({"x": torch.ones(1, 4)}), r"f32\[1, 4\] for input 'x'; expected f32\[2"),
        (lambda step: step({"z": torch.ones(1)}), "a value for 'z'; expected one of"),
        (lambda step: step.bind({"s": torch.ones(2)}), r"f32\[2\] for state 's'"),
    ],
)
@pytest.mark.parametrize("replay", [False, True])
def test_what_does_not_fit_is_refused(
    call: Callable[[CompiledProgram], object], message: str, replay: bool, graphs: list[Graph]
):
    step, tensors = compile_counter(replay=replay), given()
    with pytest.raises(ProgramError, match=r"no tensor for '[ws]'"):
        step({"x": tensors["x"]})
    step(tensors)
    with pytest.raises(ProgramError, match=message):
        call(step)
    assert torch.equal(tensors["s"], torch.ones(2, 4)), "a refused call changes nothing"


def two_states() -> CompiledProgram:
    """s += x, t += x, y = s + x after that."""
    p = distmega.ProgramBuilder("two")
    x, s, t = p.input("x", (2, 4)), p.state("s", (2, 4)), p.state("t", (2, 4))
    p.set(p.pointwise("a0 + a1", s, x), into=s)
    p.set(p.pointwise("a0 + a1", t, x), into=t)
    program = p.build(p.pointwise("a0 + a1", s, x, name="y"))
    return CompiledProgram(
        distmega.plan_program(program, ONE, distmega.CPU), SingleCommunicator(ONE)
    )


def test_states_have_memory_of_their_own():
    """An update of one would be one of another, or of more elements."""
    step, x, whole = two_states(), torch.ones(2, 4), torch.zeros(3, 4)
    for s, t in (
        (whole[:2], whole[:2]),
        (whole[:2], whole[1:]),
        (whole.view(6, 2)[:4].t(), whole[1:]),
        (whole[:2], torch.zeros(2, 4)[:, :1].expand(2, 4)),
    ):
        with pytest.raises(ProgramError, match=r"in memory that it shares with '[st]'"):
            step({"x": x, "s": s, "t": t})
    assert not whole.any()
    rows = torch.zeros(4, 2, 4)
    step({"x": x, "s": rows[:, 0][:2], "t": rows[:, 1][:2]})
    assert torch.equal(rows[:2], torch.ones(2, 2, 4))


@pytest.mark.parametrize("megakernel", [True, False])
def test_a_state_is_not_in_the_memory_of_a_weight(megakernel: bool):
    """Its updates would change the weight, or not, as the kernel holds it elsewhere."""
    p = distmega.ProgramBuilder("adds")
    w, v, s = p.weight("w", (2, 4)), p.weight("v", (2, 4)), p.state("s", (2, 4))
    program = p.build(p.set(p.pointwise("a0 + a1 + a2", s, w, v), into=s))
    plan = distmega.plan_program(program, ONE, distmega.CPU)
    step = CompiledProgram(plan, SingleCommunicator(ONE), megakernel=megakernel)
    whole, tied = torch.zeros(3, 4), torch.ones(2, 4)
    for at in (0, 1):
        given = {"w": whole[at : at + 2], "v": tied, "s": whole[1 - at : 3 - at]}
        with pytest.raises(ProgramError, match="state 's' in memory that it shares with 'w'"):
            step(given)
    assert not whole.any()
    step({"w": tied, "v": tied, "s": whole[:2]})
    assert torch.equal(whole[:2], torch.full((2, 4), 2.0))


def test_a_refused_bind_leaves_what_a_kernel_holds_as_it_is():
    """Weights are copied into its memory, and a state behind them is refused."""
    p = distmega.ProgramBuilder("adds")
    w, s = p.weight("w", (2, 4)), p.state("s", (2, 4))
    program = p.build(p.set(p.pointwise("a0 + a1", s, w), into=s))
    plan = distmega.plan_program(program, ONE, distmega.CPU)
    step = CompiledProgram(plan, SingleCommunicator(ONE), warm=True, megakernel=True)
    with pytest.raises(ProgramError, match="state 's' in memory of the caller"):
        step.bind({"w": torch.ones(2, 4), "s": torch.ones(2, 4)})
    assert not step.tensors["w"].any()


def test_a_kernel_that_is_given_parameters_records_no_gradients():
    """Or what it holds would keep all parameters that were ever bound to it."""
    p = distmega.ProgramBuilder("adds")
    w, x = p.weight("w", (2, 4)), p.input("x", (2, 4))
    plan = distmega.plan_program(p.build(p.pointwise("a0 + a1", x, w)), ONE, distmega.CPU)
    step = CompiledProgram(plan, SingleCommunicator(ONE), megakernel=True)
    step.bind({"w": torch.nn.Parameter(torch.ones(2, 4))})
    assert torch.equal(step.tensors["w"], torch.ones(2, 4))
    assert not step.tensors["w"].requires_grad


@pytest.mark.parametrize("megakernel", [True, False])
def test_what_ends_a_run_midway_voids_its_states(megakernel: bool):
    """Scores that are no numbers are found behind the update of a state."""
    p = distmega.ProgramBuilder("midway")
    x, s = p.input("x", (2, 4)), p.state("s", (2, 4))
    seen = p.set(p.pointwise("a0 + a1", s, x), into=s)
    plan = distmega.plan_program(p.build(*p.top_k(seen, 2)), ONE, distmega.CPU)
    step = CompiledProgram(plan, SingleCommunicator(ONE), megakernel=megakernel)
    ones = torch.ones(2, 4)
    step({"x": ones, "s": torch.zeros(2, 4)})
    with pytest.raises(RequestError, match="a router score of row 0 is not a number"):
        step({"x": ones * torch.nan})
    with pytest.raises(ProgramError, match="'midway' that are void since RequestError: a router"):
        step({"x": ones})
    step.bind({"s": torch.zeros(2, 4)})
    with pytest.raises(ProgramError, match="expected f32"):
        step({"x": ones.double()})
    step({"x": ones})


def test_an_input_in_the_memory_of_a_state_is_what_it_was_before_the_call():
    step, s = two_states(), torch.ones(2, 4)
    (y,) = step({"x": s, "s": s, "t": torch.zeros(2, 4)}).values()
    assert torch.equal(s, torch.full((2, 4), 2.0))
    assert torch.equal(y, torch.full((2, 4), 3.0))


def test_other_tensors_are_bound_by_name_and_captured_anew(graphs: list[Graph]):
    step, tensors = compile_counter(), given()
    step(tensors)
    other = torch.full((2, 4), 10.0)
    step.bind({"s": other, "x": tensors["x"]})
    assert graphs[0].released
    step({})
    tensors["x"].fill_(2)
    step({})
    assert torch.equal(other, torch.full((2, 4), 13.0))
    assert torch.equal(tensors["s"], torch.ones(2, 4))
    assert len(graphs) == 2
    step({"x": torch.full((2, 4), 5.0)})
    assert torch.equal(other, torch.full((2, 4), 18.0))
    assert torch.equal(tensors["x"], torch.full((2, 4), 2.0))


def elsewhere(x: Tensor) -> None:
    """Other memory, other values."""
    x.data = x.data + 1.0


def transposed(x: Tensor) -> None:
    """The same memory."""
    x.copy_(torch.arange(16.0).view(4, 4)).t_()


@pytest.mark.parametrize("change", [elsewhere, transposed])
def test_a_bound_tensor_that_was_pointed_elsewhere_is_bound_anew(
    change: Callable[[Tensor], None], graphs: list[Graph]
):
    step, tensors = compile_counter(), given()
    step(tensors)
    change(tensors["w"])
    found = step(tensors)["y"]
    assert torch.equal(found, tensors["x"] @ tensors["w"].T)
    assert len(graphs) == 2
    step(tensors)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (torch.ones(2, 3), r"f32\[2, 3\]"),
        (torch.ones(2, 4, dtype=torch.float64), r"f64\[2, 4\]"),
        (torch.ones(2, 4).to_sparse(), r"torch.sparse_coo f32\[2, 4\]"),
        (torch.ones(2, 4, device="meta"), r"meta f32\[2, 4\]"),
    ],
)
@pytest.mark.parametrize("is_bound", [True, False])
def test_what_a_mapping_has_now_is_looked_at_and_refused(
    other: Tensor, found: str, is_bound: bool, graphs: list[Graph]
):
    """Also where it is the mapping of the call before."""
    step, tensors = compile_counter(), given()
    if is_bound:
        step.bind(tensors)
    step(tensors)
    tensors["x"] = other
    with pytest.raises(ProgramError, match=f"{found} for input 'x'"):
        step(tensors)
    assert graphs[0].num_runs == 1, "refused before anything runs"
    tensors["x"] = torch.full((2, 4), 3.0)
    assert step(tensors)["y"][0, 0] == 3


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_tensor_that_changed_its_shape_is_refused(is_bound: bool, graphs: list[Graph]):
    step, tensors = compile_counter(), given()
    if is_bound:
        step.bind(tensors)
    step(tensors)
    tensors["x"].resize_(2, 3)
    with pytest.raises(ProgramError, match=r"f32\[2, 3\] for input 'x'"):
        step(tensors)
    assert graphs[0].num_runs == 1, "refused before anything runs"


@pytest.mark.parametrize("replay", [False, True])
def test_calls_may_bring_other_states_a_few_times(replay: bool, graphs: list[Graph]):
    step, tensors = compile_counter(replay=replay), given()
    step(tensors)
    for number in range(MOST_REBOUND + 2):
        state = torch.full((2, 4), float(number))
        assert step({**tensors, "s": state})["s"] is state
        assert torch.equal(state, torch.full((2, 4), number + 1.0))
    assert torch.equal(tensors["s"], torch.ones(2, 4))
    assert not step.stats.replayed
    reason = "calls bring weights or states of their own" if replay else "replay=False"
    assert step.stats.reason == reason
    assert len(graphs) == (1 + MOST_REBOUND) * replay


def test_a_warm_program_has_tensors_of_its_own(graphs: list[Graph]):
    step = compile_counter(warm=True)
    assert step.stats.replayed
    assert not any(x.any() for x in step.tensors.values())
    step.load({"w": torch.eye(4), "x": torch.ones(2, 4)})
    assert torch.equal(step({})["y"], torch.ones(2, 4))
    assert torch.equal(step.tensors["s"], torch.ones(2, 4))


def test_a_bound_parameter_is_loaded():
    step = compile_counter(warm=False)
    given = {"x": torch.ones(2, 4), "s": torch.zeros(2, 4)}
    step({"w": torch.nn.Parameter(torch.zeros(4, 4)), **given})
    step.load({"w": torch.eye(4)})
    assert torch.equal(step({"x": torch.ones(2, 4)})["y"], torch.ones(2, 4))


@pytest.mark.parametrize("replay", [True, False])
def test_inputs_are_copied_to_those_of_a_warm_program(replay: bool, graphs: list[Graph]):
    """Without a capture a call, and calls that leave them out find the last."""
    step = compile_counter(warm=True, replay=replay)
    own = step.tensors["x"]
    step.load({"w": torch.eye(4)})
    for number in range(2 * MOST_REBOUND):
        assert torch.equal(
            step({"x": torch.full((2, 4), float(number))})["y"], torch.full((2, 4), float(number))
        )
        assert torch.equal(step({})["y"], torch.full((2, 4), float(number)))
    assert step.tensors["x"] is own
    assert len(graphs) == int(replay)
    step.bind({**step.tensors, "s": torch.zeros(2, 4)})
    assert torch.equal(step({"x": torch.ones(2, 4)})["s"], torch.ones(2, 4))
    assert torch.equal(own, torch.ones(2, 4))
    bound = torch.full((2, 4), 7.0)
    step.bind({"x": bound})
    step({"x": torch.ones(2, 4)})
    assert torch.equal(bound, torch.full((2, 4), 7.0)), "the caller's, not the program's"


def test_the_cpu_has_no_graphs_and_says_so():
    step = compile_counter()
    assert step.stats.reason == "its tensors are on the CPU, which has no graphs", "before a call"
    step(given())
    assert not step.stats.replayed
    assert step.stats.reason == "its tensors are on the CPU, which has no graphs"
    assert "runs node by node: its tensors are on the CPU" in step.explain()
    slow = compile_counter(replay=False)
    slow(given())
    assert slow.stats.reason == "replay=False"


def test_stats_count_what_a_program_consists_of():
    p = distmega.ProgramBuilder("odd")
    x = p.input("x", (2, 4))
    (y,) = p.opaque("aten.sin.default", '[[{"tensor": 0}], {}, [0]]', [x], [((2, 4), "f32")])
    plan = distmega.plan_program(p.build(p.linear(y, p.weight("w", (4, 4)))), ONE, distmega.CPU)
    stats = CompiledProgram(plan, SingleCommunicator(ONE)).stats
    assert (stats.num_library_ops, stats.num_opaque_ops, stats.num_megakernels) == (2, 1, 0)
    assert (stats.num_tasks, stats.num_events, stats.num_compilations) == (0, 0, 0)


class Failing(SingleCommunicator):
    """Gives up a signal when asked to."""

    hangs = False

    def check_signals(self) -> None:
        if self.hangs:
            raise HangError("waited 1 s for signal 'go'", expected="it", remedy="look")


@pytest.mark.parametrize("replay", [False, True])
def test_states_are_void_after_a_hang_until_they_are_bound_again(replay: bool, graphs: list[Graph]):
    comm = Failing(ONE)
    step = CompiledProgram(distmega.plan_program(counter(), ONE, distmega.CPU), comm, replay=replay)
    tensors = given()
    step(tensors)
    step.wait()
    comm.hangs = True
    with pytest.raises(HangError, match="signal 'go'"):
        step.wait()
    comm.hangs = False
    for call in (lambda: step({"x": tensors["x"]}), step.wait):
        with pytest.raises(ProgramError, match="void since HangError: waited 1 s for signal 'go'"):
            call()
    step.bind({"w": torch.eye(4)})
    with pytest.raises(ProgramError, match="void since HangError"):
        step({"x": tensors["x"]})
    step.bind({"s": torch.zeros(2, 4)})
    assert torch.equal(step({"x": tensors["x"]})["s"], torch.ones(2, 4))


def test_a_wait_that_expired_in_a_kernel_is_reported_by_the_next_call(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
):
    """Though it brings what the call before brought; nothing runs."""
    step, tensors = compile_counter(warm=True, megakernel=True), {"x": torch.ones(2, 4)}
    step(tensors)

    def raise_hang(kernel: WholeKernel) -> None:
        raise HangError("SM 3 waited 2 s for event 7", expected="it", remedy="look")

    with monkeypatch.context() as patch:
        patch.setattr(WholeKernel, "raise_hang", raise_hang)
        with pytest.raises(HangError, match="SM 3 waited"):
            step(tensors)
    with pytest.raises(ProgramError, match="void since HangError: SM 3 waited"):
        step(tensors)
    assert graphs[0].num_runs == 1
    step.bind(step.tensors)
    assert torch.equal(step(tensors)["s"], torch.full((2, 4), 2.0))


class Talking(ThreadCommunicator):
    """Also tells the other thread what this one found."""

    def all_gather_object(self, value: object, axis: str = "") -> list[object]:
        for peer in self.mesh.ranks:
            self.wires.queues["tp", "signal", self.rank, peer].put(value)
        found = self.wires.queues
        return [found["tp", "signal", peer, self.rank].get(timeout=20) for peer in self.mesh.ranks]


def on_two_ranks(body: Callable[[CompiledProgram, int], object]) -> list[object]:
    """A product of two halves, called by two ranks that are threads."""
    p = distmega.ProgramBuilder("halves")
    y = p.linear(p.input("x", (2, 4)), p.weight("w", (4, 4)), name="y")
    marks = {"x": distmega.shard(1, "tp"), "w": distmega.shard(1, "tp")}
    plan = distmega.plan_program(p.build(y), TWO, distmega.CPU, marks)
    wires = Wires(TWO)
    steps = [CompiledProgram(plan, Talking(TWO, rank, wires)) for rank in (0, 1)]
    wholes = {"x": torch.ones(2, 4), "w": torch.eye(4)}

    def run(rank: int) -> object:
        step = steps[rank]
        for _ in range(2):
            parts = step.parts({n: x for n, x in wholes.items() if n not in step.tensors})
            (found,) = step(parts).values()
            assert torch.equal(found, torch.ones(2, 4))
        return body(step, rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def test_all_ranks_capture(graphs: list[Graph]):
    assert on_two_ranks(lambda step, rank: step.stats.replayed) == [True, True]
    assert [graph.num_runs for graph in graphs] == [2, 2]


def test_no_rank_captures_where_one_can_not(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch):
    def capture(runs: evaluator.Evaluator, *given: object) -> Graph:
        if runs.comm.rank == 1:
            raise RuntimeError("out of memory\nmore")
        return Graph(runs, *given)

    monkeypatch.setattr("distmega.compiled.replay.CapturedHost", capture)
    reasons = on_two_ranks(lambda step, rank: (step.stats.replayed, step.stats.reason))
    assert reasons == [(False, "rank 1: out of memory")] * 2
    (graph,) = graphs
    assert graph.released
    assert graph.num_runs == 0


def test_a_rank_that_knows_of_a_problem_keeps_all_from_capturing(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
):
    def problems(host: object, device: object, tensors: object) -> Iterator[str]:
        yield "weight 'w' is on the CPU"

    monkeypatch.setattr("distmega.compiled.replay.tensor_breaks", problems)
    found = on_two_ranks(lambda step, rank: step.stats.reason)
    assert found == ["weight 'w' is on the CPU"] * 2
    assert not graphs


def test_a_host_program_is_proven_before_it_runs(monkeypatch: pytest.MonkeyPatch):
    num: list[object] = []
    prove_once.cache_clear()
    monkeypatch.setattr("distmega.hostir.check.check._prove", num.append)
    for _ in range(3):
        compile_counter()
    assert len(num) == 1

    def refuse(host: object) -> None:
        raise CheckError("a race", expected="none", remedy="wait")

    prove_once.cache_clear()
    monkeypatch.setattr("distmega.hostir.check.check._prove", refuse)
    with pytest.raises(CheckError, match="a race"):
        compile_counter()
    prove_once.cache_clear()


def test_the_first_problem_names_its_rank():
    class Two(SingleCommunicator):
        def __init__(self) -> None:
            self.mesh, self.rank = TWO, 0

        def all_gather_object(self, value: str, axis: str = "") -> list[str]:
            return [value, "no room"]

    assert cuda_graph.capture_on_ranks(Two(), "", pytest.fail) == (None, "rank 1: no room")
