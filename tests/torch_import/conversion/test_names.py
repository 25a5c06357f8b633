"""Names of programs: all that a module holds, takes and computes stays apart."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import distmega
from distmega.torch_import import capture
from tests.torch_import.running import assert_close, check_module


class Adding(nn.Module):
    """Arguments that are called as a parameter, a buffer and a state, the last of which it
    overwrites.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((width,), 10.0))
        self.register_buffer("b", torch.full((3,), 100.0))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor, w: Tensor, b: Tensor, calls: Tensor) -> Tensor:
        self.calls.add_(1)
        calls.add_(2)
        return x + w + self.w[:3] + b * self.b + self.calls * calls


@pytest.mark.parametrize("width", [3, 4])
def test_arguments_may_be_called_as_what_the_module_holds(width: int):
    module, x = Adding(width), torch.randn(3)
    captured = capture(module, (x, x + 1, x + 2, x + 3))
    assert [tensor.name for tensor in captured.program.with_role("weight")] == ["w", "b"]
    assert captured.graph.inputs == ("x", "w#2", "b#2", "calls#2")
    compiled = captured.compile()
    found, expected = x + 3, x + 3
    with torch.no_grad():
        for _ in range(2):
            result = compiled(x, x + 1, x + 2, found)
            assert_close(result, module(x, x + 1, x + 2, expected))
            assert_close(found, expected)


class Computing(nn.Module):
    """Parameters and buffers that are called as operators, and as results of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cat = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(1, 3))
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("std", torch.ones(3))
        self.topk = nn.ParameterDict({"value": torch.randn(3), "1": torch.randn(3)})

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = torch.cat([self.cat, functional.embedding(ids, self.embedding)])
        x = ((x - self.mean) / self.std) * self.topk["value"] + self.topk["1"]
        return x.mean(0), x.std(0), *x.topk(2)


def test_what_a_module_holds_may_be_called_as_an_operator():
    captured = check_module(Computing().eval(), (torch.tensor([1, 2]),))
    held = {tensor.name for tensor in captured.program.with_role("weight")}
    assert held >= {"embedding", "cat", "mean", "std", "topk.value", "topk.1"}


class Heads(nn.Module):
    """A layer and a scale for each of some keys."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(4, 4) for key in keys})
        self.scales = nn.ParameterDict({key: torch.randn(4) for key in keys})
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> list[Tensor]:
        self.calls.add_(1)
        return [self.layers[key](x) * self.scales[key] + self.calls for key in self.layers]


@pytest.mark.parametrize("key", ["user item", "user:item", "user_item#2", "é/à", "-", "日 本"])
def test_names_that_programs_do_not_allow_stay_apart(key: str):
    module, x = Heads(key, "user?item", "user_item").eval(), torch.randn(2, 4)
    captured = check_module(module, (x,), (x,))
    assert len(captured.program.with_role("weight")) == 9
    assert captured.names["layers.user_item.weight"] == "layers.user_item.weight"
    for name in ("user_item", "user?item", key):
        pattern = f"layers.{name}".replace("?", "[?]")
        plan = captured.plan(annotations={pattern: distmega.replicate()})
        marked = [captured.targets[each] for each in plan.annotations]
        assert sorted(marked) == [f"layers.{name}.bias", f"layers.{name}.weight"]
