"""The programs of bench/programs.py are what their peers in torch compute, and cases read as they
should.
"""

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import programs
from bench.llama import VARIANTS, llama_1b
from bench.models import Model, encoder, gated_mlp, gpt2_step, mixer
from bench.programs import (
    CASES,
    GRAPH,
    OURS,
    TOLERANCE,
    Case,
    Job,
    compiling,
    measuring,
    parse_case,
    records,
    run_cases,
    run_jobs,
)
from bench.turns import Turns
from distmega.compiled import CompiledProgram
from distmega.hostir import SingleCommunicator
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.machines import CPU
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program

POSITION = 20


def small_llama(variant: str) -> Model:
    """Gives the token, and what the head reads."""
    return llama_1b(variant, 2, 64, (8, 4, 16), 128, 96, POSITION, with_state=True)


SMALL: dict[str, Callable[[], Model]] = {
    "gated_mlp": lambda: gated_mlp(3, 2, 64, 128),
    "gpt2_step": lambda: gpt2_step(0, 2, 64, 4, 32),
    "encoder": lambda: encoder(16, 2, 64, 4),
    "mixer": lambda: mixer(0, 2, 64, 24, 32),
    **{f"llama {one}": partial(small_llama, one) for one in VARIANTS},
}


def random_tensors(step: CompiledProgram) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    for buffer in step.host.buffers:
        if buffer.role == "temp":
            continue
        if buffer.dtype == "i64":
            found[buffer.name] = torch.tensor([POSITION])
        else:
            x = torch.randn(buffer.shape)
            scaled = x * buffer.shape[-1] ** -0.5 if len(buffer.shape) > 1 else 1 + 0.1 * x
            found[buffer.name] = scaled.to(torch_dtype(buffer.dtype))
    return found


@pytest.mark.parametrize("name", SMALL)
def test_a_program_is_what_torch_computes(name: str):
    model, mesh = SMALL[name](), DeviceMesh(tp=1)
    step = CompiledProgram(plan_program(model.program, mesh, CPU), SingleCommunicator(mesh))
    ours = random_tensors(step)
    theirs = {each: x.clone() for each, x in ours.items()}
    expected = model.in_torch(theirs, lambda x: x).float()
    *token, found = step(ours).values()
    if token:  # torch gives logits
        found = found @ ours["embed"].T
        assert expected[0, token[0]] > expected.max() - TOLERANCE * expected.abs().max()
    assert (found.float() - expected).abs().max() < TOLERANCE * expected.abs().max()
    for buffer in step.host.buffers:
        if buffer.role == "state":
            torch.testing.assert_close(ours[buffer.name], theirs[buffer.name], rtol=0.02, atol=0.02)
            assert (ours[buffer.name] != random_tensors(step)[buffer.name]).any()


def test_all_cases_are_read():
    assert [parse_case(text).text for text in CASES] == [*CASES]
    assert parse_case("gated_mlp rows=64 tp=2") == Case(
        "gated_mlp rows=64 tp=2", "gated_mlp", 64, 2
    )
    assert parse_case("mixer") == Case("mixer", "mixer", 0, 1)
    with pytest.raises(SystemExit, match="case 'other'; expected one of gated_mlp, gpt2_step"):
        parse_case("other")


def test_records_are_medians_over_processes():
    lines = [
        {"device": "NVIDIA H200", "floor_us": 1.0, "us": {OURS: us, GRAPH: 4.0},
         "host_us": {OURS: 3.0, GRAPH: 1.0}}
        for us in (5.0, 2.0, 9.0)
    ]  # fmt: skip
    lines[1]["us"]["torch.compile"] = 7.0
    (_, gpu), (benchmark, host) = records(parse_case("mixer"), lines)
    assert (gpu.case, gpu.ours_us, gpu.floor_us) == ("mixer", 5.0, 1.0)
    assert gpu.peers == {GRAPH: 4.0, "torch.compile": 7.0}
    assert (benchmark, host.case, host.ours_us) == ("programs-host", "host time of mixer", 3.0)
    assert host.floor_us == 1.0


def planned(at_once: int, processes: int = 2) -> list[Job]:
    """Three cases, measured by processes of which the first compiles."""
    options = argparse.Namespace(processes=processes, compiles=1, at_once=at_once, rounds=9)
    return measuring(["a", "b", "c"], 1, Path("lines"), "store", options)


def test_each_case_is_measured_by_each_process():
    jobs = planned(at_once=5)
    assert [job.cases for job in jobs] == [("a", "c"), ("b", ""), ("a", "c"), ("b", "")]
    assert [job.with_compile for job in jobs] == [True, True, False, False]
    assert [job.turns for job in jobs] == [
        Turns(store="store", number=number, num=4) for number in range(4)
    ]
    assert [job.cases for job in planned(at_once=1)] == [("a", "b", "c")] * 2
    assert [job.cases for job in planned(at_once=99)] == [("a",), ("b",), ("c",)] * 2


def test_what_is_compiled_first_is_a_process_a_case():
    jobs = compiling(["a", "b"], 2, Path("lines"), "store")
    assert [(job.cases, job.rounds, job.with_compile) for job in jobs] == [
        (("a",), 0, True),
        (("b",), 0, True),
    ]


@pytest.mark.parametrize(
    ("processes", "compiles", "rounds"),
    [(2, 1, [0, 0, 9, 9, 9, 9]), (1, 1, [9, 9]), (1, 0, [9, 9]), (0, 1, [0, 0])],
)
def test_a_single_process_compiles_for_itself(
    processes: int, compiles: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Rounds of all processes that run, in order; without rounds one only compiles."""
    ran: list[Job] = []

    def note(jobs: list[Job], *, all_or_none: bool) -> set[str]:
        ran.extend(jobs)
        return set()

    monkeypatch.setattr(programs, "run_jobs", note)
    options = argparse.Namespace(processes=processes, compiles=compiles, at_once=5, rounds=9)
    assert not run_cases(["a", "b"], 2, Path("lines"), "store", options)
    assert [job.rounds for job in ran] == rounds
    assert any(job.with_compile for job in ran) == bool(compiles)


def test_processes_set_up_together_and_measure_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Threads in their place; steps begin with one after the other."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    comm, told = SingleCommunicator(DeviceMesh(tp=1)), list[tuple[str, int, int]]()
    alone = threading.Lock()

    def work(number: int) -> None:
        turns = Turns(store=str(tmp_path / "store"), number=number, num=3)
        for step in range(3):
            told.append(("set up", step, number))
            with turns.take(step, comm):
                assert alone.acquire(blocking=False), "another one measures"
                told.append(("turn", step, number))
                alone.release()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    for step in range(3):
        order = [number for what, at, number in told if (what, at) == ("turn", step)]
        assert order == [(step + later) % 3 for later in range(3)]
        last = max(told.index(("set up", step, number)) for number in range(3))
        assert last < told.index(("turn", step, step))


def fail_for_b(job: Job) -> None:
    """Stands for a process's work; "c" waits for the others without end."""
    if "b" in job.cases:
        raise RuntimeError("no memory")
    if "c" in job.cases:
        threading.Event().wait()


@pytest.mark.nightly
def test_the_cases_of_processes_that_fail_are_told():
    jobs = planned(at_once=99, processes=1)
    assert run_jobs(jobs[:2], all_or_none=False, target=fail_for_b) == {"b"}
    assert run_jobs(jobs, all_or_none=True, target=fail_for_b) == {"b", "c"}
