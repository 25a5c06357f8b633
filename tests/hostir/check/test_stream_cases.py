"""More cases of streams and resharding: what each comes out as, exact and checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from distmega.errors import CheckError
from distmega.hostir.check.check import check_host
from distmega.hostir.passes.deallocations import peak_memory
from distmega.program.builder import Handle, ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard, stream
from tests.hostir.programs import wait_numbers, without
from tests.hostir.streams import ONE, TP, assert_exact, loops, lowered, words

GRID = DeviceMesh(dp=2, tp=2)
ROWS, COLUMNS = shard(0, "tp"), shard(1, "tp")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "take_shard", "send")
MM = "m k, k n -> m n"
Build = Callable[[ProgramBuilder], tuple[Handle, ...]]


@dataclass(frozen=True)
class Case:
    """A program, and what must come of it: extents of host loops, collectives, what is by chunk."""

    build: Build
    marks: Mapping[str, Layout]
    mesh: DeviceMesh = ONE
    loops: tuple[int, ...] = ()
    collectives: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()


def chain(p: ProgramBuilder) -> tuple[Handle, ...]:
    h = p.input("x", (6, 3))
    for i, (a, b) in enumerate(((3, 5), (5, 7), (7, 2), (2, 3))):
        h = p.linear(h, p.weight(f"w{i}", (a, b)), spec=MM, name=f"h{i}")
    return (h,)


def alternating(p: ProgramBuilder) -> tuple[Handle, ...]:
    h = p.input("x", (6, 6))
    for i in range(4):
        h = h.map("a0 + 1", name=f"h{i}")
    return (h,)


def double(p: ProgramBuilder, *shape: int) -> Handle:
    return p.input("x", shape).map("a0 * 2", name="a")


def squared(p: ProgramBuilder) -> tuple[Handle, ...]:
    a = double(p, 4, 4)
    return (p.linear(a, a, spec="m k, n k -> m n", name="y"),)


def used_twice(p: ProgramBuilder) -> tuple[Handle, ...]:
    a = double(p, 4, 6)
    return p.pointwise("a0 * a1", a, a, name="y"), a, p.input("z", (2, 2))


def projected(
    p: ProgramBuilder, rows: int = 8, depth: int = 6, columns: int = 4
) -> tuple[Handle, ...]:
    x, w = p.input("x", (rows, depth)), p.weight("w", (depth, columns))
    return (p.linear(x, w, spec=MM, name="y"),)


def biased(p: ProgramBuilder) -> tuple[Handle, ...]:
    x, w, b = p.input("x", (4, 8)), p.weight("w", (8, 4)), p.input("b", (4,))
    return (p.linear(x, w, b, spec="m k, k n, n -> m n", name="y"),)


def summed(p: ProgramBuilder, *shape: int, dim: int = 1) -> tuple[Handle, ...]:
    return (p.reduce(double(p, *shape), dim, name="b"),)


def moved(p: ProgramBuilder, *shape: int) -> tuple[Handle, ...]:
    return (double(p, *shape).map("a0 - 1", name="y"),)


def reshaped(p: ProgramBuilder, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Handle, ...]:
    return (p.reshape(double(p, *old), new, name="r").map("a0 + 1", name="y"),)


def turned(p: ProgramBuilder) -> tuple[Handle, ...]:
    return (p.transpose(double(p, 6, 4), (1, 0), name="t").map("a0 + 1", name="y"),)


def pairs(p: ProgramBuilder) -> tuple[Handle, ...]:
    """Two chains that loops of their own run, and one op that needs both."""
    a = p.input("x", (4, 6)).map("a0 + 1", name="a")
    b = p.input("z", (6, 4)).map("a0 * 2", name="b")
    c, d = a.map("a0 * 3", name="c"), b.map("a0 - 1", name="d")
    return (p.linear(c, d, spec=MM, name="e"),)


def waited(p: ProgramBuilder) -> tuple[Handle, ...]:
    """An op on a that could wait for y, which also needs b, and one that could not."""
    a = p.input("x", (6, 4)).map("a0 + 1", name="a")
    b = p.input("z", (4, 6)).map("a0 * 2", name="b")
    y = p.linear(a.map("a0 * 3", name="c"), b, spec=MM, name="y")
    return y, a.map("a0 - 1", name="t")


def centred(p: ProgramBuilder) -> tuple[Handle, ...]:
    a = double(p, 4, 6)
    return (p.pointwise("a0 - a1", a, p.reduce(a, 0, name="s"), name="b"),)


def cut_and_joined(p: ProgramBuilder) -> tuple[Handle, ...]:
    a = double(p, 6, 4)
    left, right = p.slice(a, 1, 0, 2, name="l"), p.slice(a, 1, 2, 4, name="r")
    return (p.concat([right, left], 1, name="y"),)


def overwritten(p: ProgramBuilder) -> tuple[Handle, ...]:
    s, x = p.state("s", (4, 6)), p.input("x", (4, 6))
    n = p.pointwise("a0 + a1", s, x, name="n")
    p.set(n, into=s, name="again")
    return (s.map("a0 * 2", name="y"),)


def attended(p: ProgramBuilder) -> tuple[Handle, ...]:
    q, k, v = p.input("q", (4, 2, 3)), p.input("k", (5, 2, 3)), p.input("v", (5, 2, 3))
    s = p.linear(q, k, spec="m h d, n h d -> h m n", name="s")
    return (p.linear(s, v, spec="h m n, n h e -> m h e", name="o"),)


def block(p: ProgramBuilder) -> tuple[Handle, ...]:
    h = p.linear(p.input("x", (8, 4)), p.weight("w1", (12, 4)), name="h").map("relu(a0)", name="a")
    return (p.linear(h, p.weight("w2", (4, 12)), name="y"),)


def seen(p: ProgramBuilder) -> tuple[Handle, ...]:
    v = p.slice(double(p, 8, 8), 0, 0, 8, view=True, name="v")
    return (p.linear(v, p.weight("w", (8, 8)), spec=MM, name="y"),)


def totals(p: ProgramBuilder) -> tuple[Handle, ...]:
    y = p.input("x", (16, 4)).map("a0 + 1", name="y")
    return y, p.reduce(y, 0, name="s")


def added(p: ProgramBuilder, *, shared: bool = False) -> tuple[Handle, ...]:
    """Two products of which only the sum is wanted, unless `shared`."""
    x = p.input("x", (4, 8))
    a, b = (p.linear(x, p.weight(w, (8, 4)), spec=MM, name=n) for w, n in (("w", "a"), ("v", "b")))
    y = p.pointwise("a0 + a1", a, b, name="y")
    return (y, a.map("relu(a0)", name="z")) if shared else (y,)


def around(p: ProgramBuilder) -> tuple[Handle, ...]:
    (y,) = block(p)
    return (p.pointwise("a0 + a1", p.input("r", (8, 4)), y, name="out"),)


def turned_sum(p: ProgramBuilder) -> tuple[Handle, ...]:
    return (p.reduce(p.transpose(double(p, 4, 6), (1, 0), name="t"), 1, name="s"),)


def cut(p: ProgramBuilder) -> tuple[Handle, ...]:
    return (p.slice(double(p, 8, 4), 0, 2, 8, name="l").map("a0 + 1", name="y"),)


def accumulated(p: ProgramBuilder) -> tuple[Handle, ...]:
    """A sum over ranks, added to a state that every rank holds."""
    s, (y,) = p.state("s", (1, 1)), projected(p, 1, 8, 1)
    total = p.pointwise("a0 + a1", y, s, name="total")
    return (p.set(total, into=s, name="again"), total)


def dot(p: ProgramBuilder) -> tuple[Handle, ...]:
    x, w, b = p.input("x", (8,)), p.weight("w", (8,)), p.weight("b", ())
    return (p.linear(x, w, b, spec="k, k, -> ", name="y"),)


HALVES = shard(0, "dp")
QUARTERS = HALVES | ROWS
EIGHTHS = shard(0, "a") | shard(0, "b") | shard(0, "c")
SPLIT = {"x": COLUMNS, "w": ROWS}
PARTS = {**SPLIT, "v": ROWS}
CASES = {
    "a longer chain is one loop": Case(
        chain, {"x": stream(0, 3)}, loops=(3,), chunks=("h0", "h1", "h2")
    ),
    "dims in turn are loops of their own": Case(
        alternating, {f"h{i}": stream(i % 2, 3) for i in range(4)}, loops=(3, 3, 3, 3)
    ),
    "one operand in chunks and whole": Case(squared, {"y": stream(0, 2)}, loops=(2, 2)),
    "one operand divided and whole": Case(
        squared, {"a": ROWS, "y": ROWS}, TP, collectives=("take_shard", "all_gather")
    ),
    "used twice, and an output": Case(used_twice, {"a": stream(0, 2)}, loops=(2,)),
    "a prime extent": Case(
        lambda p: summed(p, 7, 5), {"x": stream(0, 3)}, loops=(2, 1), chunks=("a",)
    ),
    "more chunks than positions": Case(
        lambda p: moved(p, 3, 5), {"x": stream(0, 7)}, loops=(3,), chunks=("a",)
    ),
    "chunks inside uneven shards": Case(
        lambda p: moved(p, 7, 5), {"x": ROWS | stream(0, 3), "y": ROWS}, TP, (2,), (), ("a",)
    ),
    "shards of an inner dim": Case(
        lambda p: summed(p, 3, 8, 5, dim=2),
        {"x": COLUMNS | stream(0, 3), "b": COLUMNS}, TP, (3,), (), ("a",),
    ),
    "chunks of a dim that is gathered": Case(
        lambda p: (double(p, 3, 8, 5),),
        {"x": COLUMNS, "a": replicate() | stream(0, 3)}, TP, (3,), ("all_gather",), ("a.tp1",),
    ),
    "rows and columns of a grid": Case(
        projected,
        {"x": HALVES, "w": COLUMNS, "y": HALVES | COLUMNS | stream(0, 2)}, GRID, (2,),
    ),
    "two mesh axes on one dim, and chunks": Case(
        projected,
        {"x": HALVES | ROWS, "y": HALVES | ROWS | stream(0, 2)}, GRID, (2,),
    ),
    "a sum over two mesh axes": Case(
        lambda p: projected(p, 4, 8),
        {"x": shard(1, "dp") | COLUMNS, "w": HALVES | ROWS, "y": stream(0, 2)},
        GRID, (2,), ("all_reduce", "all_reduce"), ("y.partial", "y.partial_"),
    ),
    "a ring over another mesh axis": Case(
        projected, {"w": COLUMNS, "y": stream(0, 2, ring="dp")}, GRID, (2,),
        ("all_gather",), ("y.tp1",),
    ),
    "a ring of one rank": Case(
        projected, {"w": COLUMNS, "y": stream(0, 2, ring="dp")}, DeviceMesh(dp=1, tp=2), (2,),
        ("all_gather",), ("y.tp1",),
    ),
    "dims merged, the outer one divided": Case(
        lambda p: reshaped(p, (4, 3, 2), (12, 2)),
        {"x": ROWS | stream(0, 2), "y": ROWS}, TP, (2,), (), ("a", "r"),
    ),
    "dims merged, the inner one divided": Case(
        lambda p: reshaped(p, (4, 6, 2), (24, 2)), {"x": COLUMNS}, TP, (), ("all_gather",)
    ),
    "a dim split, backwards": Case(
        lambda p: reshaped(p, (12, 2), (4, 3, 2)),
        {"y": ROWS | stream(0, 2)}, TP, (2,), ("take_shard",), ("a", "r"),
    ),
    "chunks smaller than what a dim is split into": Case(
        lambda p: reshaped(p, (12, 2), (2, 6, 2)), {"x": stream(0, 4)}, loops=(4,)
    ),
    "turned": Case(
        turned, {"x": ROWS | stream(0, 3), "y": COLUMNS}, TP, (3,), (), ("a", "t")
    ),
    "a sum over ranks": Case(
        lambda p: summed(p, 6, 4, dim=0), {"x": ROWS}, TP, (), ("all_reduce",)
    ),
    "a bias that every rank holds": Case(
        biased, {**SPLIT, "b": replicate()}, TP, (), ("all_reduce",)
    ),
    "a bias after a reduce-scatter": Case(
        biased, {**SPLIT, "y": ROWS}, TP, (), ("reduce_scatter",)
    ),
    "a bias by chunk": Case(
        biased, {**SPLIT, "y": stream(0, 2)}, TP, (2,), ("all_reduce",), ("y.sum", "y.sum.partial")
    ),
    "ops wait for the loop that needs them": Case(
        pairs,
        {"a": stream(0, 2), "b": stream(0, 3), "c": stream(0, 2), "d": stream(0, 3)},
        loops=(3, 2), chunks=("a", "b", "c"),
    ),
    "ops that wait would keep as much as they save": Case(
        waited, {"a": stream(0, 2), "b": stream(1, 3), "y": stream(0, 2)}, loops=(2, 3, 2),
        chunks=("a",),
    ),
    "a sum between parts a loop in two": Case(
        centred, {"a": stream(0, 2), "b": stream(0, 2)}, loops=(2, 2)
    ),
    "slices and a join along another dim": Case(
        cut_and_joined, {"x": stream(0, 3)}, loops=(3,), chunks=("a", "l", "r")
    ),
    "a state by chunk": Case(
        overwritten, {"n": stream(0, 2), "y": stream(0, 2)}, loops=(2,), chunks=("n",)
    ),
    "heads on ranks, queries by chunk": Case(
        attended, {"q": COLUMNS | stream(0, 2), "k": COLUMNS, "v": COLUMNS}, TP, (2,),
        ("all_gather",), ("o.tp1", "s"),
    ),
    "an all-to-all by chunks of a third dim": Case(
        lambda p: moved(p, 8, 4, 3),
        {"x": ROWS, "a": ROWS, "y": COLUMNS | stream(2, 3)}, TP, (3,), ("all_to_all",),
        ("a", "a.tp1"),
    ),
    "both rings of one mesh axis of two": Case(
        block,
        {
            "x": HALVES | ROWS, "w1": ROWS, "w2": COLUMNS,
            "h": HALVES | COLUMNS | stream(0, 2, ring="tp"),
            "y": HALVES | ROWS | stream(0, 2, ring="tp"),
        },
        GRID, (1, 1, 1, 1), ("send", "send"), ("h", "y.partial"),
    ),
    "dims merged, the outer one on two mesh axes": Case(
        lambda p: reshaped(p, (4, 6), (24,)), {"x": QUARTERS, "y": QUARTERS}, GRID
    ),
    "a dim on two mesh axes split": Case(
        lambda p: reshaped(p, (16, 3), (4, 4, 3)), {"x": QUARTERS, "y": QUARTERS}, GRID
    ),
    "a sum over two mesh axes, scattered over both": Case(
        lambda p: projected(p, 8, 8),
        {"x": shard(1, "dp") | COLUMNS, "w": QUARTERS, "y": QUARTERS},
        GRID, (), ("reduce_scatter", "reduce_scatter"),
    ),
    "a ring of the inner of two mesh axes": Case(
        lambda p: projected(p, 16, 4),
        {"x": QUARTERS, "w": COLUMNS, "y": HALVES | COLUMNS | stream(0, 2, ring="tp")},
        GRID, (1, 1), ("send",),
    ),
    "a view of what was gathered goes around a ring": Case(
        seen,
        {
            "x": shard(1, "dp") | ROWS, "a": shard(1, "dp") | ROWS, "v": ROWS, "w": COLUMNS,
            "y": COLUMNS | stream(0, 2, ring="tp"),
        },
        GRID, (1, 1), ("all_gather", "send"),
    ),
    "parts are added, then summed over ranks": Case(added, PARTS, TP, (), ("all_reduce",)),
    "parts that others read are summed each": Case(
        lambda p: added(p, shared=True), PARTS, TP, (), ("all_reduce", "all_reduce")
    ),
    "a sum over ranks and a state": Case(accumulated, SPLIT, TP, (), ("all_reduce",)),
    "a number from a sum over ranks and a bias": Case(
        dot, {"x": ROWS, "w": ROWS}, TP, (), ("all_reduce",)
    ),
    "a number from chunks": Case(dot, {"w": stream(0, 2)}, loops=(1, 1)),
    "parts over two mesh axes": Case(
        added,
        {"x": shard(1, "dp") | COLUMNS, "w": QUARTERS, "v": QUARTERS, "y": QUARTERS},
        GRID, (), ("reduce_scatter", "reduce_scatter"),
    ),
    "parts on one mesh axis, rows on the other": Case(
        added, {**PARTS, "x": HALVES | COLUMNS, "y": HALVES}, GRID, (), ("all_reduce",)
    ),
    "parts by chunk": Case(
        added, {**PARTS, "y": stream(0, 2)}, TP, (2,), ("all_reduce",),
        ("a.partial", "b.partial", "y.partial"),
    ),
    "parts around a ring": Case(
        added, {**PARTS, "y": ROWS | stream(0, 2, ring="tp")}, TP, (1, 1), ("send",),
        ("a.partial", "b.partial", "y.partial"),
    ),
    "a block on a grid, by chunk": Case(
        block, {"x": HALVES, "w1": ROWS, "w2": COLUMNS, "y": HALVES | stream(0, 2)}, GRID, (2,),
        ("all_reduce",), ("a", "h", "y.partial"),
    ),
    "what goes around a block by chunk": Case(
        around, {"w1": ROWS, "w2": COLUMNS, "out": stream(0, 4)}, TP, (4,), ("all_reduce",),
        ("a", "h", "y", "y.partial"),
    ),
    "uneven rows on two mesh axes, summed": Case(
        lambda p: summed(p, 7, 5, dim=0), {"x": QUARTERS}, GRID, (), ("all_reduce",) * 2
    ),
    "chunks that end inside of what was merged": Case(
        lambda p: reshaped(p, (4, 6), (24,)), {"y": stream(0, 3)}, loops=(3,)
    ),
    "turned, and summed over the chunks": Case(
        turned_sum, {"x": stream(0, 2)}, loops=(2,), chunks=("a",)
    ),
    "a cut that is not along the chunks": Case(
        cut, {"a": stream(0, 4), "y": stream(0, 3)}, loops=(4, 3)
    ),
    "rows and weights alone are annotated": Case(
        block, {"x": ROWS, "w1": ROWS, "w2": COLUMNS, "y": ROWS}, TP, (),
        ("all_gather", "reduce_scatter"),
    ),
    "three mesh axes on one dim": Case(
        totals, {"x": EIGHTHS, "y": EIGHTHS}, DeviceMesh(a=2, b=2, c=2), (), ("all_reduce",) * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name: str):
    case = CASES[name]
    p = ProgramBuilder("case")
    program = p.build(*case.build(p))
    plan, local, host = lowered(program, case.mesh, case.marks)
    kinds = [word.partition(" ")[0] for word in words(host.body)]
    assert tuple(loop.extent for loop in loops(host)) == case.loops
    assert tuple(kind for kind in kinds if kind in COLLECTIVES) == case.collectives
    chunked = sorted(name for name, domain in local.allocations.items() if domain.chunk)
    assert tuple(chunked) == case.chunks
    assert peak_memory(host) == plan.memory.total_bytes
    assert_exact(program, local, host)
    for number in wait_numbers(host):
        with pytest.raises(CheckError):
            check_host(without(host, number))
    _, local, host = lowered(program, case.mesh, case.marks, megakernel=True)
    assert_exact(program, local, host)
