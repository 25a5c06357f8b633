"""Ops of a written program are as their kinds state them: others are refused before anything runs,
and what is taken runs, with results as declared.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from distmega.errors import DistmegaError, ProgramError
from distmega.hostir.library.torch_types import torch_dtype
from distmega.kernels.machines import CPU
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.kinds import user_kinds
from distmega.program.text import parse_program, print_program
from distmega.program.types import Axis, Index, Op, Program, Tensor, verify_program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import run_program
from tests.program.test_odd_operands import CASES, declared

EXPERTS = """\
program experts
  input x: f32[4, 8]
  input ids: i64[4, 2]
  weight w: f32[3, 5, 8]
  temp counts: i32[3]
  temp offsets: i32[4]
  temp order: i32[8]
  temp slots: i32[4, 2]
  temp rows: f32[8, 8]
  temp up: f32[8, 5]
  temp act: f32[8, 5]
  route = route[m:4:reduce c:2:reduce g:3:scatter o:4:scatter p:8:scatter i:4:scatter j:2:scatter]\
 ids(m, c) -> counts(g) offsets(o) order(p) slots(i, j)
  rows = gather_rows[e:3 r:4 k0:8 m:4:reduce:sum:lookup p:8:reduce o:4:reduce]\
 x(m, k0) order(p) offsets(o) -> rows(e.r@2, k0)
  up = grouped_linear[e:3 r:4 n:5 k:8:reduce:sum o:4:reduce]\
 rows(e.r@2, k) w(e, n, k) offsets(o) -> up(e.r@2, n)
  act = pointwise[e:3 r:4 i0:5 o:4:reduce] up(e.r@1, i0) offsets(o) -> act(e.r@1, i0)\
 | expr='silu(a0)'
  return act
"""


def of_kind(kind: str) -> str:
    """The text of a program of one op, of those of test_odd_operands.py."""
    p, handles = declared()
    given = {
        name: [handles[each] for each in value]
        if kind == "concat" and name == "xs"
        else handles.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in CASES[kind].items()
    }
    found = getattr(p, kind)(**given)
    made = found if isinstance(found, tuple) else (found,)
    return print_program(p.build(*(each for each in made if isinstance(each, Handle))))


@pytest.mark.parametrize(
    ("kind", "old", "new", "named"),
    [
        # operands: too few, too many, in another order, of a shape of their own
        ("linear", " w(n, k)", "", "is linear of 1 operand; expected x, w, or x, w, bias"),
        ("linear", "x(m0, k) w(n, k)", "w(n, k) w(n, k)", "'linear_0' has axes m0 that index nei"),
        ("linear", "x(m0, k) w", "x(#1, k) w", "reads a part of 'x' of [4, 8]"),
        ("softmax", " x(m0, r)", "", "is softmax of 1 operand; expected x, row"),
        ("rope", "ids(m) angles", "angles", "is rope of 3 operands; expected x, pairs, positions"),
        ("rope", "heads(m, h0, r)", "angles(t, r)", "is stated as rope_0 = rope["),
        ("attention", "cache(h, t, e) ids", "ids", "is attention of 3 operands; expected q, k, v"),
        ("attention", "ids(m)", "ids(m) ids(m)", "is attention of 5 operands and packed=0"),
        ("embedding", "ids(m) table(v, d)", "table(v, d) ids(m)", "table (4,); expected [m] and"),
        ("concat", " x(i0-4, i1)", " x(i0-3, i1)", "is stated as concat_0"),
        ("set", " x(i0, i1)", " x(i0, i1) x(i0, i1)", "is set of 2 operands; expected one"),
        ("reduce", "x(i0, i1)", "x(i0, #0)", "has axes i1 that its operand has not"),
        # results: of another type, or more of them
        ("linear", "temp linear_0: f32", "temp linear_0: bf16", "result 'linear_0' of bf16; exp"),
        ("argmax", "argmax_0: i64", "argmax_0: i32", "with results f32[4], i32[4]; expected f32"),
        ("set", "temp set_0: f32", "temp set_0: i64", "is set with a result 'set_0' of i64; exp"),
        ("softmax", "-> softmax_0(m0, d)", "-> softmax_0(m0, d) softmax_0(m0, d)", "f32[4, 8]; e"),
        # types of operands
        ("embedding", "input ids: i64", "input ids: f32", "'ids' of dtype f32; expected dtype i32"),
        ("rope", "input heads: f32", "input heads: i64", "'heads' of dtype i64; expected a float"),
        ("linear", "input x: f32", "input x: bool", "'x' of dtype bool; expected numbers"),
        # axes: of other names, roles and ways to combine, which ranks would share out
        ("attention", "t:16:reduce]", "t:16:reduce:sum]", "t:16:reduce:sum] q(m, h, g, d)"),
        ("softmax", "r:8:reduce]", "r:8:reduce:max]", "expected softmax_0 = softmax[m0:4 d:8 r:8"),
        ("cumsum", "r:8:reduce]", "r:8:reduce z:2:reduce]", "expected cumsum_0 = cumsum[m0:4 d:8"),
        ("reshape", "i2:4]", "i2:4 z:2:reduce]", "has axes z, by which it does nothing"),
        # attributes that a kind has not, as one with a letter wrong
        ("attention", "window=0", "window=0 softcp=2.0", "has softcp=2.0; expected scale, "),
        ("softmax", "softmax_0(m0, d)\n", "softmax_0(m0, d) | scale=2.0\n", "has scale=2.0; exp"),
        # where a rank's part begins
        ("argmax", "argmax_0(m0)\n", "argmax_0(m0) | base_axis='tp'\n", "and no base_stride"),
        ("argmax", "argmax_0(m0)\n", "argmax_0(m0) | extent='few'\n", "extent='few'; expected ex"),
    ],
)  # fmt: skip
def test_an_op_is_as_its_kind_states_it(kind: str, old: str, new: str, named: str):
    text = of_kind(kind)
    assert old in text
    with pytest.raises(ProgramError, match=re.escape(named)):
        parse_program(text.replace(old, new, 1))


def test_forms_that_only_passes_of_kernels_restate_ops_in_are_refused():
    """A concat of parts of ranks, and products of groups by rows alone."""
    joined = """\
program joined
  input x: f32[2, 4, 8]
  temp y: f32[8, 8]
  y = concat[s:2 n:4 d:8] x(s, n, d) -> y(s.n, d) | dim=0
  return y
"""
    with pytest.raises(ProgramError, match=re.escape("'y' is concat with results f32[8, 8]; exp")):
        parse_program(joined)
    head, _, tail = EXPERTS.partition("  up = ")
    by_rows = "up = grouped_linear[p:8 e:3:reduce:lookup n:5 k:8:reduce:sum o:4:reduce]\
 rows(p, k) w(e, n, k) offsets(o) -> up(p, n) | groups=3\n"
    with pytest.raises(ProgramError, match=r"'up' has groups=3; expected no attributes"):
        parse_program(f"{head}  {by_rows}{tail.partition(chr(10))[2]}")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (" order(p) offsets(o) -> rows", " offsets(o) offsets(o) -> rows", "'rows' is gather_rows"),
        ("w(e, n, k) offsets(o)", "offsets(o) w(e, n, k)", "groups Index(axes=('e', 'r')"),
        ("up(e.r@1, i0) offsets(o) -> act", "rows(e.r@1, i0) offsets(o) -> act", "over other"),
        ("g:3:scatter", "h:3:scatter", "unknown axes ['g']"),
        ("input ids: i64", "input ids: f32", "'ids' of dtype f32; expected dtype i32 or i64"),
    ],
)  # fmt: skip
def test_ops_on_groups_are_as_their_kinds_state_them(old: str, new: str, named: str):
    parse_program(EXPERTS)
    assert old in EXPERTS
    with pytest.raises(ProgramError, match=re.escape(named)):
        parse_program(EXPERTS.replace(old, new, 1))


COLLECTIVE = """\
program parts
  input x: f32[4, 8]
  temp y: f32[8, 8]
  y = all_gather[r:2 i0:4 i1:8] x(i0, i1) -> y(r.i0, i1)\
 | dim=0 extent=8 mesh_axis='tp' num_ranks=2
  return y
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (" mesh_axis='tp'", "", "no mesh_axis; expected mesh_axis: text"),
        (" num_ranks=2", " num_ranks=3", "that of 3 ranks in front in dim 0 of its result"),
        ("dim=0", "dim=1", "that of 2 ranks in front in dim 1 of its result"),
        ("temp y: f32", "temp y: bf16", "is all_gather of f32 to bf16; expected equal types"),
        (" x(i0, i1)", " x(i0, i1) x(i0, i1)", "of 2 operands and 1 result; expected 1 of each"),
        ("all_gather", "all_reduce", "has no combine; expected combine: one of sum, max, min"),
    ],
)
def test_a_collective_is_as_its_kind_states_it(old: str, new: str, named: str):
    parse_program(COLLECTIVE)
    assert old in COLLECTIVE
    with pytest.raises(ProgramError, match=re.escape(named)):
        parse_program(COLLECTIVE.replace(old, new, 1))


def test_axes_that_a_kind_numbers_may_have_any_name():
    text = of_kind("rms_norm").replace("m0", "row")
    assert print_program(parse_program(text)) == text


def test_what_is_broadcast_stays_so_where_a_rank_has_one_head():
    p = ProgramBuilder("heads")
    q, k = p.input("q", (2, 4, 3, 8)), p.input("k", (2, 4, 5, 8))
    program = p.build(p.attend(q, k, k, p.input("mask", (2, 1, 3, 5)), 1.0, name="y"))
    local = localize(plan_program(program, DeviceMesh(tp=4), CPU, {"y": shard(1, "tp")})).program
    assert "h:1 g:1" in print_program(local)
    assert "mask(b, #0, m, t)" in print_program(local)
    assert parse_program(print_program(local)) == local


def test_axes_that_a_kind_knows_by_name_have_that_name():
    text = of_kind("top_k").replace("c:2", "b:2").replace("(m, c)", "(m, b)")
    with pytest.raises(ProgramError, match=r"the 0 largest of rows .*; expected x \[m, e\]"):
        parse_program(text)


def test_what_is_updated_in_place_is_there_before():
    text = of_kind("kv_append").replace("state cache", "temp cache")
    with pytest.raises(ProgramError, match="reads 'cache' before it is written"):
        parse_program(text)


def test_a_position_before_a_dim_is_refused():
    text = of_kind("slice").replace("x(i0, i1)", "x(i0-1, i1)")
    with pytest.raises(ProgramError, match="reaches past a dim of 4 of 'x'"):
        parse_program(text)


Change = Callable[[random.Random, Op], Op]


def with_access(rng: random.Random, op: Op) -> Op:
    """An operand, or one of its indices, left out, repeated, or replaced by another."""
    side = rng.choice(["reads", "reads", "writes"])
    found = list(getattr(op, side))
    if not found:
        return op
    at = rng.randrange(len(found))
    dims = list(found[at].dims)
    way = rng.choice(["drop", "double", "other", "index", "constant", "order"])
    if way == "drop":
        del found[at]
    elif way == "double":
        found.insert(at, found[at])
    elif way == "other":
        found[at] = rng.choice([*op.reads, *op.writes])
    elif dims:
        place, names = rng.randrange(len(dims)), [axis.name for axis in op.axes]
        if way == "order":
            rng.shuffle(dims)
        else:
            dims[place] = Index(axes=(rng.choice(names),)) if way == "index" else Index()
        found[at] = replace(found[at], dims=tuple(dims))
    return replace(op, **{side: tuple(found)})


def with_axis(rng: random.Random, op: Op) -> Op:
    """An axis more, or one of another role, extent or way to combine."""
    role = rng.choice(["parallel", "reduce", "scatter"])
    if not op.axes or rng.random() < 0.2:
        return replace(op, axes=(*op.axes, Axis(name="z", extent=2, role=role)))
    at = rng.randrange(len(op.axes))
    axis = rng.choice([
        replace(op.axes[at], role=role, combine=rng.choice(["", "sum", "max"])),
        replace(op.axes[at], extent=rng.choice([1, 2, 4, 8])),
        replace(op.axes[at], lookup=not op.axes[at].lookup),
    ])  # fmt: skip
    return replace(op, axes=(*op.axes[:at], axis, *op.axes[at + 1 :]))


def with_kind(rng: random.Random, op: Op) -> Op:
    return replace(op, kind=rng.choice([kind for kind in user_kinds() if kind != "opaque"]))


def with_type(rng: random.Random, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    at = rng.randrange(len(tensors))
    if rng.random() < 0.5:
        other = replace(tensors[at], dtype=rng.choice(["f32", "bf16", "i64", "i32", "bool"]))
    else:
        shape = [rng.choice([extent, extent, 1, 2, 8]) for extent in tensors[at].shape]
        other = replace(tensors[at], shape=tuple(shape))
    return (*tensors[:at], other, *tensors[at + 1 :])


def changed(rng: random.Random, program: Program) -> Program:
    """A program of one op with a thing or two changed."""
    (op,), tensors = program.ops, program.tensors
    for _ in range(rng.choice([1, 1, 2])):
        change: Change | None = rng.choice([with_access, with_access, with_axis, with_kind, None])
        op = change(rng, op) if change else op
        tensors = tensors if change else with_type(rng, tensors)
    return replace(program, ops=(op,), tensors=tensors)


def values(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """Of what a program is given: whole numbers are places that all tables have."""
    for tensor in program.tensors:
        x = torch.arange(float(tensor.num_elements)).reshape(tensor.shape)
        is_whole = tensor.dtype in ("i32", "i64")
        x = x % min(3, *tensor.shape[-1:], 2) if is_whole else x.cos().abs() + 1
        if tensor.role != "temp":
            yield tensor.name, x.to(torch_dtype(tensor.dtype))


KINDS = [kind for kind in CASES if kind not in ("is_view", "value_of", "opaque", "cutoff")]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_runs(kind: str):
    program = parse_program(of_kind(kind))
    num_run = 0
    for seed in range(150):
        found = changed(random.Random(seed), program)
        try:
            verify_program(found)
        except DistmegaError:
            continue
        made = run_program(found, dict(values(found)))
        num_run += 1
        for access in found.ops[0].writes:
            tensor, x = found.tensor_map()[access.tensor], made[access.tensor]
            assert (tuple(x.shape), x.dtype) == (tensor.shape, torch_dtype(tensor.dtype)), found
    assert num_run
