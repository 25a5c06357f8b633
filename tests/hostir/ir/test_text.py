"""`parse(print(x)) == x` for random host programs, and errors that name the line."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import ParseError, VerifyError
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SymmetricBuffer
from distmega.hostir.ir.nodes import (
    Allocate,
    Binding,
    Collective,
    CollectiveKind,
    Deallocate,
    EndCoalescing,
    ForLoop,
    HostProgram,
    LaunchMegakernel,
    LibraryOp,
    Node,
    Peer,
    RecordEvent,
    Recv,
    Send,
    SetStream,
    Signal,
    SliceView,
    Slot,
    StartCoalescing,
    Wait,
    WaitEvent,
    WaitSignal,
)
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from distmega.program.builder import ProgramBuilder
from distmega.program.ops import norms
from distmega.program.types import Access, Axis, Index, Op, Tensor
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.pairs import PairKind
from tests.hostir.programs import RING, STREAMED, chain, local, mlp

names = st.from_regex(r"[a-z_][a-z0-9_.]{0,6}", fullmatch=True)
program_names = st.from_regex(r"[a-z]([a-z0-9 _.()]{0,6}[a-z0-9)])?", fullmatch=True)
axis_names = st.from_regex(r"[a-z][a-z0-9_]{0,3}", fullmatch=True)
whole = st.integers(0, 9)
slots = st.one_of(
    st.builds(Slot, base=whole), st.builds(Slot, base=whole, index=names, count=st.integers(1, 4))
)
peers = st.one_of(
    st.builds(Peer, mesh_axis=axis_names, offset=whole),
    st.builds(Peer, mesh_axis=axis_names, offset=st.integers(-3, 3), ring=st.just(True)),
)
scalars = st.one_of(
    st.booleans(),
    st.integers(-99, 99),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("abc(),.|*+ '", max_size=8),
)
attr_values = st.one_of(scalars, st.lists(scalars, max_size=3).map(tuple))
attrs = st.dictionaries(axis_names, attr_values, max_size=3).map(lambda d: tuple(sorted(d.items())))
groups = st.lists(names, max_size=3).map(tuple)
dims = st.one_of(
    st.builds(Index, offset=st.integers(-9, 9)),
    st.builds(
        Index,
        axes=st.lists(axis_names, min_size=1, max_size=2).map(tuple),
        offset=st.integers(-9, 9),
        stride=st.integers(1, 4),
    ),
)
accesses = st.builds(Access, tensor=names, dims=st.lists(dims, max_size=3).map(tuple))
axes = st.builds(
    Axis,
    name=axis_names,
    extent=st.integers(1, 99),
    role=st.sampled_from(["reduce", "scatter"]),
    combine=st.sampled_from(["", "sum", "argmax"]),
    lookup=st.booleans(),
)
library_ops = st.builds(
    Op,
    name=names,
    kind=st.sampled_from(["linear", "view", "set"]),
    axes=st.lists(axes, max_size=3).map(tuple),
    reads=st.lists(accesses, max_size=2).map(tuple),
    writes=st.lists(accesses, max_size=2).map(tuple),
    attrs=attrs,
)
LEAVES = {
    Allocate: st.builds(Allocate, buffer=names),
    Deallocate: st.builds(Deallocate, buffer=names),
    SetStream: st.builds(SetStream, stream=slots),
    RecordEvent: st.builds(RecordEvent, event=slots),
    WaitEvent: st.builds(WaitEvent, event=slots),
    LaunchMegakernel: st.builds(
        LaunchMegakernel,
        kernel=program_names,
        args=st.lists(st.builds(Binding, name=names, buffer=names), max_size=3).map(tuple),
    ),
    LibraryOp: st.builds(LibraryOp, op=library_ops),
    Collective: st.builds(
        Collective,
        kind=st.sampled_from(get_args(CollectiveKind)),
        mesh_axis=axis_names,
        ins=groups,
        outs=groups,
        handle=names,
        attrs=attrs,
    ),
    FusedMatmul: st.builds(
        FusedMatmul,
        kind=st.sampled_from(get_args(PairKind)),
        mesh_axis=axis_names,
        x=names,
        w=names,
        out=names,
        num_rows=whole,
        borrows=st.booleans(),
        replicated=st.booleans(),
        forced=st.booleans(),
    ),
    Send: st.builds(Send, buffer=names, peer=peers, handle=st.one_of(st.just(""), names)),
    Recv: st.builds(Recv, buffer=names, peer=peers, handle=st.one_of(st.just(""), names)),
    StartCoalescing: st.builds(StartCoalescing),
    EndCoalescing: st.builds(EndCoalescing, handle=names),
    Wait: st.builds(Wait, handle=names),
    Signal: st.builds(Signal, name=names, peer=peers),
    WaitSignal: st.builds(WaitSignal, name=names, peer=peers),
    SliceView: st.builds(
        SliceView,
        view=names,
        buffer=names,
        dim=whole,
        index=names,
        swizzle=st.one_of(st.just(""), axis_names),
    ),
}
leaves = st.one_of(*LEAVES.values())
nodes = st.recursive(
    leaves,
    lambda inner: st.builds(
        ForLoop, index=names, extent=whole, body=st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)
buffers = st.builds(
    Tensor,
    name=names,
    shape=st.lists(st.integers(1, 99), max_size=3).map(tuple),
    dtype=st.sampled_from(["f32", "bf16", "i64"]),
    role=st.sampled_from(["input", "weight", "state", "temp"]),
)
meshes = st.sampled_from(
    [DeviceMesh(tp=2), DeviceMesh(dp=2, tp=4), DeviceMesh.from_ranks([[3, 4], [0, 8]], ("a", "b"))]
)
programs = st.builds(
    HostProgram,
    name=program_names,
    mesh=meshes,
    buffers=st.lists(buffers, max_size=4).map(tuple),
    body=st.lists(nodes, max_size=8).map(tuple),
    outputs=groups,
    segments=st.lists(st.sampled_from([mlp(), chain()]), max_size=2).map(tuple),
    num_streams=st.integers(1, 4),
    num_events=whole,
    symmetric_buffers=st.lists(
        st.builds(SymmetricBuffer, mesh_axis=axis_names, num_bytes=whole), max_size=2
    ).map(tuple),
)


def test_every_node_kind_is_drawn():
    assert {*LEAVES, ForLoop} == set(get_args(Node))


@given(programs)
@settings(max_examples=150, deadline=None)
def test_parse_is_the_inverse_of_print(host: HostProgram):
    assert parse_host(print_host(host)) == host


WORDS = (
    "allocate all_reduce body broadcast coalesce end event for free host input launch record recv "
    "send signal slice state stream streams symmetric temp wait weight"
)


@pytest.mark.parametrize("name", WORDS.split())
def test_ops_and_buffers_may_be_called_as_nodes_are(name: str):
    p = ProgramBuilder(name)
    x = p.transpose(p.input("x", (2, 3)), (1, 0), name=name)
    program = p.build(p.op(norms.softmax, x), x)
    for megakernel in (False, True):
        host = lower_program(local(program), megakernel=megakernel, peer_memory=False)
        assert parse_host(print_host(run_passes(host))) == run_passes(host)


@pytest.mark.parametrize("text", [STREAMED, RING])
def test_print_is_the_inverse_of_parse(text: str):
    assert print_host(parse_host(text)).strip() == text.strip()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("allocate y", "allocat y", "allocat y"),
        ("streams 3, events 3", "streams many", "streams many"),
        ("record event 0", "record event zero", "zero"),
        ("host streamed on", "hots streamed on", "hots streamed"),
        ("  return y", "", "wait event 2"),
        ("  body\n", "", "allocate y"),
        ("combine='sum'", "combine=sum", "sum"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(old: str, new: str, named: str):
    with pytest.raises(ParseError, match=f"cannot read .*{named}"):
        parse_host(STREAMED.replace(old, new))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("\n".join("    " + "  " * i + f"for i{i} in 4:" for i in range(3000)), "at most 16"),
        ("    for i in " + "9" * 5000 + ":", "5000 digits"),
        ("    stream " + "9" * 20, "20 digits"),
        ("    all_reduce tp (" + ") -> (" * 100_000, "cannot read 'all_reduce tp"),
        ("    record event " + "1 + " * 200_000, "cannot read '1 "),
        ("    free " + "x" * 1_000_000, "line 4 of 1000009 characters"),
    ],
)
def test_what_is_too_large_is_refused(body: str, named: str):
    with pytest.raises(ParseError, match=named) as caught:
        parse_host(f"host p on mesh(tp=2)\n  streams 1, events 0\n  body\n{body}\n  return x\n")
    assert len(str(caught.value)) < 2000


def test_an_empty_text_is_refused():
    with pytest.raises(ParseError):
        parse_host("")


@pytest.mark.parametrize("fields", [{"base": -1}, {"base": 0, "count": 2}])
def test_slots_are_checked(fields: dict[str, int]):
    with pytest.raises(VerifyError, match=r"slot base="):
        Slot(**fields)
