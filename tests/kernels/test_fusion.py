"""Fusion: every family becomes five fused ops a layer; what can't fuse is named."""

from collections import Counter
from dataclasses import replace

import pytest

from distmega.errors import VerifyError
from distmega.kernels.fusion import (
    Draw,
    FusedAttention,
    FusedEmbedding,
    FusedGated,
    FusedHead,
    FusedLinear,
    FusedResidual,
    Norm,
    fuse_segment,
)
from distmega.models.decoder import build_decoder
from distmega.models.presets import PRESETS
from distmega.models.sampling import Method
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from distmega.sharding.search.cost import H200


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("logits", ["none", "last"])
def test_every_family_fuses(name, logits):
    config = PRESETS[name]
    fused = fuse_segment(build_decoder(config, 1, 64, logits=logits))
    layers = config.num_layers
    assert Counter(map(type, fused)) == {
        FusedEmbedding: 1,
        FusedLinear: layers,
        FusedAttention: layers,
        FusedResidual: 2 * layers,
        FusedGated: layers,
        FusedHead: 1,
    }


def test_what_a_layer_fuses_to():
    config = PRESETS["tiny-qwen3"]
    _, qkv, attention, out, gated, down, *_ = fuse_segment(build_decoder(config, 1, 64))
    at = "layers.0"
    assert qkv == FusedLinear(
        x="embedded",
        norm=Norm(weight=f"{at}.attn_norm", eps=config.norm_eps),
        weights=(f"{at}.wq", f"{at}.wk", f"{at}.wv"),
        biases=("", "", ""),
        outs=(f"{at}.q", f"{at}.k", f"{at}.v"),
    )
    assert attention == FusedAttention(
        q=f"{at}.q",
        k=f"{at}.k",
        v=f"{at}.v",
        q_norm=Norm(weight=f"{at}.q_norm", eps=config.norm_eps),
        k_norm=Norm(weight=f"{at}.k_norm", eps=config.norm_eps),
        positions="positions",
        table="rope_table",
        k_cache=f"{at}.k_cache",
        v_cache=f"{at}.v_cache",
        scale=config.head_dim**-0.5,
        window=0,
        out=f"{at}.attention",
    )
    assert out == FusedResidual(
        x=f"{at}.attention", weight=f"{at}.wo", residual="embedded", out=f"{at}.attn_sum"
    )
    assert gated == FusedGated(
        x=f"{at}.attn_sum",
        norm=Norm(weight=f"{at}.ffn_norm", eps=config.norm_eps),
        gate=f"{at}.w_gate",
        up=f"{at}.w_up",
        out=f"{at}.ffn_mixed",
    )
    assert down == FusedResidual(
        x=f"{at}.ffn_mixed", weight=f"{at}.w_down", residual=f"{at}.attn_sum", out=f"{at}.ffn_sum"
    )


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
    assert isinstance(head, FusedHead)
    assert (head.logits, head.token) == ("logits", "next")
    assert head.draw == Draw(
        sampling="sampling", seeds="seeds", positions="positions", limits=limits
    )


DRAWN_OVER_RANKS = (
    ("plain", 0, 1, "none", "sample all_reduce", "given"),
    ("plain", 0, 1, "last", "all_gather sample", "given"),
    ("limited", 64, 1, "none", "all_gather top cutoff sample", "candidates"),
    ("limited", 64, 1, "last", "all_gather top cutoff sample", "candidates"),
    ("limited", 64, 16, "none", "top all_gather cutoff sample all_reduce", "candidates"),
    ("limited", 0, 1, "none", "all_gather cutoff sample", "all"),
)
"""Method, sequences, wanted logits; the ops behind the head on each rank, what they fuse to."""


@pytest.mark.parametrize(
    ("kind", "num_candidates", "batch", "logits", "behind", "limits"), DRAWN_OVER_RANKS
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
    assert isinstance(head, FusedHead)
    assert (head.token, head.vocab, head.num_ranks) == ("next", config.vocab, tp)
    assert ("logits" in local.outputs) == (head.logits in local.outputs)
    assert head.draw == Draw(
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
    with pytest.raises(VerifyError, match="'limits' of kind cutoff does not fuse"):
        fuse_segment(replace(local, ops=tuple(ops)))


def test_biases_are_kept():
    config = PRESETS["tiny-qwen2"]
    qkv = fuse_segment(build_decoder(config, 1, 64))[1]
    assert isinstance(qkv, FusedLinear)
    assert qkv.biases == ("layers.0.bq", "layers.0.bk", "layers.0.bv")


def test_an_op_that_no_rule_takes_is_named():
    p = ProgramBuilder("odd")
    h = p.linear(p.input("x", (1, 64)), p.weight("w", (64, 64)), name="h")
    program = p.build(h.map("tanh(a0)", name="odd_one"))
    with pytest.raises(VerifyError, match="'odd_one' of kind pointwise does not fuse"):
        fuse_segment(program)


def test_a_norm_with_another_reader_stays_and_is_refused():
    p = ProgramBuilder("shared")
    x = p.input("x", (1, 64))
    normed = p.rms_norm(x, p.weight("g", (64,)), 1e-5, name="normed")
    program = p.build(p.linear(normed, p.weight("w", (64, 64))), normed.map("abs(a0)"))
    with pytest.raises(VerifyError, match="'normed'"):
        fuse_segment(program)
