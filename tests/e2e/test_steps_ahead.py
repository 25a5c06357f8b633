"""Decode steps ahead of the host: what is awaited when a caller stops, a step fails or a rank does
not come.
"""

import pytest
import torch

from distmega.engine import library_steps, steps_ahead
from distmega.engine.library_steps import LibrarySteps
from distmega.engine.steps_ahead import _Launch, decode_ahead, launch_sizes
from distmega.errors import HangError, ModelError
from tests.e2e.test_library_steps import BATCH, opened

HANG = HangError("a wait in vain", expected="none", remedy="look")
UNSOUND = ModelError("no numbers", expected="numbers", remedy="look")


class Steps:
    """Notes which launches are waited for. hung: those that never end."""

    def __init__(self, *hung: int) -> None:
        self.hung, self.awaited = hung, list[int]()

    def await_launch(self, done: int) -> None:
        """done: the number of a launch."""
        self.awaited.append(done)
        if done in self.hung:
            raise HANG


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each launch; the third's logits are not finite."""
    found: list[int] = []

    def launch(stepping: Steps, num_steps: int, note: object) -> _Launch:
        found.append(num_steps)
        rows = torch.full((num_steps, 1), len(found))
        total = torch.tensor(float("nan") if len(found) == 3 else 0.0)
        return _Launch(rows, total, len(found))  # type: ignore[arg-type]

    monkeypatch.setattr(steps_ahead, "_launch", launch)
    return found


def tokens_of(steps: Steps, num_steps: int) -> "steps_ahead.Iterator[tuple[int, ...]]":
    return decode_ahead(steps, num_steps, lambda num: None, lambda: UNSOUND)  # type: ignore[arg-type]


def test_all_steps_are_given_and_each_launch_awaited_once(launched: list[int]):
    steps = Steps()
    assert [*tokens_of(steps, 6)] == [(1,)] * 2 + [(2,)] * 4
    assert launched == [*launch_sizes(6)] == [2, 4]
    assert steps.awaited == [1, 2]


def test_a_caller_who_stops_waits_for_the_last_launch(launched: list[int]):
    steps = Steps()
    tokens = tokens_of(steps, 100)
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert launched == [2, 4]
    assert steps.awaited == [1, 2]


def test_a_caller_who_stops_learns_that_the_last_launch_hangs():
    tokens = tokens_of(Steps(2), 100)
    next(tokens)
    with pytest.raises(HangError):
        tokens.close()  # type: ignore[attr-defined]


def test_numbers_that_are_none_are_told_behind_the_last_launch(launched: list[int]):
    steps = Steps()
    with pytest.raises(ModelError, match="no numbers"):
        list(tokens_of(steps, 100))
    assert launched == [2, 4, 8, 16]
    assert steps.awaited == [1, 2, 3, 4]


def test_a_hang_is_told_though_what_follows_hangs_too():
    steps = Steps(2, 3)
    with pytest.raises(HangError, match="a wait in vain"):
        list(tokens_of(steps, 100))
    assert steps.awaited == [1, 2, 3]


class Never:
    """An event that is not reached."""

    def query(self) -> bool:
        return False


def test_a_rank_waits_for_others_as_long_as_it_may_and_once(monkeypatch: pytest.MonkeyPatch):
    evaluator, given = opened()
    steps = LibrarySteps(evaluator, given, BATCH, limit_s=0.05)
    steps._waits = True
    limits: list[float] = []
    await_event = library_steps.await_event

    def noted(done: object, limit_s: float, what: str) -> None:
        limits.append(limit_s)
        await_event(done, limit_s, what)  # type: ignore[arg-type]

    monkeypatch.setattr(library_steps, "await_event", noted)
    for _ in range(2):
        with pytest.raises(HangError, match="decode steps of rank 0: still under way"):
            steps.await_launch(Never())  # type: ignore[arg-type]
    assert limits == [0.05, 0.0]


def test_a_rank_alone_waits_without_a_limit():
    evaluator, given = opened()
    reached: list[str] = []

    class Event:
        def synchronize(self) -> None:
            reached.append("end")

    LibrarySteps(evaluator, given, BATCH, limit_s=0.0).await_launch(Event())  # type: ignore[arg-type]
    assert reached == ["end"]
