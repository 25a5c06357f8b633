"""Launches of the pipelined kernels on a stand-in for a GPU, which compiles them and takes every
argument; and the choices that ranks measured, of which all take rank 0's.
"""

import gc
import multiprocessing
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distmega.kernels.pipelined import tuning
from distmega.kernels.pipelined.choices import KernelChoice
from distmega.kernels.pipelined.families import LaunchFamily
from distmega.kernels.pipelined.norms import norms
from distmega.kernels.pipelined.pointwise import pointwise
from distmega.kernels.pipelined.pointwise.exprs import formula_of
from distmega.kernels.runtime.ahead import launching_nothing
from tests.forked import forking
from tests.kernels.offline import offline
from tests.kernels.ptx import loads, stores
from tests.kernels.sm90 import Machine

HALF = torch.bfloat16


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machine]]:
    monkeypatch.setattr(tuning, "_table", tuning._Table())
    monkeypatch.setattr(tuning._table, "entries", {})
    with offline(monkeypatch) as found:
        yield found


def rms_family(rows: int, columns: int) -> tuple[LaunchFamily, norms.Operands]:
    x, residual, y, total = (torch.empty(rows, columns, dtype=HALF) for _ in range(4))
    operands = (x, residual, torch.empty(columns, dtype=HALF), None, y, total)
    found = norms.family_of("rms_norm", 1e-6, operands)
    assert found is not None
    return found, operands


def test_a_class_is_compiled_once(launched):
    family, operands = rms_family(32, 2048)
    family.run(operands)
    again, others = rms_family(32, 2048)
    again.run(others)
    assert again is family
    assert len(launched) == 1


def test_nothing_runs_in_a_rehearsal_not_even_what_ran_before(launched, monkeypatch):
    family, operands = rms_family(80, 2048)
    launch = family.launch(family.choices[0])
    launch(operands)
    ran: list[object] = []
    monkeypatch.setattr(launch, "_run", lambda *given: ran.append(given))
    with launching_nothing(torch.device("cpu")):
        launch(operands)
    assert not ran
    launch(operands)
    assert len(ran) == 1


def test_each_kernel_takes_what_it_is_launched_with(launched):
    family, operands = rms_family(48, 4096)
    kinds = {bool(choice.stages): choice for choice in reversed(family.choices)}
    for tma, choice in kinds.items():
        family.launch(choice)(operands)
        assert (loads(launched[-1].ptx) > 0, stores(launched[-1].ptx) > 0) == (tma, tma)
    x, row, y = torch.empty(64, 256, dtype=HALF), torch.empty(256), torch.empty(64, 256)
    spread = pointwise.family_of(formula_of(("a0 * a1", "a1")), [x, row], [y, y.clone()])
    assert spread is not None
    for choice in (spread.choices[0], next(each for each in spread.choices if each.stages)):
        spread.launch(choice)(pointwise.inplace_inputs([x, row], [y, y.clone()]))
    assert len(launched) == 4


def test_rows_that_lie_in_each_other_are_read_without_descriptors(launched):
    """As those of an expanded tensor, or of one that a window slides over; nor are odd starts."""
    y, memory = torch.empty(64, 2048, dtype=HALF), torch.empty(64 * 2048 + 1, dtype=HALF)
    same, sliding = memory[:2048].expand(64, 2048), memory.as_strided((64, 2048), (64, 1))
    for x in (same, sliding, memory[1:].view(64, 2048)):
        for residual in (None, x):
            operands = (x, residual, None, None, y, None if residual is None else y.clone())
            family = norms.family_of("rms_norm", 1e-6, operands)
            assert family is not None
            assert not any(choice.stages for choice in family.choices)
    for x in (sliding, memory[1:].view(64, 2048)):
        found = pointwise.family_of(formula_of(("a0 + a1",)), [x, y], [y])
        assert found is not None
        assert not any(choice.stages for choice in found.choices)


def test_descriptors_keep_no_memory(launched):
    family, operands = rms_family(16, 1024)
    family.launch(next(each for each in family.choices if each.stages))(operands)
    held = weakref.ref(operands[0])
    del operands
    gc.collect()
    assert held() is None


def test_choices_are_measured_within_tuning_only(launched, monkeypatch, tmp_path):
    measured = []

    def measure(choices: list[KernelChoice], run: object) -> dict[KernelChoice, float]:
        measured.extend(choices)
        return {choice: 1.0 if choice.stages else 2.0 for choice in choices}

    monkeypatch.setattr(tuning, "_median_us", measure)
    family, operands = rms_family(24, 512)
    family.run(operands)
    assert not measured
    with tuning.tuning(tmp_path / "choices.json"):
        family.run(operands)
        family.run(operands)
    finalists = len(measured) - len(set(measured))
    assert finalists == tuning.NUM_FINALISTS < len(set(measured))
    best = tuning.known_choice(family.name, family.choices)
    assert best.stages
    assert list(tuning.read_choices(tmp_path / "choices.json").values()) == [best]


def test_choices_that_cannot_be_written_hold_in_this_process(
    launched, monkeypatch, tmp_path, caplog
):
    """The caller has what was measured, and no error behind a block that did all it should."""
    monkeypatch.setattr(tuning, "_median_us", lambda choices, run: dict.fromkeys(choices, 1.0))
    folder = tmp_path / "folder"
    folder.write_text("a file")
    family, operands = rms_family(40, 512)
    with tuning.tuning(folder / "choices.json"):
        family.run(operands)
    assert len(tuning._table.known()) == 1
    assert f"can't be kept in {folder}" in caplog.text


def _measure_and_report(rank: int, folder: Path, answers: multiprocessing.Queue) -> None:
    """A rank whose own measurements favour the candidate of its number."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tuning._on_this_gpu = lambda key: key
    tuning._table.entries = {}
    candidates = [
        KernelChoice(tile=(1024 * n,), num_warps=4, stages=0, buffers=0, programs_per_sm=8, run=1)
        for n in (1, 2)
    ]
    tuning._median_us = lambda choices, run: {c: float(c != candidates[rank]) for c in choices}
    path = folder / f"{rank}.json"
    with tuning.tuning(path):
        own = tuning.pick("class", candidates, prepare=len, run=print)
    agreed = tuning.pick("class", candidates, prepare=len, run=print)
    answers.put((rank, candidates.index(own), candidates.index(agreed), path.exists()))
    dist.destroy_process_group()


def test_ranks_take_over_what_rank_0_measured(tmp_path):
    context, _ = forking()
    answers = context.Queue()
    ranks = [
        context.Process(target=_measure_and_report, args=(n, tmp_path, answers)) for n in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    found = sorted(answers.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(30)
    assert found == [(0, 0, 0, True), (1, 1, 0, False)]
