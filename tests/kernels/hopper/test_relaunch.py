"""Later launches give the compiled kernel exactly what Triton gave it in the first."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from distmega.kernels.gemm.device import start
from distmega.kernels.gemm.times.tile_times import Tiles
from distmega.kernels.hopper.batch.bodies.limits import list_words
from distmega.kernels.hopper.batch_plan.words import BATCH, BATCH_STATE_POSITIONS
from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.models.sampling import GREEDY, Method
from tests.kernels import offline
from tests.kernels.hopper.batch_plan.test_batch_team import decode_plan, open_batch_runner
from tests.kernels.hopper.one_row.test_decode_code import open_runner

LIMITED = Method(kind="limited", num_candidates=64)
"""The batched kernel that tests share: compiled once."""
METADATA = 6
"""Place of what hooks may ask for, made anew for each launch."""


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_later_launches_are_the_first(monkeypatch, num_ranks):
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: seen.append(given))
    with offline.offline(monkeypatch):
        runner: RowRunner = open_runner("llama-3.2-1b", num_ranks)
        for num_steps in (1, 1, 3):
            runner.run_steps(num_steps)
    assert_same(seen)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_prepared_kernel_is_the_one_that_runs(monkeypatch, batch):
    """Compiled beside what the host does, by any number of steps, once."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: seen.append(given))
    with offline.offline(monkeypatch) as loaded:
        if batch == 1:
            runner = open_runner("llama-3.2-1b", 1)
        else:
            runner = open_batch_runner(decode_plan("smollm2-135m", 1, batch, method=LIMITED))
        runner.prepare()
        for num_steps in (1, 1, 3):
            runner.run_steps(num_steps)
    assert len(loaded) <= 1, "tests before may have loaded it"
    assert_same(seen)


class Queued(TorchDispatchMode):
    """Ops of torch that queue work, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_a_batched_step_begins_with_one_op_a_thing_that_it_is_told(monkeypatch):
    """Each is a kernel of its own before that of the step, also in a graph."""
    with offline.offline(monkeypatch):
        runner = open_batch_runner(decode_plan("smollm2-135m", 1, 3))
    monkeypatch.setattr(runner, "_run", lambda num_steps, stamps: None)
    ids, positions, chosen = torch.tensor([[5, 0, 7], [1, 2, 3], [0, 0, 0]])
    with Queued() as queued:
        runner.launch({"tokens": ids, "positions": positions, "next": chosen})
    steps = ["copy_", "remainder", "remainder", "copy_"]
    assert queued.names == steps, "bests, ids, positions; ids chosen"
    assert runner._best_rows[:3, 0].tolist() == [5, 0, 7]
    assert runner._bests[:, 0].eq(0).all()
    assert runner._bests[:, 1:].eq(-math.inf).all()
    assert runner._state[BATCH_STATE_POSITIONS:][:3].tolist() == [1, 2, 3]
    runner._bests.fill_(1.0)
    runner.start([9, 8], [4, 5])
    assert runner._bests[:, 0].eq(0).all()
    assert runner._best_rows[:2, 0].tolist() == [9, 8]
    assert runner._state[BATCH_STATE_POSITIONS:][:3].tolist() == [4, 5, 3]


@pytest.mark.parametrize(
    ("num_ranks", "method"),
    [
        (1, LIMITED),
        pytest.param(2, GREEDY, marks=pytest.mark.nightly),
    ],
)
def test_batched_launches_are_the_first(monkeypatch, num_ranks, method):
    """Of a kernel that draws within limits, for which each sequence has lists of its own; of one
    that shares the model with another rank.
    """
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: seen.append(given))
    drawn = decode_plan("smollm2-135m", num_ranks, 3, method=method)
    with offline.offline(monkeypatch):
        runner = open_batch_runner(drawn)
        if method.samples:
            assert runner._report.numel() > 2 * BATCH * list_words(runner.queues.rank_logits)
        for num_steps in (1, 1, 3):
            runner.run_steps(num_steps)
    assert_same(seen)


@pytest.mark.parametrize("stuck", [False, True])
def test_later_launches_of_a_matmul_are_the_first(monkeypatch, stuck):
    """Also of other extents; an unaligned report has a kernel of its own."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(offline._Launcher, "__call__", lambda self, *given: seen.append(given))
    words = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(start, "_unused_words", lambda index: words)
    report = words[1:] if stuck else None
    with offline.offline(monkeypatch):
        start._launcher.cache_clear()
        for rows, depth in ((1024, 512), (1024, 512), (2048, 64)):
            a, b, out = (
                torch.empty(shape, dtype=torch.bfloat16)
                for shape in ((rows, depth), (5120, depth), (rows, 5120))
            )
            spec = start.plain_spec(Tiles(tile_n=256, stages=4, group=8))
            start.launch_matmul(a, b, out, spec, 8, stuck=report)
    first, second, third = map(shown, seen)
    assert first == second
    assert [pair for pair in zip(first, third, strict=True) if pair[0] != pair[1]] == [
        *[(described(1024, 512, 64), described(2048, 64, 64))] * 2,
        (described(5120, 512, 256), described(5120, 64, 256)),
        *[(described(1024, 5120, 64), described(2048, 5120, 64))] * 2,
        (described(1024, 5120, 64, 256), described(2048, 5120, 64, 256)),
        (8, 1),
        (8, 16),
    ]
    start._launcher.cache_clear()


def assert_same(launches: Sequence[tuple[object, ...]]) -> None:
    """Three launches that differ in the number of steps alone: 1, 1 and 3."""
    first, second, third = map(shown, launches)
    assert first == second
    differing = [pair for pair in zip(first, third, strict=True) if pair[0] != pair[1]]
    assert differing == [(1, 3)]


def shown(given: tuple[object, ...]) -> list[object]:
    """What a launcher was given: grid, stream and the like, then every argument."""
    before, after = given[:METADATA], given[METADATA + 1 :]
    return [*before, *map(identity, after)]


def described(rows: int, columns: int, block_rows: int, block_columns: int = 64) -> object:
    """What `identity` makes of a matrix's descriptor."""
    return (rows, columns), (block_rows, block_columns)


def identity(argument: object) -> object:
    """Tensors and descriptors by what they are, constants by value."""
    match argument:
        case tuple():
            return tuple(map(identity, argument))
        case torch.Tensor():
            return argument.data_ptr(), argument.dtype
        case TensorDescriptor():
            return tuple(argument.shape), tuple(argument.block_shape)
    return getattr(argument, "value", argument)
