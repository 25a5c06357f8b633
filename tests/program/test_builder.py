"""Handles, names and declarations of ProgramBuilder."""

import re
from collections.abc import Callable

import pytest

from distmega.errors import ProgramError
from distmega.program.builder import Handle, ProgramBuilder, Routing
from distmega.program.text import print_program


def test_an_mlp_takes_a_few_lines():
    p = ProgramBuilder("mlp")
    x = p.input("x", (8, 64))
    h = p.linear(x, p.weight("w1", (256, 64))).map("silu(a0)")
    program = p.build(p.linear(h, p.weight("w2", (64, 256))) + x)
    assert [op.kind for op in program.ops] == ["linear", "pointwise", "linear", "pointwise"]
    assert [t.name for t in program.with_role("weight")] == ["w1", "w2"]
    assert [t.name for t in program.with_role("input")] == ["x"]
    (out,) = program.outputs
    assert program.tensor_map()[out].shape == (8, 64)


def test_operators_are_pointwise_expressions():
    p = ProgramBuilder("p")
    x, y = p.input("x", (4,)), p.input("y", (4,))
    program = p.build(((x + y) * 2 - y) / -0.5)
    assert [op.attr("expr") for op in program.ops] == [
        "(a0 + a1)",
        "(a0 * 2.0)",
        "(a0 - a1)",
        "(a0 / (-0.5))",
    ]
    program = p.build(1 / (1 - 2 * (1 + x)))
    assert [op.attr("expr") for op in program.ops[4:]] == [
        "(1.0 + a0)",
        "(2.0 * a0)",
        "(1.0 - a0)",
        "(1.0 / a0)",
    ]
    assert p.build(-x).ops[-1].attr("expr") == "neg(a0)"
    with pytest.raises(TypeError, match="unsupported operand"):
        x + "y"  # type: ignore[operator]


def test_ops_without_a_name_get_kind_and_number():
    p = ProgramBuilder("p")
    x = p.input("x", (4, 6))
    handles = [p.set(x), p.slice(x, 0, 0, 2), p.slice(x, 0, 0, 2, view=True), p.reshape(x, (24,))]
    assert [handle.name for handle in handles] == ["set_0", "slice_1", "view_2", "reshape_3"]


def test_views_that_no_strides_show_are_refused():
    p = ProgramBuilder("p")
    x = p.input("x", (4, 6, 2))
    part = p.slice(x, 1, 1, 4, view=True)
    assert p.reshape(part, (4, 6), view=True).shape == (4, 6)
    assert p.reshape(p.slice(x, 0, 1, 3, view=True), (24,), view=True).shape == (24,)
    for source in (part, p.transpose(x, (1, 0, 2), view=True), p.slice(x, 0, 0, 4, 2, view=True)):
        shape = source.shape[0] * source.shape[1], 2
        with pytest.raises(ProgramError, match="joins dims which have gaps or are turned"):
            p.reshape(source, shape, view=True)
        assert p.reshape(source, shape).shape == shape


def test_views_and_copies_differ_in_kind_only():
    p = ProgramBuilder("p")
    x = p.input("x", (4, 6))
    copied, viewed = p.transpose(x, (1, 0)), p.transpose(x, (1, 0), view=True)
    assert copied.shape == viewed.shape == (6, 4)
    one, other = p.build(copied, viewed).ops
    assert (one.kind, other.kind) == ("transpose", "view")
    assert one.reads == other.reads


def test_a_weight_declared_twice_is_one_tensor():
    p = ProgramBuilder("p")
    embed = p.weight("embed", (10, 4))
    assert p.weight("embed", (10, 4)).tensor is embed.tensor
    assert len(p.build().tensors) == 1


@pytest.mark.parametrize("role", ["input", "state"])
def test_an_input_or_state_is_declared_once(role: str):
    p = ProgramBuilder("p")
    getattr(p, role)("x", (4,))
    with pytest.raises(ProgramError, match="declared as"):
        getattr(p, role)("x", (4,))


@pytest.mark.parametrize("shape", [(2.5, 3), ("2", 3), (True, 3), 8, {4}])
def test_extents_are_whole_numbers(shape: tuple[int, ...]):
    with pytest.raises(ProgramError, match="expected a list or tuple of whole numbers"):
        ProgramBuilder("p").input("x", shape)


def test_a_weight_of_another_shape_is_another_weight():
    p = ProgramBuilder("p")
    p.weight("w", (4,))
    with pytest.raises(ProgramError, match=r"weight 'w' of shape \(5,\) declared as"):
        p.weight("w", (5,))


def test_a_taken_name_is_refused():
    p = ProgramBuilder("p")
    x = p.input("x", (4,))
    for name in ("x", p.set(x).name):
        with pytest.raises(ProgramError, match=f"{name!r} is taken"):
            p.set(x, name=name)


def test_the_second_output_of_argmax_takes_no_name_of_another_tensor():
    p = ProgramBuilder("p")
    x = p.input("best.value", (4,))
    with pytest.raises(ProgramError, match=r"'best.value' is taken"):
        p.argmax(x, name="best")


def test_argmax_gives_the_index():
    p = ProgramBuilder("p")
    best = p.argmax(p.input("x", (3, 4)), name="best")
    assert (best.name, best.shape, best.tensor.dtype) == ("best", (3,), "i64")


def test_kv_append_and_set_write_in_place():
    p = ProgramBuilder("p")
    cache = p.state("cache", (2, 9, 4))
    p.kv_append(cache, p.input("x", (1, 2, 4)), p.input("at", (1,), "i64"))
    assert p.set(cache * 2.0, into=cache) is cache
    append, _, overwrite = p.build(cache).ops
    assert append.writes[0].tensor == overwrite.writes[0].tensor == "cache"


@pytest.mark.parametrize("role", ["input", "weight"])
def test_inputs_and_weights_are_not_overwritten(role: str):
    p = ProgramBuilder("p")
    x = getattr(p, role)("x", (4,))
    p.set(x * 2.0, into=x)
    with pytest.raises(ProgramError, match="writes 'x'"):
        p.build(x)


def test_a_tensor_of_another_program_is_refused():
    p, other = ProgramBuilder("p"), ProgramBuilder("other")
    x, stranger = p.input("x", (4,)), other.input("x", (4,))
    with pytest.raises(ProgramError, match="tensor 'x' of program 'other' used in 'p'"):
        p.pointwise("a0 + a1", x, stranger)
    with pytest.raises(ProgramError, match="of program 'other'"):
        p.build(stranger)


def test_a_value_is_no_tensor_of_a_program():
    p = ProgramBuilder("p")
    with pytest.raises(ProgramError, match="an operand of type list in program 'p'"):
        p.linear([1.0], p.weight("w", (4, 1)))
    with pytest.raises(ProgramError, match="an operand of type str in program 'p'"):
        p.build("y")


@pytest.mark.parametrize(("shape", "dtype"), [((4, 0), "f32"), ((-1,), "f32")])
def test_a_malformed_declaration_is_named_when_built(shape: tuple[int, ...], dtype: str):
    p = ProgramBuilder("p")
    p.input("x", shape, dtype)
    with pytest.raises(ProgramError, match="'x' of shape"):
        p.build()


def test_an_unknown_dtype_is_refused_where_it_is_given():
    with pytest.raises(ProgramError, match="dtype 'float33'; expected one of f64, f32"):
        ProgramBuilder("p").input("x", (4,), "float33")


def test_a_failed_op_leaves_the_program_as_it_was():
    p = ProgramBuilder("p")
    x = p.input("x", (4,))
    with pytest.raises(ProgramError):
        p.reshape(x, (5,))
    assert print_program(p.build(p.set(x, name="y"))).count("\n") == 5


def routed(p: ProgramBuilder, use: Callable[[Handle, Routing], object]) -> object:
    """What is done with rows of whole numbers sorted by group."""
    to = p.route(p.input("to", (2, 1), "i32"), 3)
    return use(p.gather_rows(p.input("i", (2, 4), "i32"), to), to)


Misuse = Callable[[ProgramBuilder, Handle], object]
MISUSES: dict[str, tuple[Misuse, str]] = {
    "a dim that is a float": (lambda p, x: p.reduce(x, 1.0), "dim 1.0; expected a whole number"),
    "a place that is a float": (lambda p, x: p.slice(x, 0, 0.0, 2), "start 0.0; expected a whole"),
    "a count that is a float": (lambda p, x: p.topk(x, 2.0), "num_top 2.0; expected a whole"),
    "an extent that is a float": (lambda p, x: p.reshape(x, (8.0,)), "extent 8.0; expected"),
    "an eps that is text": (lambda p, x: p.layer_norm(x, None, None, "1"), "eps '1'; expected a f"),
    "a spec that is no text": (lambda p, x: p.linear(x, x, spec=5), "spec 5; expected text"),
    "a concat of one tensor": (
        lambda p, x: p.concat(x, 0),
        "operands in a Handle in program 'p'; expected a list",
    ),
    "a name that is no text": (lambda p, x: p.build(p.input(5, (2,))), "name 5; expected letters"),
    "the value of no choice": (
        lambda p, x: p.value_of(x),
        "the value of 'x'; expected what argmax",
    ),
    "the largest of bools": (
        lambda p, x: p.topk(p.input("b", (2,), "bool"), 1),
        "'b' of dtype bool; expected numbers",
    ),
    "products of bools": (
        lambda p, x: p.linear(p.input("b", (4,), "bool"), x),
        "'b' of dtype bool; expected numbers",
    ),
    "whole numbers times floats": (
        lambda p, x: p.linear(p.input("i", (4,), "i32"), x),
        "'x' of f32 with 'i' of i32, whose type the result has; expected whole numbers",
    ),
    "whole numbers and a bias of floats": (
        lambda p, x: p.linear(
            p.input("i", (4,), "i32"), p.input("w", (2, 4), "i32"), p.weight("b", (2,))
        ),
        "'b' of f32 with 'i' of i32",
    ),
    "experts of floats for whole numbers": (
        lambda p, x: routed(p, lambda i, to: p.grouped_linear(i, p.weight("w", (3, 4, 4)), to)),
        "'w' of f32 with 'gather_rows_1' of i32",
    ),
    "sums of whole numbers weighed by floats": (
        lambda p, x: routed(p, lambda i, to: p.scatter_add(i, p.weight("w", (2, 1)), to)),
        "'w' of f32 with 'gather_rows_1' of i32",
    ),
    "a product of rows that nobody routed": (
        lambda p, x: routed(
            p,
            lambda i, to: p.grouped_linear(
                p.slice(i, 0, 0, 1), p.weight("w", (3, 4, 4), "i32"), to
            ),
        ),
        "of shape (1, 4) sorted by 'route_0.slots'; expected 2 rows, 1 of each of 2 that are",
    ),
    "a formula of rows that nobody routed": (
        lambda p, x: routed(
            p, lambda i, to: p.grouped_pointwise("-a0", p.weight("w", (3, 4)), routing=to)
        ),
        "'w' of shape (3, 4) sorted by 'route_0.slots'; expected 2 rows",
    ),
    "halves of whole rows": (
        lambda p, x: routed(p, lambda i, to: p.grouped_pointwise("a0 * 0.5", i, routing=to)),
        "with a result in i32 holds '0.5'",
    ),
    "a rotation of whole numbers": (
        lambda p, x: p.rope(p.input("i", (2, 4), "i32"), p.input("at", (2,), "i64"), x),
        "'i' of dtype i32; expected a float type",
    ),
    "a concat of two types": (
        lambda p, x: p.concat([x, p.input("i", (2, 4), "i32")], 0),
        "concat of dtypes f32, i32; expected one dtype",
    ),
    "attention by no scale": (
        lambda p, x: p.attend(*(p.input(n, (1, 1, 2, 8)) for n in "qkv"), None, None),
        "scale None; expected a finite number",
    ),
    "a negative softcap": (
        lambda p, x: p.attend(*(p.input(n, (1, 1, 2, 8)) for n in "qkv"), None, 1, -1),
        "softcap -1; expected at least 0",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_named_where_it_is_stated(misuse: str):
    use, found = MISUSES[misuse]
    p = ProgramBuilder("p")
    with pytest.raises(ProgramError, match=re.escape(found)):
        use(p, p.input("x", (2, 4)))


@pytest.mark.parametrize("kind", ["softmax", "rms_norm", "layer_norm", "attend"])
def test_rows_of_whole_numbers_have_no_norm(kind: str):
    p = ProgramBuilder("p")
    x = p.input("x", (1, 1, 2, 4), "i64")
    others = {"rms_norm": (x, 1e-5), "layer_norm": (None, None, 1e-5), "attend": (x, x, None, 1.0)}
    with pytest.raises(ProgramError, match="'x' of dtype i64; expected a float type"):
        getattr(p, kind)(x, *others.get(kind, ()))


def test_numbers_that_are_whole_are_taken_as_floats():
    """scale=1 and 1.0 state the same op; kernels ask for floats."""
    programs = []
    for one in (1, 1.0):
        p = ProgramBuilder("p")
        q, k, v = (p.input(name, (1, 1, 2, 8)) for name in "qkv")
        seen = p.attend(q, k, v, None, one, one)
        programs.append(p.build(p.rms_norm(seen, p.weight("w", (8,)), one)))
    assert print_program(programs[0]) == print_program(programs[1])


def test_factors_are_what_a_float_holds():
    p = ProgramBuilder("far")
    x = p.input("x", (2,))
    program = p.build(x * 2**70)
    assert str(2.0**70) in print_program(program)
    with pytest.raises(ProgramError, match=r"with a number of 1101 bits; expected one of at most"):
        x * 2**1100
