"""What callers give the kernels of steps, of any strides and wherever it begins."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.hopper.batch.runner import BatchRunner
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.program.types import Program
from tests.kernels.interpreting import shifted
from tests.kernels.row_programs import attending_rows, norm_of_input

NUM_SMS = 20


def launched(program: Program, given: dict[str, Tensor], monkeypatch) -> RowRunner | BatchRunner:
    """A runner on a CPU, which has brought what it is given to where a kernel would read it."""
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, [])
    kind, build = (
        (RowRunner, build_queues) if len(given["x"]) == 1 else (BatchRunner, build_batch_queues)
    )
    monkeypatch.setattr(kind, "_run", lambda *arguments: None)
    runner = kind(
        program,
        build(program, weights, states, NUM_SMS),
        weights=weights,
        weights_arena=torch.empty(weights.num_bytes, dtype=torch.uint8),
        state_arena=torch.empty(16, dtype=torch.uint8),
    )
    outputs = {
        tensor.name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        for tensor in program.tensors
        if tensor.name in program.outputs
    }
    runner.launch({**given, **outputs})
    return runner


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lies", ["apart", "shifted"])
def test_rows_that_come_in_are_read_side_by_side(monkeypatch, rows, lies):
    program = norm_of_input(rows)
    (shape,) = (tensor.shape for tensor in program.with_role("input"))
    x = torch.randn(*shape, 2, dtype=torch.bfloat16)[..., 0]
    if lies == "shifted":
        x = shifted(x)
    runner = launched(program, {"x": x}, monkeypatch)
    assert torch.equal(runner._embed, x)
    assert runner._embed.is_contiguous()
    assert runner._embed.data_ptr() % 16 == 0, "as in the first launch, for which it is compiled"


def test_a_mask_that_comes_in_is_read_by_its_strides(monkeypatch):
    program = attending_rows(5, sees="mask", mask=(1, 5, 5), given="input")
    mask = (torch.rand(1, 5, 5) < 0.5).transpose(1, 2)
    x = torch.zeros(5, program.tensor_map()["x"].shape[1], dtype=torch.bfloat16)
    runner = launched(program, {"x": x, "mask": mask}, monkeypatch)
    assert isinstance(runner, BatchRunner)
    (given,) = (one for one in runner.queues.given if one.tensor == "mask")
    found = runner._numbers[given.first :][: mask.numel()].view(mask.shape)
    assert torch.equal(found, torch.zeros(mask.shape).masked_fill(~mask, -math.inf))
