"""Each pass: the text it makes, and the result equal before and after."""

import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest
import torch

from distmega.errors import VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import (
    Deallocate,
    HostProgram,
    LaunchMegakernel,
    Wait,
    walk_nodes,
)
from distmega.hostir.ir.text import parse_host, print_host, print_node
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.coalesce import coalesce_send_recv
from distmega.hostir.passes.deallocations import insert_deallocations, peak_memory
from distmega.hostir.passes.event_waits import prune_event_waits
from distmega.hostir.passes.passes import PASSES, run_passes
from distmega.hostir.passes.sink_waits import sink_waits
from distmega.hostir.run.evaluator import Evaluator
from tests.hostir.programs import (
    RING,
    STREAMED,
    SegmentRunner,
    chain,
    local,
    random_tensors,
    streamed,
    without,
)
from tests.work import lines_run


def evaluate(host: HostProgram) -> dict[str, torch.Tensor]:
    """Outputs on a mesh of one rank."""
    runners = {segment.name: SegmentRunner(segment) for segment in host.segments}
    return Evaluator(host, SingleCommunicator(host.mesh), runners).run(random_tensors(host))


def assert_same_results(before: HostProgram, after: HostProgram) -> None:
    one, two = evaluate(before), evaluate(after)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def lines(host: HostProgram) -> list[str]:
    """The body, a line a node, ops by their name."""
    return [print_node(node).partition(" = ")[0] for node in walk_nodes(host.body)]


def body(text: str, *nodes: str) -> HostProgram:
    """A program over one rank: declarations, then nodes."""
    head = f"host p on mesh(tp=1)\n  streams 3, events 4\n{text}\n  body\n"
    return parse_host(head + "".join(f"    {node}\n" for node in nodes) + "  return y\n")


DECLARED = "  input x: f32[4]\n  temp a: f32[4]\n  temp b: f32[4]\n  temp y: f32[4]"


def op(out: str, *reads: str) -> str:
    """A line of a pointwise op."""
    operands = " ".join(f"{name}(i)" for name in reads)
    text = " + ".join(f"a{n}" for n in range(len(reads)))
    return f"{out} = pointwise[i:4] {operands} -> {out}(i) | expr='{text} + 1.0'"


def test_case_n21_frees_two_and_peaks_at_1536_bytes():
    host = lower_program(local(chain()), megakernel=False, peer_memory=False)
    freed = run_passes(host)
    assert [n.buffer for n in freed.body if isinstance(n, Deallocate)] == ["a", "b"]
    assert peak_memory(freed) == 1536
    assert peak_memory(host) == 4 * 512
    assert_same_results(host, freed)


def test_case_n21_as_three_segments():
    host = lower_program(
        local(chain()),
        megakernel=True,
        peer_memory=True,
        is_encodable=lambda op, tensors, _: op.name != "b",
    )
    freed = run_passes(host)
    assert sum(isinstance(n, LaunchMegakernel) for n in freed.body) == 2
    assert peak_memory(freed) == 1536
    assert_same_results(host, freed)


def test_deallocations_wait_for_views_handles_and_joins():
    text = STREAMED.replace("      free p_i\n", "").replace("return y", "return x")
    freed = insert_deallocations(parse_host(text))
    found = lines(freed)
    assert found[found.index("wait sum") + 1] == "record event 1 + i % 2"
    assert found[-4:] == ["stream 0", "wait event 1", "wait event 2", "free y"]
    assert found[found.index("record event 1 + i % 2") + 1] == "free p_i"


def test_a_temp_never_used_is_freed_at_once():
    host = body(DECLARED, "allocate a", "allocate y", op("y", "x"))
    assert lines(insert_deallocations(host)) == ["allocate a", "free a", "allocate y", "y"]


def test_outputs_are_never_freed_even_through_a_view():
    view = "y = view[i:4] a(i) -> y(i)"
    host = body(DECLARED, "allocate a", op("a", "x"), view)
    assert insert_deallocations(host) == host


def test_waits_sink_to_the_first_use():
    host = body(
        DECLARED,
        "allocate a",
        "allocate b",
        "allocate y",
        "all_reduce tp (x) -> (a) as one | combine='sum'",
        "wait one",
        op("b", "x"),
        "all_reduce tp (b) -> (y) as two | combine='sum'",
        "wait two",
        op("b", "a", "b"),
        op("y", "y", "b"),
    )
    sunk = sink_waits(host)
    assert [line.partition(" tp")[0] for line in lines(sunk)[3:]] == [
        "all_reduce", "b", "all_reduce", "wait one", "wait two", "b", "y",
    ]  # fmt: skip
    assert_same_results(host, sunk)


@pytest.mark.parametrize("fence", ["record event 0", "stream 1", "signal s to tp[0]", "coalesce"])
def test_waits_do_not_sink_past_what_hands_progress_on(fence: str):
    host = body(
        DECLARED, "allocate y", "all_reduce tp (x) -> (y) as one | combine='sum'", "wait one", fence
    )
    assert lines(sink_waits(host))[-2:] == ["wait one", fence]


def test_waits_stay_above_the_free_of_an_operand():
    host = body(
        DECLARED,
        "allocate a",
        "allocate y",
        op("a", "x"),
        "all_reduce tp (a) -> (y) as one | combine='sum'",
        "wait one",
        "free a",
    )
    assert sink_waits(host) == host


def test_sends_and_receives_coalesce():
    host = parse_host(RING)
    coalesced = coalesce_send_recv(host)
    assert lines(coalesced) == [
        "allocate from_left",
        "coalesce",
        "send x to pp[+1]",
        "recv from_left from pp[-1]",
        "end coalesce as out",
        "wait out",
        "signal done to pp[+1]",
        "wait signal done from pp[-1]",
    ]
    assert coalesce_send_recv(coalesced) == coalesced
    alone = parse_host(RING.replace("mesh(pp=3)", "mesh(pp=1)"))
    assert_same_results(alone, coalesce_send_recv(alone))


ON_TWO_STREAMS = """
host exchange on mesh(tp=2)
  streams 2, events 2
  input x: f32[4]
  temp y: f32[4]
  temp z: f32[4]
  body
    allocate y
    allocate z
    record event 0
    send x to tp[+1] as out
    recv y from tp[-1] as in
    wait out
    stream 1
    wait event 0
    wait in
    z = pointwise[i0:4] y(i0) -> z(i0) | expr='a0'
    record event 1
    stream 0
    wait event 1
    free y
  return z
"""


def test_what_two_streams_wait_for_stays_apart():
    host = verify_host(parse_host(ON_TWO_STREAMS))
    assert coalesce_send_recv(host) == host


@pytest.mark.parametrize("waited", [(0, 0, 1, 1), (0, 1, 1, 0), (1, 1, 1, 1)])
def test_each_stream_waits_for_its_own_exchange(waited: tuple[int, ...]):
    """Of four transfers that stand side by side, those that one stream waits for are one."""
    declared = "  streams 2, events 0\n  input x: f32[4]\n" + "".join(
        f"  temp y{n}: f32[4]\n" for n in range(4)
    )
    starts = [f"recv y{n} from tp[+1] as h{n}" for n in range(4)]
    waits = [
        line
        for stream in (0, 1)
        for line in (f"stream {stream}", *(f"wait h{n}" for n in range(4) if waited[n] == stream))
    ]
    text = (
        "host p on mesh(tp=1)\n"
        + declared
        + "  body\n"
        + "".join(
            f"    {line}\n" for line in (*(f"allocate y{n}" for n in range(4)), *starts, *waits)
        )
    )
    found = lines(coalesce_send_recv(parse_host(text + "  return\n")))
    runs = [len([*run]) for _, run in groupby(waited)]
    assert found.count("coalesce") == sum(run > 1 for run in runs)
    assert sum(line.startswith("wait h") for line in found) == len(runs)


def test_a_send_alone_needs_no_group():
    host = body(DECLARED, "send x to tp[+1] as out", "wait out")
    assert coalesce_send_recv(host) == host


def test_implied_event_waits_are_pruned():
    host = body(
        DECLARED,
        "allocate a",
        "allocate b",
        "allocate y",
        "record event 0",
        "stream 1",
        "wait event 0",
        op("a", "x"),
        "record event 1",
        "stream 2",
        "wait event 1",
        "wait event 0",
        op("b", "a"),
        "record event 2",
        "stream 0",
        "wait event 2",
        "wait event 1",
        "record event 3",
        "wait event 3",
        op("y", "a", "b"),
    )
    pruned = prune_event_waits(host)
    waits = [line for line in lines(pruned) if line.startswith("wait")]
    assert waits == ["wait event 0", "wait event 1", "wait event 2"]
    assert_same_results(host, pruned)


def test_needed_event_waits_stay():
    assert prune_event_waits(streamed()) == streamed()
    late = body(
        DECLARED,
        "record event 0",
        "stream 1",
        "wait event 0",
        "stream 0",
        op("y", "x"),
        "record event 0",
        "stream 1",
        "wait event 0",
    )
    assert prune_event_waits(late) == late


def test_the_runner_verifies_and_logs(caplog: pytest.LogCaptureFixture):
    host = lower_program(local(chain()), megakernel=False, peer_memory=False)
    with caplog.at_level(logging.DEBUG, "distmega.hostir.passes.passes"):
        run_passes(host)
    assert [record.args[1] for record in caplog.records] == [each.__name__ for each in PASSES]

    def break_it(host: HostProgram) -> HostProgram:
        return without(host, 0)

    with pytest.raises(VerifyError, match=r"node 0 .*rule buffer_lifetimes"):
        run_passes(host, passes=[break_it])


def test_the_runner_dumps_numbered_files(tmp_path: Path):
    host = lower_program(local(chain()), megakernel=False, peer_memory=False)
    last = run_passes(host, dump=tmp_path / "dump")
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    names = ["lowered", *(each.__name__ for each in PASSES)]
    assert files == [f"{n:02}_{name}.hostir" for n, name in enumerate(names)]
    assert (tmp_path / "dump" / files[-1]).read_text() == print_host(last)


REUSED = """
host reused on mesh(tp=2, dp=2)
  streams 1, events 0
  input x: f32[4]
  temp a: f32[4]
  temp b: f32[4]
  temp c: f32[4]
  temp y: f32[4]
  body
    allocate a
    allocate b
    allocate c
    allocate y
    send x to tp[+1] as one
    recv a from tp[-1] as two
    wait two
    wait one
    all_reduce dp (x) -> (b) as two | combine='sum'
    wait two
    all_reduce tp (x) -> (c) as two | combine='sum'
    wait two
    send x to tp[+1] as one
    recv a from tp[-1] as two
    wait one
    wait two
    all_reduce dp (x) -> (b) as one | combine='sum'
    wait one
    y = pointwise[i:4] a(i) b(i) c(i) -> y(i) | expr='a0 + a1 + a2'
  return y
"""


def test_a_handle_is_free_again_behind_its_wait():
    host = parse_host(REUSED)
    verify_host(host, freed=False)
    passed = run_passes(host)
    check_host(passed)
    assert sum(isinstance(node, Wait) for node in walk_nodes(passed.body)) == 5


def test_handles_that_are_used_again_are_waited_for_in_the_order_of_their_waits():
    """Alike in every process: ranks compare their programs."""
    num = 8
    names = [f"t{n}" for n in range(num)]
    total = " + ".join(f"a{n}" for n in range(num))
    reads = " ".join(f"{name}(i)" for name in names)

    def summed(order: Sequence[int]) -> str:
        parts = (
            f"    all_reduce tp (x) -> (t{n}) as h{n} | combine='sum'\n    wait h{n}\n"
            for n in order
        )
        op = f"    y = pointwise[i:4] {reads} -> y(i) | expr='{total}'\n"
        return "".join(parts) + op

    declared = "".join(f"  temp {name}: f32[4]\n" for name in (*names, "y"))
    given = "".join(f"    allocate {name}\n" for name in (*names, "y"))
    head = "host p on mesh(tp=2)\n  streams 1, events 0\n  input x: f32[4]\n"
    body = given + summed(range(num)) + summed(range(num)[::-1])
    host = sink_waits(parse_host(f"{head}{declared}  body\n{body}  return y\n"))
    waited = [node.handle for node in host.body if isinstance(node, Wait)]
    assert waited == [*(f"h{n}" for n in range(num)), *(f"h{n}" for n in range(num)[::-1])]


SIDE_BY_SIDE = """
host side_by_side on mesh(tp=2)
  streams 1, events 0
  input x: f32[4]
  temp a: f32[4]
  temp y: f32[4]
  body
    allocate a
    allocate y
    a = pointwise[i:4] x(i) -> a(i) | expr='a0 + 1.0'
    all_reduce tp (a) -> (y) as sum | combine='sum'
    wait sum
    send x to tp[+1] as there
    recv a from tp[-1] as here
    wait there
    wait here
    y = pointwise[i:4] a(i) y(i) -> y(i) | expr='a0 + a1'
  return y
"""


def test_waits_do_not_come_between_the_transfers_of_an_exchange():
    """Alone, each rank's receive would wait for a send behind another's receive."""
    host = run_passes(parse_host(SIDE_BY_SIDE))
    check_host(host)
    assert [line.split()[0] for line in lines(host)][3:7] == [
        "all_reduce",
        "wait",
        "coalesce",
        "send",
    ]


def test_work_of_sinking_waits_grows_with_the_number_of_communications():
    def under_way(num: int) -> HostProgram:
        declared = "".join(f"  temp t{n}: f32[4]\n" for n in range(num))
        nodes = (
            f"    allocate t{n}\n    all_reduce tp (x) -> (t{n}) as h{n} | combine='sum'\n"
            f"    wait h{n}\n"
            for n in range(num)
        )
        head = "host p on mesh(tp=2)\n  streams 1, events 0\n  input x: f32[4]\n"
        results = ", ".join(f"t{n}" for n in range(num))
        return parse_host(f"{head}{declared}  body\n{''.join(nodes)}  return {results}\n")

    few, many = under_way(20), under_way(80)
    assert lines(sink_waits(many))[-80:] == [f"wait h{n}" for n in range(80)]
    assert lines_run(lambda: sink_waits(many)) < 6 * lines_run(lambda: sink_waits(few))
