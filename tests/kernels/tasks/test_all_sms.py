"""Every op that is large enough has tasks on all SMs: no instruction is a whole op."""

from collections.abc import Callable, Mapping

import pytest

from distmega.kernels.events import analyse_events, choose_tilings, make_queues
from distmega.kernels.megakernel import compile_megakernel
from distmega.program.builder import Handle, ProgramBuilder, Routing
from distmega.program.kinds import kinds
from distmega.program.ops import norms
from distmega.program.ops.attention import biased_attention
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh

NUM_SMS = 4
ROWS, COLUMNS, HEADS, DIM, CONTEXT, EXPERTS = 64, 1024, 8, 32, 128, 16
CACHE = HEADS, CONTEXT, DIM

State = Callable[[ProgramBuilder], object]
TOGETHER = {"route"}
"""Kinds that sort all rows together, by one task: numbers of 4 bytes, few of them."""


def rows(p: ProgramBuilder, num: int = 1) -> list[Handle]:
    return [p.input(f"x{i}", (ROWS, COLUMNS)) for i in range(num)]


def numbers(p: ProgramBuilder, name: str = "positions") -> Handle:
    return p.input(name, (ROWS,), "i64")


def limits(p: ProgramBuilder) -> Handle:
    return p.input("limits", (ROWS, 2))


def routing(p: ProgramBuilder) -> Routing:
    return p.route(p.input("ids", (ROWS, 2), "i32"), EXPERTS)


def grouped(p: ProgramBuilder) -> Handle:
    """Rows sorted by group."""
    return p.input("grouped", (2 * ROWS, COLUMNS))


def heads(p: ProgramBuilder) -> Handle:
    return p.input("heads", (ROWS, HEADS, DIM))


def attended(p: ProgramBuilder) -> tuple[Handle, Handle, Handle, Handle]:
    """Queries, keys, values and positions."""
    q = p.input("q", (ROWS, HEADS, 2, DIM))
    return q, p.state("k", CACHE), p.state("v", CACHE), numbers(p)


def attend(p: ProgramBuilder) -> Handle:
    q, k, v = (p.input(name, (2, HEADS, ROWS, DIM)) for name in "qkv")
    return p.attend(q, k, v, None, 0.25)


STATED: Mapping[str, State] = {
    "linear": lambda p: p.linear(*rows(p), p.weight("w", (512, COLUMNS))),
    "pointwise": lambda p: p.pointwise("a0 + a1", *rows(p, 2)),
    "reduce": lambda p: p.reduce(*rows(p), 1),
    "rms_norm": lambda p: p.rms_norm(*rows(p), p.weight("w", (COLUMNS,)), 1e-5),
    "layer_norm": lambda p: p.layer_norm(*rows(p), None, None, 1e-5),
    "softmax": lambda p: p.softmax(*rows(p)),
    "cumsum": lambda p: p.cumsum(*rows(p)),
    "cumprod": lambda p: p.op(norms.cumprod, *rows(p)),
    "rope": lambda p: p.rope(heads(p), numbers(p), p.weight("angles", (CONTEXT, DIM))),
    "kv_append": lambda p: p.kv_append(p.state("cache", CACHE), heads(p), numbers(p)),
    "attention": lambda p: p.attention(*attended(p), 0.25),
    "biased_attention": lambda p: p.op(
        biased_attention, *attended(p), p.weight("b", (CONTEXT, HEADS, 2)), scale=0.25
    ),
    "attend": attend,
    "embedding": lambda p: p.embedding(numbers(p), p.weight("table", (CONTEXT, COLUMNS))),
    "gather": lambda p: p.gather(*rows(p), p.input("at", (ROWS, COLUMNS), "i64"), 1),
    "topk": lambda p: p.topk(*rows(p), 5),
    "argmax": lambda p: p.argmax(*rows(p)),
    "top": lambda p: p.top(*rows(p), 5),
    "cutoff": lambda p: p.cutoff(*rows(p), p.input("settings", (ROWS, 3))),
    "sample": lambda p: p.sample(*rows(p), limits(p), numbers(p, "seeds"), numbers(p)),
    "set": lambda p: p.set(*rows(p)),
    "slice": lambda p: p.slice(*rows(p), 1, 0, COLUMNS, 2),
    "reshape": lambda p: p.reshape(*rows(p), (COLUMNS, ROWS)),
    "transpose": lambda p: p.transpose(*rows(p), (1, 0)),
    "concat": lambda p: p.concat(rows(p, 2), 1),
    "expand": lambda p: p.expand(*rows(p), (2, ROWS, COLUMNS)),
    "top_k": lambda p: p.top_k(*rows(p), 2),
    "route": routing,
    "gather_rows": lambda p: p.gather_rows(*rows(p), routing(p)),
    "grouped_linear": lambda p: p.grouped_linear(
        grouped(p), p.weight("w", (EXPERTS, 512, COLUMNS)), routing(p)
    ),
    "scatter_add": lambda p: p.scatter_add(grouped(p), p.input("weights", (ROWS, 2)), routing(p)),
}


def program_of(kind: str) -> Program:
    p = ProgramBuilder(kind)
    STATED[kind](p)
    return p.build()


def test_every_kind_of_a_megakernel_is_stated_above():
    told = {kind.name for kind in kinds() if kind.in_megakernel and kind.origin == "user"}
    assert told == STATED.keys()


@pytest.mark.parametrize("kind", sorted(STATED))
def test_an_op_that_is_large_enough_has_tasks_on_all_sms(kind: str):
    schedule = compile_megakernel(program_of(kind), DeviceMesh(tp=1), num_sms=NUM_SMS).schedule
    (last,) = (n for n, group in enumerate(schedule.graph.groups) if group.op.kind == kind)
    busy = {sm for sm, queue in enumerate(schedule.queues) for t in queue if t.group == last}
    assert len(busy) == (1 if kind in TOGETHER else NUM_SMS)


@pytest.mark.parametrize("kind", sorted(STATED))
def test_its_tiles_with_event_tensors_are_shared_out_too(kind: str):
    program = program_of(kind)
    name = program.ops[-1].name
    graph = analyse_events(program, choose_tilings(program, NUM_SMS))
    queues = make_queues(graph, NUM_SMS, "never")
    busy = {sm for sm, queue in enumerate(queues.sms) for e in queue if e.task[0] == name}
    assert len(busy) == (1 if kind in TOGETHER else NUM_SMS)
