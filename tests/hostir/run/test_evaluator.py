"""The evaluator on one rank: equal to plain torch, and errors that name the node."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.errors import ProgramError, RankFailure, RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.ir.text import parse_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.hostir.run.evaluator import Evaluator
from distmega.hostir.run.timeline import HostClock
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.hostir import streams
from tests.hostir.programs import (
    RING,
    STREAMED,
    SegmentRunner,
    local,
    mlp,
    random_tensors,
    with_views,
)


class Noting(SegmentRunner):
    """Notes its launches."""

    def __init__(self, segment: Program, seen: list[str]) -> None:
        super().__init__(segment)
        self.seen = seen

    def launch(self, tensors: Mapping[str, Tensor]) -> None:
        self.seen.append(self.segment.name)
        super().launch(tensors)


def lowered(program: Program, *, megakernel: bool, **options: frozenset[str]) -> HostProgram:
    """The program of one rank, through all passes."""
    host = lower_program(local(program), megakernel=megakernel, peer_memory=True, **options)
    return run_passes(host)


def evaluator(host: HostProgram) -> Evaluator:
    """On a mesh of one rank, kernels as plain Python."""
    runners = {segment.name: SegmentRunner(segment) for segment in host.segments}
    return Evaluator(host, SingleCommunicator(host.mesh), runners)


@pytest.mark.parametrize("megakernel", [False, True])
def test_mlp_equals_torch(megakernel: bool):
    host = lowered(mlp(), megakernel=megakernel)
    tensors, run = random_tensors(host), evaluator(host)
    expected = F.silu(tensors["x"] @ tensors["w1"].T) @ tensors["w2"].T
    for _ in range(2):
        torch.testing.assert_close(run.run(tensors)["y"], expected)


@pytest.mark.parametrize(
    ("megakernel", "apart"), [(False, "reduce"), (True, "nothing"), (True, "reduce")]
)
def test_views_share_storage(megakernel: bool, apart: str):
    options = {"is_encodable": lambda op, *_: op.kind != apart}
    host = lowered(with_views(), megakernel=megakernel, **options)
    tensors = random_tensors(host)
    found = evaluator(host).run(tensors)
    a = tensors["x"] + 1
    half = a.flatten()[:12]
    assert torch.equal(found["top"], (half * 2).amax(0))
    assert torch.equal(found["c"], torch.cat((half * 2, half)))
    assert torch.equal(found["turned"], a.T)


def test_outputs_that_turn_a_sum_over_ranks_show_it():
    """Views come before the wait for the sum."""
    p = ProgramBuilder("turned")
    x, w = p.input("x", (6, 4)), p.weight("w", (2, 4))
    program = p.build(p.transpose(p.linear(x, w), (1, 0), view=True))
    _, split, host = streams.lowered(program, streams.TP, streams.SPLIT_SUM)
    streams.assert_exact(program, split, host)


def test_another_evaluator_is_watched_or_has_other_kernels():
    host, kernels = lowered(mlp(), megakernel=False), lowered(mlp(), megakernel=True)
    tensors, clock = random_tensors(host), HostClock()
    plain = evaluator(host)
    expected = plain.watched(clock.watch).run(tensors)["y"]
    seen = {word: len(times) for word, times in clock.times_us.items()}
    assert seen["linear"] == 2
    assert torch.equal(plain.run(tensors)["y"], expected)
    assert seen == {word: len(times) for word, times in clock.times_us.items()}
    (segment,), seen = kernels.segments, []
    other = evaluator(kernels).watched(kernels={segment.name: Noting(segment, seen)})
    torch.testing.assert_close(other.run(tensors)["y"], expected)
    assert seen == [segment.name]


@pytest.mark.parametrize("megakernel", [False, True])
def test_what_is_overwritten_keeps_its_type(megakernel: bool):
    p = ProgramBuilder("narrowed")
    x = p.input("x", (3,))
    half = p.pointwise("a0 * 2", x, dtype="bf16", name="half")
    p.set(x, into=half)
    host = lowered(p.build(half.map("a0 + 1", name="y"), half), megakernel=megakernel)
    tensors = random_tensors(host)
    found = evaluator(host).run(tensors)
    assert torch.equal(found["half"], tensors["x"].bfloat16())
    assert torch.equal(found["y"], found["half"] + 1)


@pytest.mark.parametrize("megakernel", [False, True])
def test_states_live_across_calls(megakernel: bool):
    p = ProgramBuilder("counter")
    total = p.state("total", (3,))
    x = p.input("x", (3,))
    doubled = total.map("a0 * 2", name="doubled")
    p.set(p.pointwise("a0 + a1", total, x), into=total)
    host = lowered(p.build(doubled, total), megakernel=megakernel)
    run, state = evaluator(host), torch.zeros(3)
    for step in range(1, 4):
        found = run.run({"total": state, "x": torch.ones(3)})
        assert found["total"] is state
        assert found["doubled"].tolist() == [2.0 * (step - 1)] * 3
        assert state.tolist() == [float(step)] * 3


def test_an_overwritten_temp_is_seen_through_its_view():
    p = ProgramBuilder("aliased")
    x = p.input("x", (4,))
    a = x.map("a0 + 1", name="a")
    head = p.slice(a, 0, 0, 2, view=True, name="head")
    p.set(x, into=a)
    host = lowered(p.build(head.map("a0 * 10", name="y")), megakernel=False)
    assert evaluator(host).run({"x": torch.arange(4.0)})["y"].tolist() == [0.0, 10.0]


SHOWN_EARLY = """
host early on mesh(tp=1)
  streams 1, events 0
  input x: f32[2, 3]
  temp a: f32[2, 3]
  temp turned: f32[3, 2]
  body
    allocate a
    all_reduce tp (x) -> (a) as a.all_reduce | combine='sum'
    turned = view[i1:3 i0:2] a(i0, i1) -> turned(i1, i0)
    wait a.all_reduce
  return turned
"""


def test_an_output_that_is_a_view_shows_what_is_written_after_it():
    host = parse_host(SHOWN_EARLY)
    tensors = random_tensors(host)
    assert torch.equal(evaluator(host).run(tensors)["turned"], tensors["x"].T)


def test_a_streamed_loop_equals_the_whole():
    host = parse_host(STREAMED.replace("tp=2", "tp=1"))
    tensors = random_tensors(host)
    found = evaluator(host).run(tensors)["y"]
    torch.testing.assert_close(found, tensors["x"] @ tensors["w"].T)


def test_ring_order_visits_every_chunk():
    host = parse_host(STREAMED.replace("tp=2", "tp=1").replace("by i\n", "by i ring tp\n"))
    tensors = random_tensors(host)
    found = evaluator(host).run(tensors)["y"]
    torch.testing.assert_close(found, tensors["x"] @ tensors["w"].T)


def test_a_rank_alone_sends_to_itself():
    host = parse_host(RING.replace("pp=3", "pp=1"))
    tensors = random_tensors(host)
    assert torch.equal(evaluator(host).run(tensors)["from_left"], tensors["x"])


def test_a_missing_kernel_is_named():
    host = lowered(mlp(), megakernel=True)
    with pytest.raises(ProgramError, match=r"no kernels for segments \['mlp.0'\]"):
        Evaluator(host, SingleCommunicator(host.mesh), {})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (None, r"no tensor for weight 'w1'; expected f32\[16, 8\]; pass every input"),
        ([0.0], r"no tensor for weight 'w1'; expected f32\[16, 8\]"),
        (torch.zeros(8, 16), r"f32\[8, 16\] for weight 'w1'; .*; give this rank's part of it"),
        (torch.zeros(16, 8, dtype=torch.float64), r"f64\[16, 8\] for weight 'w1'"),
        (torch.zeros(16, 8, dtype=torch.uint8), r"torch.uint8\[16, 8\] for weight 'w1'"),
    ],
)
def test_tensors_are_checked(wrong: torch.Tensor | list[float] | None, named: str):
    host = lowered(mlp(), megakernel=False)
    tensors = random_tensors(host)
    del tensors["w1"]
    if wrong is not None:
        tensors["w1"] = wrong  # type: ignore[assignment]
    with pytest.raises(ProgramError, match=named):
        evaluator(host).run(tensors)


def test_a_failing_node_is_named():
    p = ProgramBuilder("append")
    cache, x, at = p.state("cache", (1, 4, 2)), p.input("x", (1, 1, 2)), p.input("at", (1,), "i64")
    p.kv_append(cache, x, at, name="more")
    host = lowered(p.build(cache), megakernel=False)
    with torch.inference_mode():
        cache = torch.zeros(1, 4, 2)  # which torch lets nobody change outside of that mode
    given = {"cache": cache, "x": torch.zeros(1, 1, 2), "at": torch.tensor([3])}
    failed = r"node 0 \(more = kv_append.*rank 0 failed: RuntimeError"
    with pytest.raises(RankFailure, match=failed):
        evaluator(host).run(given)


def test_a_node_that_raises_an_error_of_ours_is_named_in_a_note():
    p = ProgramBuilder("lookup")
    ids, table = p.input("ids", (1,), "i64"), p.weight("table", (4, 2))
    host = lowered(p.build(p.embedding(ids, table, name="row")), megakernel=False)
    with pytest.raises(RequestError, match="an id of 7 in a table of 4 rows") as error:
        evaluator(host).run({"ids": torch.tensor([7]), "table": torch.zeros(4, 2)})
    assert "node 1 (row = embedding" in error.value.__notes__[0]


def test_a_failure_in_a_loop_names_the_inner_node():
    text = STREAMED.replace("tp=2", "tp=1")
    host = parse_host(text)

    class Broken(SingleCommunicator):
        def all_reduce(self, *args: object) -> None:
            raise RankFailure("link is down", expected="a link", remedy="mend it")

    with pytest.raises(RankFailure, match="link is down") as caught:
        Evaluator(host, Broken(host.mesh), {}).run(random_tensors(host))
    (note,) = caught.value.__notes__
    assert note.startswith("at node 9 (all_reduce tp (p_i) -> (y_i)")
