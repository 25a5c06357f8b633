"""Which attentions are joined with what is done to their heads, and that these give the bits that
both ops give.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from distmega.errors import VerifyError
from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import ForLoop, HostProgram, LibraryOp, walk_nodes
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.library.ops import TorchOps
from distmega.hostir.lower import lower
from distmega.hostir.passes.fuse_attention import FUSED, appends_once, fuse_attention
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.hostir.passes.test_fuse import lowered, steps
from tests.hostir.programs import local, random_tensors, run_program

KV_HEADS, DIM, CONTEXT, EPS = 2, 8, 7, 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: sequences, each with a cache, or one without a dim for it. norms: of "q" and "k"."""

    rows: int = 4
    single: bool = False
    group: int = 3
    value_dim: int = DIM
    norms: str = ""
    rotates: str = "qk"
    window: int = 0
    softcap: float = 0.0
    dtype: str = "f32"


class Step:
    """Builds attention of a row of each sequence over the parts of one product."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.p = p = ProgramBuilder("step")
        self.positions = p.input("positions", (case.rows,), "i64")
        self.table = p.weight("table", (CONTEXT, DIM))
        x = p.input("x", (case.rows, 16), case.dtype)
        queries = KV_HEADS * case.group * DIM
        sizes = queries, KV_HEADS * DIM, KV_HEADS * case.value_dim
        w = p.weight("wqkv", (sum(sizes), 16), case.dtype)
        whole = p.linear(x, w, name="qkv")
        starts = [sum(sizes[:n]) for n in range(4)]
        q, k, v = (p.slice(whole, 1, start, stop, view=True) for start, stop in pairwise(starts))
        self.q = p.reshape(q, (case.rows, KV_HEADS, case.group, DIM), view=True)
        self.k = p.reshape(k, (case.rows, KV_HEADS, DIM), view=True)
        self.v = p.reshape(v, (case.rows, KV_HEADS, case.value_dim), view=True)
        own = () if case.single else (case.rows,)
        self.caches = [
            p.state(name, (*own, KV_HEADS, CONTEXT, dim), case.dtype)
            for name, dim in (("k_cache", DIM), ("v_cache", case.value_dim))
        ]

    def shaped(self, x: Handle, name: str, positions: Handle | None = None) -> Handle:
        if name in self.case.norms:
            w = self.p.weight(f"{name}_norm", (DIM,), self.case.dtype)
            x = self.p.rms_norm(x, w, EPS, name=f"{name}_normed")
        if name in self.case.rotates:
            x = self.p.rope(x, positions or self.positions, self.table, name=f"{name}_rotated")
        return x

    def append(self, number: int, x: Handle) -> None:
        name = f"{'kv'[number]}_append"
        self.p.kv_append(self.caches[number], x, self.positions, name=name)

    def attend(self, q: Handle, positions: Handle | None = None) -> Handle:
        return self.p.attention(
            q, *self.caches, positions or self.positions, 0.3, window=self.case.window,
            softcap=self.case.softcap, name="y",
        )  # fmt: skip


def whole_step(case: Case) -> Program:
    s = Step(case)
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    return s.p.build(s.attend(q))


def tensors_of(host: HostProgram) -> dict[str, Tensor]:
    """Random ones, positions the first and the last among them."""
    tensors = random_tensors(host)
    for name, x in tensors.items():
        if name.startswith("positions"):
            x.copy_(torch.tensor([CONTEXT - 1, 0, 3, 5])[: len(x)])
    return tensors


def kinds_of(program: Program) -> list[str]:
    """Of the ops that are no views, of a program whose results are those of its ops."""
    host = lowered(program)
    assert parse_host(print_host(host)) == host
    check_host(host)
    tensors = tensors_of(host)
    kept = [*program.outputs, *(tensor.name for tensor in program.with_role("state"))]
    expected = {name: x.clone() for name, x in tensors.items()}
    expected |= run_program(program, expected)
    for ops in (TorchOps(), KernelOps(), KernelOps(masked=True)):
        given = {name: x.clone() for name, x in tensors.items()}
        found = given | Evaluator(host, SingleCommunicator(host.mesh), {}, ops=ops).run(given)
        for name in kept:
            torch.testing.assert_close(found[name], expected[name])
    return [step.split()[0] for step in steps(host) if not step.startswith(("view", "linear"))]


def leave_out_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(join for join in lower.JOINS if join is not fuse_attention)
    monkeypatch.setattr(lower, "JOINS", others)


CASES = [
    Case(),
    Case(norms="qk"),
    Case(norms="q", window=2),
    Case(norms="k", softcap=4.0, group=1),
    Case(rows=1, single=True, window=3),
    Case(rows=1, value_dim=4),
    Case(norms="qk", value_dim=12, dtype="bf16"),
    Case(dtype="f16", softcap=2.0, window=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_and_attention_are_one_and_keep_their_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    program = whole_step(case)
    host = lowered(program)
    fused = [step for step in steps(host) if not step.startswith(("view", "linear"))]
    assert fused == ["fused_attention y k_cache v_cache"]
    assert "q_rotated" not in host.buffer_map()
    assert parse_host(print_host(host)) == host
    check_host(host)
    leave_out_the_pass(monkeypatch)
    apart = lowered(program)
    assert [s.split()[0] for s in steps(apart)][-2:] == ["fused_heads", "attention"]
    tensors = tensors_of(host)
    for ops in (TorchOps(), KernelOps(), KernelOps(masked=True)):
        found = []
        for each in (host, apart):
            given = {name: x.clone() for name, x in tensors.items()}
            run = Evaluator(each, SingleCommunicator(each.mesh), {}, ops=ops).run(given)
            found.append([run["y"], given["k_cache"], given["v_cache"]])
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other)


def test_the_host_is_asked_for_positions_by_torch_alone():
    (op,) = [op for op in ops_of(lowered(whole_step(Case()))) if op.kind == FUSED]
    assert TorchOps().reads_host(op) == "the host reads positions"
    assert KernelOps(masked=True).reads_host(op) == ""


def ops_of(host: HostProgram) -> list:
    return [node.op for node in walk_nodes(host.body) if isinstance(node, LibraryOp)]


def another_reader_of_queries() -> Program:
    s = Step(Case())
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    return s.p.build(s.attend(q), q)


def a_view_of_queries() -> Program:
    s = Step(Case(rotates=""))
    flat = s.p.reshape(s.q, (4, KV_HEADS * 3, DIM), view=True)
    q = s.p.rope(flat, s.positions, s.table, name="q_rotated")
    s.append(0, s.p.rope(s.k, s.positions, s.table, name="k_rotated"))
    s.append(1, s.v)
    return s.p.build(s.attend(s.p.reshape(q, (4, KV_HEADS, 3, DIM), view=True)))


def other_positions() -> Program:
    s = Step(Case())
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    return s.p.build(s.attend(q, s.p.input("positions_too", (4,), "i64")))


def positions_that_are_computed() -> Program:
    s = Step(Case())
    s.positions = s.p.pointwise("a0 - 0", s.positions, name="positions_here")
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    return s.p.build(s.attend(q))


def positions_that_are_counted_on() -> Program:
    s = Step(Case())
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    y = s.attend(q)
    s.p.set(s.p.pointwise("a0 + 0", s.positions), into=s.p.state("kept", (4,), "i64"))
    return s.p.build(y)


def a_state_of_positions_that_is_written() -> Program:
    s = Step(Case())
    given, s.positions = s.positions, s.p.state("positions_kept", (4,), "i64")
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    y = s.attend(q)
    s.p.set(s.p.pointwise("a0 + 1", given), into=s.positions)
    return s.p.build(y)


def another_writer(first: bool) -> Callable[[], Program]:
    def build() -> Program:
        s = Step(Case())
        if first:
            s.p.kv_append(s.caches[1], s.v.map("a0 * 2", name="twice"), s.positions, name="early")
        q = s.shaped(s.q, "q")
        s.append(0, s.shaped(s.k, "k"))
        s.append(1, s.v)
        y = s.attend(q)
        if not first:
            s.p.set(s.p.pointwise("a0 * 2", s.caches[0]), into=s.caches[0])
        return s.p.build(y)

    return build


def another_reader_between() -> Program:
    s = Step(Case())
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    seen = s.p.pointwise("a0 + 1", s.caches[0], name="seen")
    return s.p.build(s.attend(q), seen)


def swapped_caches() -> Program:
    s = Step(Case())
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    return s.p.build(s.p.attention(q, *reversed(s.caches), s.positions, 0.3, name="y"))


def rotated_values() -> Program:
    s = Step(Case(rotates="qkv"))
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.shaped(s.v, "v"))
    return s.p.build(s.attend(q))


def rows_of_one_sequence() -> Program:
    return whole_step(Case(single=True))


def a_prompt_of_one_row() -> Program:
    s = Step(Case(rows=1, single=True))
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    return s.p.build(s.p.attention(q, *s.caches, s.positions, 0.3, in_order=True, name="y"))


APART: list[Callable[[], Program]] = [
    another_reader_of_queries,
    a_view_of_queries,
    other_positions,
    positions_that_are_computed,
    a_state_of_positions_that_is_written,
    another_writer(first=True),
    another_writer(first=False),
    another_reader_between,
    swapped_caches,
    rotated_values,
    rows_of_one_sequence,
    lambda: whole_step(Case(rotates="q")),
    lambda: whole_step(Case(rotates="k", norms="q")),
    lambda: whole_step(Case(rotates="k")),
    lambda: whole_step(Case(norms="qk", rotates="")),
]


@pytest.mark.parametrize("build", APART)
def test_others_stay_two(build: Callable[[], Program]):
    kinds = kinds_of(build())
    assert FUSED not in kinds
    assert "attention" in kinds


def test_a_prompt_of_one_row_stays_two():
    assert FUSED not in [op.kind for op in ops_of(lowered(a_prompt_of_one_row()))]


def test_what_else_reads_positions_or_caches_does_no_harm():
    assert FUSED in kinds_of(positions_that_are_counted_on())
    s = Step(Case())
    before = s.p.pointwise("a0 * 2", s.caches[0], name="before")
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    assert FUSED in kinds_of(s.p.build(s.attend(q), before))
    s = Step(Case())
    q = s.shaped(s.q, "q")
    s.append(0, s.shaped(s.k, "k"))
    s.append(1, s.v)
    y = s.attend(q)
    assert FUSED in kinds_of(s.p.build(y, s.p.pointwise("a0 * 2", s.caches[0], name="after")))


def raw(program: Program) -> HostProgram:
    """As passes behind lowering get it."""
    return lower.lower_program(local(program), megakernel=False, peer_memory=False, fuse=True)


def test_ops_in_loops_stay_two(monkeypatch: pytest.MonkeyPatch):
    leave_out_the_pass(monkeypatch)
    apart = raw(whole_step(Case()))
    given = apart.buffer_map(), apart.outputs
    joined = fuse_attention(apart.body, *given)
    assert FUSED in [node.op.kind for node in joined if isinstance(node, LibraryOp)]
    loop = ForLoop(index="i", extent=2, body=apart.body)
    assert fuse_attention((loop,), *given) == (loop,)


def test_a_program_that_repeats_a_step_does_not_append_once(monkeypatch: pytest.MonkeyPatch):
    """As micro-batches of a stage do."""
    host = raw(whole_step(Case()))
    leave_out_the_pass(monkeypatch)
    apart = raw(whole_step(Case()))
    assert appends_once(host.body)
    assert appends_once(apart.body), "it has no such op"
    assert not appends_once((ForLoop(index="i", extent=2, body=host.body),))
    assert not appends_once((*host.body, *host.body))
    assert not appends_once((*host.body, *apart.body))


BROKEN = {
    "kind of parts": ("'rope append', 'append')", "'rope', 'append')"),
    "no part": ("parts=('rope', 'rope append', 'append')", "parts=('rope', 'rope append')"),
    "one rotation": ("parts=('rope', 'rope", "parts=('norm', 'rope"),
    "scale": ("scale=0.3", "scale='much'"),
    "window": (" window=0", ""),
    "caches": ("k_cache(m, h, t, d) v_cache(m, h, t, e)", "v_cache(m, h, t, e)"),
    "cache": ("k_cache(m, h, t, d) ", "v_cache(m, h, t, d) "),
    "place": ("k_cache(m, h, c, i)", "k_cache(m, h, t, i)"),
    "result": ("temp y: f32[4, 2, 3, 8]", "temp y: f32[4, 2, 3, 9]"),
    "type": ("temp y: f32", "temp y: bf16"),
    "positions": ("positions: i64[4]", "positions: f32[4]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_other_ops_of_the_kind_are_refused(name: str):
    text = print_host(lowered(whole_step(Case())))
    old, new = BROKEN[name]
    assert text.count(old) == 1, text
    with pytest.raises(VerifyError, match="'y'"):
        verify_host(parse_host(text.replace(old, new)))


def test_a_text_may_say_eps_as_a_whole_number():
    text = print_host(lowered(whole_step(Case(norms="qk"))))
    host = verify_host(parse_host(text.replace("eps=0.001", "eps=1")))
    Evaluator(host, SingleCommunicator(host.mesh), {}).run(tensors_of(host))


def test_a_cache_is_written_by_the_op_that_reads_it():
    text = print_host(lowered(whole_step(Case())))
    host = parse_host(text)
    (node,) = [n for n in host.body if isinstance(n, LibraryOp) and n.op.kind == FUSED]
    out, k, v = node.op.writes
    swapped = replace(node, op=replace(node.op, writes=(out, v, k)))
    body = tuple(swapped if n is node else n for n in host.body)
    with pytest.raises(VerifyError, match="'y'"):
        verify_host(replace(host, body=body))
