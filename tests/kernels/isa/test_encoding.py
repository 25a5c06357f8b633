"""Device words: every instruction survives the round trip, and the layout of a record is as
stated.
"""

from dataclasses import fields
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmega.errors import CheckError, ProgramError, UnsupportedError
from distmega.kernels.isa import encoding
from distmega.kernels.isa.encoder import encode
from distmega.kernels.isa.encoding import MAX_WAITS, WORDS, Header, pack, unpack
from distmega.kernels.isa.opcodes import OPCODES, Linear, Nop, Norm, Ref
from distmega.kernels.runtime.arena import Space, layout_segment
from distmega.kernels.tasks.graph import build_task_graph
from distmega.kernels.tasks.schedule import schedule_graph
from distmega.kernels.tasks.tile import tile_segment
from distmega.kernels.tasks.types import (
    Schedule,
    ScheduledTask,
    TaskGraph,
    TaskGroup,
    TaskSignal,
    TaskWait,
)
from distmega.program import expr
from distmega.program.dtypes import ITEM_BYTES
from distmega.program.types import Program
from tests.kernels.programs import decoder

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
REFS = st.builds(
    Ref,
    space=st.sampled_from(Space),
    dtype=st.sampled_from(list(ITEM_BYTES)),
    base=st.integers(0, 2**31 - 1),
    first=INT32,
)
HEADERS = st.builds(
    Header,
    group=st.integers(0, 2**31 - 1),
    task=st.integers(0, 2**31 - 1),
    wait=st.integers(0, 2**31 - 1),
    num_waits=st.integers(0, MAX_WAITS),
    signal=st.integers(0, 2**31 - 1),
    num_signals=st.integers(0, encoding.MAX_SIGNALS),
)


def values_of(hint):
    """A strategy for a field of this annotation."""
    if hint is Ref:
        return REFS
    if hint is float:
        return FLOAT32
    if hint is int:
        return INT32
    if get_origin(hint) is tuple:
        return st.tuples(*(INT32 for _ in get_args(hint)))
    return st.none() | REFS


def instructions():
    choices = []
    for kind in OPCODES:
        hints = get_type_hints(kind)
        choices.append(st.builds(kind, **{f.name: values_of(hints[f.name]) for f in fields(kind)}))
    return st.one_of(choices)


@given(instructions(), HEADERS)
@settings(max_examples=400, deadline=None)
def test_records_round_trip(instruction, header):
    record = pack(instruction, header)
    assert record.shape == (WORDS,)
    assert record.dtype == np.int32
    assert unpack(record) == (header, instruction)
    assert type(instruction).__name__ in encoding.describe(record)


def linear(**changes) -> Linear:
    ref = Ref(space=Space.ACT, dtype="f32", base=1, first=0)
    weight = Ref(space=Space.WEIGHT, dtype="bf16", base=2, first=640)
    values = {
        "x": ref, "w": weight, "bias": None, "out": ref, "m": 1, "n": 8, "k": 64,
        "x_strides": (64, 1), "w_strides": (64, 1), "bias_stride": 0, "out_strides": (8, 1),
    }  # fmt: skip
    return Linear(**values | changes)


def test_the_layout_of_a_record_is_fixed():
    """A GPU kernel reads these words: a change here is a change there."""
    header = Header(group=3, task=5, wait=7, num_waits=2, signal=9, num_signals=1)
    words = pack(linear(), header).tolist()
    types = (1 + 2 * 8 + 1) | (1 + 0 * 8 + 2) << 6 | 0 << 12 | (1 + 2 * 8 + 1) << 18
    assert words[:6] == [OPCODES.index(Linear) | 2 << 8 | 1 << 20, 3, 5, 7, 9, types]
    assert words[6:14] == [1, 0, 2, 640, 0, 0, 1, 0]
    assert words[14:24] == [1, 8, 64, 64, 1, 64, 1, 0, 8, 1]
    assert words[24:] == [0] * 8


def test_a_record_reads_as_one_line():
    header = Header(group=0, task=5, wait=7, num_waits=2, signal=9, num_signals=1)
    assert encoding.describe(pack(linear(), header), ("layers.0.wq",)) == (
        "layers.0.wq[5] Linear x=act+0x80:f32 w=weight+0x100[640]:bf16 out=act+0x80:f32 "
        "m=1 n=8 k=64 x_strides=(64,1) w_strides=(64,1) bias_stride=0 out_strides=(8,1) "
        "| waits 7..8 | signals 9..9"
    )


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(ProgramError, match="beyond int32"):
        pack(linear(n=2**31), Header(group=0, task=0))
    with pytest.raises(ProgramError, match="5000 waits"):
        pack(Nop(), Header(group=0, task=0, num_waits=5000))
    x = linear().x
    sizes = {"kind": 0, "rows": 1, "dim": 8, "start": 0, "count": 8}
    strides = dict.fromkeys(("x_strides", "vector_strides", "out_strides"), (8, 1))
    norm = Norm(x=x, weight=None, bias=None, out=x, eps=1e39, **sizes, **strides)
    with pytest.raises(UnsupportedError, match=r"Norm with eps=1e\+39; expected a number that f32"):
        pack(norm, Header(group=0, task=0))


TREES = st.recursive(
    st.builds(expr.Arg, st.integers(0, 3)) | st.builds(expr.Const, st.floats(allow_nan=False)),
    lambda inner: st.sampled_from(list(expr.FUNCTIONS)).flatmap(
        lambda fn: st.builds(expr.Call, st.just(fn), st.tuples(*[inner] * expr.FUNCTIONS[fn]))
    ),
)


@given(st.lists(TREES, min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_expressions_round_trip(trees):
    words, starts = [], []
    for tree in trees:
        starts.append(len(words))
        words += encoding.pack_expression(tree)
    table = np.array(words, dtype=np.int32)
    assert [encoding.unpack_expression(table, start) for start in starts] == trees


def encoded(program: Program, num_sms: int = 3):
    groups = tile_segment(program, num_sms, min_task_bytes=256)
    schedule = schedule_graph(build_task_graph(program, groups), num_sms)
    return schedule, encode(schedule, layout_segment(program))


def test_queues_hold_the_tasks_of_the_schedule():
    schedule, words = encoded(decoder(2))
    for queue, records, length in zip(schedule.queues, words.queues, words.lengths, strict=True):
        found = []
        for record in records[:length]:
            header, _ = unpack(record)
            rows = words.waits[header.wait : header.wait + header.num_waits].tolist()
            signals = words.signals[header.signal : header.signal + header.num_signals].tolist()
            found.append((header.group, header.task, rows, signals))
        assert found == [
            (
                t.group,
                t.task,
                [[w.event, w.count, -1] for w in t.waits],
                [[s.event, -1] for s in t.signals],
            )
            for t in queue
        ]
        assert (records[length:] == 0).all()


def test_equal_layers_differ_in_their_bases_alone():
    program = decoder(3)
    _, words = encoded(program, 1)
    by_name = {}
    for record in words.queues[0]:
        header, _ = unpack(record)
        by_name.setdefault(words.names[header.group], []).append(record)
    places = [op.name for op in program.ops if op.kind == "attention"]
    first, second, third = (by_name[name][0] for name in places)
    bases = list(encoding.base_columns(int(first[0]) & 0xFF))
    kept = [i for i in range(5, WORDS) if i not in bases]
    assert (first[kept] == second[kept]).all()
    assert (first[bases] != second[bases]).any()
    assert (second[bases] != third[bases]).any()
    assert len({op.attr("expr") for op in program.ops if op.kind == "pointwise"}) == 2
    assert words.constants.tolist().count(0) >= 2


def test_fingerprints_tell_schedules_apart():
    program = decoder(1)
    first, again, other = (encoded(program, n)[1].fingerprint() for n in (2, 2, 3))
    assert first == again != other


def test_a_wait_that_ranks_can_not_share_evenly_is_refused():
    (op,) = (op for op in decoder(1, tp=2).ops if op.name == "all_reduce.attn.0.push")
    graph = TaskGraph(
        segment=decoder(1, tp=2), groups=(TaskGroup(op=op, all_ranks=True),), events=(), team_size=2
    )
    signal = TaskSignal(event=0, all_ranks=True)
    queue = (
        ScheduledTask(group=0, task=0, waits=(), signals=(signal,)),
        ScheduledTask(group=0, task=0, waits=(TaskWait(event=0, count=3),), signals=()),
    )
    broken = Schedule(graph=graph, queues=(queue,), num_events=1)
    with pytest.raises(CheckError, match="3 triggers of event 0 from 2 ranks"):
        encode(broken, layout_segment(graph.segment), [("tp", 2)])


def test_queues_read_as_text():
    schedule, words = encoded(decoder(1))
    lines = words.disassemble().splitlines()
    assert [line for line in lines if line.startswith("SM")] == ["SM 0", "SM 1", "SM 2"]
    assert len(lines) == 3 + sum(map(len, schedule.queues))
    assert any(line.startswith("  next[0] Argmax x=act+") for line in lines)
