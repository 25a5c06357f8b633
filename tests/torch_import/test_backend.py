"""torch.compile with distmega as its backend, on one rank here and on two under a launcher."""

import importlib
import tomllib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import distmega
from distmega.errors import CaptureError
from distmega.sharding.layout.placements import Layout
from distmega.sharding.planner import Plan
from distmega.torch_import import backend, captured
from distmega.torch_import.graph_numbers import GraphNumbers
from tests.repo.source import ROOT
from tests.torch_import.running import assert_close


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, twice: bool = False) -> tuple[Tensor, int]:
        self.calls += 1
        y = self.down_proj(torch.relu(self.up_proj(x)))
        return (2 * y if twice else y) + self.calls, x.shape[0]


@pytest.fixture(scope="module")
def dynamo() -> ModuleType:
    """torch's own package, which warns of torch's own parts as it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("torch._dynamo")


@pytest.fixture(autouse=True)
def _fresh(dynamo: ModuleType) -> None:
    torch.manual_seed(0)
    dynamo.reset()


def test_torch_finds_the_backend_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = project["entry-points"]["torch_dynamo_backends"]["distmega"]
    module, _, name = place.partition(":")
    assert getattr(importlib.import_module(module), name) is backend.compile_graph


@torch.no_grad()
def test_compiled_models_agree_with_eager_as_inputs_change():
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=backend.compile_graph)
    for rows, twice in ((3, False), (3, True), (5, False), (7, False), (5, True)):
        x = torch.randn(rows, 4)
        assert_close(compiled(x, twice), plain(x, twice))
    assert_close(model.calls, plain.calls)


@torch.no_grad()
def test_a_graph_break_leaves_parts_that_are_programs():
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.softmax(-1)
            torch._dynamo.graph_break()
            return x.cumsum(0) * 3

    x = torch.randn(3, 4)
    found = torch.compile(Breaks(), backend=backend.compile_graph)(x)
    assert_close(found, Breaks()(x))


@torch.no_grad()
def test_parts_of_a_broken_graph_reach_each_other_by_memory():
    """What the second part overwrites are results of the first, or asks how they lie in memory."""
    scale = nn.Parameter(torch.ones(4))

    def part_of_result(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 2, (x + 1).t()
        row, copy, columns = y[0], y.clone(), z.reshape(4, 3)
        torch._dynamo.graph_break()
        for each in (row, copy, columns):
            each.add_(1)
        return y, z, copy

    def order(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        y = x.t() * 2
        torch._dynamo.graph_break()
        return y.t().view(-1), y.stride()

    def weight(x: Tensor) -> Tensor:
        part = scale[1:]
        torch._dynamo.graph_break()
        part.add_(1)
        return x * scale

    for function in (part_of_result, order, weight):
        found, expected = [], []
        for results, each in (
            (found, torch.compile(function, backend=backend.compile_graph)),
            (expected, function),
        ):
            scale.fill_(1)
            torch._dynamo.reset()
            results += [each(torch.arange(12.0).reshape(3, 4)) for _ in range(2)]
        assert_close(found, expected)


@torch.no_grad()
def test_annotations_name_the_parameters_of_the_model():
    model, x = Model(), torch.randn(3, 4)
    marks = {"up_proj.weight": distmega.replicate(), "down_proj": distmega.replicate()}
    compiled = torch.compile(model, backend=backend.compile_graph, options={"annotations": marks})
    assert_close(compiled(x)[0] - 1, model(x)[0] - 2)


class Keyed(nn.Module):
    """A layer for each of some keys, and one by the name of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        keys = ("user item", "user_item", "a-b", "it's", "\"'\\", "é\n")
        self.layers = nn.ModuleDict({key: nn.Linear(4, 4) for key in keys})
        self._graph = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in (*self.layers.values(), self._graph)]


@torch.no_grad()
def test_parameters_of_odd_names_stay_apart():
    model, x = Keyed(), torch.randn(3, 4)
    marks = {f"layers.{key}": distmega.replicate() for key in ("user item", "user_item", "a-b")}
    compiled = torch.compile(model, backend=backend.compile_graph, options={"annotations": marks})
    for _ in range(2):
        assert_close(compiled(x), model(x))
        model.layers["user item"].weight.mul_(2)


@torch.no_grad()
def test_parameters_of_several_modules_stay_apart():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(4, 4)  # a module of the name of others' parameters

        def forward(self, x: Tensor) -> Tensor:
            return self.weight(x)

    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), Named()

    def summed(x: Tensor) -> Tensor:
        return first(x) - second(x) * third(x)

    x = torch.randn(3, 4)
    compiled = torch.compile(summed, backend=backend.compile_graph)
    for _ in range(2):
        assert_close(compiled(x), summed(x))
        second.weight.mul_(2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "rest.0", "*.weight"])
def test_annotations_know_all_names_of_a_shared_weight(name: str, monkeypatch: pytest.MonkeyPatch):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.rest = nn.ModuleList([nn.Linear(8, 12, bias=False)])
            self.head.weight = self.rest[0].weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(x) + self.rest[0](x * x)

    seen: list[Mapping[str, Layout]] = []
    plan = captured.Captured.plan

    def planned(self: captured.Captured, *args: Any) -> Plan:
        found = plan(self, *args)
        seen.append(found.annotations)
        return found

    monkeypatch.setattr(captured.Captured, "plan", planned)
    model, ids = Tied(), torch.tensor([1, 2, 3])
    options = {"annotations": {name: distmega.replicate()}}
    compiled = torch.compile(model, backend=backend.compile_graph, options=options)
    for _ in range(2):
        assert_close(compiled(ids), model(ids))
        model.embed.weight.mul_(2)
    assert [*map(len, seen)] == [1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "option 'mode' of torch.compile; expected one of mesh, annotations"),
        ({"mesh": distmega.DeviceMesh(tp=2)}, "without a process group"),
        ({"annotations": {"*.gate": distmega.replicate()}}, "which names nothing"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str):
    compiled = torch.compile(Model(), backend=backend.compile_graph, options=options)
    with pytest.raises(Exception, match=message):
        compiled(torch.randn(3, 4))


@torch.no_grad()
def test_a_mode_is_refused():
    compiled = torch.compile(Model(), backend=backend.compile_graph, mode="reduce-overhead")
    with pytest.raises(Exception, match=r"mode 'reduce-overhead' of torch\.compile; expected none"):
        compiled(torch.randn(3, 4))


def test_gradients_are_refused():
    compiled = torch.compile(Model(), backend=backend.compile_graph)
    with pytest.raises(CaptureError, match="records gradients; expected inference"):
        compiled(torch.randn(3, 4))


def test_a_module_that_records_no_gradients_runs_where_others_would():
    class Apart(nn.Linear):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model, x = Apart(4, 2), torch.randn(3, 4)
    found = torch.compile(model, backend=backend.compile_graph)(x)
    assert not found.requires_grad
    assert_close(found, model(x))


@torch.no_grad()
def test_parameters_are_those_that_the_model_has_now():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    compiled = torch.compile(model, backend=backend.compile_graph)
    changes = (
        lambda: None,
        lambda: model.weight.mul_(2),
        lambda: setattr(model, "weight", nn.Parameter(torch.randn(4, 4))),
        lambda: setattr(model.weight, "data", torch.randn(4, 4)),
        lambda: model.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)}),
    )
    for change in changes:
        change()
        assert_close(compiled(x), model(x))


@torch.no_grad()
def test_changes_of_parameters_in_place_are_not_captured_anew(monkeypatch: pytest.MonkeyPatch):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())  # lies turned, so that programs copy it
    captures: list[object] = []

    def counted(*args: Any) -> captured.Captured:
        captures.append(args)
        return captured.capture(*args)

    monkeypatch.setattr(backend, "capture", counted)
    compiled = torch.compile(model, backend=backend.compile_graph)
    for value in (3.0, 2.0, 1.0):
        assert_close(compiled(x), model(x))
        model.load_state_dict({"weight": torch.eye(4) * value, "bias": torch.ones(4)})
    assert_close(compiled(x), model(x))
    assert len(captures) == 1


@torch.no_grad()
def test_inputs_in_the_same_memory_and_an_update_reach_each_other():
    def add(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    compiled = torch.compile(add, backend=backend.compile_graph)
    for start in (3, 1, 0):  # apart, and by views of one tensor
        found, expected = torch.arange(6.0), torch.arange(6.0)
        result = compiled(found[:3], found[start : start + 3])
        assert_close(result, add(expected[:3], expected[start : start + 3]))
        assert_close(found, expected)


@torch.no_grad()
def test_a_parameter_that_the_graph_overwrites_is_overwritten():
    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return x * self.weight

    model, own = Decaying(), Decaying()
    compiled = torch.compile(model, backend=backend.compile_graph)
    for _ in range(3):
        assert_close(compiled(torch.ones(3)), own(torch.ones(3)))
        assert_close(model.weight, own.weight)


@torch.no_grad()
def test_numbers_and_inputs_without_elements():
    def scaled(x: Tensor, n: int, s: float) -> tuple[Tensor, Tensor]:
        return x * n + s, x.sum() * s

    compiled = torch.compile(scaled, backend=backend.compile_graph)
    calls = ((3, 2, 0.5), (3, 3, 1.5), (3, 3, 2.5), (0, 3, 2.5))
    for rows, n, s in calls:
        x = torch.randn(rows)
        assert_close(compiled(x, n, s), scaled(x, n, s))


def test_threads_that_call_at_once():
    """One captures inputs of a shape while dynamo traces the model for another."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    compiled = torch.compile(model, backend="distmega")
    given = [torch.randn(1 + number % 3, 4) for number in range(6)]

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return compiled(x)

    with ThreadPoolExecutor(len(given)) as threads:
        for x, y in zip(given, threads.map(call, given), strict=True):
            torch.testing.assert_close(y, model(x).detach())


def test_numbers_that_a_call_asks_for_are_a_part_of_its_program():
    """With dynamic=True dynamo gives floats as tensors; batch norm asks whether eps is below 0."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.norm(x) * scale

    model = Norm().eval()
    model.norm.running_var.fill_(0.1)
    compiled = torch.compile(model, backend="distmega", dynamic=True)
    with torch.no_grad():
        for num, scale, eps in ((3, 0.5, 1e-5), (5, 1.5, 1e-5), (5, 1.5, 0.1)):
            model.norm.eps = eps
            x = torch.randn(num, 4)
            torch.testing.assert_close(compiled(x, scale), model(x, scale))


@torch.no_grad()
def test_threads_that_find_at_once_that_a_program_asks_for_a_number(
    monkeypatch: pytest.MonkeyPatch,
):
    """Both have failed to capture the graph before either takes the number as a part of it."""
    calls: list[tuple[Any, ...]] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made = backend.compile_graph(graph, inputs)
        return lambda *given: calls.append((made, given)) or graph(*given)

    model, x = nn.BatchNorm1d(4).eval(), torch.randn(3, 4)
    expected = torch.compile(model, backend=keep, dynamic=True)(x)
    ((made, given),) = calls
    opened, both = type(made)._open, Barrier(2)

    def fail_together(self: object, args: Sequence[Any], *others: Any) -> object:
        try:
            return opened(self, args, *others)
        except CaptureError:
            both.wait(60)
            raise

    monkeypatch.setattr(type(made), "_open", fail_together)

    def call(number: int) -> Tensor:
        with torch.no_grad():
            return made(*given)[0]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(call, range(2)):
            assert_close(found, expected)


@torch.no_grad()
def test_numbers_in_a_program_are_told_apart_by_sign_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """-0.0 is equal to 0.0, nan not to itself."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor, by: float) -> Tensor:
            return self.norm(x) / by

    model, x = Divided().eval(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="distmega", dynamic=True)
    captures: list[object] = []
    capture = captured.capture
    monkeypatch.setattr(backend, "capture", lambda *given: captures.append(0) or capture(*given))
    counts = []
    for _ in range(2):
        for by in (0.5, 0.0, -0.0, float("nan")):
            torch.testing.assert_close(compiled(x, by), model(x, by), equal_nan=True)
        counts.append(len(captures))
    assert counts[0] == counts[1], "each number has its program by then"


def compiled_with(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[..., Tensor], list[Any], list[weakref.ref[object]]]:
    """The model compiled, its graphs, and the modules that were captured of them."""
    made: list[Any] = []
    modules: list[weakref.ref[object]] = []
    opened = backend._Compiled._open

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(backend.compile_graph(graph, inputs))
        return made[-1]

    def note(self: Any, *given: Any) -> object:
        entry = opened(self, *given)
        modules.append(weakref.ref(entry.module))
        return entry

    monkeypatch.setattr(backend._Compiled, "_open", note)
    return torch.compile(model, backend=keep, dynamic=True), made, modules


class Times(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * n


@torch.no_grad()
def test_programs_of_numbers_are_kept_up_to_the_limit_of_dynamo(
    monkeypatch: pytest.MonkeyPatch, dynamo: ModuleType, caplog: pytest.LogCaptureFixture
):
    """Each has a program, of which the one not called for longest goes, with its memory."""
    caplog.set_level("WARNING")
    model, x = Times(), torch.randn(3, 4)
    compiled, made, modules = compiled_with(model, monkeypatch)

    def call(x: Tensor, *numbers: int) -> None:
        for n in numbers:
            assert_close(compiled(x, n), model(x, n))

    with dynamo.config.patch(recompile_limit=3):
        call(x, 15, 25, 35, 15, 45, 55, 15)
    (graph,) = made
    assert len(graph._entries) == 3
    assert len(modules) == 5, "15 was called for all along"
    assert [each() is not None for each in modules] == [True, False, False, True, True]
    assert caplog.text.count("raise recompile_limit") == 1
    with dynamo.config.patch(recompile_limit=3):
        call(x, 35)
    assert len(graph._entries) == 3
    assert caplog.text.count("raise recompile_limit") == 1
    with dynamo.config.patch(accumulated_recompile_limit=2):
        call(x[:2], 15)
    assert len(graph._entries) == 2


@torch.no_grad()
def test_a_number_that_nothing_asks_for_is_an_input_once_it_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    """Though batch norm asks for another of the same graph, whether it is below 0."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float, eps: float) -> Tensor:
            return nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4), eps=eps) * by

    model, x = Scaled(), torch.randn(3, 4)
    compiled, made, modules = compiled_with(model, monkeypatch)
    counts = []
    for by in (0.5, 1.5, 2.5, 0.5, -0.0):
        assert_close(compiled(x, by, 1.0), model(x, by, 1.0))
        counts.append(len(modules))
    assert counts == [1, 2, 2, 2, 2]
    assert len(made) == 1
    assert modules[0]() is None, "no call finds it any longer"


def test_a_number_that_captures_ask_for_is_bound_for_good():
    """a is asked for, b and c are not; each is tried as an input once."""
    graph = fx.Graph()
    for name in "abc":
        given = graph.placeholder(name)
        given.meta["example_value"] = torch.tensor(0.0, dtype=torch.float64)
        graph.call_method("item", (given,))
    graph.output(())
    numbers, tried = GraphNumbers(fx.GraphModule({}, graph)), list[str]()

    def capture(*values: float) -> str:
        args = [torch.tensor(value, dtype=torch.float64) for value in values]
        while True:
            form = numbers.form
            if numbers.free(form, args):
                continue
            tried.append("".join(name for at, name in enumerate("abc") if at in form.bound))
            if 0 in form.bound:
                numbers.note_captured(form)
                return tried[-1]
            assert numbers.bind(form, args)

    assert capture(1, 1, 1) == "abc"
    assert capture(1, 2, 1) == "ac"
    assert capture(2, 3, 1) == "ac"
    assert capture(3, 3, 2) == "a"
    assert tried == ["", "abc", "ac", "c", "ac", "a"]
    alone = GraphNumbers(fx.GraphModule({}, fx.Graph()))
    assert not alone.bind(alone.form, ()), "there is nothing to bind"


@torch.no_grad()
def test_a_number_taken_from_a_tensor():
    def counted(x: Tensor) -> Tensor:
        return x * int(x.sum().item())

    compiled = torch.compile(counted, backend=backend.compile_graph)
    for rows in (3, 4):
        assert_close(compiled(torch.ones(rows)), counted(torch.ones(rows)))


@torch.no_grad()
def test_a_model_without_values_is_refused():
    model = nn.Linear(4, 2, device="meta")
    compiled = torch.compile(model, backend=backend.compile_graph)
    with pytest.raises(CaptureError, match=r"weights on the meta device: weight.*load_state_dict"):
        compiled(torch.ones(3, 4, device="meta"))
