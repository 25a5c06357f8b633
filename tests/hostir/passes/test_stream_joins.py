"""Streams meet only where one needs what another did."""

from distmega.hostir.ir.nodes import HostProgram
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.placements import stream
from tests.hostir.programs import require_every_wait
from tests.hostir.streams import ONE, assert_exact, lowered, words


def ordering(host: HostProgram) -> list[str]:
    """Streams, events and work outside of loops, and where the loops are."""
    return [
        "loop" if hasattr(node, "body") else word
        for node in host.body
        for word in words((node,))[:1]
        if not word.startswith(("allocate", "free", "slice"))
    ]


def apart() -> Program:
    """Two ops with nothing in common, and one that needs both."""
    p = ProgramBuilder("apart")
    x, z = p.input("x", (6, 4)), p.input("z", (5, 4))
    a, b = x.map("a0 + 1", name="a"), z.map("a0 * 2", name="b")
    c = p.concat([a, b], 0, name="c")
    return p.build(a, b, c)


def test_loops_that_have_nothing_in_common_are_joined_once():
    marks = {"a": stream(0, 3), "b": stream(1, 2), "c": stream(0, 1)}
    _, local, host = lowered(apart(), ONE, marks)
    assert ordering(host) == [
        "record event 0", "loop", "stream 0", "record event 0", "loop", "stream 0",
        "wait event 1", "wait event 2", "wait event 3", "concat",
    ]  # fmt: skip
    assert_exact(apart(), local, host)


def test_a_loop_that_nothing_needs_yet_stays_open_on_its_own_streams():
    """m waits for a's two streams, the third has only done b; the end waits for that one alone."""
    p = ProgramBuilder("open")
    a = p.input("x", (6, 4)).map("a0 + 1", name="a")
    b = p.input("z", (3, 3)).map("a0 * 2", name="b")
    program = p.build(p.reduce(a, 0, name="m"), b)
    _, local, host = lowered(program, ONE, {"a": stream(0, 2), "b": stream(0, 3)})
    assert ordering(host) == [
        "record event 0", "loop", "stream 0", "record event 0", "loop", "stream 0",
        "wait event 1", "wait event 2", "reduce", "wait event 3",
    ]  # fmt: skip
    assert_exact(program, local, host)
    require_every_wait(host)


def test_the_main_stream_goes_on_beside_a_loop_it_does_not_need():
    _, local, host = lowered(apart(), ONE, {"a": stream(0, 2)})
    assert ordering(host) == [
        "record event 0", "loop", "stream 0", "pointwise", "wait event 1", "wait event 2",
        "concat",
    ]  # fmt: skip
    assert_exact(apart(), local, host)


def test_a_loop_that_needs_another_waits_for_it_through_the_main_stream():
    p = ProgramBuilder("turned")
    x = p.input("x", (6, 4))
    a = x.map("a0 + 1", name="a")
    program = p.build(a.map("a0 * 2", name="b"))
    _, local, host = lowered(program, ONE, {"a": stream(0, 2), "b": stream(1, 2)})
    assert ordering(host) == [
        "record event 0", "loop", "stream 0", "wait event 1", "wait event 2", "record event 0",
        "loop", "stream 0", "wait event 1", "wait event 2",
    ]  # fmt: skip
    assert_exact(program, local, host)
    require_every_wait(host)
