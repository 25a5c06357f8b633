"""The search for one mesh axis: which iteration axis of each op to divide, at the least total time.

Comes in: a program's Steps and Options. Goes out: one SplitOption an op. A state is the set of
placements in which every live tensor is available; it moves from op to op, paying the op's time on
its local extents, collectives for operands held otherwise, and residency of weights and states.
The frontier of states is kept relative and nameless: when it comes back to what it was a layer
ago, so do its successors, and a layer costs a dictionary lookup. Next: resolve.py.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from distmega.program.dtypes import item_bytes
from distmega.program.types import Op, Program, Tensor
from distmega.sharding.layout.placements import (
    PAIR,
    REPLICATE,
    Partial,
    Placement,
    Shard,
)
from distmega.sharding.resolve.padding import Pad, inexact_reason, result_pads
from distmega.sharding.resolve.reshard import step_cost, table
from distmega.sharding.search.cost import Machine, op_time_us
from distmega.sharding.search.options import Options, SplitOption
from distmega.sharding.search.signatures import OptionTable
from distmega.sharding.search.steps import CONSTANT, SearchStep, Situation, StepBuilder, StepOperand

Held = tuple[int, ...]
"""Ways in which one tensor is available: 4 * placement number + padding, sorted."""
State = tuple[tuple[int, Held], ...]
"""What a state holds otherwise than the best one, by slot, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """States, best first, with their cost in ns above the best. Of many live tensors they hold most
    alike: best has what the first of them holds, by slot.
    """

    best: tuple[Held, ...]
    states: tuple[tuple[State, int], ...]


Reached = tuple[State, tuple[Held, ...]]
"""A state behind a step: of tensors that the step leaves as they are, what it holds otherwise than
the best one before it; of those that it uses and keeps, all that it holds.
"""

MAX_STATES = 96
_WHOLE = 0
"""Number of Replicate."""


class NoOptionError(Exception):
    """No option of an op fits what is held of its operands; the planner tries another way."""

    def __init__(self, op: Op, options: Options) -> None:
        super().__init__(op.name)
        self.op, self.options = op, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """One step taken by a whole frontier: the next one, its best cost, and where states came from.

    origins: for each next state, the index of the state before and of the option taken.
    """

    frontier: int
    cost: int
    origins: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mesh axis to plan."""

    program: Program
    axis: str
    num_ranks: int
    machine: Machine
    situation: Situation


class AxisSearch:
    """Dynamic programming over the ops of a Problem.

    careful: whether the state with the fewest tensors divided is kept whatever it costs. The
    cheapest states alone may all end at an op that needs a tensor whole.
    """

    def __init__(self, problem: Problem, options: OptionTable, *, careful: bool = False) -> None:
        self.problem, self.options, self.careful = problem, options, careful
        self.tensors: Mapping[str, Tensor] = options.tensors
        self.numbers: dict[Placement, int] = {REPLICATE: _WHOLE}
        self.placements: list[Placement] = [REPLICATE]
        self.movements: dict[tuple[tuple[int, ...], int, int, int], int | None] = {}
        self.times: dict[tuple[int, tuple[tuple[str, int], ...], str], int] = {}
        self.pads: dict[tuple[int, str, tuple[int, ...]], Pad | None] = {}
        self.frontiers: list[Frontier] = []
        self.frontier_numbers: dict[Frontier, int] = {}

    def run(self) -> dict[str, SplitOption]:
        """The chosen option of every op. NoOptionError where an op fits in no way."""
        ops = self.problem.program.ops
        problem = self.problem
        builder = StepBuilder(problem.program, problem.situation, self.options, problem.num_ranks)
        here = self.number_frontier(Frontier(best=(), states=(((), 0),)))
        memo: dict[tuple[SearchStep, int], Advance] = {}
        trail: list[Advance] = []
        for op, step in zip(ops, builder.run(), strict=True):
            key = step, here
            if key not in memo:
                memo[key] = self.advance(op, step, self.frontiers[here])
            trail.append(memo[key])
            here = memo[key].frontier
        best = self.best_end(builder.live, self.frontiers[here])
        chosen: dict[str, SplitOption] = {}
        for op, advance in zip(reversed(ops), reversed(trail), strict=True):
            best, number = advance.origins[best]
            taken = problem.situation.taken.get(op.name, ())
            found = self.options.options(op, problem.num_ranks, taken)
            chosen[op.name] = found.options[number]
        return chosen

    def number_frontier(self, frontier: Frontier) -> int:
        number = self.frontier_numbers.setdefault(frontier, len(self.frontiers))
        if number == len(self.frontiers):
            self.frontiers.append(frontier)
        return number

    def number(self, placement: Placement) -> int:
        found = self.numbers.get(placement)
        if found is None:
            found = self.numbers[placement] = len(self.placements)
            self.placements.append(placement)
        return found

    def best_end(self, live: Sequence[str], frontier: Frontier) -> int:
        """Index of the state that is cheapest once outputs are in the layout they leave in."""
        pins = self.problem.situation.pins

        def final(slot: int, held: Held) -> int:
            tensor = self.tensors[live[slot]]
            target, item = self.number(pins.get(tensor.name, REPLICATE)), item_bytes(tensor.dtype)
            prices = (self.move(tensor.shape, item, way // 4, target) for way in held)
            return min(price for price in prices if price is not None)

        costs = [
            cost + sum(final(slot, held) - final(slot, frontier.best[slot]) for slot, held in state)
            for state, cost in frontier.states
        ]
        return costs.index(min(costs))

    def advance(self, op: Op, step: SearchStep, frontier: Frontier) -> Advance:
        """All states after an op; of all its options where the wanted one fits nowhere."""
        found = self.options.options(op, self.problem.num_ranks, step.taken)
        usable = [n for n, o in enumerate(found.options) if o.axis not in step.closed]
        wanted = [n for n in usable if found.options[n].axis in step.wanted]
        used = {slot: _held(frontier, slot) for slot in step.used}
        kept = [slot for slot in step.used if slot not in step.dropped]
        reached: dict[Reached, tuple[int, int, int]] = {}
        for numbers in (wanted, usable) if step.wanted else (usable,):
            prepared = [(n, *self.prepare(op, step, found.options[n])) for n in numbers]
            outcomes: dict[tuple[Held, ...], list[tuple[int, int, tuple[Held, ...]]]] = {}
            for position, (state, cost) in enumerate(frontier.states):
                rest = tuple([each for each in state if each[0] not in used])
                before = used | dict([each for each in state if each[0] in used])
                holds = tuple(before.values())
                if holds not in outcomes:
                    outcomes[holds] = [
                        (number, time + price, tuple([held[slot] for slot in kept]))
                        for number, time, reads, writes in prepared
                        for held in (dict(before),)
                        for price in self.apply(
                            op, step, found, found.options[number], held, reads, writes
                        )
                    ]
                for number, price, own in outcomes[holds]:
                    after, total = (rest, own), cost + price
                    known = reached.get(after)
                    if known is None or total < known[0]:
                        reached[after] = (total, position, number)
            if reached:
                break
        if not reached:
            raise NoOptionError(op, found)
        everything = sorted(reached.items(), key=lambda item: item[1][0])
        ordered = everything[:MAX_STATES]
        if self.careful and len(everything) > MAX_STATES:
            ordered.append(min(everything, key=lambda item: _num_divided(frontier, item[0])))
        best = ordered[0][1][0]
        states = [(state, how[0] - best) for state, how in ordered]
        return Advance(
            frontier=self.number_frontier(_after(frontier, step, kept, states)),
            cost=best,
            origins=tuple((position, number) for _, (_, position, number) in ordered),
        )

    def prepare(
        self, op: Op, step: SearchStep, option: SplitOption
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Time of an op under an option, and the numbers of the placements it needs and gives."""
        key = step.op_class, step.taken, option.axis
        if key not in self.times:
            extents = dict(step.taken)
            if option.axis:
                extents[option.axis] = option.chunk
            time = op_time_us(op, self.tensors, self.problem.machine, extents)
            self.times[key] = round(1000 * time)
        reads = tuple(map(self.number, option.reads))
        return self.times[key], reads, tuple(map(self.number, option.writes))

    def apply(
        self,
        op: Op,
        step: SearchStep,
        found: Options,
        option: SplitOption,
        held: dict[int, Held],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
    ) -> Iterator[int]:
        """What operands of an op under an option cost, in each way, of which `held`, by slot, has
        the results meanwhile; none where it can't be.
        """
        cost = 0
        pads: list[int] = []
        for operand, need in zip(step.reads, reads, strict=True):
            way = self.read(operand, need, held)
            if way is None:
                return
            cost += way[0]
            pads.append(way[1])
        pad = self.padding(op, step, found, option, tuple(pads)) if option.uneven else Pad.ZERO
        if pad is None:
            return
        results = [
            self.write(operand, made, pad, held)
            for operand, made in zip(step.writes, writes, strict=True)
        ]
        slots = [operand.slot for operand in step.writes]
        for ways in product(*results):
            for slot, (_, result) in zip(slots, ways, strict=True):
                if slot != CONSTANT:
                    held[slot] = result
            prices = [price for price, _ in ways]
            paid = prices[:1] if option.writes[0] == PAIR else prices
            yield cost + sum(paid)

    def read(
        self, operand: StepOperand, need: int, held: dict[int, Held]
    ) -> tuple[int, int] | None:
        """Cost of having an operand as needed, and its padding; notes a kept copy in `held`."""
        if operand.slot == CONSTANT:
            assert operand.fixed is not None
            ways: Held = (4 * self.number(operand.fixed),)
        else:
            ways = held[operand.slot]
        if not ways:
            return self.choose(operand, need, held)
        for way in ways:
            if way // 4 == need:
                return 0, way % 4
        if operand.exact:
            return None
        prices = [self.move(operand.shape, operand.item_bytes, way // 4, need) for way in ways]
        possible = [price for price in prices if price is not None]
        if not possible:
            return None
        if operand.keeps:
            kept = [w for w in ways if not isinstance(self.placements[w // 4], Partial)]
            held[operand.slot] = tuple(sorted([*kept, 4 * need]))
        return min(possible), Pad.ZERO

    def choose(
        self, operand: StepOperand, need: int, held: dict[int, Held]
    ) -> tuple[int, int] | None:
        """First use of a weight or state: it will live as it is needed here."""
        placement = self.placements[need]
        if isinstance(placement, Partial) and (operand.is_state or not operand.shape):
            return None
        held[operand.slot] = (4 * need,)
        share = 1.0
        if isinstance(placement, Shard):
            share = placement.chunk / operand.shape[placement.dim]
        return round(share * operand.price_ns), Pad.ZERO

    def write(
        self, operand: StepOperand, made: int, pad: Pad, held: dict[int, Held]
    ) -> list[tuple[int, Held]]:
        """Ways to have a result, with their cost: as made, or at once as something can use it."""
        cost = 0
        if self.placements[made] == PAIR:
            cost, made = self.move(operand.shape, operand.item_bytes, made, _WHOLE) or 0, _WHOLE
        padding = int(pad) if isinstance(self.placements[made], Shard) else 0
        if operand.exact:
            return self.overwrite(operand, made, padding, cost, held)
        useful = operand.useful if operand.fixed is None else (operand.fixed,)
        targets = tuple(map(self.number, useful))
        if not targets or made in targets:
            return [(cost, (4 * made + padding,))]
        prices = [
            (self.move(operand.shape, operand.item_bytes, made, target), target)
            for target in targets
        ]
        return [(cost + price, (4 * target,)) for price, target in prices if price is not None]

    def overwrite(
        self, operand: StepOperand, made: int, padding: int, cost: int, held: dict[int, Held]
    ) -> list[tuple[int, Held]]:
        """A result that goes to where a tensor already lives, or will from here on."""
        ways = held[operand.slot] if operand.slot != CONSTANT else ()
        if operand.fixed is not None:
            ways = (4 * self.number(operand.fixed),)
        if isinstance(self.placements[made], Partial) or padding:
            return []
        if ways:
            return [(cost, ways)] if ways == (4 * made,) else []
        if operand.is_free:
            chosen = self.choose(operand, made, held)
            return [(cost + chosen[0], (4 * made,))] if chosen else []
        return [(cost, (4 * made,))]

    def padding(
        self, op: Op, step: SearchStep, found: Options, option: SplitOption, pads: tuple[int, ...]
    ) -> Pad | None:
        """Padding of the results of an uneven option; None if it isn't exact."""
        key = step.op_class, option.axis, pads
        if key not in self.pads:
            reads = [
                {option.axis: Pad(pad)} if isinstance(need, Shard) else {}
                for need, pad in zip(option.reads, pads, strict=True)
            ]
            uneven = (option.axis,)
            inexact = inexact_reason(op, uneven, reads, found.index_reads)
            results = result_pads(op, uneven, reads)
            self.pads[key] = None if inexact else results.get(option.axis, Pad.ZERO)
        return self.pads[key]

    def move(self, shape: tuple[int, ...], item_bytes: int, source: int, target: int) -> int | None:
        """Nanoseconds from one placement to another; None if there is no way."""
        key = shape, item_bytes, source, target
        if key not in self.movements:
            self.movements[key] = self.move_time(shape, item_bytes, source, target)
        return self.movements[key]

    def move_time(
        self, shape: tuple[int, ...], item_bytes: int, source: int, target: int
    ) -> int | None:
        """As `move`, computed anew."""
        here = self.placements[source]
        steps = table(here, self.placements[target])
        if steps is None:
            return None
        total = 0.0
        for kind, after in steps:
            problem = self.problem
            cost = step_cost(
                kind, here, after, shape, item_bytes, problem.num_ranks, problem.machine
            )
            total += cost[1]
            here = after
        return round(1000 * total)


def _held(frontier: Frontier, slot: int) -> Held:
    """What the best state holds of a tensor; nothing of a new one."""
    return frontier.best[slot] if slot < len(frontier.best) else ()


def _after(
    before: Frontier,
    step: SearchStep,
    kept: Sequence[int],
    states: Sequence[tuple[Reached, int]],
) -> Frontier:
    """The frontier of these states behind a step, of which `kept` are the slots that it uses and
    keeps.
    """
    best = [*before.best, *((),) * step.num_new]
    (others, used), _ = states[0]
    changed = {slot: best[slot] for slot, _ in others}  # what a state holds there, unless it says
    for slot, held in (*others, *zip(kept, used, strict=True)):
        best[slot] = held
    behind = []
    for (rest, own), cost in states:
        all_held = changed | dict(rest) | dict(zip(kept, own, strict=True))
        state = sorted(item for item in all_held.items() if item[1] != best[item[0]])
        moved = tuple([(slot - bisect(step.dropped, slot), held) for slot, held in state])
        behind.append((moved, cost))
    for slot in reversed(step.dropped):
        del best[slot]
    return Frontier(best=tuple(best), states=tuple(behind))


def _num_divided(before: Frontier, reached: Reached) -> int:
    """Tensors that are whole nowhere, more than of the best state before a step."""
    rest, used = reached
    apart = (_is_divided(held) - _is_divided(before.best[slot]) for slot, held in rest)
    return sum(apart) + sum(map(_is_divided, used))


def _is_divided(held: Held) -> bool:
    return 4 * _WHOLE not in held
