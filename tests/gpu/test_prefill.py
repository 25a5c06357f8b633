"""Prefill on one GPU: what is done to heads by one kernel, short prompts as CUDA graphs."""

import math
from collections.abc import Callable

import pytest
import torch

from distmega.engine import pass_memory, prefill
from distmega.hostir.library import ops as library
from distmega.hostir.library.heads import Heads, MoveHeads
from distmega.hostir.library.heads import move_heads as move_by_torch
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.kernels.library.heads import append, move_heads, rotate
from distmega.kernels.library.packed_attention import (
    STAGES,
    attend_by_groups,
    attend_by_tiles,
    attend_packed,
)
from distmega.program.ops.attention import append_values, rope_values
from tests.gpu.engines import open_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 3, 64), (130, 8, 4, 128), (77, 3, 3, 64), (5, 1, 1, 16)])
def test_rotations_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    num_rows, dim = shape[0], shape[-1]
    whole = torch.randn(num_rows, *shape[1:-1], 2 * dim, device="cuda").to(dtype)
    table = torch.randn(200, dim, device="cuda")
    positions = torch.randperm(200, device="cuda")[:num_rows]
    for x in (whole[..., :dim].contiguous(), whole[..., dim:]):
        found, expected = rotate(x, positions, table), rope_values(x, positions, table)
        tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert found.is_contiguous()


@pytest.mark.parametrize("shape", [(130, 8, 128), (7, 3, 64), (33, 2, 96)])
def test_appended_rows_are_those_of_torch(shape: tuple[int, int, int]):
    num_rows, heads, dim = shape
    wide = torch.randn(num_rows, 3 * heads * dim, device="cuda").bfloat16()
    x = wide[:, heads * dim : 2 * heads * dim].view(shape)
    positions = torch.randperm(200, device="cuda")[:num_rows]
    sequences = torch.randint(0, 4, (num_rows,), device="cuda")
    for own in ((), (sequences,)):
        caches = [torch.zeros(*[4] * len(own), heads, 200, dim, device="cuda").bfloat16()] * 2
        found = append(caches[0].clone(), x, positions, *own)
        assert torch.equal(found, append_values(caches[1].clone(), x, positions, *own))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (96, 2), (128, 4), (256, 1)])
def test_queries_keys_and_values_of_one_product_are_those_of_torch(
    dim: int, group: int, norm: bool
):
    """In fp32 until they leave, so nearer to fp32 than torch with its steps in bf16."""
    torch.manual_seed(0)
    num_rows, kv_heads, context = 77, 4, 200
    counts = kv_heads * group, kv_heads, kv_heads
    whole = torch.randn(num_rows, sum(counts) * dim, device="cuda").bfloat16()
    q, k, v = (x.unflatten(1, (-1, dim)) for x in whole.split([n * dim for n in counts], dim=1))
    q = q.unflatten(1, (kv_heads, group))
    weights = [(torch.rand(dim, device="cuda") + 0.5).bfloat16() for _ in range(2)]
    positions = torch.randperm(context, device="cuda")[:num_rows]
    sequences = torch.randint(0, 3, (num_rows,), device="cuda")
    angles = torch.outer(torch.arange(context), 10000 ** (-torch.arange(dim // 2) / (dim // 2)))
    table = torch.cat((angles.cos(), angles.sin()), -1).float().cuda()

    def outs(dtype: torch.dtype, move: MoveHeads) -> list[torch.Tensor]:
        shapes = q.shape, (3, kv_heads, context, dim), (3, kv_heads, context, dim)
        found = [torch.zeros(shape, device="cuda", dtype=dtype) for shape in shapes]
        given = zip((q, k, v), (*weights, None), found, strict=True)
        parts = [
            Heads(
                x=x.to(dtype),
                weight=w.to(dtype) if norm and w is not None else None,
                out=out,
                rotates=x is not v,
                appends=x is not q,
            )
            for x, w, out in given
        ]
        move(parts, positions, table, sequences, 1e-6)
        return found

    exact = outs(torch.float32, move_by_torch)
    for found, rounded, expected in zip(
        outs(torch.bfloat16, move_heads),
        outs(torch.bfloat16, move_by_torch),
        exact,
        strict=True,
    ):
        error, torchs = ((x.float() - expected).norm() / expected.norm() for x in (found, rounded))
        assert error <= torchs * 1.01
        assert error < 3e-3
    for found, expected in zip(outs(torch.float32, move_heads), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("attend", [attend_packed, attend_by_tiles, attend_by_groups])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (96, 2), (128, 4), (128, 3), (256, 1)])
def test_packed_attention_is_that_of_float64(
    dim: int, group: int, window: int, attend: Callable[..., torch.Tensor], softcap: float
):
    """Sequences of several tiles and of one row, behind prefixes, one without rows. What is seen by
    no row is no number.
    """
    if attend is attend_by_groups and (dim not in STAGES or softcap):
        pytest.skip(f"heads of {dim}, or soft caps, are the other kernel's")
    torch.manual_seed(0)
    lengths, cached = (700, 0, 1, 129, 64), (0, 40, 900, 300, 0)
    kv_heads, context = 3, 1000
    num_rows = sum(lengths)
    q = torch.randn(num_rows, kv_heads, group, dim, device="cuda").bfloat16()
    shape = (len(lengths), kv_heads, context, dim)
    caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(2)]
    spans = [range(start, start + num) for num, start in zip(lengths, cached, strict=True)]
    for cache in caches:
        for own, span in zip(cache, spans, strict=True):
            own[:, span.stop :] = math.nan
            own[:, : max(0, span.start + 1 - window) if window else 0] = math.nan
    positions = torch.tensor([at for span in spans for at in span], device="cuda")
    sequences = torch.tensor([i for i, span in enumerate(spans) for _ in span], device="cuda")
    starts = torch.tensor([sum(lengths[:i]) for i in range(6)], device="cuda")
    given = (q, *caches, positions, sequences)
    operands = given if attend is attend_packed else given[:4]
    capped = {"softcap": softcap} if softcap else {}
    found = attend(*operands, starts, dim**-0.5, window, **capped)
    exact = library.packed_attention(*(x.double() if x.is_floating_point() else x for x in given),
                                     dim**-0.5, window, softcap)  # fmt: skip
    error = (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    print(f"d={dim} window={window} cap={softcap:g}: {error.max():.2e}")
    assert error.max() < 1.6e-2


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 4), (128, 3)])
def test_more_items_of_attention_than_programs(dim: int, group: int, window: int):
    """Each program has several, as they come: all are done once, with the same bits each time."""
    torch.manual_seed(0)
    lengths, cached = (1500, 64, 0, 900, 2100, 1, 3000), (0, 7, 0, 1700, 0, 3000, 100)
    kv_heads, context = 3, 3200
    q = torch.randn(sum(lengths), kv_heads, group, dim, device="cuda").bfloat16()
    shape = (len(lengths), kv_heads, context, dim)
    caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(2)]
    spans = [range(start, start + num) for num, start in zip(lengths, cached, strict=True)]
    positions = torch.tensor([at for span in spans for at in span], device="cuda")
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], device="cuda")
    given = q, *caches, positions, starts, dim**-0.5, window
    found = attend_by_groups(*given)
    by_tiles = attend_by_tiles(*given)
    error = (found - by_tiles).float().norm(dim=-1) / by_tiles.float().norm(dim=-1)
    assert error.max() < 1.6e-2
    for _ in range(30):
        assert torch.equal(attend_by_groups(*given), found)


def test_packed_prompts_give_what_each_gives_alone():
    """Whole and in parts, as programs and as graphs; logits within bf16's rounding."""
    engine = open_engine("smollm2-135m", batch=8, max_context=1024, max_batched_tokens=512)
    generator = torch.Generator().manual_seed(0)
    lengths = 100, 1, 700, 333, 64, 5
    prompts = [torch.randint(0, 49152, (n,), generator=generator).tolist() for n in lengths]
    alone = [engine.prefill(prompt, slot) for slot, prompt in enumerate(prompts)]
    scores = [engine.logits(prompt)[-1].float() for prompt in prompts]
    for _ in range(3):
        found = engine.prefill_all(prompts)
        for token, one, row in zip(found, alone, scores, strict=True):
            assert token == one or row[token] >= row.max() - 0.05 * row.abs().max()
    assert any(program.graph for program in engine._prefills._programs.values())
    steps = [engine.decode_step(found)["logits"][: len(lengths)].float().clone()]
    for slot, prompt in enumerate(prompts):
        engine.prefill(prompt, slot)
    steps.append(engine.decode_step(found)["logits"][: len(lengths)].float())
    error = (steps[0] - steps[1]).norm(dim=-1) / steps[1].norm(dim=-1)
    print(f"logits behind packed prompts: {error.max():.2e}")
    assert error.max() < 3e-2


def test_a_prompt_gives_the_same_token_in_a_graph():
    """Prompts of one size by a program, then by a graph, between prompts of other sizes."""
    engine = open_engine("llama-3.2-1b", max_context=2048)
    vocab = engine.decode_plan.config.vocab
    generator = torch.Generator().manual_seed(0)
    sizes = 100, 128, 5, 97, 1500, 101, 60, 1410
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in sizes]
    programs = engine._prefills._programs
    first = [engine.prefill(prompt) for prompt in prompts]
    graphs = {size for (size, *_), program in programs.items() if program.graph}
    assert graphs == {64, 128, 1536}
    for _ in range(2):
        assert [engine.prefill(prompt) for prompt in prompts] == first
    for prompt, token in zip(prompts, first, strict=True):
        logits = engine.logits(prompt)[-1]
        assert logits[token] >= logits.max() - 0.05 * logits.abs().max()
    reopened = open_engine("llama-3.2-1b", max_context=2048)
    assert [reopened.prefill(prompt) for prompt in prompts] == first
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does
    torch.cuda.empty_cache()
    for one in (engine, reopened):
        one.prefill(prompts[0])
    steps = [one.decode_step([7])["logits"].clone() for one in (engine, reopened)]
    assert torch.equal(steps[0], steps[1])


def test_a_pass_behind_the_one_that_captures_waits_for_its_rows(monkeypatch: pytest.MonkeyPatch):
    """The GPU begins the first replay late: by then the rows of the next pass must not be there."""
    given = {"max_context": 2048, "max_batched_tokens": 64}
    prompt = torch.randint(0, 49152, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    engine, other = (open_engine("smollm2-135m", **given) for _ in range(2))
    for each in (engine, other):
        each.prefill(prompt[:64])
    run = CapturedHost.run

    def run_late(self: CapturedHost, *inputs: object) -> object:
        torch.cuda._sleep(100_000_000)  # some 50 ms
        return run(self, *inputs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(CapturedHost, "run", run_late)
        token = engine.prefill(prompt)
    run_pass = prefill.Prefills._run_pass

    def run_alone(self: prefill.Prefills, *inputs: object) -> object:
        outputs = run_pass(self, *inputs)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(prefill.Prefills, "_run_pass", run_alone)
        assert other.prefill(prompt) == token
    assert torch.equal(engine._arenas.states, other._arenas.states)


@pytest.mark.parametrize("way", ["mapped", "copied", "refused"])
def test_rows_of_a_pass_wait_until_the_one_before_has_taken_its_own(
    way: str, monkeypatch: pytest.MonkeyPatch
):
    """Many passes of one size in one call leave the caches that passes leave one by one: by a graph
    whose kernel fetches rows, or copies them where their memory was pinned for another GPU, and op
    by op where nothing is captured.
    """
    if way == "copied":
        monkeypatch.setattr(pass_memory, "map_pinned", lambda memory, device: None)
    if way == "refused":
        monkeypatch.setattr(prefill, "capture_on_ranks", lambda *given: (None, "not today"))
    engine = open_engine("smollm2-135m", max_context=2048, max_batched_tokens=64)
    prompt = torch.randint(0, 49152, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    run_pass = prefill.Prefills._run_pass

    def run_alone(self: prefill.Prefills, *given: object) -> object:
        torch.cuda.synchronize()
        outputs = run_pass(self, *given)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(prefill.Prefills, "_run_pass", run_alone)
        token = [engine.prefill(prompt) for _ in range(2)][-1]
        logits = engine.logits(prompt)
    programs = engine._prefills._programs.values()
    assert any(program.graph for program in programs) == (way != "refused")
    for program in programs:
        assert program.memory is not None
        assert (program.memory.rows._mapped_rows is None) == (way == "copied")
    expected = engine._arenas.states.clone()
    for _ in range(10):
        engine._arenas.states.zero_()
        assert engine.prefill(prompt) == token
        assert torch.equal(engine._arenas.states, expected)
    assert torch.equal(engine.logits(prompt), logits)
