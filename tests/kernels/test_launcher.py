"""Later launches give the compiled kernel exactly what Triton gave it in the first."""

from collections.abc import Sequence

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from distmega.kernels.hopper.batch_limits import list_words
from distmega.kernels.hopper.batch_words import BATCH
from distmega.kernels.hopper.runner import DecodeRunner
from distmega.models.sampling import GREEDY, Method
from tests.kernels import offline
from tests.kernels.test_batch_team import blueprint, open_batch_runner
from tests.kernels.test_decode_code import open_runner

METADATA = 6
"""Place of what hooks may ask for, made anew for each launch."""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_later_launches_are_the_first(monkeypatch, num_ranks):
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: seen.append(given))
    with offline.offline(monkeypatch):
        runner: DecodeRunner = open_runner("smollm2-135m", num_ranks)
        for num_steps in (1, 1, 3):
            runner.decode(num_steps)
    assert_alike(seen)


@pytest.mark.parametrize(
    ("num_ranks", "method"), [(1, Method(kind="limited", num_candidates=64)), (2, GREEDY)]
)
def test_batched_launches_are_the_first(monkeypatch, num_ranks, method):
    """Of a kernel that draws within limits, for which each sequence has lists of its own; of one
    that shares the model with another rank.
    """
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: seen.append(given))
    drawn = blueprint("smollm2-135m", num_ranks, 3, method=method)
    with offline.offline(monkeypatch):
        runner = open_batch_runner(drawn)
        if method.draws:
            assert runner._report.numel() > 2 * BATCH * list_words(runner.queues.shape.vocab)
        for num_steps in (1, 1, 3):
            runner.decode(num_steps)
    assert_alike(seen)


def assert_alike(launches: Sequence[tuple[object, ...]]) -> None:
    """Three launches that differ in the number of steps alone: 1, 1 and 3."""
    first, second, third = map(shown, launches)
    assert first == second
    differing = [pair for pair in zip(first, third, strict=True) if pair[0] != pair[1]]
    assert differing == [(1, 3)]


def shown(given: tuple[object, ...]) -> list[object]:
    """What a launcher was given: grid, stream and the like, then every argument."""
    before, after = given[:METADATA], given[METADATA + 1 :]
    return [*before, *map(identity, after)]


def identity(argument: object) -> object:
    """Tensors and descriptors by what they are, constants by value."""
    match argument:
        case tuple():
            return tuple(map(identity, argument))
        case torch.Tensor() | TensorDescriptor():
            return id(argument)
    return getattr(argument, "value", argument)
