"""Normal forms of captured programs: what is brought to them, what is left, the values."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from distmega import CPU, DeviceMesh, plan_program
from distmega.compiled import CompiledProgram
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.hopper.batch_plan.queues import build_batch_queues
from distmega.kernels.hopper.plan.weight_order import order_weights
from distmega.kernels.hopper.row_plan.queues import build_queues
from distmega.kernels.runtime.arena import Space, layout_arena
from distmega.kernels.tasks.fuse import (
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    fuse_segment,
    norms_of,
)
from distmega.models.decoder import build_decoder
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sources.locate import read_config
from distmega.torch_import.forms import Derived, Normal, normalise
from distmega.torch_import.huggingface.decoders import open_decoder
from tests.torch_import.huggingface.test_decoders import family_config
from tests.torch_import.small_decoders import DECODERS

WIDTH, ROWS = 16, 3


def values(normal: Normal, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a program gives."""
    plan = plan_program(normal.program, DeviceMesh(tp=1), CPU, {})
    step = CompiledProgram(plan, SingleCommunicator(DeviceMesh(tp=1)))
    known = {name: x.of(given[x.source]) for name, x in normal.derived.items()}
    held = {**given, **known, **normal.constants}
    names = {tensor.name for tensor in normal.program.tensors}
    return step(step.parts({name: x for name, x in held.items() if name in names}))


def check(program: Program, kinds: dict[str, int]) -> Normal:
    """The normal form has ops of these kinds, and gives the same values."""
    normal = normalise(program, {}, "positions", 8)
    found = Counter(op.kind for op in normal.program.ops if not op.is_view)
    assert found == kinds
    torch.manual_seed(0)
    given = {
        tensor.name: torch.randn(tensor.shape)
        for tensor in program.tensors
        if tensor.role in ("input", "weight")
    }
    before = values(Normal(program=program, derived={}, constants={}), given)
    after = values(normal, given)
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=1e-5, atol=1e-5)
    return normal


def mean(p: ProgramBuilder, x: Handle) -> Handle:
    total = p.reduce(x, 1)
    return p.reshape(total, (ROWS, 1), view=True) / WIDTH


SPELLED = {
    "x * rsqrt * w": lambda x, r, w: x * r.map("rsqrt(a0 + 1e-05)") * w,
    "w * (x / sqrt)": lambda x, r, w: w * (x / r.map("sqrt(a0 + 1e-05)")),
    "x * (w * power)": lambda x, r, w: x * (w * r.map("(1e-05 + a0) ** -0.5")),
    "1 + w": lambda x, r, w: x * r.map("rsqrt(a0 + 1e-05)") * (1.0 + w),
    "no weight": lambda x, r, w: x * r.map("rsqrt(a0 + 1e-05)"),
}


@pytest.mark.parametrize("name", SPELLED)
def test_rms_norms_are_found_however_they_are_written(name: str):
    p = ProgramBuilder("norm")
    x, w = p.input("x", (ROWS, WIDTH)), p.weight("w", (WIDTH,))
    p.weight("unused", (WIDTH,))
    out = SPELLED[name](x, mean(p, x * x), w)
    normal = check(p.build(p.set(out, name="out")), {"rms_norm": 1})
    (op,) = (op for op in normal.program.ops if op.kind == "rms_norm")
    assert op.attr("eps") == 1e-5


def test_layer_norms_are_found():
    p = ProgramBuilder("norm")
    x, w, b = p.input("x", (ROWS, WIDTH)), p.weight("w", (WIDTH,)), p.weight("b", (WIDTH,))
    off = x - mean(p, x)
    out = off * mean(p, off * off).map("rsqrt(a0 + 0.01)") * w + b
    check(p.build(p.set(out, name="out")), {"layer_norm": 1})


def test_a_norm_without_the_front_dim_reads_one_tensor():
    """Planners must not divide what it reads in one place and leave it whole in another."""
    p = ProgramBuilder("norm")
    x, w = p.input("x", (1, ROWS, WIDTH)), p.weight("w", (WIDTH,))
    normal = check(p.build(p.rms_norm(x, w, 1e-5)), {"rms_norm": 1})
    (op,) = (op for op in normal.program.ops if op.kind == "rms_norm")
    assert [read.tensor for read in op.reads] == [op.reads[0].tensor] * 2 + ["w"]
    assert len(op.reads[0].dims) == 2


@pytest.mark.parametrize("wrong", ["another tensor", "another mean", "not centred"])
def test_what_only_looks_like_a_norm_is_left(wrong: str):
    p = ProgramBuilder("norm")
    x, y = p.input("x", (ROWS, WIDTH)), p.input("y", (ROWS, WIDTH))
    if wrong == "another tensor":
        out = x * mean(p, y * y).map("rsqrt(a0 + 1e-05)")
    elif wrong == "another mean":
        out = x * (mean(p, x * x) * 2).map("rsqrt(a0 + 1e-05)") + y
    else:
        off = x - mean(p, y)
        out = off * mean(p, off * off).map("rsqrt(a0 + 1e-05)")
    normal = normalise(p.build(p.set(out, name="out")), {}, "positions", 8)
    kinds = {op.kind for op in normal.program.ops}
    assert not kinds & {"layer_norm"}
    centred = [op for op in normal.program.ops if op.kind == "rms_norm"]
    assert len(centred) == (1 if wrong == "not centred" else 0)


def test_products_are_turned_and_split_and_take_their_biases():
    p = ProgramBuilder("parts")
    x, w, b = p.input("x", (ROWS, 8)), p.weight("w", (8, 12)), p.weight("b", (12,))
    y = p.linear(x, w, spec="m k, k n -> m n") + b
    parts = [p.slice(y, 1, 4 * n, 4 * n + 4, view=True) for n in range(3)]
    out = parts[0] * parts[1] + parts[2]
    normal = check(p.build(p.set(out, name="out")), {"linear": 3, "pointwise": 1})
    shapes = {x.name: x.shape for x in normal.program.with_role("weight")}
    assert sorted(shapes.values()) == [(4,)] * 3 + [(4, 8)] * 3


def test_a_product_that_is_read_whole_too_stays_one():
    p = ProgramBuilder("whole")
    x, w = p.input("x", (ROWS, 8)), p.weight("w", (12, 8))
    y = p.linear(x, w, spec="m k, n k -> m n")
    part = p.slice(y, 1, 0, 4, view=True)
    check(p.build(p.set(y, name="all"), p.set(part, name="part")), {"linear": 1, "set": 1})


class Array:
    """A stored weight that notes how much of it was read."""

    def __init__(self, whole: np.ndarray) -> None:
        self.whole, self.num_read, self.shape = whole, 0, whole.shape

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        part = self.whole[slices]
        self.num_read += part.size
        return part


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("text", ["", "1 + a0"])
def test_parts_of_derived_weights_read_no_more_than_they_take(turned: bool, text: str):
    whole = np.arange(48, dtype=np.float32).reshape(6, 8) / 7
    rows = (4, 5, 0, 1)
    derived = Derived(
        source="w", stored=(6, 8), stored_dtype="f32", turned=turned, rows=rows, text=text
    )
    expected = derived.of(torch.from_numpy(whole)).numpy()
    assert expected.shape == derived.shape
    reader = Array(whole)
    part = (slice(0, 2), slice(2, 5))
    np.testing.assert_array_equal(derived.read(reader, part), expected[part])
    assert reader.num_read == 2 * 3
    np.testing.assert_array_equal(derived.read(reader), expected)


def fused(program: Program) -> list[object]:
    """Fused ops with tensors numbered as they come, without names."""
    numbers: dict[str, int] = {"": -1}

    def number(*names: str) -> tuple[int, ...]:
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)

    found: list[object] = []
    for op in fuse_segment(program):
        match op:
            case FusedEmbedding():
                found.append(("embedding", number(op.ids, op.table, op.out)))
            case FusedContraction():
                norm = op.norm and (op.norm.kind, op.norm.eps, number(op.norm.weight))
                streams = [number(*each.weights, *each.biases) for each in op.streams]
                tensors = number(op.x, *op.operands, *op.outs)
                found.append(("contraction", norm, streams, op.formula, tensors))
            case FusedAttention():
                tensors = number(op.q, op.k, op.v, op.positions, op.table, op.k_cache, op.v_cache)
                found.append((op.scale, op.window, op.q_norm, op.k_norm, tensors, number(op.out)))
            case FusedChoice():
                found.append(("choice", number(op.source, op.logits, op.chosen), op.num_logits))
    return found


def queues(program: Program, batch: int) -> list[list[str]]:
    """Kinds of instructions that each SM of a GPU would follow."""
    weights = layout_arena(Space.WEIGHT, order_weights(program))
    states = layout_arena(Space.STATE, program.with_role("state"))
    build = build_queues if batch == 1 else build_batch_queues
    return [
        [type(each).__name__ for each in queue]
        for queue in build(program, weights, states, 8).queues
    ]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_captured_llama_is_the_built_in_one_to_kernels(batch: int, tmp_path: Path):
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=64, head_dim=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    captured = open_decoder(config).build(1, 32, batch=batch, dtype="bf16")
    built = build_decoder(read_config(tmp_path), 1, 32, batch=batch, dtype="bf16")
    assert fused(captured) == fused(built)
    assert queues(captured, batch) == queues(built, batch)


def angles_by_product(
    self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """As transformers up to 5.17 wrote them: a matrix product over one element."""
    frequencies = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).float()
    angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


def test_angles_that_are_a_product_over_one_element(monkeypatch: pytest.MonkeyPatch):
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=64,
    )  # fmt: skip
    expected = fused(open_decoder(config).build(1, 32, dtype="bf16"))
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", angles_by_product)
    assert fused(open_decoder(config).build(1, 32, dtype="bf16")) == expected


def test_logits_that_leave_are_what_the_last_product_makes():
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=64,
    )  # fmt: skip
    program = open_decoder(config).build(1, 32, dtype="bf16", logits="last")
    *_, product, choice = program.ops
    assert product.writes[0].tensor == choice.reads[0].tensor == program.outputs[0] == "logits"
    assert any("RowLinear" in queue for queue in queues(program, 1))


def test_factors_of_a_residual_stream_and_of_scores_leave_one_kernel():
    """Granite's multipliers: of embeddings, of what is added, of logits."""
    config = GraniteConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=512, max_position_embeddings=64,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0,
    )  # fmt: skip
    program = open_decoder(config).build(1, 32, dtype="bf16")
    assert len({norm.eps for op in fuse_segment(program) for norm in norms_of(op)}) == 1
    assert any("RowLinear" in queue for queue in queues(program, 1))
    program = open_decoder(config).build(1, 32, batch=8, dtype="bf16", logits="last")
    assert "BatchLogits" in queues(program, 8)[0]


@pytest.mark.parametrize(
    "name",
    [
        "olmo2",
        "phi",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("gpt2", "granite", "bloom", "mpt")
        ),
    ],
)
def test_rows_of_captured_decoders_are_one_kernel(name: str):
    """Norms of what is added and of all heads, learned positions, biases, heads of 80."""
    program = open_decoder(DECODERS[name]()).build(1, 32, batch=8, dtype="bf16")
    kinds = queues(program, 8)[0]
    assert kinds.count("BatchAttention") == 2
    assert ("BatchPointwise" in kinds) == (name in ("gpt2", "olmo2", "bloom"))


def stream(last: str) -> Program:
    """3 x goes through a norm, and comes back with what is added to it."""
    p = ProgramBuilder("stream")
    x = p.input("x", (ROWS, WIDTH)) * 3.0
    normed = p.rms_norm(x, p.weight("w", (WIDTH,)), 1e-3)
    x = x + p.linear(normed, p.weight("a", (WIDTH, WIDTH))) * 0.5
    normed = p.layer_norm(x, None, None, 1e-3)
    x = x.map("a1 + a0", p.linear(normed, p.weight("b", (WIDTH, WIDTH))))
    if last == "norm":
        return p.build(p.rms_norm(x, p.weight("v", (WIDTH,)), 1e-3, name="out"))
    return p.build(p.linear(x, p.weight("v", (WIDTH, WIDTH)), name="out"))


@pytest.mark.parametrize("last", ["norm", "product"])
def test_a_factor_leaves_a_stream_that_norms_alone_read(last: str):
    norms = {"rms_norm": 2, "linear": 2} if last == "norm" else {"rms_norm": 1, "linear": 3}
    pointwise = 2 if last == "norm" else 3
    normal = check(stream(last), {**norms, "layer_norm": 1, "pointwise": pointwise})
    eps = {op.attr("eps") for op in normal.program.ops if op.kind.endswith("_norm")}
    assert eps == ({1e-3 / 9} if last == "norm" else {1e-3})


@pytest.mark.parametrize(
    ("text", "rises"),
    [("tanh(a0 / 30) * 30", True), ("3 - a0", False), ("-a0 * -2.0 + 1", True), ("a0 * a0", False)],
)
def test_an_argmax_goes_before_functions_that_rise(text: str, rises: bool):
    p = ProgramBuilder("choice")
    x = p.input("x", (ROWS, WIDTH))
    program = p.build(p.argmax(x.map(text), name="next"))
    check(program, {"argmax": 1} if rises else {"argmax": 1, "pointwise": 1})


def test_an_argmax_stays_behind_a_function_whose_results_leave():
    p = ProgramBuilder("choice")
    scaled = p.input("x", (ROWS, WIDTH)) / 8.0
    normal = check(p.build(scaled, p.argmax(scaled, name="next")), {"argmax": 1, "pointwise": 1})
    (argmax,) = [op for op in normal.program.ops if op.kind == "argmax"]
    assert argmax.reads[0].tensor == normal.program.outputs[0]


ROTATING = ("gpt_neox", "phi", "phi3", "stablelm")
"""Rotations of a part of each head, before and after norms, of q, k and v in one matrix."""


@pytest.mark.parametrize("name", ROTATING)
def test_rotations_of_every_form_become_one_op(name: str):
    decoder = open_decoder(family_config(name))
    program = decoder.build(1, 24)
    kinds = Counter(op.kind for op in program.ops)
    num_layers = decoder.num_layers
    assert kinds["rope"] == 2 * num_layers
    assert kinds["attention"] == num_layers
    assert not kinds["concat"]
    assert len({op.reads[3].tensor for op in program.ops if op.kind == "rope"}) == 1
