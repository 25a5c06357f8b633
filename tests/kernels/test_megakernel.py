"""Compiling and launching: shared memory is used in place, misfits are refused, ranks can
compare.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from distmega.errors import LaunchError, PlanError, UnsupportedError, VerifyError
from distmega.hostir.library.ops import run_op
from distmega.kernels.cpu.runner import CpuMegakernel, open_peers
from distmega.kernels.megakernel import Megakernel, compile_megakernel
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.runtime.memory import allocate_arena, arena_views
from distmega.kernels.tasks.tile import tile_segment
from distmega.kernels.tasks.types import RangeSplit, TaskGroup
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh

ALONE = DeviceMesh(tp=1)


def counter() -> Program:
    """total += x @ w; y = total * 2, seen through a view."""
    p = ProgramBuilder("counter")
    total = p.state("total", (2, 3))
    step = p.linear(p.input("x", (2, 4)), p.weight("w", (3, 4)))
    p.set(total + step, into=total)
    return p.build(p.reshape(total * 2.0, (6,), view=True, name="y"))


def test_tasks_that_leave_out_elements_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Whatever cut the ops: the schedule's check sees races, not what nobody writes."""

    def tile_half(segment: Program, num_sms: int) -> tuple[TaskGroup, ...]:
        *others, last = tile_segment(segment, num_sms)
        axis = last.op.axes[0]
        half = RangeSplit(axes=(axis.name,), bounds=(0, axis.extent // 2))
        return (*others, replace(last, splits=(half,)))

    monkeypatch.setattr("distmega.kernels.megakernel.tile_segment", tile_half)
    with pytest.raises(VerifyError, match="expected rising bounds from 0 to"):
        compile_megakernel(counter(), ALONE, num_sms=3)


def runner_of(kernel: Megakernel) -> tuple[CpuMegakernel, dict[str, torch.Tensor]]:
    weights, states = (allocate_arena(layout) for layout in kernel.layout.arenas[:2])
    views = arena_views(kernel.layout.weights, weights) | arena_views(kernel.layout.states, states)
    peers = open_peers(kernel, 0, lambda own: [own])
    runner = CpuMegakernel(
        kernel, rank=0, weights_arena=weights, state_arena=states, peers=peers, poison=True
    )
    return runner, views | {"x": torch.randn(2, 4), "y": torch.empty(6)}


def test_states_live_across_launches_and_weights_are_used_in_place():
    runner, tensors = runner_of(compile_megakernel(counter(), ALONE, num_sms=3))
    total = torch.zeros(2, 3)
    for launch in range(4):
        tensors["x"].normal_()
        tensors["w"].fill_(launch)
        runner.launch(tensors)
        total += tensors["x"] @ tensors["w"].t()
        torch.testing.assert_close(tensors["total"], total)
        torch.testing.assert_close(tensors["y"], 2 * total.view(6))


def test_library_ops_and_the_kernel_work_on_one_memory():
    """As prefill and decode do: both read and write the same state."""
    program = counter()
    runner, tensors = runner_of(compile_megakernel(program, ALONE, num_sms=2))
    values = dict(tensors)
    for op in program.ops:
        results = run_op(op, values, {"tp": 0})
        for name, value in results.items():
            values[name] = tensors[name].copy_(value) if name == "total" else value
    expected = tensors["total"] + tensors["x"] @ tensors["w"].t()
    runner.launch(tensors)
    torch.testing.assert_close(tensors["total"], expected)


@pytest.mark.parametrize("name", ["w", "total"])
def test_a_copy_of_a_weight_or_state_is_refused(name):
    runner, tensors = runner_of(compile_megakernel(counter(), ALONE, num_sms=2))
    with pytest.raises(LaunchError, match=f"'{name}' lies outside the arenas"):
        runner.launch(tensors | {name: tensors[name].clone()})


@pytest.mark.parametrize(
    ("name", "value"), [("x", torch.zeros(4)), ("y", torch.zeros(6, dtype=torch.float64))]
)
def test_inputs_and_outputs_must_fit(name, value):
    runner, tensors = runner_of(compile_megakernel(counter(), ALONE, num_sms=2))
    with pytest.raises(LaunchError, match=f"'{name}' is "):
        runner.launch(tensors | {name: value})


def test_an_arena_that_is_too_small_is_refused():
    kernel = compile_megakernel(counter(), ALONE, num_sms=2)
    small = torch.zeros(16, dtype=torch.uint8)
    peers = open_peers(kernel, 0, lambda own: [own])
    with pytest.raises(LaunchError, match="weight arena of 16 bytes; expected 128 bytes"):
        CpuMegakernel(kernel, rank=0, weights_arena=small, state_arena=small, peers=peers)


def test_a_shared_arena_must_hold_the_segments_weights():
    empty = layout_arena(Space.WEIGHT, [])
    with pytest.raises(PlanError, match="'w'"):
        compile_megakernel(counter(), ALONE, num_sms=2, weights=empty)


def test_an_op_without_instructions_is_refused():
    p = ProgramBuilder("flips")
    call = '[[{"tensor": 0}, [1]], {}, [0]]'
    out = p.opaque("aten.flip.default", call, [p.input("x", (3, 4))], [((3, 4), "f32")])
    program = p.build(*out)
    with pytest.raises(UnsupportedError, match="keep it outside megakernels"):
        compile_megakernel(program, ALONE, num_sms=2)


def test_both_event_modes_give_the_same_results():
    outputs = []
    for mode in ("overlap", "op"):
        runner, tensors = runner_of(compile_megakernel(counter(), ALONE, num_sms=3, mode=mode))
        tensors["w"].fill_(0.5)
        tensors["x"].copy_(torch.arange(8.0).view(2, 4))
        runner.launch(tensors)
        outputs.append(tensors["y"].clone())
    assert torch.equal(*outputs)


def test_ranks_compare_fingerprints():
    first, again = (compile_megakernel(counter(), ALONE, num_sms=2) for _ in range(2))
    other = compile_megakernel(counter(), ALONE, num_sms=1)
    assert first.fingerprint() == again.fingerprint()
    assert len({first.fingerprint(), other.fingerprint()}) == 1 + (
        first.encoded.queues.shape[0] > 1
    )


def test_the_summary_counts():
    kernel = compile_megakernel(counter(), ALONE, num_sms=2)
    lines = kernel.summary().splitlines()
    assert lines[:2] == [
        "megakernel counter: 2 SMs on 1 rank",
        "  ops          5: 1 linear, 2 pointwise, 1 set, 1 view",
    ]
    assert "  collectives  none" in lines
    assert "  weight       128 bytes a rank" in lines
    assert lines[-1].startswith("  compiled     expansion")


def test_compiling_needs_no_torch():
    code = (
        "import sys, distmega.kernels.megakernel as m; "
        "sys.exit('torch' in sys.modules or not m.compile_megakernel)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
