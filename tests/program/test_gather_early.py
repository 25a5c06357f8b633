"""Gathers of rows move up as far as other rows are read by nobody, and results stay as they are."""

from array import array

import numpy as np
import pytest
import torch

from distmega.engine.packing import ROWS as ROW_INPUTS
from distmega.engine.packing import PassRows, PromptPart, row_lengths
from distmega.models.decoder import Logits, build_decoder
from distmega.models.presets import PRESETS
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.gather_early import gather_early
from distmega.program.text import print_program
from distmega.program.types import Program
from tests.hostir.programs import run_program_in
from tests.sharding.random_programs import random_gathers
from tests.sharding.simulate import random_arrays, run_whole

HIDDEN, ROWS = 4, 8


def check(program: Program, *kept: str) -> Program:
    """The program with its gathers early, which gives what it gave before."""
    early, arrays = gather_early(program, kept), random_arrays(program, 1)
    found, expected = run_whole(early, arrays), run_whole(program, arrays)
    for name in (*program.outputs, *kept, *(t.name for t in program.with_role("state"))):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)
    given = [t for t in program.tensors if t.role != "temp"]
    assert [t for t in early.tensors if t.role != "temp"] == given
    assert gather_early(early, kept) is early
    return early


def extents(program: Program) -> dict[str, tuple[int, ...]]:
    """Shapes of what ops give, by the first result of each."""
    tensors = program.tensor_map()
    return {op.name: tensors[op.writes[0].tensor].shape for op in program.ops}


class Block:
    """A residual block under construction: x + w2 silu(w1 norm(x)), of rows."""

    def __init__(self, *rows: int) -> None:
        self.p = ProgramBuilder("block")
        self.x = self.p.input("x", (*(rows or (ROWS,)), HIDDEN)).map("a0 * 2.0", name="first")
        self.last = self.p.input("last", (2,), "i64")
        self.normed = self.p.rms_norm(self.x, self.p.weight("g", (HIDDEN,)), 1e-5, name="normed")
        w1, w2 = self.p.weight("w1", (6, HIDDEN)), self.p.weight("w2", (HIDDEN, 6))
        self.up = self.p.linear(self.normed, w1, name="up")
        down = self.p.linear(self.up.map("silu(a0)", name="mixed"), w2, name="down")
        self.sum = self.p.pointwise("a0 + a1", self.x, down, name="sum")

    def taken(self, x: Handle) -> Handle:
        return self.p.embedding(self.last, x, name="taken")


EXPECTED = """
  first.rows = embedding[m:2 d:4 v:8:reduce:sum:lookup] last(m) first(v, d) -> first.rows(m, d)
  normed = rms_norm[m0:2 d:4 r:4:reduce] first.rows(m0, d) first.rows(m0, r) g(d) -> normed.rows(m0, d) | eps=1e-05
  up = linear[m0:2 n:6 k:4:reduce:sum] normed.rows(m0, k) w1(n, k) -> up.rows(m0, n)
  mixed = pointwise[i0:2 i1:6] up.rows(i0, i1) -> mixed.rows(i0, i1) | expr='silu(a0)'
  down = linear[m0:2 n:4 k:6:reduce:sum] mixed.rows(m0, k) w2(n, k) -> down.rows(m0, n)
  sum = pointwise[i0:2 i1:4] first.rows(i0, i1) down.rows(i0, i1) -> taken(i0, i1) | expr='(a0 + a1)'
"""  # noqa: E501


def test_a_block_does_the_rows_that_are_taken():
    """Both readers of its input take them from one gather, and what a first op reads is whole."""
    b = Block()
    early = check(b.p.build(b.p.argmax(b.taken(b.sum)), b.x), "first")
    text = print_program(early)
    assert EXPECTED.strip() in text.replace("\n    ", "\n  ")
    assert "sum: f32[8" not in text


def test_a_slice_of_an_inner_dim():
    """As a view it is a view further up, too."""
    for view in (False, True):
        b = Block(3, ROWS)
        x = b.p.transpose(b.sum, (1, 0, 2), name="turned")
        early = check(b.p.build(b.p.slice(x, 0, 5, 8, 2, view=view, name="taken")))
        assert {*extents(early).values()} >= {(3, 2, HIDDEN), (3, 2, 6)}
        assert extents(early)["turned"] == (2, 3, HIDDEN)
        (op, *_) = early.ops
        assert (op.kind, op.reads[0].tensor) == ("view" if view else "slice", "x")


def test_heads_are_rows_of_several_dims():
    b = Block()
    heads = b.p.reshape(b.p.linear(b.x, b.p.weight("w", (6, HIDDEN))), (ROWS, 2, 3))
    early = check(b.p.build(b.taken(b.p.reshape(heads.map("relu(a0)"), (ROWS, 6)))))
    (gather,) = (op for op in early.ops if op.kind == "embedding")
    assert gather.reads[1].tensor == "first"


def test_rows_taken_twice_are_gathered_once():
    b = Block()
    early = check(b.p.build(b.taken(b.sum), b.p.embedding(b.last, b.x).map("relu(a0)")))
    assert [op.reads[1].tensor for op in early.ops if op.kind == "embedding"] == ["x"]
    b = Block()
    y, z = (b.p.embedding(b.last, b.sum, name=name) for name in ("y", "z"))
    early = check(b.p.build(b.p.pointwise("a0 - a1", y, z.map("silu(a0)"))))
    assert extents(early)["sum"] == (2, HIDDEN)


def all_rows_of_the_sum(b: Block) -> Program:
    return b.p.build(b.taken(b.sum), b.sum)


def all_rows_by_another_op(b: Block) -> Program:
    return b.p.build(b.taken(b.sum), b.p.reduce(b.sum, 0))


def other_rows(b: Block) -> Program:
    return b.p.build(b.taken(b.sum), b.p.slice(b.sum, 0, 0, 2))


def almost_all_rows(b: Block) -> Program:
    return b.p.build(b.p.slice(b.sum, 0, 1, ROWS))


def columns_of_a_norm(b: Block) -> Program:
    return b.p.build(b.p.slice(b.normed, 1, 0, 2))


def columns_of_a_product(b: Block) -> Program:
    return b.p.build(b.p.slice(b.up, 1, 0, 2))


def shares_of_a_sum_of_rows(b: Block) -> Program:
    return b.p.build(b.p.slice(b.p.softmax(b.p.transpose(b.sum, (1, 0))), 1, 0, 2))


def numbers_known_late(b: Block) -> Program:
    return b.p.build(b.p.embedding(b.p.argmax(b.p.transpose(b.x, (1, 0))), b.sum))


def a_sum_that_is_overwritten(b: Block) -> Program:
    b.p.set(b.x, into=b.sum)
    return b.p.build(b.taken(b.sum))


def a_part_that_is_overwritten(b: Block) -> Program:
    part = b.p.slice(b.sum, 0, 0, 5, view=True)
    b.p.set(part.map("a0 + 1.0"), into=part)
    return b.p.build(b.taken(b.sum))


def rows_of_a_state(b: Block) -> Program:
    state = b.p.state("s", (ROWS, HIDDEN))
    b.p.set(b.x, into=state)
    return b.p.build(b.taken(state))


STAYING = (
    all_rows_of_the_sum, all_rows_by_another_op, other_rows, almost_all_rows, columns_of_a_norm,
    columns_of_a_product, shares_of_a_sum_of_rows, numbers_known_late, a_sum_that_is_overwritten,
    a_part_that_is_overwritten, rows_of_a_state,
)  # fmt: skip


@pytest.mark.parametrize("build", STAYING)
def test_programs_that_stay(build):
    program = build(Block())
    assert check(program) is program


def test_a_kept_tensor_has_all_its_rows():
    b = Block()
    early = check(b.p.build(b.taken(b.sum)), "up")
    assert (extents(early)["up"], extents(early)["down"]) == ((ROWS, 6), (2, HIDDEN))


def test_what_is_read_before_a_state_changes_is_read_then():
    """The gather of what an op reads stands in front of that op, not where it stood before."""
    b = Block()
    state = b.p.state("s", (ROWS, HIDDEN))
    x = b.p.pointwise("a0 + a1", b.sum, b.p.reduce(state, 0))
    b.p.set(b.x, into=state)
    early = check(b.p.build(b.taken(x)))
    assert extents(early)["down"] == (2, HIDDEN)


def test_random_programs():
    programs = [random_gathers(seed) for seed in range(200)]
    assert sum(check(program) is not program for program in programs) > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny")])
def test_prompts_of_models_give_the_same_logits(name: str, dtype: torch.dtype):
    """Two prompts in one pass, and a slot without one. In the last layer of those without experts
    rows that make no token end with its attention.
    """
    config = PRESETS[name]
    program = build_decoder(config, 14, 16, batch=3, logits="last", prompt=True)
    early = gather_early(program)
    last = config.num_layers - 1
    rows = {op.name: early.tensor_map()[op.writes[0].tensor].shape[0] for op in early.ops}
    assert rows[f"layers.{last}.attention"] == 14
    assert rows[f"layers.{last}.ffn_sum"] == 3
    assert (rows[f"layers.{last}.attn_out"] == 3) is not config.has_experts(last)
    given = prompt_tensors(program)
    found, expected = (run_program_in(dtype, each, given) for each in (early, program))
    error = (found["logits"] - expected["logits"]).abs().max() / expected["logits"].abs().max()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for state in program.with_role("state"):
        assert torch.equal(found[state.name], expected[state.name])


def prompt_tensors(program: Program) -> dict[str, torch.Tensor]:
    """Random weights, and rows of prompts of 5 and 7 tokens in slots 0 and 2."""
    parts = [PromptPart(slot=s, position=0, ids=array("q", range(1, n + 1)), ends=True)
             for s, n in ((0, 5), (2, 7))]  # fmt: skip
    laid = PassRows(14, 3, 14)
    laid.lay(parts)
    rows = laid.memory[:-1].split(list(row_lengths(14, 3)))
    generator = torch.Generator().manual_seed(0)
    weights = {
        t.name: torch.randn(t.shape, generator=generator) * 0.3
        for t in program.tensors
        if t.role in ("weight", "state")
    }
    return weights | dict(zip(ROW_INPUTS, rows, strict=True))


@pytest.mark.parametrize("logits", ["none", "last", "all"])
def test_logits_of_all_rows_need_all_rows(logits: Logits):
    program = build_decoder(PRESETS["tiny-llama"], 12, 16, batch=2, logits=logits, prompt=True)
    assert (gather_early(program) is program) == (logits == "all")
