"""verify_program finds every mutation of a sound program; value types answer what they hold."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from distmega.errors import ProgramError
from distmega.program import kinds, types
from distmega.program.builder import ProgramBuilder
from distmega.program.text import parse_program, print_program
from distmega.program.types import (
    Access,
    Axis,
    Index,
    Op,
    Program,
    Tensor,
    accesses,
    verify_program,
)
from tests.program.programs import programs


def sound() -> Program:
    """x -> linear h -> pointwise y; y is the output, s a state, c a concat."""
    p = ProgramBuilder("sound")
    x = p.input("x", (8, 6))
    h = p.linear(x, p.weight("w", (4, 6)), name="h")
    y = h.map("silu(a0)", name="y")
    p.set(y, into=p.state("s", (8, 4)), name="keep")
    return p.build(y, p.concat([h, y], 0, name="c"))


def with_tensor(index: int, **changes: object) -> Program:
    tensors = list(sound().tensors)
    tensors[index] = replace(tensors[index], **changes)
    return replace(sound(), tensors=tuple(tensors))


def with_op(index: int, **changes: object) -> Program:
    ops = list(sound().ops)
    ops[index] = replace(ops[index], **changes)
    return replace(sound(), ops=tuple(ops))


def with_axis(number: int = -1, **changes: object) -> Program:
    """Changes an axis of h, by default the reduced one."""
    axes = [*sound().ops[0].axes]
    axes[number] = replace(axes[number], **changes)
    return with_op(0, axes=tuple(axes))


def with_write(**changes: object) -> Program:
    """Changes the index of the first dim that y's op writes."""
    (write,) = sound().ops[1].writes
    first = replace(write.dims[0], **changes)
    return with_op(1, writes=(replace(write, dims=(first, *write.dims[1:])),))


def with_read(tensor: str) -> Program:
    """Makes y's op read another tensor of the same shape."""
    (read,) = sound().ops[1].reads
    return with_op(1, reads=(replace(read, tensor=tensor),))


MUTATIONS: dict[str, tuple[Callable[[], Program], str]] = {
    "program without a name": (lambda: replace(sound(), name=""), "its name"),
    "program name that is no text": (lambda: replace(sound(), name=5), "its name"),
    "program name of two lines": (lambda: replace(sound(), name="a\nb"), "its name"),
    "tensor twice": (
        lambda: replace(sound(), tensors=(*sound().tensors, sound().tensors[0])),
        "two tensors",
    ),
    "tensor renamed": (lambda: with_tensor(0, name="z"), "unknown tensor 'x'"),
    "tensor name that is no text": (lambda: with_tensor(0, name=5), "name 5"),
    "tensor name with a space": (lambda: with_tensor(0, name="x y"), "'x y'"),
    "tensor dtype": (lambda: with_tensor(0, dtype="f31"), "f31"),
    "tensor without elements": (lambda: with_tensor(0, shape=(8, 0)), "(8, 0)"),
    "tensor smaller than read": (lambda: with_tensor(0, shape=(7, 6)), "a dim of 7 of 'x'"),
    "tensor of more dims": (lambda: with_tensor(0, shape=(8, 6, 1)), "'x' by 2 dims"),
    "input becomes temporary": (lambda: with_tensor(0, role="temp"), "'x' before it is written"),
    "temporary becomes input": (lambda: with_tensor(2, role="input"), "writes 'h'"),
    "state becomes weight": (lambda: with_tensor(4, role="weight"), "writes 's'"),
    "op twice": (lambda: replace(sound(), ops=(*sound().ops, sound().ops[0])), "two ops"),
    "op name": (lambda: with_op(0, name="return"), "'return'"),
    "ops swapped": (
        lambda: replace(sound(), ops=(sound().ops[1], sound().ops[0], *sound().ops[2:])),
        "'h' before it is written",
    ),
    "op dropped": (lambda: replace(sound(), ops=sound().ops[1:]), "'h' before it is written"),
    "last op dropped": (lambda: replace(sound(), ops=sound().ops[:-1]), "output 'c'"),
    "axis dropped": (lambda: with_op(0, axes=sound().ops[0].axes[:-1]), "unknown axes ['k']"),
    "axis twice": (
        lambda: with_op(0, axes=(*sound().ops[0].axes, sound().ops[0].axes[0])),
        "two axes",
    ),
    "axis longer": (lambda: with_axis(extent=7), "a dim of 6 of 'x'"),
    "axis empty": (lambda: with_axis(extent=0), "extent=0"),
    "axis name": (lambda: with_axis(name="k.2"), "k.2"),
    "axis role": (lambda: with_axis(role="serial"), "serial"),
    "axis combine": (lambda: with_axis(combine="product"), "product"),
    "combined parallel axis": (lambda: with_axis(role="parallel"), "role='parallel'"),
    "combined otherwise": (lambda: with_axis(combine="max"), "'k' by max"),
    "summed axis parallel": (
        lambda: with_axis(role="parallel", combine=""),
        "without parallel axis 'k'",
    ),
    "written axis reduced": (lambda: with_axis(0, role="reduce"), "by reduce axis 'm0'"),
    "index shifted": (lambda: with_write(offset=1), "a dim of 8 of 'y'"),
    "index stretched": (lambda: with_write(stride=2), "a dim of 8 of 'y'"),
    "index reversed": (lambda: with_write(stride=-1), "stride -1"),
    "index of all axes": (lambda: with_write(axes=("i0", "i1")), "a dim of 8 of 'y'"),
    "index of an unknown axis": (lambda: with_write(axes=("q",)), "['q']"),
    "constant index past the end": (lambda: with_write(axes=(), offset=8), "a dim of 8 of 'y'"),
    "constant index before the start": (lambda: with_write(axes=(), offset=-1), "a dim of 8"),
    "constant index with a stride": (lambda: with_write(axes=(), stride=2), "stride 2"),
    "read of an unknown tensor": (lambda: with_read("z"), "unknown tensor 'z'"),
    "read of a later tensor": (lambda: with_read("y"), "'y' before it is written"),
    "output unknown": (lambda: replace(sound(), outputs=("z",)), "output 'z'"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_found_and_named(mutation: str):
    mutate, value = MUTATIONS[mutation]
    with pytest.raises(ProgramError) as caught:
        verify_program(mutate())
    assert value in caught.value.found
    assert caught.value.expected
    assert caught.value.remedy


def of_attributes() -> Program:
    """Ops of all kinds whose functions read attributes."""
    p = ProgramBuilder("attributes")
    x, scores = p.input("x", (4, 8)), p.input("scores", (4, 16))
    cache = p.state("cache", (2, 6, 4))
    q, positions = p.input("q", (4, 2, 1, 4)), p.input("positions", (4,), "i64")
    results = [
        p.rms_norm(x, p.weight("w", (8,)), 1e-6, name="rms"),
        p.layer_norm(x, None, None, 1e-5, name="layer"),
        p.reduce(x, 0, "max", name="largest"),
        p.attention(q, cache, cache, positions, 0.5, softcap=2.0, name="seen"),
        p.concat([x, scores], 1, name="joined"),
        p.gather(x, p.input("at", (4, 2), "i64"), 1, name="found"),
        p.top_k(scores, 2, "softmax", name="chosen")[0],
        x.map("a0 + 1.0", name="more"),
        *p.opaque("aten.round.default", '[[{"tensor": 0}], {}, [0]]', [x], [((4, 8), "f32")]),
    ]
    return p.build(*results)


WRONG = ("x", 1, 1.5, -1, -0.5, True, math.nan, (1, 2), 10**30, "")


def test_attributes_are_held_to_the_rules_of_their_kinds():
    """What a written program says of an op is checked before anything runs by it."""
    program = of_attributes()
    ruled = {(op.kind, name) for op in program.ops for name in kinds.kind_of(op).attrs}
    with_attrs = {k.name for k in kinds.kinds() if k.attrs and k.origin == "user"}
    assert {kind for kind, _ in ruled} >= with_attrs - {"biased_attention", "attend"}
    for number, op in enumerate(program.ops):
        for name, rule in kinds.kind_of(op).attrs.items():
            for value in WRONG:
                attrs = tuple(sorted({**dict(op.attrs), name: value}.items()))
                ops = (*program.ops[:number], replace(op, attrs=attrs), *program.ops[number + 1 :])
                if rule.fits(value):
                    assert not kinds.wrong_attr(ops[number])
                    continue
                with pytest.raises(ProgramError, match=f"{name}=.*; expected {name}: "):
                    verify_program(replace(program, ops=ops))
            without = tuple(pair for pair in op.attrs if pair[0] != name)
            ops = (*program.ops[:number], replace(op, attrs=without), *program.ops[number + 1 :])
            if rule.is_optional:
                verify_program(replace(program, ops=ops))
            else:
                with pytest.raises(ProgramError, match=f"has no {name}; expected {name}: "):
                    verify_program(replace(program, ops=ops))


def test_numbers_of_attributes_may_be_whole():
    """As a text may say eps=0."""
    p = ProgramBuilder("whole")
    program = p.build(p.rms_norm(p.input("x", (4, 8)), p.weight("w", (8,)), 1.0, name="n"))
    text = print_program(program).replace("eps=1.0", "eps=1")
    found = parse_program(text)
    assert dict(found.ops[0].attrs) == {"eps": 1}
    assert print_program(found) == text
    assert len({*kinds.kinds()}) == len(kinds.kinds())


def test_unknown_starts_of_groups_are_named():
    p = ProgramBuilder("groups")
    routing = p.route(p.input("ids", (4, 2), "i64"), 4)
    rows = p.gather_rows(p.input("x", (4, 8)), routing, name="rows")
    program = p.build(p.grouped_linear(rows, p.weight("w", (4, 6, 8)), routing, name="y"))
    op = program.ops[-1]
    reads = (*op.reads[:-1], replace(op.reads[-1], tensor="elsewhere"))
    ops = (*program.ops[:-1], replace(op, reads=reads))
    with pytest.raises(ProgramError, match="op 'y' accesses unknown tensor 'elsewhere'"):
        verify_program(replace(program, ops=ops))


def test_a_sound_program_passes_unchanged():
    program = sound()
    assert verify_program(program) is program


def test_ops_of_one_form_are_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    """Names aside; roles count, since a state may be written and a weight not."""
    looked_at: list[str] = []

    def wrong_axes(op: Op) -> None:
        looked_at.append(op.name)

    monkeypatch.setattr(types, "_sound", types.SoundForms())
    monkeypatch.setattr(types, "wrong_axes", wrong_axes)
    p = ProgramBuilder("layers")
    x = p.input("x", (8, 6))
    for layer in range(3):
        x = p.linear(x, p.weight(f"w{layer}", (6, 6)), name=f"h{layer}")
    program = p.build(x)
    assert looked_at == ["h0", "h1"], "h0 alone reads an input"
    verify_program(program)
    state = replace(program.tensors[1], role="state")
    verify_program(replace(program, tensors=(program.tensors[0], state, *program.tensors[2:])))
    assert looked_at == ["h0", "h1", "h0"]


def test_a_value_of_another_type_is_no_known_one():
    """Though it is equal to one."""
    p = ProgramBuilder("gathered")
    rows = p.gather(p.input("x", (4, 4)), p.input("ids", (4, 4), "i64"), 1)
    program = p.build(rows)
    (op,) = program.ops
    attrs = tuple((name, float(str(value))) for name, value in op.attrs)
    with pytest.raises(ProgramError, match=r"dim=1\.0"):
        verify_program(replace(program, ops=(replace(op, attrs=attrs),)))


@given(programs())
def test_built_programs_are_sound(program: Program):
    assert verify_program(program) == program


@given(programs())
def test_an_op_removed_is_missed_by_who_reads_it(program: Program):
    for index, op in enumerate(program.ops):
        others = (*program.ops[:index], *program.ops[index + 1 :])
        needed = {access.tensor for other in others for access in other.reads} | {*program.outputs}
        elsewhere = {access.tensor for other in others for access in other.writes}
        if {access.tensor for access in op.writes} & needed - elsewhere:
            with pytest.raises(ProgramError):
                verify_program(replace(program, ops=others))


def test_values_are_frozen_and_hashable():
    program = sound()
    assert hash(program) == hash(sound())
    assert program == sound()
    with pytest.raises(FrozenInstanceError):
        program.name = "other"  # type: ignore[misc]


def test_equal_programs_have_one_hash():
    assert sound() == sound()
    assert hash(sound()) == hash(sound())
    assert len({sound(), sound(), with_op(1, name="z"), with_tensor(0, dtype="bf16")}) == 3


def test_tensor_sizes():
    tensor = Tensor(name="x", shape=(3, 5), dtype="bf16")
    assert (tensor.num_elements, tensor.num_bytes) == (15, 30)
    assert Tensor(name="c", shape=(), dtype="i64").num_bytes == 8


def test_an_op_answers_by_name():
    op = Op(
        name="y",
        kind="embedding",
        axes=(Axis(name="m", extent=5), Axis(name="v", extent=100, role="reduce", lookup=True)),
        reads=(Access(tensor="x", dims=(Index(axes=("m",)),)),),
        writes=(Access(tensor="y", dims=(Index(axes=("m",)),)),),
        attrs=(("a", 1), ("b", "c")),
    )
    assert op.axis("v").extent == 100
    assert (op.attr("a"), op.get("b", ""), op.get("z", 3)) == (1, "c", 3)
    assert op.extents == {"m": 5, "v": 100}
    assert [access.tensor for access in accesses(op)] == ["x", "y"]
    with pytest.raises(KeyError):
        op.axis("q")
    with pytest.raises(KeyError):
        op.attr("q")


@pytest.mark.parametrize("role", ["input", "weight"])
def test_what_is_only_read_is_not_written_through_views(role: str):
    p = ProgramBuilder("p")
    x = getattr(p, role)("x", (4, 6))
    turned = p.transpose(p.slice(x, 0, 1, 3, view=True), (1, 0), view=True, name="turned")
    p.set(p.input("y", (6, 2)), into=turned, name="over")
    with pytest.raises(
        ProgramError, match="op 'over' writes 'turned', a view of 'x'; expected inp"
    ):
        p.build(turned)
