"""Which ops on heads are joined, and that these give what the same ops one by one give."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions
from distmega.hostir.check.check import check_host
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import LibraryOp
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import H200
from distmega.models.presets import PRESETS
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.text import parse_program, print_program
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.passes.test_fuse import lowered, steps
from tests.hostir.programs import random_tensors, run_program

ROWS, KV_HEADS, GROUP, DIM, CONTEXT, SEQUENCES = 5, 2, 3, 8, 7, 3


def given_tensors(program: Program) -> dict[str, Tensor]:
    """Random ones; each row has a position of its own."""
    tensors = random_tensors(lowered(program))
    generator = torch.Generator().manual_seed(0)
    for name, x in tensors.items():
        if name.startswith("positions"):
            x.copy_(torch.randperm(CONTEXT, generator=generator)[: len(x)])
        if name == "sequences":
            x.copy_(torch.randint(0, SEQUENCES, x.shape, generator=generator))
    return tensors


def check(program: Program) -> list[str]:
    """As test_fuse.check, caches too."""
    host = lowered(program)
    assert parse_host(print_host(host)) == host
    check_host(host)
    tensors = given_tensors(program)
    states = [tensor.name for tensor in program.with_role("state")]
    one_by_one = {name: x.clone() for name, x in tensors.items()}
    expected = one_by_one | run_program(program, one_by_one)
    for ops in (None, KernelOps()):
        given = {name: x.clone() for name, x in tensors.items()}
        found = given | Evaluator(host, SingleCommunicator(host.mesh), {}, ops=ops).run(given)
        for name in (*program.outputs, *states):
            torch.testing.assert_close(found[name], expected[name])
    return [step for step in steps(host) if not step.startswith(("view", "linear"))]


class Block:
    """Builds attention over the parts of one product."""

    def __init__(self, *, several: bool = False) -> None:
        self.p = p = ProgramBuilder("block")
        x = p.input("x", (ROWS, 16))
        self.positions = p.input("positions", (ROWS,), "i64")
        self.sequences = p.input("sequences", (ROWS,), "i64") if several else None
        self.table = p.weight("table", (CONTEXT, DIM))
        heads = KV_HEADS * GROUP, KV_HEADS, KV_HEADS
        whole = p.linear(x, p.weight("wqkv", (sum(heads) * DIM, 16)), name="qkv")
        self.q, self.k, self.v = (
            self.heads(whole, sum(heads[:i]), number) for i, number in enumerate(heads)
        )
        caches = (SEQUENCES,) if several else ()
        self.caches = [
            p.state(name, (*caches, KV_HEADS, CONTEXT, DIM)) for name in ("k_cache", "v_cache")
        ]

    def heads(self, whole: Handle, first: int, number: int) -> Handle:
        """`number` heads of the product, from `first` on."""
        part = self.p.slice(whole, 1, first * DIM, (first + number) * DIM, view=True)
        shape = (ROWS, number, DIM) if number == KV_HEADS else (ROWS, KV_HEADS, GROUP, DIM)
        return self.p.reshape(part, shape, view=True)

    def norm(self, x: Handle, name: str, eps: float = 1e-3) -> Handle:
        return self.p.rms_norm(x, self.p.weight(f"{name}_norm", (DIM,)), eps, name=f"{name}_normed")

    def rope(self, x: Handle, name: str, positions: Handle | None = None) -> Handle:
        return self.p.rope(x, positions or self.positions, self.table, name=f"{name}_rotated")

    def append(self, number: int, x: Handle) -> None:
        name = f"{'kv'[number]}_append"
        self.p.kv_append(self.caches[number], x, self.positions, self.sequences, name=name)

    def attend(self, q: Handle) -> Handle:
        if self.sequences is not None:
            return q.map("a0 * 2", name="y")
        return self.p.attention(q, *self.caches, self.positions, 0.3, name="y")


@pytest.mark.parametrize("several", [False, True])
def test_queries_keys_and_values_are_one(several: bool):
    for norms in (False, True):
        b = Block(several=several)
        q, k = (b.norm(x, n) if norms else x for x, n in ((b.q, "q"), (b.k, "k")))
        q, k = b.rope(q, "q"), b.rope(k, "k")
        b.append(0, k)
        b.append(1, b.v)
        found = check(b.p.build(b.attend(q)))
        last = "pointwise y" if several else "attention y"
        assert found == ["fused_heads q_rotated k_cache v_cache", last]


def test_rotations_alone_are_one():
    b = Block()
    q, k = b.rope(b.q, "q"), b.rope(b.k, "k")
    found = check(b.p.build(q.map("a0 * 2", name="y"), k.map("a0 * 2", name="z")))
    assert found == ["fused_heads q_rotated k_rotated", "pointwise y", "pointwise z"]


def test_a_result_that_others_read_is_kept():
    b = Block()
    k = b.rope(b.k, "k")
    b.append(0, k)
    b.append(1, b.v)
    q = b.rope(b.norm(b.q, "q"), "q")
    found = check(b.p.build(b.attend(q), k))
    assert found == ["rope k_rotated", "fused_heads k_cache v_cache q_rotated", "attention y"]


def test_other_positions_norms_and_tables_stay_apart():
    b = Block()
    other = b.p.input("positions_too", (ROWS,), "i64")
    q, k = b.rope(b.q, "q"), b.rope(b.k, "k", other)
    b.append(0, k)
    assert check(b.p.build(b.attend(q))) == [
        "rope q_rotated", "rope k_rotated", "kv_append k_cache", "attention y",
    ]  # fmt: skip
    b = Block()
    q, k = (b.rope(b.norm(x, n, e), n) for x, n, e in ((b.q, "q", 1e-3), (b.k, "k", 1e-5)))
    assert check(b.p.build(q.map("a0 * 2", name="y"), k.map("a0 * 2", name="z")))[:2] == [
        "fused_heads q_rotated", "fused_heads k_rotated",
    ]  # fmt: skip
    b = Block()
    b.append(0, b.rope(b.k, "k"))
    again = b.p.rope(b.q, b.positions, b.p.weight("other_table", (CONTEXT, DIM)), name="q_rotated")
    assert check(b.p.build(b.attend(again)))[:2] == ["fused_heads k_cache", "rope q_rotated"]


def test_nothing_moves_past_what_reads_a_cache():
    b = Block()
    b.append(0, b.rope(b.k, "k"))
    early = b.p.pointwise("a0 + 1", b.caches[0], name="early")
    b.append(1, b.v)
    assert check(b.p.build(early, b.attend(b.q)))[:3] == [
        "fused_heads k_cache", "pointwise early", "kv_append v_cache",
    ]  # fmt: skip


def test_a_cache_a_row_is_appended_to_with_the_rotation():
    p = ProgramBuilder("rows")
    x, positions = p.input("x", (3, 2, DIM)), p.input("positions", (3,), "i64")
    cache = p.state("cache", (3, 2, CONTEXT, DIM))
    rotated = p.rope(x, positions, p.weight("table", (CONTEXT, DIM)), name="rotated")
    p.kv_append(cache, rotated, positions, name="append")
    assert check(p.build(p.pointwise("a0 * 2", cache, name="y"))) == [
        "fused_heads cache", "pointwise y",
    ]  # fmt: skip


def test_caches_of_rows_and_of_sequences_stay_apart():
    p = ProgramBuilder("both")
    x, positions = p.input("x", (3, 2, DIM)), p.input("positions", (3,), "i64")
    caches = [p.state(name, (3, 2, CONTEXT, DIM)) for name in ("of_rows", "of_sequences")]
    p.kv_append(caches[0], x, positions, name="first")
    p.kv_append(caches[1], x, positions, p.input("sequences", (3,), "i64"), name="second")
    y = p.pointwise("a0 + a1", *caches, name="y")
    assert check(p.build(y)) == ["kv_append of_rows", "kv_append of_sequences", "pointwise y"]


def test_norms_may_have_a_whole_number_as_eps():
    """As texts of programs and of host programs may say."""
    b = Block()
    q, k = (b.rope(b.norm(x, n, 1.0), n) for x, n in ((b.q, "q"), (b.k, "k")))
    b.append(0, k)
    program = parse_program(print_program(b.p.build(b.attend(q))).replace("eps=1.0", "eps=1"))
    assert {dict(op.attrs)["eps"] for op in program.ops if op.kind == "rms_norm"} == {1}
    assert check(program) == ["fused_heads q_rotated k_cache", "attention y"]
    text = print_host(lowered(program)).replace("eps=1.0", "eps=1")
    host, tensors = verify_host(parse_host(text)), given_tensors(program)
    (found,) = Evaluator(host, SingleCommunicator(host.mesh), {}).run(tensors).values()
    assert torch.equal(found, run_program(program, given_tensors(program))["y"])


def test_a_cache_is_appended_to_by_one_part():
    """The second time what the first one appended, rotated."""
    b = Block()
    b.append(0, b.k)
    b.p.kv_append(b.caches[0], b.rope(b.k, "k"), b.positions, name="again")
    b.append(1, b.v)
    assert check(b.p.build(b.attend(b.rope(b.q, "q")))) == [
        "fused_heads k_cache k_rotated", "fused_heads k_cache v_cache q_rotated", "attention y",
    ]  # fmt: skip


def heads_in_a_cache(shown: str) -> Program:
    """A step whose queries, keys, values or norm's weight is a view of the keys' cache, made
    before anything is appended.
    """
    p = ProgramBuilder("shown")
    positions, table = p.input("positions", (1,), "i64"), p.weight("table", (CONTEXT, DIM))
    caches = [p.state(name, (1, KV_HEADS, CONTEXT, DIM)) for name in ("k_cache", "v_cache")]
    head = (1, KV_HEADS, DIM)
    shapes = {"q": (1, KV_HEADS, CONTEXT, DIM), "k": head, "v": head, "weight": (DIM,)}
    given = {name: p.input(name, shape) for name, shape in shapes.items() if name != shown}
    part = p.slice(caches[0], 1, 0, 1, view=True) if shown == "weight" else caches[0]
    part = part if shown == "q" else p.slice(part, 2, 0, 1, view=True)
    given[shown] = p.reshape(part, shapes[shown], view=True, name="part")
    early = given[shown].map("a0 * 2", name="early")
    p.kv_append(caches[0], p.rope(given["k"], positions, table), positions)
    normed = p.rms_norm(given["q"], given["weight"], 1e-3)
    q = p.rope(normed, positions, table)
    p.kv_append(caches[1], given["v"], positions)
    return p.build(p.attention(q, *caches, positions, 0.3, name="y"), early)


@pytest.mark.parametrize("shown", ["q", "k", "v", "weight"])
def test_no_op_appends_to_what_a_part_of_it_reads(shown: str):
    """Which may run before or after the append, or beside it."""
    program = heads_in_a_cache(shown)
    check(program)
    for node in lowered(program).body:
        if isinstance(node, LibraryOp) and not node.op.is_view:
            reads, writes = ({a.tensor for a in x} for x in (node.op.reads, node.op.writes))
            assert not ("part" in reads and "k_cache" in writes), node.op.kind


def random_block(rng: random.Random) -> Program:
    """Some of the steps, in any order that the heads allow."""
    b = Block(several=rng.random() < 0.5)
    left = {"q": b.q, "k": b.k, "v": b.v}
    todo = {"q": ["norm", "rope"], "k": ["norm", "rope", "append"], "v": ["append"]}
    todo = {n: [s for s in order if rng.random() < 0.8] for n, order in todo.items()}
    seen: list[Handle] = []
    while any(todo.values()):
        name = rng.choice([n for n, order in todo.items() if order])
        match todo[name].pop(0):
            case "norm":
                left[name] = b.norm(left[name], name, rng.choice([1e-3, 1e-5]))
            case "rope":
                left[name] = b.rope(left[name], name)
            case _:
                b.append("kv".index(name), left[name])
        if rng.random() < 0.3:
            read = rng.choice([*left.values(), *b.caches])
            seen.append(b.p.pointwise("a0 * 3", read, name=f"seen{len(seen)}"))
    return b.p.build(left["q"].map("a0 + 1", name="y"), *seen)


def test_random_blocks():
    joined = 0
    for seed in range(40):
        joined += sum(
            step.startswith("fused_heads") for step in check(random_block(random.Random(seed)))
        )
    assert joined > 20


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.2-1b"])
def test_a_layer_of_a_prompt_is_eight_kernels(model: str):
    """The last one takes the rows that make tokens behind its attention; norm and head follow."""
    config = replace(PRESETS[model], num_layers=3)
    options = EngineOptions(max_context=1024, batch=4)
    staged = plan_decode(config, DeviceMesh(tp=1), H200, options)
    plan = lower_decode(config, staged, options, peer_memory=False)
    host = lower_prefill(plan, 512, "none")
    ops = [node.op for node in host.body if isinstance(node, LibraryOp) and not node.op.is_view]
    starts = [n for n, op in enumerate(ops) if op.name.endswith(".attn_in")]
    layers = [[op.kind for op in ops[start:stop]] for start, stop in pairwise([*starts, len(ops)])]
    first = ["fused_norm", "linear", "fused_heads", "attention"]
    assert layers[1] == [*first, "linear", "fused_norm", "fused_linear", "linear"]
    assert layers[2] == [
        *first, "embedding", "linear", "embedding", "fused_norm", "fused_linear", "linear",
        "fused_norm", "linear", "argmax",
    ]  # fmt: skip
