"""Modules that were looked at hold what they held."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

import distmega
from distmega.errors import CaptureError
from distmega.torch_import.attributes import kept_attributes
from distmega.torch_import.exported import export_module
from distmega.torch_import.huggingface.decoders import open_decoder
from distmega.torch_import.repeats import find_kinds
from tests.torch_import.more_families import MORE_FAMILIES

Look = Callable[[nn.Module], object]


class Replacing(nn.Module):
    """Replaces a buffer, a parameter, and what its other attributes hold."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table: Tensor = nn.Buffer(torch.arange(4.0))
        self.calls, self.seen, self.nested = 0, set[Tensor](), {"rows": [1]}
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(torch.float64)
        self.calls += 1
        self.seen.add(x)
        self.nested["rows"].append(2)
        self.late = x
        self.inner.weight = nn.Parameter(self.inner.weight * 2)
        if self.fails:
            raise ValueError("late")
        return self.inner(x) + self.table.float()


def looks() -> dict[str, Look]:
    x = torch.ones(2, 4)
    return {
        "export": lambda module: export_module(module, (x,), {}),
        "layers": lambda module: find_kinds(module, (x,), {}, [("inner",)]),
        "call": lambda module: _called(module, x),
    }


def _called(module: nn.Module, x: Tensor) -> Tensor:
    with kept_attributes(module):
        out: Tensor = module(x)
    return out


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("look", looks())
def test_attributes_are_those_of_before(look: str, fails: bool):
    module = Replacing(fails=fails)
    table, weight = module.table, module.inner.weight
    if fails:
        with pytest.raises((CaptureError, ValueError), match="late"):
            looks()[look](module)
    else:
        looks()[look](module)
    assert module.table is table
    assert module.inner.weight is weight
    assert (module.calls, module.seen, module.nested) == (0, set(), {"rows": [1]})
    assert not hasattr(module, "late")
    assert list(module.state_dict()) == ["table", "inner.weight", "inner.bias"]


def test_lists_that_refuse_changes_stay_as_they_are():
    """As those of torch.fx do."""
    module = nn.Linear(4, 4)
    module.sizes, module.names = immutable_list([1, 2]), immutable_dict({"a": 1})
    with kept_attributes(module):
        module(torch.ones(2, 4))
    assert (module.sizes, module.names) == ([1, 2], {"a": 1})


class Doubling(nn.Module):
    """Puts another tensor in the place of an attribute at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.written, self.converted = torch.ones(4), torch.ones(4), torch.ones(4)
        self.doubles = True

    def forward(self, x: Tensor) -> Tensor:
        self.written = x[0] * 3
        self.converted = self.converted.to(torch.float64)
        if self.doubles:
            self.read = self.read * 2
        return x + self.read + self.converted.float()


def test_a_tensor_that_changes_from_call_to_call_is_a_buffer_or_refused():
    """A program would have the first value in each call."""
    outer = nn.Sequential(Doubling())
    message = "a tensor '0.read' that its forward reads and replaces; expected a buffer"
    with pytest.raises(CaptureError, match=message):
        export_module(outer, (torch.ones(2, 4),), {})
    outer[0].doubles = False
    export_module(outer, (torch.ones(2, 4),), {})
    assert not outer._forward_hooks


class Counting(nn.Module):
    """Takes a number from a tensor, for which torch.export asks dynamo, or none."""

    def __init__(self, change: str, *, asks: bool) -> None:
        super().__init__()
        self.change, self.asks = change, asks
        self.kept, self.other, self.third = torch.ones(4), torch.full((4,), 2.0), torch.ones(4)
        self.table: Tensor = nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        number = int(x.sum().item()) if self.asks else 1
        y = (x + self.kept) * self.other + self.table * number
        match self.change:
            case "by an input":
                self.kept = x * 3
            case "by itself":
                self.kept = self.kept + 1
            case "by another":
                self.kept, self.third = self.third, x * 1
            case "a buffer":
                self.table = x * 3
            case "a buffer in place":
                self.table.copy_(self.table * 2)
            case "copies":
                self.kept = self.kept.clone().view(2, 2).view(4)
                self.table = self.table.clone()
            case "computed":
                self.kept = (self.other - 1).to(torch.float64).float()
            case "lists":
                self.kept, self.third = self.kept.clone(), [x * 1, x * 2]  # type: ignore[assignment]
            case "by a weight":
                self.kept = self.table * 1
        return y


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("change", ["by an input", "by itself", "by another", "by a weight"])
def test_a_tensor_that_another_call_would_find_changed_is_refused(change: str, asks: bool):
    """Also where dynamo traces, which leaves the module as it is."""
    with pytest.raises(CaptureError, match="a tensor 'kept' that its forward reads and replaces"):
        distmega.capture(Counting(change, asks=asks), (torch.ones(4),))


class Growing(nn.Module):
    """Puts a longer tensor, or one of another type, in the place of what it has read."""

    def __init__(self, how: str, *, asks: bool) -> None:
        super().__init__()
        self.how, self.asks, self.seen = how, asks, torch.ones(4)
        self.rate = nn.Buffer(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        number = int(x.sum().item()) if self.asks else 1
        y = x + self.seen[:4] * number
        match self.how:
            case "rows of inputs":
                self.seen = torch.cat([self.seen, x])
            case "inputs of another type":
                self.seen = (self.seen + x).double()
            case "a table":
                self.seen = torch.cat([self.seen, self.rate])
        return y


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("how", ["rows of inputs", "inputs of another type"])
def test_a_tensor_that_grows_by_inputs_is_refused(how: str, asks: bool):
    with pytest.raises(CaptureError, match="a tensor 'seen' that its forward reads and replaces"):
        distmega.capture(Growing(how, asks=asks), (torch.ones(4),))


@torch.no_grad()
@pytest.mark.parametrize("asks", [False, True])
def test_a_table_that_grows_is_taken(asks: bool):
    module, own = (Growing("a table", asks=asks) for _ in range(2))
    compiled = distmega.capture(module, (torch.ones(4),)).compile()
    for number in (1.0, 2.0):
        x = torch.full((4,), number)
        torch.testing.assert_close(compiled(x), own(x))


@torch.no_grad()
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("change", ["nothing", "copies", "computed", "a buffer in place", "lists"])
def test_what_is_replaced_by_the_same_numbers_is_not_refused(change: str, asks: bool):
    module, own = Counting(change, asks=asks), Counting(change, asks=asks)
    compiled = distmega.capture(module, (torch.ones(4),)).compile()
    for number in (1.0, 2.0, 3.0):
        x = torch.full((4,), number)
        torch.testing.assert_close(compiled(x), own(x))


@torch.no_grad()
def test_a_buffer_that_is_replaced_changes_from_call_to_call_or_is_refused():
    """Dynamo would not follow it."""
    module, own = (Counting("a buffer", asks=False) for _ in range(2))
    compiled = distmega.capture(module, (torch.ones(4),)).compile()
    for number in (1.0, 2.0, 3.0):
        x = torch.full((4,), number)
        torch.testing.assert_close(compiled(x), own(x))
    message = r"a buffer 'table' that its forward replaces.*write self\.table\.copy_"
    with pytest.raises(CaptureError, match=message):
        distmega.capture(Counting("a buffer", asks=True), (torch.ones(4),))


def test_a_decoder_that_replaces_a_buffer_is_built_in_any_type():
    """Its table of positions takes the type of its weights at each call."""
    decoder = open_decoder(MORE_FAMILIES["ctrl"](random.Random(0)))
    for dtype in ("f32", "bf16"):
        program = decoder.build(1, 16, dtype=dtype)
        assert not any("pos_encoding" in tensor.name for tensor in program.tensors)
