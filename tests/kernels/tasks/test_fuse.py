"""Fusion by structure: every family becomes the same ops a layer, and so do programs of one's own;
what can't fuse is named.
"""

import tracemalloc
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from distmega.compiled import CompiledProgram
from distmega.errors import UnsupportedError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.machines import CPU, H200
from distmega.kernels.megakernel import compile_megakernel
from distmega.kernels.tasks.fuse import (
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedPointwise,
    FusedSample,
    InputNorm,
    Joining,
    WeightStream,
    canonical,
    first_that_fits,
    fuse_segment,
    row_attention,
)
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method
from distmega.program import expr
from distmega.program.builder import ProgramBuilder
from distmega.program.ops.attention import attend
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program

FAMILIES = sorted(name for name, config in PRESETS.items() if not config.num_experts)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("logits", ["none", "last"])
def test_every_family_fuses(name, logits):
    config = PRESETS[name]
    fused = fuse_segment(build_decoder(config, 1, 64, logits=logits))
    layers = config.num_layers
    assert Counter(map(type, fused)) == {
        FusedEmbedding: 1,
        FusedContraction: 4 * layers + 1,
        FusedAttention: layers,
        FusedChoice: 1,
    }


def test_what_a_layer_fuses_to():
    config = PRESETS["tiny-qwen3"]
    _, qkv, attention, out, gated, down, *_ = fuse_segment(build_decoder(config, 1, 64))
    at = "layers.0"
    assert qkv == FusedContraction(
        name=f"{at}.q",
        x="embedded",
        norm=InputNorm(weight=f"{at}.attn_norm", eps=config.norm_eps),
        streams=(WeightStream(weights=(f"{at}.wq", f"{at}.wk", f"{at}.wv"), biases=("", "", "")),),
        outs=(f"{at}.q", f"{at}.k", f"{at}.v"),
    )
    assert attention == FusedAttention(
        name=f"{at}.attention",
        q=f"{at}.q",
        k=f"{at}.k",
        v=f"{at}.v",
        q_norm=InputNorm(weight=f"{at}.q_norm", eps=config.norm_eps),
        k_norm=InputNorm(weight=f"{at}.k_norm", eps=config.norm_eps),
        positions="positions",
        table="rope_table",
        k_cache=f"{at}.k_cache",
        v_cache=f"{at}.v_cache",
        scale=config.head_dim**-0.5,
        window=0,
        out=f"{at}.attention",
    )
    assert out == FusedContraction(
        name=f"{at}.attn_sum",
        x=f"{at}.attention",
        norm=None,
        streams=(WeightStream(weights=(f"{at}.wo",), biases=("",)),),
        formula=expr.parse("a0 + a1"),
        operands=("embedded",),
        outs=(f"{at}.attn_sum",),
    )
    assert gated == FusedContraction(
        name=f"{at}.ffn_mixed",
        x=f"{at}.attn_sum",
        norm=InputNorm(weight=f"{at}.ffn_norm", eps=config.norm_eps),
        streams=(
            WeightStream(weights=(f"{at}.w_gate",), biases=("",)),
            WeightStream(weights=(f"{at}.w_up",), biases=("",)),
        ),
        formula=expr.parse("a1 * silu(a0)"),
        outs=(f"{at}.ffn_mixed",),
    )
    assert isinstance(down, FusedContraction)
    assert (down.x, down.operands) == (f"{at}.ffn_mixed", (f"{at}.attn_sum",))


@pytest.mark.parametrize(
    ("method", "limits"),
    [
        (Method(kind="plain"), "given"),
        (Method(kind="limited", num_candidates=8), "candidates"),
        (Method(kind="limited"), "all"),
    ],
)
def test_a_head_that_draws(method: Method, limits: str):
    program = build_decoder(PRESETS["tiny-llama"], 1, 64, method=method)
    head = fuse_segment(program)[-1]
    assert isinstance(head, FusedChoice)
    assert (head.logits, head.chosen) == ("logits", "next")
    assert head.sampler == FusedSample(
        sampling="sampling", seeds="seeds", positions="positions", limits=limits
    )


SAMPLED_OVER_RANKS = (
    ("plain", 0, 1, "none", "sample all_reduce", "given"),
    ("plain", 0, 1, "last", "all_gather sample", "given"),
    ("limited", 64, 1, "none", "all_gather top cutoff sample", "candidates"),
    ("limited", 64, 1, "last", "all_gather top cutoff sample", "candidates"),
    ("limited", 64, 16, "none", "top all_gather cutoff sample all_reduce", "candidates"),
    ("limited", 0, 1, "none", "all_gather cutoff sample", "all"),
)
"""Method, sequences, wanted logits; the ops behind the head on each rank, what they fuse to."""


@pytest.mark.parametrize(
    ("kind", "num_candidates", "batch", "logits", "behind", "limits"), SAMPLED_OVER_RANKS
)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_head_that_draws_over_ranks(kind, num_candidates, batch, logits, behind, limits, tp):
    config = replace(PRESETS["qwen3-8b"], num_layers=1)
    method = Method(kind=kind, num_candidates=num_candidates)
    program = build_decoder(config, 1, 64, batch=batch, logits=logits, dtype="bf16", method=method)
    local = localize(plan_program(program, DeviceMesh(tp=tp), H200)).program
    kinds = [op.kind for op in local.ops]
    assert " ".join(kinds[kinds.index("linear", -len(behind.split()) - 1) + 1 :]) == behind
    head = fuse_segment(local)[-1]
    assert isinstance(head, FusedChoice)
    assert (head.chosen, head.num_logits, head.num_ranks) == ("next", config.vocab, tp)
    assert ("logits" in local.outputs) == (head.logits in local.outputs)
    assert head.sampler == FusedSample(
        sampling="sampling", seeds="seeds", positions="positions", limits=limits
    )


def test_limits_of_a_part_of_the_logits_do_not_fuse():
    """Those that one rank finds among its own are not the limits of all."""
    program = build_decoder(
        replace(PRESETS["qwen3-8b"], num_layers=1), 1, 64, batch=16, dtype="bf16",
        method=Method(kind="limited", num_candidates=64),
    )  # fmt: skip
    local = localize(plan_program(program, DeviceMesh(tp=2), H200)).program
    gather = local.ops[-4]
    (top,) = (op for op in local.ops if op.kind == "top")
    assert gather.kind == "all_gather"
    found = top.writes[0].tensor, gather.writes[0].tensor
    cutoff = next(op for op in local.ops if op.kind == "cutoff")
    reads = tuple(
        replace(read, tensor=found[0]) if read.tensor == found[1] else read for read in cutoff.reads
    )
    ops = [replace(op, reads=reads) if op is cutoff else op for op in local.ops if op is not gather]
    with pytest.raises(UnsupportedError, match="'limits' of kind cutoff does not fuse"):
        fuse_segment(replace(local, ops=tuple(ops)))


def test_biases_are_kept():
    config = PRESETS["tiny-qwen2"]
    qkv = fuse_segment(build_decoder(config, 1, 64))[1]
    assert isinstance(qkv, FusedContraction)
    assert qkv.streams[0].biases == ("layers.0.bq", "layers.0.bk", "layers.0.bv")


def contractions(program: Program) -> list[FusedContraction]:
    fused: tuple[Fused, ...] = fuse_segment(program)
    assert all(isinstance(op, FusedContraction) for op in fused)
    return [op for op in fused if isinstance(op, FusedContraction)]


def test_a_chain_joins_the_contraction_before_it():
    p = ProgramBuilder("chain")
    h = p.linear(p.input("x", (1, 64)), p.weight("w", (64, 64)), name="h")
    doubled = h.map("tanh(a0)", name="t").map("a0 * 2 + 1", name="d")
    (op,) = contractions(p.build(doubled))
    assert (op.name, op.outs, op.operands) == ("d", ("d",), ())
    assert op.formula == canonical(expr.parse("tanh(a0) * 2 + 1"))


@pytest.mark.parametrize("turned", [False, True])
def test_contractions_of_one_x_that_meet_are_streams(turned):
    p = ProgramBuilder("meet")
    x = p.input("x", (1, 64))
    gate, up = (p.linear(x, p.weight(f"w{i}", (64, 64)), name=f"h{i}") for i in range(2))
    pair = (up, gate) if turned else (gate, up)
    y = p.pointwise("a0 * silu(a1)" if turned else "a1 * silu(a0)", *pair, name="y")
    (op,) = contractions(p.build(y))
    streams = [stream.weights[0] for stream in op.streams]
    assert sorted(streams) == ["w0", "w1"]
    gated = streams.index("w0")
    assert op.formula in (
        expr.parse(f"a{1 - gated} * silu(a{gated})"),
        expr.parse(f"silu(a{gated}) * a{1 - gated}"),
    )


def test_a_sum_of_contractions_of_two_x_takes_the_first_as_operand():
    p = ProgramBuilder("sum")
    x = p.input("x", (1, 64))
    a = p.linear(x, p.weight("wa", (64, 64)), name="a")
    b = p.linear(a.map("relu(a0)", name="r"), p.weight("wb", (64, 64)), name="b")
    first, second = contractions(p.build(p.pointwise("a0 + a1", x, b, name="y")))
    assert (first.outs, first.formula) == (("r",), expr.parse("relu(a0)"))
    assert (second.x, second.operands, second.outs) == ("r", ("x",), ("y",))


def test_an_op_that_no_rule_takes_is_named():
    p = ProgramBuilder("odd")
    x = p.input("x", (1, 64))
    program = p.build(p.linear(p.cumsum(x, name="odd_one"), p.weight("w", (64, 64))))
    with pytest.raises(UnsupportedError, match="'odd_one' of kind cumsum does not fuse"):
        fuse_segment(program)


def test_rows_of_heads_that_are_looked_up_are_named():
    p = ProgramBuilder("rows")
    rows = p.embedding(p.input("ids", (1,), "i64"), p.weight("table", (9, 4, 16)), name="rows")
    program = p.build(p.linear(rows, p.weight("w", (64, 4, 16)), spec="m h d, n h d -> m n"))
    with pytest.raises(UnsupportedError, match="'rows' of kind embedding does not fuse"):
        fuse_segment(program)


def test_attention_to_values_of_other_sizes_is_named():
    p = ProgramBuilder("values")
    q, k, v = (p.input(name, (1, 2, 4, 24 if name == "v" else 16)) for name in "qkv")
    mask = p.input("mask", (1, 1, 4, 4), "bool")
    program = p.build(p.op(attend, q, k, v, mask, scale=0.25, name="att"))
    with pytest.raises(UnsupportedError, match=r"'att' of kind attend .*: its keys and values are"):
        fuse_segment(program)


def test_attention_of_which_a_part_leaves_is_named():
    """A slice shows fewer elements than the result has: it can't be the rows that leave."""
    p = ProgramBuilder("part")
    q, k, v = (p.input(name, (1, 2, 4, 16)) for name in "qkv")
    seen = p.op(attend, q, k, v, p.input("mask", (1, 1, 4, 4), "bool"), scale=0.25, name="att")
    program = p.build(p.slice(seen, 3, 0, 8))
    with pytest.raises(UnsupportedError, match=r"'att' of kind attend .*: its keys and values are"):
        fuse_segment(program)


def test_a_norm_that_sums_take_too_is_given_by_its_first_contraction():
    """norm(x + f(x)), twice: the norm is folded into f, and x of the next sum is its result."""
    p = ProgramBuilder("post")
    x = p.input("x", (1, 64))
    for i in range(2):
        h = x
        for name in "ab":
            h = p.linear(h, p.weight(f"{name}{i}", (64, 64)), name=f"{name}{i}.y").map("relu(a0)")
        x = p.rms_norm(x + h, p.weight(f"n{i}", (64,)), 1e-5, name=f"normed{i}")
    last = p.linear(x, p.weight("head", (64, 64)), name="last")
    ops = contractions(p.build(last, x))
    assert [op.normed for op in ops] == ["", "", "normed0", "", "normed1"]
    assert [op.norm is None for op in ops] == [True, True, False, True, False]
    assert ops[3].operands == ("normed0",)


def test_a_parallel_sum_takes_two_operands():
    p = ProgramBuilder("parallel")
    x = p.input("x", (1, 64))
    h = p.rms_norm(x, p.weight("n", (64,)), 1e-5)
    a, b = (
        p.linear(
            p.linear(h, p.weight(f"u{i}", (64, 64))).map("relu(a0)"), p.weight(f"d{i}", (64, 64)),
            name=f"y{i}",
        )
        for i in range(2)
    )  # fmt: skip
    *_, first, up, last = contractions(p.build(p.pointwise("a0 + a1 + a2", x, a, b)))
    assert (first.outs, first.operands) == (("y0",), ())
    assert last.operands == ("x", "y0")
    assert last.x == up.outs[0]


def joined_program() -> Program:
    """A norm that three products take, of which two meet."""
    p = ProgramBuilder("joined")
    x = p.rms_norm(p.input("x", (1, 64)), p.weight("g", (64,)), 1e-5, name="normed")
    a, b, c = (p.linear(x, p.weight(f"w{name}", (64, 64)), name=name) for name in "abc")
    d = p.linear(x, p.weight("wd", (64, 64)), name="d")
    return p.build(p.pointwise("a0 * a1", a, b, name="met"), c, d)


@pytest.mark.parametrize(
    ("joining", "names"),
    [
        (Joining(), ["met", "c"]),
        (Joining(norms=False), ["normed", "met", "c"]),
        (Joining(beside=False), ["met", "c", "d"]),
        (Joining(streams=1), ["a", "met"]),
        (Joining(norms=False, beside=False, streams=1), ["normed", "a", "c", "d", "met"]),
    ],
)
def test_contractions_take_in_as_much_as_is_asked(joining: Joining, names: list[str]):
    fused = fuse_segment(joined_program(), joining=joining)
    assert sorted(op.name for op in fused) == sorted(names)
    made = {name for op in fused for name in (op.outs if hasattr(op, "outs") else (op.out,))}
    assert made >= {"met", "c", "d"}


@pytest.mark.parametrize("fewest", [2, 3, 5])
def test_the_first_way_to_fuse_that_fits_is_taken(fewest):
    tried: list[tuple[Fused, ...]] = []
    found = first_that_fits(joined_program(), partial(taking, fewest, tried))
    assert tried[-1] is found
    assert [len(one) >= fewest for one in tried] == [False] * (len(tried) - 1) + [True]


def test_the_first_refusal_is_told_where_nothing_fits():
    tried: list[tuple[Fused, ...]] = []
    with pytest.raises(UnsupportedError, match="2 ops"):
        first_that_fits(joined_program(), partial(taking, 9, tried))
    assert len(tried) == len({*tried}) > 4, "no way is tried twice"


def taking(fewest: int, tried: list[tuple[Fused, ...]], fused: tuple[Fused, ...]) -> object:
    """Stands for a kernel that takes no fewer fused ops."""
    tried.append(fused)
    if len(fused) < fewest:
        raise UnsupportedError(f"{len(fused)} ops", expected="more", remedy="divide them")
    return fused


def test_a_norm_with_another_reader_is_given_to_it():
    p = ProgramBuilder("shared")
    x = p.input("x", (1, 64))
    normed = p.rms_norm(x, p.weight("g", (64,)), 1e-5, name="normed")
    y, z = p.linear(normed, p.weight("w", (64, 64))), normed.map("abs(a0)", name="z")
    product, rows = fuse_segment(p.build(y, z))
    assert isinstance(product, FusedContraction)
    assert product.normed == "normed"
    assert rows == FusedPointwise(
        name="z", x="", norm=None, length=0, out="z", formula=expr.parse("abs(a0)"),
        operands=("normed",),
    )  # fmt: skip


def test_elements_of_caches_are_not_followed_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """What a decode step attends to is found by names, however long caches are."""
    followed = []
    monkeypatch.setattr(row_attention, "moved", lambda *given: followed.append(given))
    program = build_decoder(PRESETS["tiny-llama"], 1, 256, batch=16)
    assert any(isinstance(op, FusedAttention) for op in fuse_segment(program))
    assert not followed


@pytest.mark.parametrize("of_input", [True, False])
def test_contractions_of_parts_of_a_row_are_apart(of_input: bool):
    """Two of one part stand side by side, that of another by itself."""
    p = ProgramBuilder("parts")
    x = p.input("x", (1, 192))
    whole = x if of_input else p.linear(x, p.weight("whole", (192, 192)), name="made")
    first, other = (p.slice(whole, 1, at, at + 64, view=True) for at in (0, 128))
    outs = [p.linear(first, p.weight(name, (64, 64)), name=f"{name}.out") for name in "ab"]
    program = p.build(*outs, p.linear(other, p.weight("c", (64, 64)), name="c.out"))
    found = [op for op in fuse_segment(program) if isinstance(op, FusedContraction)]
    assert [op.outs for op in found][-2:] == [("a.out", "b.out"), ("c.out",)]


@pytest.mark.parametrize(("formula", "num"), [("tanh(a0)", 1500), ("a0 * a1", 40)])
def test_a_chain_that_is_no_expression_one_can_write_is_refused(formula: str, num: int):
    """Of 1500 functions inside each other, and of 2 ** 40 parts, since each result is read twice;
    the CPU's megakernel does the ops one by one.
    """
    p = ProgramBuilder("chain")
    x = p.linear(p.input("x", (1, 8)), p.weight("w", (8, 8)))
    for _ in range(num):
        x = p.pointwise(formula, *[x] * (1 + ("a1" in formula)))
    program = p.build(x)
    with pytest.raises(UnsupportedError, match="of kind pointwise does not fuse"):
        fuse_segment(program)
    kernel = compile_megakernel(program, DeviceMesh(tp=1), num_sms=2)
    assert len(order_weights(program)) == 1
    assert kernel.schedule.graph.num_tasks == num + 1


@pytest.mark.parametrize(("given", "shown"), [((), (1,)), ((1,), ())])
def test_a_number_without_dims_is_viewed(given: tuple[int, ...], shown: tuple[int, ...]):
    p = ProgramBuilder("number")
    made = p.input("x", given).map("a0 + 1")
    program = p.build(p.reshape(made, shown, view=True).map("a0 * 2", name="y"))
    mesh = DeviceMesh(tp=1)
    plan = plan_program(program, mesh, CPU)
    step = CompiledProgram(plan, SingleCommunicator(mesh), megakernel=True)
    assert torch.equal(step({"x": torch.full(given, 3.0)})["y"], torch.full(shown, 8.0))


def test_caches_of_one_row_each_that_no_op_appends_to_are_refused_at_once():
    """Not by looking at the place of each of their elements: these are 500 million."""
    p = ProgramBuilder("exchanged")
    q, positions = p.input("q", (128, 1, 1, 64)), p.input("positions", (128,), "i64")
    caches = [p.state(name, (128, 1, 2**16, 64)).map("a0") for name in ("k", "v")]
    program = p.build(p.attention(q, *caches, positions, 0.5, name="mixed"))
    tracemalloc.start()
    with pytest.raises(UnsupportedError, match="'mixed' of kind attention does not fuse"):
        fuse_segment(program)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**24
