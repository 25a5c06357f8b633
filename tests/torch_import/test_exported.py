"""Export: what torch is asked once, what it sees that came since the last time, and what it leaves
unsaid.
"""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch._export import utils as export_utils

from distmega.torch_import.exported import export_module


def targets(module: nn.Module) -> list[str]:
    """Operators of the module on a 2 x 4 tensor."""
    graph = export_module(module, (torch.ones(2, 4),), {}).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_operators_are_listed_once_while_a_module_is_taken_apart(monkeypatch: pytest.MonkeyPatch):
    """Torch lists them for each of its namespaces."""
    listed: list[str] = []
    listing = export_utils._materialize_cpp_cia_ops

    def counted() -> None:
        listed.append("once")
        listing()

    monkeypatch.setattr(export_utils, "_materialize_cpp_cia_ops", counted)
    assert targets(nn.Hardswish())
    assert listed == ["once"]
    assert export_utils._materialize_cpp_cia_ops is counted


def test_an_operator_that_came_since_the_last_export_is_taken_apart():
    assert targets(nn.ReLU()) == ["aten.relu.default"]
    library = torch.library.Library("distmega_test_exported", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.distmega_test_exported.twice(x)

    assert targets(Twice()) == ["aten.add.Tensor"]


def test_what_torch_refuses_at_first_is_not_written_anywhere(capfd: pytest.CaptureFixture[str]):
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * int(x.sum().item())

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("torch")
    log.addHandler(handler)
    try:
        assert "aten.mul.Tensor" in targets(Scaled())
    finally:
        log.removeHandler(handler)
    assert not [record for record in records if record.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", "")
