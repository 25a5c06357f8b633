"""The happens-before checker: sound programs pass, and every wait of them is needed."""

import re
from contextlib import suppress
from dataclasses import replace

import pytest

from distmega.errors import CheckError, DistmegaError, VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.check.order_graph import Before
from distmega.hostir.ir.nodes import (
    HostProgram,
    LaunchMegakernel,
    walk_nodes,
)
from distmega.hostir.ir.text import parse_host, print_node
from distmega.hostir.ir.uses import node_reads, node_writes
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.coalesce import coalesce_send_recv
from distmega.hostir.passes.passes import run_passes
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.programs import (
    RING,
    STREAMED,
    chain,
    local,
    sharded_mlp,
    streamed,
    wait_numbers,
    without,
)

PIPELINED = """
host pipelined on mesh(tp=2)
  streams 3, events 6
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
    record event 0
    stream 1
    wait event 0
    a = pointwise[i:4] x(i) -> a(i) | expr='a0 + 1.0'
    record event 1
    all_reduce tp (a) -> (b) as sum | combine='sum'
    stream 2
    wait event 1
    c = pointwise[i:4] a(i) -> c(i) | expr='a0 * 2.0'
    record event 2
    stream 1
    wait event 2
    wait sum
    a = pointwise[i:4] b(i) -> a(i) | expr='a0 - 1.0'
    record event 3
    stream 0
    wait event 3
    y = pointwise[i:4] a(i) c(i) -> y(i) | expr='a0 + a1'
    free a
    free b
    free c
  return y
"""
"""Two streams beside the main one: write-after-read, a collective under way, a join, frees."""

PUSHED = """
host pushed on mesh(tp=2)
  streams 1, events 0
  input x: f32[4]
  temp y: f32[4]
  body
    allocate y
    signal ready to tp[+1]
    wait signal ready from tp[-1]
    coalesce
    send x to tp[+1]
    recv y from tp[-1]
    end coalesce as swap
    wait swap
  return y
"""


SOUND = [STREAMED, PIPELINED, PUSHED]


@pytest.mark.parametrize("text", SOUND)
def test_sound_programs_pass(text: str):
    check_host(parse_host(text))


@pytest.mark.parametrize(
    ("text", "number"),
    [(text, number) for text in SOUND for number in wait_numbers(parse_host(text))],
)
def test_every_wait_is_needed(text: str, number: int):
    host = parse_host(text)
    with pytest.raises(CheckError):
        check_host(without(host, number))


@pytest.mark.parametrize("megakernel", [False, True])
@pytest.mark.parametrize("peer_memory", [False, True])
def test_lowered_programs_pass(megakernel: bool, peer_memory: bool):
    for program in (local(chain()), sharded_mlp()):
        host = lower_program(program, megakernel=megakernel, peer_memory=peer_memory)
        check_host(host)
        check_host(run_passes(host))


def test_the_order_of_chunks_is_free():
    check_host(parse_host(STREAMED.replace("by i\n", "by i ring tp\n")))


def test_chunks_that_overlap_race():
    text = STREAMED.replace("slice y_i of y dim 0 by i", "y_i = view[m:2 n:4] y(m, n) -> y_i(m, n)")
    with pytest.raises(CheckError, match=r"buffer 'y_i': rank 0 node 9 i=1 .*is not ordered after"):
        check_host(parse_host(text))


def test_a_free_before_the_last_use_on_another_stream_is_caught():
    early = "    free c\n    stream 1\n    wait event 2"
    text = PIPELINED.replace("    free c\n", "").replace("    stream 1\n    wait event 2", early)
    with pytest.raises(CheckError, match=r"buffer 'c'.*is not ordered after .*free c"):
        check_host(parse_host(text))


def test_reading_what_nobody_wrote_is_caught():
    text = PIPELINED.replace("a(i) c(i) -> y(i)", "a(i) y(i) -> y(i)")
    with pytest.raises(CheckError, match=r"buffer 'y'.* reads what nobody wrote"):
        check_host(parse_host(text))


@pytest.mark.parametrize(("written", "left"), [((0,), "[2:6]"), ((0, 2), "[2:4]"), ((0, 1, 2), "")])
def test_each_part_of_what_is_read_must_be_written(written: tuple[int, ...], left: str):
    """Of six elements, so many pairs."""
    head = [
        "host p on mesh(tp=1)",
        "  streams 1, events 0",
        "  input x: f32[2]",
        "  temp y: f32[6]",
    ]
    head += [f"  temp y{n}: f32[2]" for n in written]
    body = [
        "allocate y",
        *(f"slice y{n} of y dim 0 by 0 + {n} step 2" for n in written),
    ]
    body += [f"y{n} = pointwise[i:2] x(i) -> y{n}(i) | expr='a0 + 1.0'" for n in written]
    text = "\n".join([*head, "  body", *(f"    {node}" for node in body), "  return y"])
    if not left:
        check_host(parse_host(text))
        return
    with pytest.raises(CheckError, match=re.escape(f"elements {left}, which nobody wrote")):
        check_host(parse_host(text))


def on_two_ranks(*bodies: list[str]) -> list[HostProgram]:
    """A program a rank, with an input x and a temp a."""
    head = "host p on mesh(tp=2)\n  streams 1, events 0\n  input x: f32[4]\n  temp a: f32[4]\n"
    return [
        parse_host(head + "  body\n" + "".join(f"    {n}\n" for n in body) + "  return\n")
        for body in bodies
    ]


def test_case_t22_a_cycle_of_signals_is_named():
    """Rank 0 waits e1 then signals e0 while rank 1 waits e0 then signals e1."""
    waits = [f"wait signal {name} from tp[+1]" for name in ("e1", "e0")]
    signals = [f"signal {name} to tp[+1]" for name in ("e0", "e1")]
    with pytest.raises(CheckError, match=r"rank 0 node 0 .*e1.* <- .*rank 1 node"):
        check_host(on_two_ranks([waits[0], signals[0]], [waits[1], signals[1]]))
    check_host(on_two_ranks([signals[0], waits[0]], [waits[1], signals[1]]))


@pytest.mark.parametrize("kind", ["signal", "wait signal"])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_a_counter_counts_comes_one_behind_the_other(kind: str, ordered: bool):
    """Two of one name on two streams: the counter does not tell which of them has come."""
    signals = kind == "signal"
    own, others = ("signal e to tp[+1]", "wait signal e from tp[+1]")[:: 1 if signals else -1]
    apart = ["record event 0", "stream 1", "wait event 0", own, "record event 1", "stream 2"]
    apart += ["wait event 1" if ordered else "wait event 0", own, "record event 2", "stream 0"]
    apart += ["wait event 1", "wait event 2"]
    head = "host p on mesh(tp=2)\n  streams 3, events 3\n  input x: f32[4]\n  body\n"
    texts = [head + "".join(f"    {n}\n" for n in body) for body in (apart, [others, others])]
    programs = [parse_host(text + "  return\n") for text in texts]
    if ordered:
        check_host(programs)
        return
    with pytest.raises(CheckError, match=r"may come before .*, which counts as the same"):
        check_host(programs)


def test_a_ring_must_be_coalesced():
    host = parse_host(RING)
    with pytest.raises(CheckError, match="wait for each other"):
        check_host(host)
    check_host(coalesce_send_recv(host))


EXCHANGE = """
host p on mesh(tp=2)
  streams 1, events 0
  input x: f32[4]
  input z: f32[2]
  temp a: f32[4]
  temp b: f32[2]
  body
    allocate a
    allocate b
    all_reduce tp (x) -> (a) as one | combine='sum'
    wait one
    all_reduce tp (z) -> (b) as two | combine='sum'
    wait two
  return a, b
"""


def test_ranks_must_start_the_same_exchanges_in_order():
    turned = EXCHANGE.replace("(x) -> (a)", "(?)").replace("(z) -> (b)", "(x) -> (a)")
    turned = turned.replace("(?)", "(z) -> (b)")
    with pytest.raises(CheckError, match=r"rank 0 node 2 .* meets rank 1 node 2"):
        check_host([parse_host(EXCHANGE), parse_host(turned)])
    shorter = "\n".join(line for line in EXCHANGE.splitlines() if "two" not in line)
    with pytest.raises(CheckError, match=r"rank 0 node 4 .*not met by the other ranks of \(0, 1\)"):
        check_host([parse_host(EXCHANGE), parse_host(shorter.replace("return a, b", "return a"))])


def test_a_collective_that_waits_for_a_later_one_elsewhere_is_a_cycle():
    """One rank signals after the exchange, the other waits for that before it takes part."""
    exchange = ["all_reduce tp (x) -> (a) as one | combine='sum'", "wait one"]
    first = ["allocate a", *exchange, "signal s to tp[+1]"]
    second = ["allocate a", "wait signal s from tp[+1]", *exchange]
    with pytest.raises(CheckError, match="wait for each other"):
        check_host(on_two_ranks(first, second))


def test_a_send_without_a_receive_finds_no_counterpart():
    text = RING.replace("    recv from_left from pp[-1] as in\n", "").replace("    wait in\n", "")
    with pytest.raises(CheckError, match=r"send x to pp\[\+1\] as out\) finds no counterpart"):
        check_host(parse_host(text.replace("return from_left", "return x")))


def test_pipelines_have_a_program_a_rank():
    head = (
        "host p on mesh(pp=2)\n  streams 1, events 0\n  {} x: f32[4]\n  body\n    {}\n  return x\n"
    )
    first = head.format("input", "send x to pp[1] as s\n    wait s")
    second = head.format("temp", "allocate x\n    recv x from pp[0] as r\n    wait r")
    check_host([parse_host(first), parse_host(second)])
    with pytest.raises(CheckError, match="never waits for"):
        check_host([parse_host(first), without(parse_host(second), 2)])


@pytest.mark.parametrize("text", [PIPELINED, PUSHED, STREAMED])
def test_a_text_with_a_line_too_few_or_twice_is_proven_or_refused_by_name(text: str):
    lines = text.splitlines()
    for number, line in enumerate(lines):
        for instead in ([], [line, line]):
            with suppress(DistmegaError):
                check_host(parse_host("\n".join([*lines[:number], *instead, *lines[number + 1 :]])))


def test_what_a_text_does_not_declare_or_allocate_is_named():
    with pytest.raises(VerifyError, match=r"node 2 \(allocate c\): 'c' is no buffer"):
        check_host(parse_host(PIPELINED.replace("  temp c: f32[4]\n", "")))
    with pytest.raises(VerifyError, match=r"index 'j' .*; expected one of the loops"):
        check_host(parse_host(STREAMED.replace("stream 1 + i % 2", "stream 1 + j % 2")))
    with pytest.raises(CheckError, match=r"rank 0 node 11 .* uses 'c', which has no storage there"):
        check_host(parse_host(PIPELINED.replace("    allocate c\n", "")))


def test_a_list_has_a_program_for_each_rank_of_one_mesh():
    host = parse_host(PIPELINED)
    with pytest.raises(CheckError, match=r"1 host program on mesh\(tp=2\); .*for each rank"):
        check_host([host])
    with pytest.raises(CheckError, match="0 host programs on no mesh"):
        check_host([])
    other = replace(host, mesh=DeviceMesh(dp=2))
    with pytest.raises(CheckError, match=r"on mesh\(tp=2\), mesh\(dp=2\); .*one mesh"):
        check_host([host, other])


def test_kernels_that_communicate_meet_like_collectives():
    host = lower_program(sharded_mlp(), megakernel=True, peer_memory=True)
    other = parse_host("host p on mesh(tp=2)\n  streams 1, events 0\n  body\n  return\n")
    with pytest.raises(CheckError, match=r"launch mlp.0.* is not met by the other ranks"):
        check_host([host, other])


def test_what_a_kernel_gives_and_reads_itself_needs_no_earlier_write():
    p = ProgramBuilder("both")
    h = p.input("x", (8,)).map("a0 + 1", name="h")
    host = lower_program(
        local(p.build(h, h.map("a0 * 2", name="y"))), megakernel=True, peer_memory=False
    )
    assert host.segments[0].outputs == ("h", "y")
    check_host(host)


def test_kernels_use_what_they_see_through_views():
    p = ProgramBuilder("through_views")
    state = p.state("s", (8,))
    p.set(p.input("x", (4,)), into=p.slice(state, 0, 4, 8, view=True))
    read = p.slice(p.state("r", (8,)), 0, 0, 4, view=True).map("a0 + 1", name="y")
    host = lower_program(local(p.build(read)), megakernel=True, peer_memory=False)
    (node,) = (node for node in host.body if isinstance(node, LaunchMegakernel))
    assert node_reads(node, host.segment_map()) == ("x", "r")
    assert node_writes(node, host.segment_map()) == ("s", "y")


def test_what_is_updated_in_place_is_written_before():
    text = """
host appends on mesh(tp=1)
  streams 1, events 0
  input x: f32[2, 1, 4]
  input at: i64[2]
  input zeros: f32[1, 8, 4]
  temp cache: f32[1, 8, 4]
  body
    allocate cache
    cache = set[i0:1 i1:8 i2:4] zeros(i0, i1, i2) -> cache(i0, i1, i2)
    append = kv_append[h:1 d:4 m:2:reduce t:8:scatter:lookup] x(m, h, d) at(m) -> cache(h, t, d)
  return cache
"""
    host = parse_host(text)
    check_host(host)
    with pytest.raises(CheckError, match=r"buffer 'cache'.* reads what nobody wrote"):
        check_host(without(host, 1))


def test_a_part_that_is_written_does_not_stand_for_the_whole():
    text = """
host halves on mesh(tp=1)
  streams 1, events 0
  input x: f32[2]
  temp a: f32[4]
  temp low: f32[2]
  temp y: f32[4]
  body
    allocate a
    a = concat[i:4] x(i) x(i-2) -> a(i) | dim=0
    low = view[i:2] a(i) -> low(i)
    low = set[i:2] x(i) -> low(i)
    allocate y
    y = set[i:4] a(i) -> y(i)
    free a
  return y
"""
    check_host(parse_host(text))
    unwritten = text.replace("    a = concat[i:4] x(i) x(i-2) -> a(i) | dim=0\n", "")
    with pytest.raises(CheckError, match=r"buffer 'a'.* reads what nobody wrote"):
        check_host(parse_host(unwritten))


def test_waits_are_only_removed_from_where_they_stand():
    host = streamed()
    texts = [print_node(node) for node in walk_nodes(without(host, 10).body)]
    assert len(texts) == len(list(walk_nodes(host.body))) - 1
    assert "wait sum" not in texts


@pytest.mark.parametrize("num", [20, 40])
def test_writes_of_one_buffer_are_compared_with_those_before_them_alone(
    num: int, monkeypatch: pytest.MonkeyPatch
):
    """However often a state is written, each write is asked of the uses since the one before."""
    asked: list[tuple[int, int]] = []

    class Counting(Before):
        def __call__(self, one: int, other: int) -> bool:
            asked.append((one, other))
            return super().__call__(one, other)

    monkeypatch.setattr("distmega.hostir.check.check.Before", Counting)
    p = ProgramBuilder("again")
    x, s = p.input("x", (4,)), p.state("s", (4,))
    for _ in range(num):
        p.set(x + s, into=s)
    host = run_passes(lower_program(local(p.build(s)), megakernel=False, peer_memory=False))
    check_host(host)
    assert len(asked) < 15 * num


ALL_AT_ONCE = """
host all_at_once on mesh(dp=2, tp=2)
  streams 1, events 0
  input x: f32[4]
  temp a: f32[4]
  temp b: f32[4]
  body
    allocate a
    all_reduce tp (x) -> (a) as one | combine='sum'
    allocate b
    all_reduce dp (x) -> (b) as two | combine='sum'
    wait one
    wait two
  return a, b
"""


def test_communications_of_two_axes_under_way_at_once_are_named():
    found = r"node 1 \(all_reduce tp.* may run beside rank 0 node 3 \(all_reduce dp"
    with pytest.raises(CheckError, match=found):
        check_host(parse_host(ALL_AT_ONCE))
