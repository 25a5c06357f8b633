"""Programs of 2 to 16 rows other than decoders in one kernel: what their queues hold, that they are
proven, what is refused; and that changed queues are not.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.models import gated_mlp
from distmega.errors import UnsupportedError
from distmega.kernels.hopper.batch_plan.proof import find_batch_hazard
from distmega.kernels.hopper.batch_plan.queues import apart, build_batch_queues
from distmega.kernels.hopper.batch_plan.types import BatchQueues
from distmega.kernels.hopper.batch_plan.words import (
    NORM_KINDS,
    BatchEmbed,
    BatchInstruction,
    BatchLinear,
    BatchNorm,
)
from distmega.kernels.hopper.plan.extents import count_rows
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.machines import H200
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import fuse_segment
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program

EPS = 1e-5
WIDE, INNER = 256, 640


class Maker:
    """A program of rows, with weights by name."""

    def __init__(self, rows: int, dtype: str = "bf16") -> None:
        self.p, self.rows, self.dtype = ProgramBuilder("rows"), rows, dtype

    def input(self, columns: int = WIDE) -> Handle:
        return self.p.input("x", (self.rows, columns), self.dtype)

    def linear(self, x: Handle, name: str, rows: int, *, bias: bool = False) -> Handle:
        w = self.p.weight(name, (rows, x.shape[-1]), self.dtype)
        return self.p.linear(
            x,
            w,
            self.p.weight(f"{name}.b", (rows,), self.dtype) if bias else None,
            name=f"{name}.y",
        )

    def rms(self, x: Handle, name: str) -> Handle:
        return self.p.rms_norm(
            x, self.p.weight(name, x.shape[-1:], self.dtype), EPS, name=f"{name}.y"
        )

    def layer_norm(self, x: Handle, name: str) -> Handle:
        vectors = (self.p.weight(n, x.shape[-1:], self.dtype) for n in (name, f"{name}.b"))
        return self.p.layer_norm(x, *vectors, EPS, name=f"{name}.y")


def gated(m: Maker) -> Handle:
    x = m.input()
    for i in range(3):
        h = m.rms(x, f"n{i}")
        mixed = m.p.pointwise(
            "tanh(a0) + a1", m.linear(h, f"g{i}", INNER), m.linear(h, f"u{i}", INNER)
        )
        x = m.p.pointwise("a0 + a1", x, m.linear(mixed, f"d{i}", WIDE))
    return x


def layer_normed(m: Maker) -> Handle:
    x = m.input()
    for i in range(2):
        h = m.linear(m.layer_norm(x, f"n{i}"), f"u{i}", INNER, bias=True).map("gelu(a0)")
        x = m.p.pointwise("a0 * 0.5 + a1", m.linear(h, f"d{i}", WIDE, bias=True), x)
    return x


def post_normed(m: Maker) -> Handle:
    """x = norm(x + f(x)): the norm of a sum is read by linears and by the next sum."""
    x = m.input()
    for i in range(2):
        h = m.linear(x, f"u{i}", INNER).map("relu(a0)")
        x = m.rms(m.p.pointwise("a0 + a1", x, m.linear(h, f"d{i}", WIDE)), f"n{i}")
    return m.linear(x, "out", 192)


def chain(m: Maker) -> Handle:
    x = m.input(128)
    for i, rows in enumerate((192, 1088, 64)):
        x = m.linear(x, f"w{i}", rows)
    return x


def forked(m: Maker) -> Handle:
    """Two linears of one x, each read by another; x raw, after one norm and after a second."""
    x = m.input()
    a = m.linear(m.linear(x, "a", 320), "aa", WIDE)
    b = m.linear(m.linear(m.rms(x, "n"), "b", 192), "bb", WIDE)
    c = m.linear(m.layer_norm(x, "l"), "c", WIDE)
    return m.p.pointwise("a0 * a1 - a2", c, a, b)


def attending(m: Maker) -> Handle:
    """Two layers of attention without rotation, 6 heads of 64 over 2 caches a row."""
    heads, dim, cached = 2, 64, 256
    x, at = m.input(), m.p.input("positions", (m.rows,), "i64")
    for i in range(2):
        h = m.layer_norm(x, f"n{i}")
        q = m.linear(h, f"q{i}", 3 * heads * dim, bias=True)
        q = m.p.reshape(q, (m.rows, heads, 3, dim), view=True)
        caches = [m.p.state(f"{name}{i}", (m.rows, heads, cached, dim), "bf16") for name in "kv"]
        for cache in caches:
            new = m.linear(h, f"w{cache.name}", heads * dim, bias=True)
            m.p.kv_append(cache, m.p.reshape(new, (m.rows, heads, dim), view=True), at)
        mixed = m.p.attention(q, *caches, at, dim**-0.5)
        mixed = m.p.reshape(mixed, (m.rows, 3 * heads * dim), view=True)
        x = m.p.pointwise("a0 + a1", x, m.linear(mixed, f"o{i}", WIDE, bias=True))
    return x


def odd(m: Maker) -> Handle:
    """Rows that are no multiple of 64 elements."""
    x = m.input(160)
    for i, inner in enumerate((200, 1096)):
        h = m.rms(x, f"n{i}")
        pair = (m.linear(h, f"{name}{i}", inner, bias=True) for name in "gu")
        mixed = m.p.pointwise("silu(a0) * a1", *pair)
        x = m.p.pointwise("a0 + a1", x, m.linear(mixed, f"d{i}", 160, bias=True))
    return m.linear(m.layer_norm(x, "last"), "head", 72)


PROGRAMS: dict[str, Callable[[Maker], Handle]] = {
    "gated": gated, "layer norms": layer_normed, "chain": chain, "forked": forked,
    "post norms": post_normed, "attention": attending, "odd sizes": odd,
}  # fmt: skip


def build(program: Program, num_sms: int = 132) -> BatchQueues:
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    return build_batch_queues(program, weights, states, num_sms)


def program_of(name: str, rows: int = 16, dtype: str = "bf16") -> Program:
    m = Maker(rows, dtype)
    return m.p.build(PROGRAMS[name](m))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("rows", "num_sms"), [(16, 132), (4, 132), (2, 3)])
def test_programs_are_proven(name: str, rows: int, num_sms: int):
    program = program_of(name, rows)
    assert count_rows(program) == rows
    queues = build(program, num_sms)
    assert queues.batch == rows
    assert len(queues.queues) == num_sms
    (out,) = queues.outputs
    assert out.num * rows == program.tensor_map()[out.tensor].num_elements


def test_rms_norms_cost_no_instruction_and_layer_norms_one():
    kinds = [type(one) for one in build(program_of("gated")).queues[0]]
    assert kinds == [BatchEmbed, *[BatchLinear] * 6]
    queues = build(program_of("layer norms"))
    (queue, *_) = queues.queues
    assert [type(one) for one in queue] == [
        BatchEmbed, *[BatchNorm, BatchLinear, BatchLinear] * 2
    ]  # fmt: skip
    norms = [one for one in queue if isinstance(one, BatchNorm)]
    assert {NORM_KINDS[one.kind] for one in norms} == {"layer_norm"}
    assert queues.normalises


def test_epilogues_are_those_of_the_program():
    epilogues = build(program_of("gated")).epilogues
    mixed, summed, last = epilogues.each
    assert (mixed.num_streams, mixed.num_carried, mixed.keeps) == (2, 0, False)
    assert (summed.num_streams, summed.num_carried, summed.keeps) == (1, 1, True)
    assert summed.scaled
    assert last == replace(summed, publishes=False, scaled=False)


def test_a_third_operand_is_refused():
    m = Maker(4)
    x = m.input()
    a, b = (m.linear(x, name, WIDE) for name in "ab")
    u = m.linear(a.map("relu(a0)"), "u", WIDE)
    y = m.p.pointwise("a0 * a1 + a2 + a3", m.linear(u, "c", WIDE), x, b, u)
    with pytest.raises(UnsupportedError, match="whose epilogue takes"):
        build(m.p.build(y))


@pytest.mark.parametrize(
    ("rows", "columns", "found"),
    [(17, 256, "17 rows"), (4, 164, "rows of .164"), (2, 2**20, "rows of .1048576")],
)
def test_what_no_body_takes_is_refused_by_name(rows: int, columns: int, found: str):
    m = Maker(rows)
    with pytest.raises(UnsupportedError, match=found):
        build(m.p.build(m.linear(m.input(columns), "w", 64)))


def changed(queues: BatchQueues, **fields: int) -> BatchQueues:
    """With another linear at the end of the second of three layers, on every SM."""

    def other(number: int, one: BatchInstruction) -> BatchInstruction:
        return replace(one, **fields) if number == 4 else one

    return replace(
        queues, queues=tuple(tuple(map(other, range(7), queue)) for queue in queues.queues)
    )


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"src": 0}, "reads"),
        ({"carry": 16 * 1024}, "reads"),
        ({"dst": 1024 * 16 * 3}, "reads"),
        ({"flags": 1}, "reads"),
        ({"next_norm": -1}, "reads"),
        ({"num_units": 0}, "no SM's"),
    ],
)
def test_a_changed_queue_is_not_proven(fields: dict[str, int], found: str):
    program = program_of("gated")
    fused = tuple(apart(fuse_segment(program)))
    queues = build(program)
    assert find_batch_hazard(queues, fused) == ""
    assert found in find_batch_hazard(changed(queues, **fields), fused)


def team_program(num_layers: int) -> Program:
    """That of each of two ranks which share gate, up and down of every layer."""
    model = gated_mlp(4, num_layers, WIDE, INNER)
    return localize(plan_program(model.program, DeviceMesh(tp=2), H200, model.marks)).program


@pytest.mark.parametrize(("num_layers", "num_buffers"), [(2, 2), (3, 3), (4, 2)])
def test_sums_of_steps_on_end_have_buffers_of_their_own(num_layers: int, num_buffers: int):
    """No choice of a token lies between the last sum of a step and the first of the next."""
    queues = build(team_program(num_layers))
    assert queues.num_ranks == 2
    assert len(queues.buffers) == num_buffers
    parts = [one.parts for one in queues.queues[0] if isinstance(one, BatchLinear) and one.parts]
    assert len(parts) == num_layers
    assert all(a != b for a, b in zip(parts, [*parts[1:], parts[0]], strict=True))


def test_one_buffer_for_all_sums_is_not_proven():
    program = team_program(4)
    fused, queues = tuple(apart(fuse_segment(program))), build(program)
    (first, *_) = queues.buffers
    assert "before other ranks have read it" in find_batch_hazard(
        changed(queues, parts=first.first), fused
    )


def test_sums_over_ranks_are_of_whole_units():
    """Parts of ranks lie one behind the other, in units of 8 rows."""
    m = Maker(4)
    program = m.p.build(m.linear(m.linear(m.input(), "up", 64), "down", 12))
    marks = {"up": shard(0, "tp"), "down": shard(1, "tp")}
    local = localize(plan_program(program, DeviceMesh(tp=2), H200, marks)).program
    with pytest.raises(UnsupportedError, match="a sum over ranks of 12 elements"):
        build(local)


def test_one_sum_a_step_follows_on_one_of_the_rows_that_come_in():
    """Else it would follow on itself, and ranks would have heard nothing in between."""
    queues = build(team_program(1))
    entry, *_ = queues.queues[0]
    assert isinstance(entry, BatchEmbed)
    assert entry.parts
    parts = [one.parts for one in queues.queues[0] if isinstance(one, BatchLinear) and one.parts]
    assert len({entry.parts, *parts}) == len(queues.buffers) == 2
    for num_layers in (2, 3):
        assert not build(team_program(num_layers)).epilogues.entry.summed
