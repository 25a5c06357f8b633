"""Programs that the kernels of rows refuse, as one launch of the kernel of records."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from distmega.compiled import CompiledProgram, lowering
from distmega.engine import kept_plans
from distmega.engine.ranks.trace_summary import sum_tasks, summarise_sms
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import H200
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.trace_file import write_trace
from tests.kernels.records.programs import (
    KINDS,
    NAMES,
    expected_of,
    program_of,
    tolerance,
    values_of,
)

pytestmark = pytest.mark.gpu

MESH = DeviceMesh(tp=1)


def difference(found: torch.Tensor, expected: torch.Tensor, most: float) -> str:
    """How they differ by more than that; "" if they don't."""
    try:
        torch.testing.assert_close(found, expected, rtol=most, atol=most, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def found_wrong(name: tuple[str, str]) -> str:
    """What differs from the library's values, or from one call to the next; "" if nothing does.
    What is no number here must be none there.
    """
    torch.set_num_threads(1)
    program = program_of(*name)
    values = values_of(program)
    step = CompiledProgram(
        plan_program(program, MESH, H200), SingleCommunicator(MESH), "cuda:0", megakernel=True
    )
    if (step.stats.num_megakernels, step.stats.num_library_ops) != (1, 0):
        return f"{name}: {step.stats}"
    given = {key: x.cuda() for key, x in values.items()}
    found = {key: x.cpu() for key, x in step(given).items()}
    expected = expected_of(program, values)
    for out in program.outputs:
        most = tolerance(program, out)
        if text := difference(found[out], expected[out], most):
            return f"{name} {out}: {text}"
    if not step.stats.replayed:
        return f"{name}: {step.stats.reason}"
    if not program.with_role("state"):
        again = step(given)
        if any(difference(again[key].cpu(), x, 0.0) for key, x in found.items()):
            return f"{name}: a second call gives other values"
    return ""


@pytest.mark.parametrize(
    "names",
    [
        [(kind, dtypes[0]) for kind, (_, dtypes) in KINDS.items()],
        pytest.param(list(NAMES), marks=pytest.mark.nightly),
    ],
    ids=len,
)
def test_one_launch_gives_what_library_ops_give(names):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        wrong = [text for text in pool.map(found_wrong, names) if text]
    assert not wrong


@pytest.mark.parametrize(
    ("kind", "megakernel"), [("tiled", True), ("states", True), ("tiled", False)]
)
def test_a_traced_call_does_what_any_does_and_shows_what_took_its_time(kind, megakernel, tmp_path):
    """By records, of a caller's states too, and by library ops."""
    program = program_of(kind, KINDS[kind][1][0])
    plan, values = plan_program(program, MESH, H200), values_of(program)
    steps = [
        CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", megakernel=megakernel)
        for _ in range(2)
    ]
    given = [{key: x.cuda() for key, x in values.items()} for _ in steps]
    steps[0](given[0])
    steps[1].trace(given[1])
    for tensor in program.with_role("state"):
        assert torch.equal(*(each[tensor.name] for each in given))
    assert all(torch.equal(x, y) for x, y in zip(*map(outputs, steps, given), strict=True))
    spans = steps[1].trace(given[1])
    assert all(span.duration_us >= 0.0 for span in spans)
    write_trace(tmp_path / "trace.json", spans)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > len(spans)
    if megakernel:
        text = summarise_sms(spans)
        assert "a launch: " in text
        assert sum(sums.work_us for sums in sum_tasks(spans)) > 0.0
        return
    assert {span.track for span in spans} >= {"stream 0", "host"}


def outputs(step: CompiledProgram, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of a call."""
    return list(step(given).values())


def one_linear(rows: int) -> Program:
    p = ProgramBuilder("rows")
    x = p.linear(p.input("x", (rows, 64), "bf16"), p.weight("w", (96, 64), "bf16"), name="y")
    return p.build(x)


@pytest.mark.parametrize(
    "program",
    [one_linear(1), one_linear(3), program_of("tiled", KINDS["tiled"][1][0])],
    ids=["one row", "three rows", "records"],
)
def test_a_kernel_is_planned_by_the_first_process(program, tmp_path, monkeypatch):
    """Its timeline as well, for which instructions are made again."""
    monkeypatch.setattr(kept_plans, "FOLDER", tmp_path)
    planned = Mock(wraps=lowering.plan_whole)
    monkeypatch.setattr(lowering, "plan_whole", planned)
    plan = plan_program(program, MESH, H200)
    given = {key: x.cuda() for key, x in values_of(program).items()}
    found = []
    for _ in range(2):
        step = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", megakernel=True)
        found.append([x.clone() for x in outputs(step, given)])
        assert planned.call_count == 1
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert step.stats.num_tasks > 0
    assert step.trace(given)


def test_a_kernel_of_rows_has_a_timeline_by_the_same_call():
    program = one_linear(1)
    plan = plan_program(program, MESH, H200)
    step = CompiledProgram(plan, SingleCommunicator(MESH), "cuda:0", megakernel=True)
    spans = step.trace({key: x.cuda() for key, x in values_of(program).items()})
    assert "y" in {span.name for span in spans if "step" in span.args}
    assert "a launch: " in summarise_sms(spans)


def test_auto_leaves_them_to_library_ops():
    program = program_of("batched", "bf16")
    step = CompiledProgram(plan_program(program, MESH, H200), SingleCommunicator(MESH), "cuda:0")
    assert step.stats.num_megakernels == 0
