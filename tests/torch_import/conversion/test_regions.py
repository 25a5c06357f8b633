"""Graphs within graphs, and shapes that data decide: run by torch as one op, as small as can be."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.while_loop import while_loop

import distmega
from distmega.hostir.library.ops import TorchOps
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.run.graph_breaks import graph_breaks
from distmega.program.text import parse_program, print_program
from distmega.sharding.localize import localize
from distmega.torch_import import Captured, capture
from distmega.torch_import.backend import compile_graph
from tests.torch_import.running import assert_close, open_ranks

Function = Callable[["Parts", Tensor], object]


class Parts(nn.Module):
    """A function with layers and a buffer at hand."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def branch(m: Parts, x: Tensor) -> Tensor:
    """Layers in branches, in whole numbers so that sums are exact."""
    return m.second(torch.cond(x.sum() > 0, lambda x: m.first(x) * 2, lambda x: x.sin(), (x,)))


def loop(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    def body(n: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return n - 1, m.first(y)

    steps, y = while_loop(lambda n, y: n > 2, body, ((x > 0).sum(), x))
    return steps, m.second(y)


def mapped(m: Parts, x: Tensor) -> Tensor:
    return torch_map(lambda row: m.first(row), x) + 1


def chosen(m: Parts, x: Tensor) -> Tensor:
    return m.second(m.first(x[x[:, 0] > 0]).sum(0))


def chosen_rows(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = (x[:, 0] > 0).nonzero().squeeze(1)
    return rows, torch.zeros(5, 4).index_add(0, rows, m.first(x)[rows])


def around(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    """An ordinary product between two operators on an open shape."""
    rows = x[x[:, 0] > 0]
    total = m.first(rows.sum(0))
    return rows * total, (rows * total).sum(0)


def first_rows(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    n = (x[:, 0] > 0).sum().item()
    torch._check(n >= 0)
    torch._check(n <= 5)
    return m.first(x[:n]).sum(0), x * n


def counted(m: Parts, x: Tensor) -> tuple[object, Tensor]:
    positive = x[x > 0]
    return (x > 0).sum().item(), positive.shape[0], positive.sum() / positive.shape[0]


def distinct(m: Parts, x: Tensor) -> object:
    return torch.unique((x > 0).long(), return_inverse=True, return_counts=True)


def stateful(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    before = x[x[:, 0] + m.count[0] * 0 > 0]
    m.count.add_(before.sum(0))
    return before, m.count * 1


def overwritten(m: Parts, x: Tensor) -> Tensor:
    old = x[x > 0]
    x.add_(1)
    return old, x[x > 0]


def foreign(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.view_as_complex(x.reshape(5, 2, 2))
    return z[x[:, 0] > 0], (x > 0).to(torch.uint8)[x[:, 0] > 0].sum(0)


CASES: dict[str, tuple[Function, set[str]]] = {
    "cond": (branch, {"higher_order.cond"}),
    "while_loop": (loop, {"higher_order.while_loop"}),
    "map": (mapped, {"higher_order.map_impl"}),
    "rows by a mask": (
        chosen, {"aten.index.Tensor", "aten.linear.default", "aten.sum.dim_IntList"}
    ),
    "rows by number": (
        chosen_rows,
        {"aten.nonzero.default", "aten.squeeze.dims", "aten.index.Tensor",
         "aten.index_put.default"},
    ),
    "around a product": (
        around,
        {"aten.index.Tensor", "aten.sum.dim_IntList", "aten.linear.default", "aten.mul.Tensor"},
    ),
    "first rows": (
        first_rows,
        {"aten._local_scalar_dense.default", "aten.slice.Tensor", "aten.linear.default",
         "aten.sum.dim_IntList"},
    ),
    "numbers": (counted, {"aten.index.Tensor", "aten.sum.dim_IntList", "aten.div.Tensor"}),
    "distinct": (distinct, {"aten._unique2.default"}),
    "a state": (stateful, {"aten.index.Tensor", "aten.sum.dim_IntList"}),
    "an input that is overwritten": (overwritten, {"aten.index.Tensor"}),
    "types that programs lack": (foreign, {"aten.index.Tensor", "aten.sum.dim_IntList",
                                           "aten._to_copy.default"}),
}  # fmt: skip


def inputs() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(5, 4), torch.randn(5, 4), torch.ones(5, 4), -torch.ones(5, 4)]


@pytest.mark.parametrize("name", CASES)
def test_programs_with_parts_for_torch_agree_with_eager(name: str):
    function, operators = CASES[name]
    module = Parts(function)
    captured = capture(module, (inputs()[0],))
    assert captured.opaque.keys() == operators
    assert parse_program(print_program(captured.program)) == captured.program
    for num_ranks in (1, 2):
        own, ranks = copy.deepcopy(module), open_ranks(captured, num_ranks)
        for x in inputs():
            given = [x.clone() for _ in ranks]
            expected = own(x)
            with ThreadPoolExecutor(num_ranks) as pool:
                found = list(pool.map(lambda rank, mine: rank(mine), ranks, given))
            for each, mine in zip(found, given, strict=True):
                assert_close(each, expected)
                assert torch.equal(mine, x)


BY_DYNAMO = ("cond", "rows by number", "numbers")


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        each if each in BY_DYNAMO else pytest.param(each, marks=pytest.mark.nightly)
        for each in CASES
    ],
)
def test_dynamo_leaves_open_shapes_to_the_backend(name: str):
    module = Parts(CASES[name][0])
    own, graphs = copy.deepcopy(module), []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor], **options: object) -> object:
        graphs.append(graph)
        return compile_graph(graph, example)

    torch._dynamo.reset()
    patches = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(patches):
        compiled = torch.compile(module, backend=backend)
        for x in inputs():
            assert_close(compiled(x.clone()), own(x.clone()))
    assert len(graphs) == 1


def ops_of(captured: Captured) -> list[str]:
    return [op.kind for op in captured.program.ops if op.kind not in ("view", "pointwise")]


def test_a_part_for_torch_is_as_small_as_can_be():
    assert ops_of(capture(Parts(chosen), (torch.ones(5, 4),))) == ["opaque", "linear"]
    two = capture(Parts(lambda m, x: (x[x > 0].sum(), x[x < 0].sum())), (torch.ones(5, 4),))
    assert ops_of(two) == ["opaque", "opaque"]
    closed = capture(Parts(lambda m, x: m.second(around(m, x)[1])), (torch.ones(5, 4),))
    assert ops_of(closed) == ["opaque", "linear"]


def test_equal_parts_are_equal_whatever_their_names():
    def twice(m: Parts, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.cond(x.sum() > 0, lambda x: m.first(x), lambda x: x.cos(), (x,))
        return x

    captured = capture(Parts(twice), (torch.ones(5, 4),))
    one, other = (op for op in captured.program.ops if op.kind == "opaque")
    assert one.attrs == other.attrs
    assert "2 x higher_order.cond" in captured.plan().explain()


def test_what_the_host_reads_is_no_cuda_graph():
    def breaks(function: Function) -> list[str]:
        plan = capture(Parts(function), (torch.ones(5, 4),)).plan()
        host = lower_program(localize(plan), megakernel=False, peer_memory=False)
        device = torch.device("cuda")
        return [*graph_breaks(host, device, TorchOps(), signals_on_device=True)]

    assert "which graph runs next" in breaks(branch)[0]
    assert "numbers and shapes that data decide" in breaks(chosen)[0]
    masked = breaks(lambda m, x: x.index_put((x[:, 0] > 0,), x[0]))
    assert "how many a mask chooses" in masked[0]
    assert not breaks(mapped)
    assert not breaks(lambda m, x: torch.special.i0(x))


def test_checks_of_shapes_are_made():
    def few(m: Parts, x: Tensor) -> Tensor:
        n = (x[:, 0] > 0).sum().item()
        torch._check(n >= 0)
        torch._check(n <= 3)
        return x[:n].sum(0)

    step = capture(Parts(few), (torch.ones(5, 4),)).compile()
    assert_close(step(-torch.ones(5, 4)), torch.zeros(4))
    with pytest.raises(distmega.errors.RankFailure, match="Runtime assertion failed"):
        step(torch.ones(5, 4))


def test_weights_are_read_where_they_are():
    module = Parts(lambda m, x: m.first.weight[x[:4, 0] > 0])
    step = capture(module, (torch.ones(5, 4),)).compile()
    module.first.weight.fill_(3)
    assert_close(step(torch.ones(5, 4)), module(torch.ones(5, 4)))
