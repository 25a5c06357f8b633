"""What is made under torch.inference_mode() runs outside of it, and the other way round."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distmega
from distmega.torch_import import CapturedModule
from tests.e2e.test_library import CPU_RANK, cache_program

MODES = pytest.mark.parametrize(
    ("made", "used"),
    [(torch.inference_mode, nullcontext), (nullcontext, torch.inference_mode)],
    ids=["made under it", "used under it"],
)
X, AT = torch.ones(2, 1, 4), torch.tensor([2, 5])


def in_turns(make: Callable[[], Any], use: Callable[[Any], Any], made: Any, used: Any) -> list[Any]:
    """What is found where it is used, where it was made, and where it is used again."""
    with made():
        it = make()
    found = []
    for mode in (used, made, used):
        with mode():
            found.append(use(it))
    return found


@MODES
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_engine_answers_in_either_mode(made: Any, used: Any, temperature: float) -> None:
    source, options = distmega.open_model("tiny-llama"), distmega.EngineOptions(max_context=16)

    def make() -> distmega.Engine:
        chosen = distmega.Sampling(temperature=temperature)
        return distmega.open_engine(CPU_RANK, source, 1, options, sampling=chosen)

    answers = in_turns(make, lambda engine: [*engine.generate([1, 2], 3)], made, used)
    assert answers == [[*make().generate([1, 2], 3)]] * 3


@MODES
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("megakernel", [False, True])
def test_a_program_updates_its_states_in_either_mode(
    made: Any, used: Any, warm: bool, megakernel: bool
) -> None:
    plan = distmega.plan_program(cache_program(), distmega.DeviceMesh(tp=1), distmega.CPU)

    def make() -> distmega.CompiledProgram:
        step = distmega.compile_plan(plan, CPU_RANK, warm=warm, megakernel=megakernel)
        if not warm:
            step.bind({"s": torch.zeros(1, 8, 4)})
        return step

    def use(step: distmega.CompiledProgram) -> float:
        y = step({"x": X, "at": AT})["y"]
        assert not y.is_inference()
        total = step.tensors["s"].sum().item()
        step.load({"s": torch.ones(1, 8, 4)})
        return total

    assert in_turns(make, use, made, used) == [8, 32, 32]


class Counter(nn.Module):
    """Counts its calls, and doubles its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x.mul_(2)
        return x + self.count


@MODES
def test_a_captured_module_updates_its_states_in_either_mode(made: Any, used: Any) -> None:
    def use(step: CapturedModule) -> list[float]:
        x = torch.ones(4)
        return [step(x)[0].item(), x[0].item()]

    def make() -> CapturedModule:
        return distmega.capture(Counter(), (torch.ones(4),)).compile()

    assert in_turns(make, use, made, used) == [[3, 2], [4, 2], [5, 2]]
