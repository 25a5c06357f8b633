"""Random programs whose values stay small integers, so that any order of additions is exact.

Beside plain graphs of ops they have what planners and lowerings got wrong before: extents of 1,
0-d tensors, states and caches, broadcasts, tied weights, biases that other ops use, one tensor read
in two ways, views, and overwrites through those.
"""

import math
import random
from collections.abc import Callable, Sequence

from distmega.errors import ProgramError
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program

EXTENTS = (1, 2, 3, 4, 5, 6, 8)
UNARY = ("relu(a0)", "a0 + 1.0", "abs(a0) - 2.0", "a0 * 2.0", "neg(a0)")
BINARY = ("a0 + a1", "a0 - a1", "maximum(a0, a1)", "a0 * a1")
MOST_ELEMENTS = 600
GIVEN_BITS, MOST_BITS = 2, 13
"""Sizes of values: of those given (-3 to 3), of what an op begins with or a product has."""

Step = Callable[["Draft", Handle], Handle | None]


def random_program(seed: int, *, num_ops: int = 6, overwrite: bool = True) -> Program:
    """A graph of that many steps, mostly an op each. overwrite: with states, and sets of those
    and of views."""
    draft = Draft(seed)
    steps = STEPS + OVERWRITES * overwrite
    for _ in range(num_ops):
        draft.grow(steps)
    return draft.finished()


def flattened(p: ProgramBuilder, x: Handle, *, view: bool) -> Handle:
    """All elements of x in one dim."""
    return reshaped(p, x, (math.prod(x.shape),), view=view)


def reshaped(p: ProgramBuilder, x: Handle, shape: Sequence[int], *, view: bool) -> Handle:
    """x in another shape; a copy where no view can show it so."""
    try:
        return p.reshape(x, shape, view=view)
    except ProgramError:
        return p.reshape(x, shape)


class Draft:
    """A program under construction, and what the next op may use.

    known: results so far, latest last. `bits` bounds the values of every tensor; it holds forever,
    since what overwrites a tensor is clamped to it.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.p = random.Random(seed), ProgramBuilder(f"random {seed}")
        self.bits: dict[str, int] = {}
        self.weights: list[Handle] = []
        self.states: list[Handle] = []
        self.writable: list[Handle] = []
        first = self.p.input("x0", self.shape(self.rng.choice((0, 1, 2, 2, 2, 3, 3, 3))))
        self.known = [first, self.p.input("x1", self.shape(self.rng.choice((1, 2, 2, 3))))]

    def shape(self, rank: int) -> list[int]:
        return [self.rng.choice(EXTENTS) for _ in range(rank)]

    def grow(self, steps: tuple[Step, ...]) -> None:
        """One step from one of the latest results; a pointwise op where a few can't be made."""
        for step in (*self.rng.choices(steps, k=4), unary):
            x = self.clamped(self.rng.choice(self.known[-3:]))
            if (y := step(self, x)) is not None:
                self.known.append(y)
                return

    def finished(self) -> Program:
        """The program with its last result, and perhaps others, a state or a weight, as outputs."""
        outputs = [self.known[-1], *self.rng.sample(self.known[2:], self.rng.choice((0, 1, 2)))]
        for others, chance in ((self.states, 0.3), (self.weights, 0.1)):
            if others and self.rng.random() < chance:
                outputs.append(self.rng.choice(others))
        return self.p.build(*{handle.name: handle for handle in outputs}.values())

    def any_dim(self, x: Handle) -> int:
        return self.rng.randrange(len(x.shape))

    def any_like(self, x: Handle) -> Handle | None:
        """A result of x's shape."""
        return self.any_of(self.known, lambda y: y.shape == x.shape)

    def any_of(self, among: Sequence[Handle], fits: Callable[[Handle], bool]) -> Handle | None:
        found = [handle for handle in among if fits(handle)]
        return self.rng.choice(found) if found else None

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def weight(self, shape: Sequence[int]) -> Handle:
        self.weights.append(self.p.weight(f"w{len(self.weights)}", shape))
        return self.weights[-1]

    def sized(self, y: Handle, *operands: Handle, more: int = 0) -> Handle:
        """Notes the bits of y: `more` than of its largest operand."""
        self.bits[y.name] = more + max(self.bits_of(x) for x in operands)
        return y

    def bits_of(self, x: Handle) -> int:
        return self.bits.get(x.name, GIVEN_BITS)

    def clamped(self, x: Handle, bits: int = MOST_BITS) -> Handle:
        """x, limited where its values may have more bits."""
        if self.bits_of(x) <= bits:
            return x
        limit = float(2**bits - 1)
        y = x.map(f"minimum(maximum(a0, neg({limit})), {limit})")
        self.bits[y.name] = bits
        return y

    def contracted(
        self, x: Handle, w: Handle, bias: Handle | None = None, *, spec: str = "", count: int = 0
    ) -> Handle:
        """A linear. count: of products in a sum, by default x's last extent."""
        x, w = self.factors(x, w)
        y = self.p.linear(x, w, bias and self.clamped(bias), spec)
        product = self.bits_of(x) + self.bits_of(w) + (count or x.shape[-1]).bit_length()
        self.bits[y.name] = max(product, self.bits_of(bias)) + 1 if bias else product
        return y

    def factors(self, x: Handle, y: Handle) -> tuple[Handle, Handle]:
        """Both, clamped where their product would be large."""
        if self.bits_of(x) + self.bits_of(y) <= MOST_BITS:
            return x, y
        return self.clamped(x, MOST_BITS // 2), self.clamped(y, MOST_BITS // 2)

    def overwritten(self, x: Handle, into: Handle) -> Handle:
        self.p.set(self.clamped(x, self.bits_of(into)), into=into)
        return into


def unary(d: Draft, x: Handle) -> Handle:
    return d.sized(x.map(d.rng.choice(UNARY)), x, more=1)


def linear(d: Draft, x: Handle) -> Handle | None:
    """With a bias at times, which may be a result, or the bias of another linear."""
    if not x.shape or len(x.shape) > 3:
        return None
    (extent,) = d.shape(1)
    bias = d.any_of(d.known + d.weights, lambda y: y.shape == (extent,))
    if d.chance(0.5):
        bias = None
    elif bias is None or d.chance(0.4):
        bias = d.weight((extent,))
    return d.contracted(x, d.weight((extent, x.shape[-1])), bias)


def tied_linear(d: Draft, x: Handle) -> Handle | None:
    """Of any result, by a weight that is used already, at times by its columns."""
    w = d.any_of(d.weights, lambda y: len(y.shape) == 2)
    if w is None:
        return None
    dim, rank, spec = (1, 3, "") if d.chance(0.7) else (0, 2, "m k, k n -> m n")
    found = d.any_of(d.known, lambda y: rank >= len(y.shape) > 1 and y.shape[-1] == w.shape[dim])
    return found and d.contracted(found, w, spec=spec)


def matmul(d: Draft, x: Handle) -> Handle | None:
    """Of two results, which may be one."""
    if len(x.shape) != 2:
        return None
    y = d.any_of(d.known, lambda y: len(y.shape) == 2 and y.shape[0] == x.shape[1])
    return y and d.contracted(x, y, spec="m k, k n -> m n")


def square(d: Draft, x: Handle) -> Handle | None:
    """x with itself, by rows or by columns, or with its negative."""
    if len(x.shape) != 2:
        return None
    x, _ = d.factors(x, x)
    if d.chance(0.5):
        return d.contracted(x, x, spec="k m, k n -> n m", count=x.shape[0])
    return d.contracted(d.sized(x.map("neg(a0)"), x) if d.chance(0.5) else x, x)


def dot(d: Draft, x: Handle) -> Handle | None:
    """Sums over any dims of a product, up to all, in any order of those that stay."""
    if not x.shape:
        return None
    names = [f"d{i}" for i in range(len(x.shape))]
    left = [name for name in names if d.chance(0.5)]
    d.rng.shuffle(left)
    spec = f"{' '.join(names)}, {' '.join(names)} -> {' '.join(left)}"
    return d.contracted(x, d.any_like(x) or x, spec=spec, count=math.prod(x.shape))


def batched(d: Draft, x: Handle) -> Handle | None:
    if len(x.shape) != 3:
        return None
    w = d.weight((x.shape[0], d.rng.choice(EXTENTS), x.shape[-1]))
    return d.contracted(x, w, spec="b m k, b n k -> m b n")


def embedding(d: Draft, x: Handle) -> Handle:
    """Rows of a table, by ids of as many rows as x."""
    rows = x.shape[0] if x.shape else 1
    ids = d.p.input(f"ids{len(d.known)}", (rows,), "i64")
    return d.p.embedding(ids, d.weight((max(rows, 7), d.rng.choice(EXTENTS))))


def joined(d: Draft, x: Handle, y: Handle) -> Handle:
    """A binary op."""
    text = d.rng.choice(BINARY)
    if "*" in text:
        x, y = d.factors(x, y)
    more = d.bits_of(x) if "*" in text else 1
    return d.sized(d.p.pointwise(text, x, y), x, y, more=more)


def binary(d: Draft, x: Handle) -> Handle:
    return joined(d, x, d.clamped(d.any_like(x) or x))


def broadcast(d: Draft, x: Handle) -> Handle:
    """With a tensor of fewer dims, and of extent 1 in some, on either side."""
    shape = [extent if d.chance(0.6) else 1 for extent in x.shape]
    shape = shape[d.rng.randrange(len(shape) + 1) :]
    other = d.any_of(d.known + d.weights, lambda y: y.shape == tuple(shape))
    other = d.clamped(other if other and d.chance(0.7) else d.weight(shape))
    return joined(d, x, other) if d.chance(0.5) else joined(d, other, x)


def reduced(d: Draft, x: Handle) -> Handle | None:
    if not x.shape:
        return None
    y = d.p.reduce(x, d.any_dim(x), d.rng.choice(("sum", "sum", "max", "min")))
    return d.sized(y, x, more=max(x.shape).bit_length())


def sliced(d: Draft, x: Handle) -> Handle | None:
    """Some of a dim, at times every second."""
    if not x.shape:
        return None
    dim, step = d.any_dim(x), d.rng.choice((1, 1, 2))
    start = d.rng.randrange(x.shape[dim]) if step == 1 or d.chance(0.5) else 0
    stop = d.rng.randint(start + 1, x.shape[dim])
    return d.sized(d.p.slice(x, dim, start, stop, step, view=d.chance(0.4)), x)


def concatenated(d: Draft, x: Handle) -> Handle | None:
    """With another of equal shape but for one dim, which may be itself, or three of them."""
    if not x.shape:
        return None
    dim = d.any_dim(x)

    def fits(y: Handle) -> bool:
        others = (x.shape[:dim], x.shape[dim + 1 :]) == (y.shape[:dim], y.shape[dim + 1 :])
        return others and len(y.shape) == len(x.shape)

    parts = [x, d.any_of(d.known, fits) or x] + [x] * d.chance(0.3)
    if sum(math.prod(part.shape) for part in parts) > MOST_ELEMENTS:
        return None
    return d.sized(d.p.concat(parts, dim), *parts)


def transposed(d: Draft, x: Handle) -> Handle | None:
    if len(x.shape) < 2:
        return None
    order = d.rng.sample(range(len(x.shape)), len(x.shape))
    return d.sized(d.p.transpose(x, order, view=d.chance(0.4)), x)


def reshape(d: Draft, x: Handle) -> Handle | None:
    """Two dims as one, an even one as two, one of extent 1 more or less, or all as one."""
    shape, view = list(x.shape), d.chance(0.4)
    even = [dim for dim, extent in enumerate(shape) if extent % 2 == 0]
    way = d.rng.random()
    if way < 0.3 and len(shape) > 1:
        dim = d.rng.randrange(len(shape) - 1)
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    elif way < 0.6 and even:
        dim = d.rng.choice(even)
        halves = [2, shape[dim] // 2]
        shape[dim : dim + 1] = halves if d.chance(0.5) else halves[::-1]
    elif way < 0.8:
        shape.insert(d.rng.randrange(len(shape) + 1), 1)
    elif way < 0.9 and 1 in shape:
        shape.remove(1)
    else:
        shape = [math.prod(shape)]
    return None if len(shape) > 4 else d.sized(reshaped(d.p, x, shape, view=view), x)


def copied(d: Draft, x: Handle) -> Handle:
    return d.sized(d.p.set(x), x)


def argmax(d: Draft, x: Handle) -> Handle | None:
    """Beside what goes on from x."""
    if not x.shape:
        return None
    d.p.argmax(x)
    return unary(d, x)


def weight_alone(d: Draft, x: Handle) -> Handle | None:
    """A weight as any other tensor."""
    w = d.any_of(d.weights, lambda _: True)
    return w and unary(d, w)


def state(d: Draft, x: Handle) -> Handle | None:
    """A new state beside x, itself or a view of which ops may go on from."""
    new = d.p.state(f"s{len(d.states)}", x.shape)
    d.states.append(new)
    d.writable.append(new)
    if d.chance(0.3):
        d.known.append(new)
    return joined(d, x, new)


def into_any(d: Draft, x: Handle) -> Handle | None:
    """A result over a state or a temporary that others may have read, and will read."""
    into = d.any_of(d.writable, lambda _: True)
    if into is None:
        return None
    found = d.any_like(into)
    if found is None or found.name == into.name:
        return None
    d.overwritten(found, into)
    return into if d.chance(0.5) else unary(d, into)


def into_part(d: Draft, x: Handle) -> Handle | None:
    """A copy of x with a part of it overwritten through a view."""
    if not x.shape:
        return None
    dim, whole = d.any_dim(x), copied(d, x)
    extent = whole.shape[dim]
    part = d.sized(d.p.slice(whole, dim, 0, max(extent - 1, 1), view=True), whole)
    d.writable += [whole, part]
    d.overwritten(d.sized(part.map("a0 + 1.0"), part, more=1), part)
    return whole


def cached(d: Draft, x: Handle) -> Handle | None:
    """Rows of x, of heads and values, at the end of a cache: one for all rows, or one a row."""
    if len(x.shape) != 3:
        return None
    rows, heads, size = x.shape
    ids = d.p.input(f"ids{len(d.known)}", (rows,), "i64")
    own = (rows,) if d.chance(0.4) else ()
    cache = d.p.state(f"s{len(d.states)}", (*own, heads, rows + d.rng.choice((0, 1, 2)), size))
    d.states.append(cache)
    for _ in range(d.rng.choice((1, 1, 2))):
        d.p.kv_append(cache, d.clamped(x, GIVEN_BITS), ids)
    return unary(d, cache)


STEPS: tuple[Step, ...] = (
    *(linear, linear, linear, tied_linear, tied_linear, matmul, matmul, square, dot, batched),
    *(unary, binary, binary, broadcast, broadcast, reduced, sliced, sliced, concatenated),
    *(concatenated, transposed, transposed, reshape, reshape, copied, argmax, embedding),
)
OVERWRITES: tuple[Step, ...] = (
    *(state, into_any, into_any, into_part, into_part, cached, cached, weight_alone),
)


def random_gathers(seed: int) -> Program:
    """A random program of whose last results gathers and slices take half of the rows."""
    d, outputs = Draft(seed), dict[str, Handle]()
    for _ in range(7):
        d.grow(STEPS + OVERWRITES)
    for x in d.known[-3:]:
        if x.shape:
            y = half_of_rows(d, x)
            outputs |= {z.name: z for z in ((y, unary(d, y)) if d.chance(0.5) else (y,))}
    return d.p.build(*(outputs.values() or d.known[-1:]))


def half_of_rows(d: Draft, x: Handle) -> Handle:
    """The first dim by numbers that an input holds, or any by a slice."""
    dim = d.any_dim(x)
    num = (x.shape[dim] + 1) // 2
    if dim == 0 and len(x.shape) > 1 and d.chance(0.6):
        ids = d.p.input(f"last_{x.name}", (num,), "i64")
        return d.sized(d.p.embedding(ids, x), x)
    start = d.rng.randrange(num)
    start -= max(start + num - x.shape[dim], 0)
    return d.sized(d.p.slice(x, dim, start, start + num, view=d.chance(0.3)), x)
