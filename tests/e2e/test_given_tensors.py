"""Tensors whose values are not where their address says, given to compiled programs and captured
modules: refused by name, or read right.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import distmega
from distmega.compiled import CompiledProgram
from distmega.errors import CaptureError, ProgramError
from distmega.hostir import SingleCommunicator
from distmega.torch_import import capture

X = torch.arange(32.0).reshape(4, 8) / 8
W = torch.arange(128.0).reshape(16, 8) % 5 - 2
Call = Callable[[Tensor], Tensor]


def linear(*, bound: bool) -> Call:
    """y = x w' as a call of x; bound: an earlier call has bound the weight, and both come again."""
    p = distmega.ProgramBuilder("linear")
    program = p.build(p.linear(p.input("x", (4, 8)), p.weight("w", (16, 8)), name="y"))
    mesh = distmega.DeviceMesh(tp=1)
    plan = distmega.plan_program(program, mesh, distmega.CPU)
    step = CompiledProgram(plan, SingleCommunicator(mesh))
    if bound:
        step({"x": X, "w": W})
    return lambda x: step({"x": x, "w": W})["y"]


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([*X])


def without_storage() -> Tensor:
    x = X.clone()
    x.untyped_storage().resize_(0)
    return x


TRANSFORMED: dict[str, Callable[[Call], object]] = {
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(X),
    "vmap": lambda call: torch.vmap(call)(X.repeat(3, 1, 1)),
    "functionalize": lambda call: torch.func.functionalize(call)(X),
}
MISFITS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "nested": (nested, "nested f32"),
    "jagged": (lambda: torch.nested.nested_tensor([*X], layout=torch.jagged), "NestedTensor f32"),
    "fake": (lambda: FakeTensorMode().from_tensor(X), "FakeTensor f32"),
    "lazy": (torch.nn.UninitializedParameter, "memoryless f32"),
    "freed": (without_storage, "memoryless f32"),
    "sparse": (X.to_sparse, "torch.sparse_coo f32"),
    "meta": (lambda: X.to("meta"), "meta f32"),
}


@pytest.mark.parametrize("bound", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_a_call_inside_of_torch_func_is_refused(
    transform: Callable[[Call], object], *, bound: bool
) -> None:
    call = linear(bound=bound)
    with pytest.raises(ProgramError, match=r"memoryless f32\[4, 8\] for input 'x'; .* torch.func"):
        transform(call)
    assert torch.equal(call(X), X @ W.T)


@pytest.mark.parametrize("bound", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(("make", "named"), MISFITS.values(), ids=MISFITS)
def test_a_tensor_without_values_in_memory_is_refused(
    make: Callable[[], Tensor], named: str, *, bound: bool
) -> None:
    call = linear(bound=bound)
    with pytest.raises(ProgramError, match=rf"{named}.* for input 'x'; .* that holds values"):
        call(make())
    assert torch.equal(call(X), X @ W.T)


@pytest.mark.parametrize("bound", [False, True], ids=["first", "later"])
def test_a_call_under_fake_tensors_is_refused(*, bound: bool) -> None:
    call = linear(bound=bound)
    with FakeTensorMode(), pytest.raises(ProgramError, match="FakeTensor of each tensor"):
        call(X)
    assert torch.equal(call(X), X @ W.T)


def test_what_torch_is_yet_to_negate_is_read_right() -> None:
    call = linear(bound=False)
    assert torch.equal(call(torch._neg_view(X)), -X @ W.T)
    p = distmega.ProgramBuilder("double")
    w = p.weight("w", (16, 8))
    plan = distmega.plan_program(
        p.build(w.map("a0 + a0", name="y")), distmega.DeviceMesh(tp=1), distmega.CPU
    )
    step = CompiledProgram(plan, SingleCommunicator(plan.mesh))
    step({"w": W})
    with pytest.raises(ProgramError, match=r"'w' in memory that has its negative; .*resolve_neg"):
        step({"w": torch._neg_view(W)})
    assert torch.equal(step({})["y"], 2 * W)
    assert torch.equal(step.part("w", torch._neg_view(W)), -W)
    with pytest.raises(ProgramError, match="lies there as its negative"):
        step.part("w", torch._neg_view(W), copy=False)


def test_captured_modules_refuse_tensors_without_values() -> None:
    module = torch.nn.Linear(8, 16)
    step = capture(module, (X,)).compile()
    for call in TRANSFORMED["grad"], TRANSFORMED["vmap"]:
        with pytest.raises(ProgramError, match="memoryless f32"):
            call(step)
    for make in nested, torch.nn.UninitializedParameter:
        with pytest.raises(CaptureError, match="without a shape"):
            step(make())
    small = X.to(torch.uint8)
    for num in range(2):  # the second call is bound as the first was
        with FakeTensorMode(), pytest.raises(ProgramError, match="FakeTensor of each tensor"):
            step(X)
        assert torch.equal(step(X), module(X).detach()), num
    held = capture(torch.nn.Flatten(), (small,)).compile()  # takes it in another type
    with FakeTensorMode(), pytest.raises(ProgramError, match="FakeTensor of each tensor"):
        held(small)
    with FakeTensorMode(), pytest.raises(ProgramError, match="FakeTensor of each tensor"):
        capture(module, (X,))
    with pytest.raises(CaptureError, match=r"torch\.export refused it"):
        torch.func.grad(lambda x: capture(module, (x,)).compile()(x).sum())(X)
    torch.testing.assert_close(step(X), module(X).detach())
    torch.testing.assert_close(step(torch._neg_view(X)), module(-X).detach())


def test_an_input_that_is_an_output_is_copied_out() -> None:
    """What the caller does to it later is not seen in results of calls before, nor the reverse."""
    p = distmega.ProgramBuilder("gives_back")
    x = p.input("x", (4, 8))
    turned = p.transpose(x, (1, 0), view=True, name="turned")
    program = p.build(x, turned, x.map("a0 + 1", name="y"))
    mesh = distmega.DeviceMesh(tp=1)
    plan = distmega.plan_program(program, mesh, distmega.CPU)
    step = CompiledProgram(plan, SingleCommunicator(mesh))
    given = X.clone()
    found = step({"x": given})
    given.fill_(7)
    found["y"].fill_(3)
    assert torch.equal(found["x"], X)
    assert torch.equal(found["turned"], X.T)
    found["x"].fill_(5)
    assert torch.equal(step({"x": X})["y"], X + 1)
