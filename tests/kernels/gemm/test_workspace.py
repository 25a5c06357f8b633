"""Calls that ranks make one after another through a workspace, whatever order streams come to run
in: each waits for its own peers' words and for none of an earlier call, and nothing is overwritten
that somebody still reads.

Streams are lists of operations here, of which any whose waits are over may run next. A kernel is
two operations, its start and its end, before which it waits for words as the real one does.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")
from distmega.kernels.gemm import workspace as module

NUM_WORDS = module.NUM_WORDS


@dataclass(eq=False)
class Stream:
    """A queue of (may it run, what it does); `done` counts those that ran."""

    queue: list[tuple[Callable[[], bool], Callable[[], object]]] = field(default_factory=list)
    done: int = 0

    def add(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, run))

    def wait_stream(self, other: "Stream") -> None:
        queued = len(other.queue)
        self.add(lambda: None, lambda: other.done >= queued)

    def step(self) -> bool:
        if self.done == len(self.queue) or not self.queue[self.done][0]():
            return False
        self.queue[self.done][1]()
        self.done += 1
        return True


@dataclass(eq=False)
class Machine:
    """Words of all ranks by address, and what has happened: slots, by rank, turn and source, the
    last call whose data lies there; started, finished: kernels by rank and call; copied: by rank,
    call and peer; sent: by rank, calls whose copies read the workspace's own memory.
    """

    words: dict[int, int] = field(default_factory=dict)
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    started: set[tuple[int, int]] = field(default_factory=set)
    finished: set[tuple[int, int]] = field(default_factory=set)
    copied: set[tuple[int, int, int]] = field(default_factory=set)
    sent: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def wait_word(self, address: int, value: int, stream: Stream) -> None:
        stream.add(lambda: None, lambda: self.words.get(address, 0) >= value)

    def write_word(self, address: int, value: int, stream: Stream) -> None:
        stream.add(lambda: self.words.__setitem__(address, value))

    def write_words(self, addresses: list[int], value: int, stream: Stream) -> None:
        for address in addresses:
            self.write_word(address, value, stream)


def make(rank: int, num_ranks: int) -> module.Workspace:
    """A workspace without a GPU: only what its protocol is made of."""
    made = object.__new__(module.Workspace)
    made.turn, made._queued, made.rank, made.num_ranks = 0, False, rank, num_ranks
    made.waits_for_ready = made.pushes_when_ready = True
    made._held, made.freed = [None, None], []
    made.stream, made._words, made._waits = Stream(), Stream(), Stream()
    made.arrival_address = lambda at, source, word: (
        ((at * 2 + made.turn) * num_ranks + source) * NUM_WORDS + word
    )
    made.count_address = lambda index: -1 - (
        ((rank * 2 + made.turn) * num_ranks + rank) * NUM_WORDS + index
    )
    return made


class Own:
    """What a gather copies; when its last reference goes, its memory is written into again."""

    def __init__(self, number: int, freed: list[int]) -> None:
        self.number, self.freed = number, freed

    def __del__(self) -> None:
        self.freed.append(self.number)


def call(machine: Machine, made: module.Workspace, here: Stream, number: int, kind: str) -> None:
    """A gather, of "final" rows or of such as are written into behind it; a sending kernel whose
    copies wait for its count; one that pushes, and clears its own words. Checks what it finds.
    """
    rank, others, sends, pushes = made.rank, made.peers, kind == "send", kind == "push"
    made.begin()
    use_freed(machine, made, here)
    turn = made.turn
    made.follow()
    count = made.count_address(0)
    arrivals = [made.arrival_address(rank, source, 0) for source in others]
    ready = made.arrival_address(rank, rank, module.READY)

    def copy(peer: int) -> Callable[[], None]:
        def run() -> None:
            started = (rank, number) in machine.started
            assert started or not (sends or pushes), "sends what is not there yet"
            assert number < 2 or (peer, number - 2) in machine.finished, "somebody reads there"
            machine.slots[peer, turn, rank] = number
            machine.copied.add((rank, number, peer))
            if pushes:
                machine.words[there] = 1

        there = made.arrival_address(peer, rank, 0)
        return run

    def is_ready() -> bool:
        return bool(machine.words.get(ready, 0)) or not made.pushes_when_ready

    def start() -> None:
        before = {(rank, number - 2, peer) for peer in others if number > 1}
        assert before <= machine.copied, "overwrites what is still to be copied"
        machine.started.add((rank, number))
        if sends:
            machine.words[count] = machine.words.get(count, 0) + 1

    def finish() -> None:
        for source in others:
            assert machine.slots.get((rank, turn, source)) == number, "data of another call"
        if pushes:
            machine.words.update(dict.fromkeys(arrivals, 0))
        machine.finished.add((rank, number))

    if sends or pushes:
        here.add(start)
    for peer in others:
        if pushes:
            here.add(copy(peer), is_ready)
            continue
        if sends and peer == others[0]:
            made.await_count(0, 1)
        made.stream.add(copy(peer))
        made.tell(peer, 0)
    if not (sends or pushes):
        here.add(start)
    awaited = [*arrivals, *([ready] if made.waits_for_ready else [])]
    here.add(finish, lambda: all(machine.words.get(address, 0) for address in awaited))
    own = None if sends or pushes else Own(number, made.freed)
    words, counts = [] if pushes else [0], [0] if sends else []
    made.end(words, counts, copied=own, is_final=kind == "final")
    del own
    use_freed(machine, made, here)


def use_freed(machine: Machine, made: module.Workspace, here: Stream) -> None:
    """The stream writes into all memory that is free by now."""
    rank, freed = made.rank, set(made.freed) - machine.sent[made.rank]
    made.freed.clear()

    def write() -> None:
        copies = {(rank, number, peer) for number in freed for peer in made.peers}
        assert copies <= machine.copied, "overwrites what is still to be copied"

    here.add(write)


def run_calls(seed: int, num_ranks: int, change: Callable[[module.Workspace], None]) -> int:
    """Random calls in a random order of streams; how many streams are left waiting."""
    numbers = random.Random(seed)
    machine = Machine()
    kinds = numbers.choices(("send", "gather", "final", "push"), k=12)
    streams: list[Stream] = []
    for rank in range(num_ranks):
        here, made = Stream(), make(rank, num_ranks)
        change(made)
        with (
            patch.object(module.torch.cuda, "current_stream", lambda here=here: here),
            patch.object(module, "wait_word", machine.wait_word),
            patch.object(module, "write_word", machine.write_word),
            patch.object(module, "write_words", machine.write_words),
        ):
            machine.sent[rank] = {n for n, kind in enumerate(kinds) if kind in ("send", "push")}
            for number, kind in enumerate(kinds):
                call(machine, made, here, number, kind)
            made.settle()
            use_freed(machine, made, here)
        streams += [here, made.stream, made._words, made._waits]
    weights = [numbers.choice((0.01, 0.1, 1.0, 10.0)) for _ in streams]  # some are slow
    moving = True
    while moving:
        order = sorted(streams, key=lambda s: numbers.expovariate(weights[streams.index(s)]))
        moving = any(stream.step() for stream in order)
    return sum(stream.done < len(stream.queue) for stream in streams)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_calls_wait_for_each_other_in_any_order_of_streams(num_ranks: int):
    for seed in range(60):
        assert run_calls(seed, num_ranks, lambda made: None) == 0, seed


def forget_to_follow(made: module.Workspace) -> None:
    """Words are told before copies are there, and go back to 0 while a kernel polls them."""
    made._words.wait_stream = lambda other: None


def forget_the_caller(made: module.Workspace) -> None:
    """The caller's memory is free again before it is copied."""
    end = made.end
    made.end = lambda words, counts, copied, is_final: end(
        words, counts, copied=copied if is_final else None, is_final=is_final
    )


def take_words_as_ready(made: module.Workspace) -> None:
    """Kernels poll words whether those of the call before are 0 again or not."""
    made.waits_for_ready = False


def push_before_words_are_clear(made: module.Workspace) -> None:
    """A peer goes on by such a word, and sets one that the call before is still to clear."""
    made.pushes_when_ready = False


def forget_to_hold(made: module.Workspace) -> None:
    """Rows that stay as they are lose their memory at once."""
    end = made.end
    made.end = lambda words, counts, copied, is_final: end(
        words, counts, copied=None if is_final else copied, is_final=is_final
    )


def hold_for_a_call(made: module.Workspace) -> None:
    """The next call begins where memory is free, not the one behind it."""
    begin = made.begin

    def begin_without() -> None:
        begin()
        made._held = [None, None]

    made.begin = begin_without


@pytest.mark.parametrize(
    "change",
    [
        forget_to_follow,
        forget_the_caller,
        take_words_as_ready,
        push_before_words_are_clear,
        forget_to_hold,
        hold_for_a_call,
    ],
)
def test_without_a_wait_some_order_goes_wrong(change):
    def goes_wrong(seed: int) -> bool:
        try:
            return run_calls(seed, 3, change) > 0
        except AssertionError:
            return True

    assert any(goes_wrong(seed) for seed in range(200))
