"""Programs made as layers of networks are, planned for both kernels and emulated: what a kernel
takes is what torch computes. In named ones contractions can't take in all that they otherwise do.
"""

import random
from collections.abc import Mapping
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from distmega.errors import UnsupportedError
from distmega.hostir.library.ops import compile_op, op_operands
from distmega.kernels.hopper.emulator import BatchLaunch, emulate_batch
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from tests.kernels.hopper.emulator.batch.test_batch_emulator import arenas_of, batch_case
from tests.kernels.hopper.emulator.emulating import case_of, error, expected
from tests.kernels.random_forms import POSITIONS, VOCAB, random_form, random_values

MOST_ERROR = 0.03
"""Of what is rounded to bf16 between ops."""


def rounding_error(program: Program, values: Mapping[str, Tensor], name: str) -> float:
    """Of a tensor where each op is rounded to bf16: some forms make more of an error than others,
    such as a cosine of a square.
    """
    runs = []
    for dtype in (torch.bfloat16, torch.float64):
        known = {n: x.to(dtype) if x.is_floating_point() else x for n, x in values.items()}
        for op in program.ops:
            results = compile_op(op, {})([known[n] for n in op_operands(op)])
            known.update(zip((access.tensor for access in op.writes), results, strict=True))
        runs.append(known[name].double())
    return error(*runs)


def require_right(program: Program, rows: int, seed: int) -> None:
    """One launch gives what torch does; UnsupportedError where no kernel takes the program."""
    values = random_values(program, seed)
    inputs = {tensor.name: values[tensor.name] for tensor in program.with_role("input")}
    num_sms = random.Random(seed).choice((2, 3, 5, 8, 13))
    outs: Mapping[str, Tensor]
    if rows == 1:
        case = case_of(program, num_sms=num_sms)
        ((one,),) = case.emulate(values, [inputs], seed)
        tokens, outs = one.ids, {**one.outputs, case.queues[0].logits: one.logits}
    else:
        case = batch_case(program, num_sms=num_sms)
        ((batch,),) = emulate_batch(arenas_of(case, values), [[BatchLaunch(inputs=inputs)]], seed)
        (tokens,) = batch.ids or ((),)
        outs = batch.outputs
    (exact,) = expected(program, values, [inputs])
    for name in program.outputs:
        if name == case.queues[0].chosen:
            (argmax,) = (op for op in program.ops if op.kind == "argmax")
            logits = exact[argmax.reads[0].tensor]
            chosen = logits[torch.arange(rows), torch.tensor(tokens)]
            assert (chosen >= logits.amax(-1) - 0.02 * logits.abs().max()).all()
        elif name in outs:
            found = error(outs[name], exact[name])
            assert found < MOST_ERROR or found < rounding_error(program, values, name), found
    assert outs or tokens


Made = tuple[Handle, ...]


def norm(
    p: ProgramBuilder, x: Handle, name: str, *, bias: bool = True, eps: float = 1e-5
) -> Handle:
    size = x.shape[-1:]
    weight = p.weight(name, size, "bf16")
    return p.layer_norm(x, weight, p.weight(f"{name}.b", size, "bf16") if bias else None, eps)


def linear(p: ProgramBuilder, x: Handle, name: str, size: int, *, bias: bool = False) -> Handle:
    weight = p.weight(name, (size, x.shape[-1]), "bf16")
    return p.linear(x, weight, p.weight(f"{name}.b", (size,), "bf16") if bias else None)


def parallel(p: ProgramBuilder, rows: int) -> Made:
    """Side by side behind one layer norm, with biases no multiple of 64 long."""
    x = p.input("x", (rows, 160), "bf16")
    h = norm(p, x, "n")
    products = [linear(p, h, name, 80, bias=True) for name in "abc"]
    up = linear(p, h, "up", 320, bias=True).map("gelu(a0)")
    y = linear(p, p.pointwise("a0 * a1 - tanh(a2)", *products), "o", 160, bias=True)
    return (p.pointwise("a0 + a1 + a2", x, y, linear(p, up, "down", 160, bias=True)),)


def no_bias(p: ProgramBuilder, rows: int) -> Made:
    x = p.input("x", (rows, 72), "bf16")
    h = linear(p, norm(p, x, "n", bias=False), "up", 96).map("gelu(a0)")
    return (x + linear(p, h, "down", 72),)


def some_biases(p: ProgramBuilder, rows: int) -> Made:
    """On one of two products that meet, and on one of two side by side."""
    x = p.input("x", (rows, 64), "bf16")
    gate, up = linear(p, x, "g", 96, bias=True), linear(p, x, "u", 96)
    y = linear(p, p.pointwise("silu(a0) * a1", gate, up), "d", 64)
    return linear(p, y, "one", 40, bias=True), linear(p, y, "other", 48)


def three_meet(p: ProgramBuilder, rows: int) -> Made:
    x = p.input("x", (rows, 64), "bf16")
    parts = [linear(p, x, name, 96) for name in "abc"]
    return (linear(p, p.pointwise("silu(a0) * a1 + a2", *parts), "d", 64),)


def capped(p: ProgramBuilder, rows: int) -> Made:
    """A token is chosen from what a formula makes of logits."""
    ids, table = p.input("ids", (rows,), "i64"), p.weight("table", (VOCAB, 64), "bf16")
    x = p.embedding(ids, table)
    logits = linear(p, x + linear(p, x, "w", 64), "head", 104)
    logits = logits.map("30.0 * tanh(a0 / 30.0)")
    return p.argmax(logits), logits


def placed(p: ProgramBuilder, rows: int) -> Made:
    """Rows come in, and positions have a table."""
    x, at = p.input("x", (rows, 64), "bf16"), p.input("positions", (rows,), "i64")
    x = x + p.embedding(at, p.weight("places", (POSITIONS, 64), "bf16"))
    return (x + linear(p, norm(p, x, "n"), "w", 64),)


def both_go_on(p: ProgramBuilder, rows: int) -> Made:
    """What comes in, and its norm."""
    x = p.input("x", (rows, 72), "bf16")
    h = norm(p, x, "n")
    y = linear(p, linear(p, h, "up", 40).map("tanh(a0)"), "down", 72)
    return (p.pointwise("a0 + a1 * a2", h, x, y),)


def attended(p: ProgramBuilder, rows: int, group: int, *, of_queries: bool) -> Made:
    """Attention with a norm of queries alone, or more queries a key than one task has."""
    x, at = p.input("x", (rows, 64), "bf16"), p.input("positions", (rows,), "i64")
    table = p.weight("angles", (POSITIONS, 16), "f32")
    q, k, v = (
        p.reshape(linear(p, x, name, 16 * num), (rows, 1, *shape), view=True)
        for name, num, shape in (("q", group, (group, 16)), ("k", 1, (16,)), ("v", 1, (16,)))
    )
    if of_queries:
        q = p.rms_norm(q, p.weight("n", (16,), "bf16"), 1e-5)
    q, k = p.rope(q, at, table), p.rope(k, at, table)
    caches = [p.state(f"{name}_cache", (1, POSITIONS, 16), "bf16") for name in "kv"]
    for cache, new in zip(caches, (k, v), strict=True):
        p.kv_append(cache, new, at)
    mixed = p.reshape(p.attention(q, *caches, at, 0.25), (rows, 16 * group), view=True)
    return (x + linear(p, mixed, "o", 64),)


def test_a_task_has_some_of_the_queries_of_a_key():
    p = ProgramBuilder("group")
    require_right(p.build(*attended(p, 1, 20, of_queries=False)), 1, seed=4)


def test_a_norm_of_queries_alone_is_no_part_of_attention():
    p = ProgramBuilder("queries")
    require_right(p.build(*attended(p, 1, 1, of_queries=True)), 1, seed=4)


def several_eps(p: ProgramBuilder, rows: int) -> Made:
    x = p.input("x", (rows, 64), "bf16")
    for i, eps in enumerate((1e-6, 1e-3, 1e-5)):
        x = x + linear(p, norm(p, x, f"n{i}", eps=eps), f"w{i}", 64)
    return (x,)


FORMS = (parallel, no_bias, some_biases, three_meet, capped, placed, both_go_on, several_eps)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_a_form_is_what_torch_computes(make, rows):
    p = ProgramBuilder(make.__name__)
    require_right(p.build(*make(p, rows)), rows, seed=rows)


def count_right(seeds: range) -> int:
    """Programs that a kernel takes; those of several rows are without attention."""
    num = 0
    for seed in seeds:
        rows = random.Random(seed).choice((1, 1, 2, 5, 16))
        with suppress(UnsupportedError):
            require_right(random_form(seed, rows, attends=rows == 1), rows, seed)
            num += 1
    return num


def test_random_forms_are_what_torch_computes():
    assert count_right(range(12)) >= 6


@pytest.mark.nightly
def test_many_random_forms_are_what_torch_computes():
    assert count_right(range(12, 1000)) >= 500
