"""Random programs for property tests, as a hypothesis strategy over ProgramBuilder."""

from collections.abc import Callable
from math import prod

from hypothesis import strategies as st

from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.dtypes import is_integer
from distmega.program.types import Program
from tests.sharding.random_programs import flattened

Step = Callable[[st.DrawFn, ProgramBuilder, Handle], Handle]


def _linear(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    n, dtype = draw(st.integers(1, 5)), x.tensor.dtype
    w = p.weight(f"w{n}.{x.shape[-1]}.{dtype}", (n, x.shape[-1]), dtype)
    return p.linear(x, w, p.weight(f"b{n}.{dtype}", (n,), dtype) if draw(st.booleans()) else None)


def _pointwise(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    floats = ["silu(a0)", "a0 * -2.5", "(-1) ** a0", "exp(-a0) + 1e-6"]
    whole = ["a0 * -2", "relu(a0) + 9007199254740993", "-a0 ** 3"]
    return x.map(draw(st.sampled_from(whole if is_integer(x.tensor.dtype) else floats)))


def _add(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    return x + p.reshape(x, x.shape)


def _reduce(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    if len(x.shape) < 2:
        return x
    dim = draw(st.integers(-len(x.shape), len(x.shape) - 1))
    return p.reduce(x, dim, draw(st.sampled_from(["sum", "max", "min"])))


def _floats(p: ProgramBuilder, x: Handle) -> Handle:
    return p.pointwise("a0", x, dtype="f32") if is_integer(x.tensor.dtype) else x


def _rms_norm(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    x = _floats(p, x)
    return p.rms_norm(x, p.weight(f"g{x.shape[-1]}", x.shape[-1:]), draw(st.floats(0, 1)))


def _layer_norm(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    weight, bias = (p.weight(f"{n}{x.shape[-1]}", x.shape[-1:]) for n in "gb")
    return p.layer_norm(_floats(p, x), weight, bias, draw(st.floats(0, 1)))


def _softmax(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    return p.softmax(_floats(p, x))


def _slice(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    dim = draw(st.integers(0, len(x.shape) - 1))
    start = draw(st.integers(0, x.shape[dim] - 1))
    stop = draw(st.integers(start + 1, x.shape[dim]))
    step, view = draw(st.integers(1, 3)), draw(st.booleans())
    return p.slice(x, dim, start, stop, step, view=view)


def _concat(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    return p.concat([x] * draw(st.integers(1, 3)), draw(st.integers(0, len(x.shape) - 1)))


def _transpose(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    return p.transpose(x, draw(st.permutations(range(len(x.shape)))), view=draw(st.booleans()))


def _reshape(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    size = prod(x.shape)
    rows = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    flat = flattened(p, x, view=draw(st.booleans()))
    return p.reshape(flat, (rows, size // rows))


def _set(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    copy = p.set(x)
    return p.set(x * 2.0, copy) if draw(st.booleans()) else copy


def _argmax(draw: st.DrawFn, p: ProgramBuilder, x: Handle) -> Handle:
    return p.argmax(x) if len(x.shape) > 1 else x


STEPS: tuple[Step, ...] = (
    *(_linear, _pointwise, _add, _reduce, _rms_norm, _layer_norm, _softmax, _slice, _concat),
    *(_transpose, _reshape, _set, _argmax),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A chain of up to eight ops over small shapes; one or two outputs."""
    p = ProgramBuilder(draw(st.sampled_from(["mlp", "a chain", "layer.0"])))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    first = x = p.input("x", shape)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=8)):
        if prod(x.shape) < 300:
            x = step(draw, p, x)
    return p.build(x, first) if draw(st.booleans()) else p.build(x)
