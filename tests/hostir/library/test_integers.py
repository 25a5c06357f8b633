"""Pointwise ops on integers: exact at the edges of their types, or refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmega.errors import ProgramError
from distmega.kernels import pointwise
from distmega.kernels.megakernel import compile_megakernel
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.programs import run_program
from tests.kernels.running import launch_all, make_ranks

EDGES = [0, 1, -1, 2**24 + 1, 2**31 - 1, -(2**31), 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1]
BIG = 2**53 + 1


def wrapped(value: int, bits: int = 64) -> int:
    """What so many bits store of a number."""
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


MEANING = {
    "a0 + 1": lambda a, b: a + 1,
    "1 - a0": lambda a, b: 1 - a,
    "a0 * 3 - a1": lambda a, b: 3 * a - b,
    "-a0": lambda a, b: -a,
    "abs(a0)": lambda a, b: abs(a),
    "relu(a0 - a1)": lambda a, b: max(wrapped(a - b), 0),
    f"maximum(a0, {BIG})": lambda a, b: max(a, BIG),
    f"minimum(a1, a0) + {BIG}": lambda a, b: min(a, b) + BIG,
    "a0 ** 2": lambda a, b: a**2,
    "a0 * (2 ** 10)": lambda a, b: a * 1024,
}


@pytest.mark.parametrize("text", MEANING)
@given(a=st.sampled_from(EDGES), b=st.sampled_from(EDGES))
def test_i64_is_exact(text: str, a: int, b: int):
    p = ProgramBuilder("p")
    names = ("x", "z") if "a1" in text else ("x",)
    program = p.build(p.pointwise(text, *(p.input(n, (1,), "i64") for n in names), name="y"))
    values = {"x": torch.tensor([a]), "z": torch.tensor([b])}
    found = run_program(program, {name: values[name] for name in names})["y"]
    assert found.dtype == torch.int64
    assert found.item() == wrapped(MEANING[text](a, b))


def test_i64_is_exact_in_a_megakernel():
    p = ProgramBuilder("p")
    x = p.state("x", (3,), "i64")
    p.set(x.map(f"a0 + {BIG}"), into=x)
    kernel = compile_megakernel(p.build(), DeviceMesh(tp=1), num_sms=2)
    (rank,) = ranks = make_ranks(kernel)
    rank.fill({"x": torch.tensor([2**53, -1, 0])})
    launch_all(ranks)
    assert rank.tensors["x"].tolist() == [2**53 + BIG, BIG - 1, BIG]


def test_handles_take_whole_numbers_as_they_are():
    p = ProgramBuilder("p")
    x = p.input("x", (2,), "i64")
    program = p.build((x + BIG) * 2 - 1)
    assert str(BIG) in str(program.ops[0].attrs)
    found = run_program(program, {"x": torch.tensor([0, 3])})[program.outputs[0]]
    assert found.tolist() == [2 * BIG - 1, 2 * BIG + 5]


def test_i32_and_bools_are_exact():
    i32 = torch.tensor([2**31 - 1, -(2**31), 2**24 + 1], dtype=torch.int32)
    found = pointwise("a0 + 1", i32)
    assert found.dtype == torch.int32
    assert found.tolist() == [-(2**31), -(2**31) + 1, 2**24 + 2]
    assert pointwise("a0 + a1", i32, i32 > 0).tolist() == [-(2**31), -(2**31), 2**24 + 2]
    bools = torch.tensor([True, False])
    assert pointwise("maximum(a0, 0) * a1", bools, ~bools).tolist() == [False, False]
    assert pointwise("a0 + 1", bools).tolist() == [True, True]
    assert pointwise("1 - a0", bools).tolist() == [False, True]
    assert pointwise("a0 - a1", bools, ~bools).tolist() == [True, True]


def test_a_type_asked_for_is_converted_to():
    p = ProgramBuilder("p")
    x = p.input("x", (3,), "i64")
    halves = p.pointwise("floor(a0 / 2)", x, dtype="i64", name="halves")
    quarters = p.pointwise("a0 / 4", x, dtype="f32", name="quarters")
    wide = p.pointwise(f"a0 + {BIG}", p.input("n", (3,), "i32"), dtype="i64", name="wide")
    program = p.build(halves, quarters, wide)
    values = {"x": torch.tensor([5, -5, 2**40]), "n": torch.tensor([0, 1, -1], dtype=torch.int32)}
    found = run_program(program, values)
    assert found["halves"].tolist() == [2, -3, 2**39]
    assert found["quarters"].tolist() == [1.25, -1.25, 2.0**38]
    assert found["wide"].tolist() == [BIG, BIG + 1, BIG - 1]


def test_a_float_result_may_come_of_integers():
    x, n = torch.tensor([0.5, 2.0]), torch.tensor([3, 4])
    torch.testing.assert_close(pointwise("a0 * a1 + 0.25", x, n), torch.tensor([1.75, 8.25]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a0 ** -1", [1.0, 0.5, -0.25]),
        ("a0 ** a1", [1.0, 4.0, 0.0625]),
        ("a0 ** 2 + a1 ** 0.5 * 0", [torch.nan, 4.0, torch.nan]),
        ("silu(a0)", torch.nn.functional.silu(torch.tensor([1.0, 2.0, -4.0])).tolist()),
        ("gelu(a0)", torch.nn.functional.gelu(torch.tensor([1.0, 2.0, -4.0])).tolist()),
    ],
)
def test_functions_without_a_whole_result_are_those_of_floats(text: str, expected: list[float]):
    values = {"x": torch.tensor([1, 2, -4]), "z": torch.tensor([-3, 2, -2], dtype=torch.int32)}
    p = ProgramBuilder("p")
    x, z = p.input("x", (3,), "i64"), p.input("z", (3,), "i32")
    used = (x, z) if "a1" in text else (x,)
    alone = p.pointwise(text, *used, dtype="f32")
    beside = p.pointwise(f"{text} + a{len(used)} * 0", *used, p.input("f", (3,)), dtype="f32")
    program = p.build(alone, beside)
    found = run_program(program, values | {"f": torch.ones(3)})
    for name in program.outputs:
        torch.testing.assert_close(found[name], torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize(
    ("text", "dtypes", "part"),
    [
        ("a0 + 0.5", ("i64",), "0.5"),
        ("a0 * 1e19", ("i64",), "1e+19"),
        (f"a0 + {2**63}", ("i64",), "9.223372036854776e+18"),
        (f"a0 + {2**31}", ("i32",), "2147483648.0"),
        ("a0 / 2", ("i64",), "(a0 / 2.0)"),
        ("relu(exp(a0))", ("i32",), "exp(a0)"),
        ("a0 ** -1", ("i64",), "(a0 ** (-1.0))"),
        ("a0 ** a1", ("i64", "i64"), "(a0 ** a1)"),
        ("a0 + a1", ("i64", "f32"), "a1 in f32"),
        ("a0 + a1", ("i32", "i64"), "a1 in i64"),
        ("a0 + a1", ("bool", "i32"), "a1 in i32"),
        ("a0 + 2", ("bool",), "2.0"),
        ("sqrt(a0)", ("bool",), "sqrt(a0)"),
        ("where(a1, a0, 0.5)", ("i64", "bool"), "0.5"),
        ("floor(a0 / 2)", ("i64",), "(a0 / 2.0)"),
    ],
)
def test_what_is_not_exact_is_refused(text: str, dtypes: tuple[str, ...], part: str):
    p = ProgramBuilder("p")
    operands = [p.input(f"x{i}", (2,), dtype) for i, dtype in enumerate(dtypes)]
    with pytest.raises(ProgramError) as caught:
        p.pointwise(text, *operands)
    assert f"in {dtypes[0]} holds {part!r}" in caught.value.found
    types = {"i64": torch.int64, "i32": torch.int32, "f32": torch.float32, "bool": torch.bool}
    with pytest.raises(ProgramError, match=f"with a result in {dtypes[0]} holds"):
        pointwise(text, *(torch.ones(2, dtype=types[dtype]) for dtype in dtypes))


@pytest.mark.gpu
@pytest.mark.parametrize("text", MEANING)
def test_i64_is_exact_on_a_gpu(text: str):
    a, b = torch.tensor(EDGES), torch.tensor(EDGES[::-1])
    args = (a, b) if "a1" in text else (a,)
    found = pointwise(text, *(x.cuda() for x in args))
    assert found.is_cuda
    expected = [wrapped(MEANING[text](*pair)) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.tolist() == expected
