"""Attention of a decode step with its heads on a GPU: caches as heads.py's kernel leaves them,
results beside torch's in float64, also from a graph whose kernels start early.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from distmega.hostir.ir.nodes import LibraryOp
from distmega.hostir.library import heads as library_heads
from distmega.hostir.library import ops
from distmega.hostir.library.heads import Heads
from distmega.hostir.library.torch_types import torch_dtype
from distmega.hostir.passes.fuse_attention import FUSED
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.early_reads import early_reads
from distmega.kernels.library import heads, step_attention
from distmega.kernels.library.step_attention import attend_appended, takes
from distmega.program.builder import ProgramBuilder
from distmega.program.types import Program
from tests.gpu.test_host_program import evaluator, lowered

pytestmark = pytest.mark.gpu

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences at random positions, 0 and the last one among them. parts: of positions."""

    sequences: int = 6
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    context: int = 300
    window: int = 0
    softcap: float = 0.0
    parts: int = 1
    num_keys: int = 32
    normed: bool = True
    rotated: bool = True
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case(),
    Case(parts=3),
    Case(num_keys=64),
    Case(normed=False, rotated=False),
    Case(normed=False, group=1, kv_heads=1),
    Case(rotated=False, group=7, kv_heads=3, parts=2),
    Case(group=8, kv_heads=2, softcap=5.0),
    Case(group=16, kv_heads=2, dtype=torch.float16),
    Case(window=40),
    Case(window=100, parts=2, softcap=0.8),
    Case(window=1, parts=2),
    Case(dim=64, num_keys=64),
    Case(dim=64, num_keys=64, window=70, group=7, parts=4),
    Case(dim=64, num_keys=32, kv_heads=1, dtype=torch.float16, softcap=3.0),
    Case(dim=256),
    Case(dim=256, num_keys=64, kv_heads=1, parts=2),
    Case(dim=256, num_keys=64, window=33, group=1),
    Case(sequences=64, context=640),
    Case(sequences=1, context=2000, parts=7),
    Case(sequences=3, context=20, parts=2),
)


def operands(case: Case) -> dict[str, Tensor | None]:
    """q, k and v lie in one product; what no row sees of caches is no number."""
    generator = torch.Generator("cuda").manual_seed(case.sequences + case.dim)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(case.dtype)

    s, h, dim, context = case.sequences, case.kv_heads, case.dim, case.context
    widths = [case.group * h * dim, h * dim, h * dim]
    q, k, v = drawn(s, sum(widths)).split(widths, 1)
    positions = torch.randint(context, (s,), generator=generator, device="cuda")
    positions[-1] = 0
    positions[0] = context - 1
    caches = drawn(2, s, h, context, dim)
    place = torch.arange(context, device="cuda")
    unseen = place >= positions[:, None]
    if case.window:
        unseen |= place <= positions[:, None] - case.window
    caches.masked_fill_(unseen[:, None, :, None], math.nan)
    return {
        "q": q.view(s, h, case.group, dim),
        "k": k.view(s, h, dim),
        "v": v.view(s, h, dim),
        "q_weight": drawn(dim) if case.normed else None,
        "k_weight": drawn(dim) if case.normed else None,
        "positions": positions,
        "table": drawn(context, dim).float() if case.rotated else None,
        "k_cache": caches[0],
        "v_cache": caches[1],
    }


def run(case: Case, given: dict[str, Tensor | None]) -> Tensor:
    return attend_appended(
        **given, eps=EPS, scale=case.dim**-0.5, window=case.window, softcap=case.softcap
    )


def copied(given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """With caches of its own."""
    return given | {name: given[name].clone() for name in ("k_cache", "v_cache")}


def append_heads(move, case: Case, given: dict[str, Tensor | None], caches) -> Tensor:
    """The rotated q; k and v are in the caches."""
    q = given["q"].flatten(1, 2)
    out = torch.empty(q.shape, dtype=q.dtype, device="cuda")
    parts = [
        Heads(x=q, weight=given["q_weight"], out=out, rotates=case.rotated, appends=False),
        Heads(x=given["k"], weight=given["k_weight"], out=caches[0], rotates=case.rotated,
              appends=True),
        Heads(x=given["v"], weight=None, out=caches[1], rotates=False, appends=True),
    ]  # fmt: skip
    move(parts, given["positions"], given["table"], None, EPS)
    return out.view(given["q"].shape)


def ulps_apart(x: Tensor, y: Tensor) -> Tensor:
    """Of halves of one sign where they part; compilers may join products and sums otherwise."""
    return (x.view(torch.int16).int() - y.view(torch.int16).int()).abs()


def doubled(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch):
    def choose(case: Case) -> None:
        monkeypatch.setattr(step_attention, "choose_parts", lambda *_: case.parts)
        monkeypatch.setattr(step_attention, "choose_keys", lambda *_: case.num_keys)

    return choose


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_appended_and_attend(case: Case, chosen):
    chosen(case)
    given = operands(case)
    assert takes(**given)
    mine = copied(given)
    found = run(case, mine)
    caches = [given[name].clone() for name in ("k_cache", "v_cache")]
    append_heads(heads.move_heads, case, given, caches)
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        apart = ulps_apart(mine[name], cache)
        assert apart.max() <= 1, name
        assert (apart > 0).float().mean() < 1e-3, name

    exact = {name: doubled(x) for name, x in given.items()}
    exact_caches = [exact["k_cache"].clone(), exact["v_cache"].clone()]
    rows = append_heads(library_heads.move_heads, case, exact, exact_caches)
    attention = case.dim**-0.5, case.window, case.softcap
    expected = ops.masked_attention(rows, *exact_caches, given["positions"], *attention)
    apart = (found.double() - expected).norm() / expected.norm()
    assert found.is_contiguous()
    assert apart < 1e-2  # q, keys and weights are rounded to a half type
    assert torch.equal(found, run(case, copied(given)))


def test_parts_and_blocks_are_chosen():
    for sequences in (1, 17, 64):
        case = Case(sequences=sequences, context=1100)
        given = operands(case)
        found = run(case, copied(given))
        rows = append_heads(heads.move_heads, case, given, (given["k_cache"], given["v_cache"]))
        caches = (doubled(given["k_cache"]), doubled(given["v_cache"]))
        expected = ops.masked_attention(
            rows.double(), *caches, given["positions"], case.dim**-0.5, 0, 0.0
        )
        assert (found.double() - expected).norm() / expected.norm() < 1e-2


def test_places_outside_of_caches_append_nothing():
    case = Case(sequences=4, rotated=False)
    given = operands(case)
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].nan_to_num(0.5)
    given["positions"] = torch.tensor([-1, case.context, -70, case.context + 50], device="cuda")
    mine = copied(given)
    found = run(case, mine)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(mine[name], given[name])
    assert not found[[0, 2]].any()
    assert found[[1, 3]].isfinite().all()
    assert found[1].any()


def test_one_sequence_has_a_cache_without_a_dim_for_it():
    case = Case(sequences=1)
    given = operands(case)
    whole = run(case, copied(given))
    single = copied(given)
    single |= {name: single[name][0] for name in ("k_cache", "v_cache")}
    assert torch.equal(run(case, single), whole)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_kernels_of_a_graph_wait_for_what_is_of_this_step(parts: int, early: bool, chosen):
    """Layers after each other, each with a cache of its own; steps are replays. early: kernels ask
    for caches before those in front of them are done.
    """
    case = Case(sequences=16, context=200, parts=parts)
    chosen(case)
    layers = [operands(replace(case, sequences=16)) for _ in range(6)]
    positions, table = layers[0]["positions"], layers[0]["table"]
    positions.fill_(90)
    width = case.group * case.kv_heads * case.dim
    all_width = width + 2 * case.kv_heads * case.dim
    w = [torch.randn(all_width, width, device="cuda").to(case.dtype) * width**-0.5 for _ in layers]
    start = torch.randn(16, width, device="cuda").to(case.dtype)
    for given in layers:
        given |= {"positions": positions, "table": table}
        for name in ("k_cache", "v_cache"):
            given[name].copy_(torch.randn_like(given[name]))

    def step(caches: list[dict[str, Tensor | None]]) -> Tensor:
        x = start
        for weight, given in zip(w, caches, strict=True):
            q, k, v = torch.mm(x, weight.T).split([width] + [case.kv_heads * case.dim] * 2, 1)
            given |= {
                "q": q.view(given["q"].shape),
                "k": k.view(given["k"].shape),
                "v": v.view(given["v"].shape),
            }
            x = run(case, given).view(16, width)
        return x

    mine = [copied(given) for given in layers]
    warm = [copied(given) for given in layers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with early_reads(states=True) if early else nullcontext():
        step(warm)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = step(mine)
    for _ in range(20):
        expected = step(layers).clone()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        positions += 1
    for one, other in zip(mine, layers, strict=True):
        assert torch.equal(one["k_cache"], other["k_cache"])
        assert torch.equal(one["v_cache"], other["v_cache"])


def layered(rows: int, layers: int, dim: int, context: int) -> Program:
    """Decode steps of 4 kv heads of 2 queries each, with norms of heads."""
    heads, kv_heads, half = 8, 4, "bf16"
    p = ProgramBuilder("layers")
    x, positions = p.input("x", (rows, heads * dim), half), p.input("positions", (rows,), "i64")
    table = p.weight("table", (context, dim))
    for n in range(layers):
        w = p.weight(f"w{n}", ((heads + 2 * kv_heads) * dim, heads * dim), half)
        whole = p.linear(x, w, name=f"qkv{n}")
        parts = []
        for first, number in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
            part = p.slice(whole, 1, first * dim, (first + number) * dim, view=True)
            inner = (kv_heads, heads // kv_heads) if number == heads else (kv_heads,)
            parts.append(p.reshape(part, (rows, *inner, dim), view=True))
        q, k = (
            p.rope(p.rms_norm(x, p.weight(f"{name}_norm{n}", (dim,), half), EPS), positions, table)
            for name, x in zip("qk", parts[:2], strict=True)
        )
        caches = [p.state(f"{c}_cache{n}", (rows, kv_heads, context, dim), half) for c in "kv"]
        for cache, new in zip(caches, (k, parts[2]), strict=True):
            p.kv_append(cache, new, positions)
        mixed = p.attention(q, *caches, positions, dim**-0.5, name=f"mixed{n}")
        x = p.reshape(mixed, (rows, heads * dim), view=True)
    return p.build(p.linear(x, p.weight("last", (64, heads * dim), half), name="y"))


@pytest.mark.parametrize(("rows", "dim"), [(17, 128), (64, 64), (1, 256)])
def test_replays_of_a_program_that_ask_for_caches_early_are_its_runs(rows: int, dim: int):
    """And those of two kernels a layer, but for rounding."""
    layers, context = 4, 300
    host = lowered(layered(rows, layers, dim, context))
    kinds = [node.op.kind for node in host.body if isinstance(node, LibraryOp)]
    assert kinds.count(FUSED) == layers
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for buffer in host.buffers:
        if buffer.role != "temp":
            x = torch.randn(buffer.shape, generator=generator, device="cuda")
            scale = (8 * dim) ** -0.5 if len(buffer.shape) == 2 and buffer.role == "weight" else 1
            tensors[buffer.name] = (x * scale).to(torch_dtype(buffer.dtype))
    tensors["table"] = torch.randn(context, dim, generator=generator, device="cuda")
    tensors["positions"] = torch.arange(rows, device="cuda") * 4
    mine, apart = ({name: x.clone() for name, x in tensors.items()} for _ in range(2))
    plain, two = evaluator(host), evaluator(host)
    captured = CapturedHost(plain, mine)
    for step in range(12):
        positions = tensors["positions"] + step
        expected = plain.run(tensors | {"positions": positions})["y"].clone()
        found = captured.run({"positions": positions})["y"]
        assert torch.equal(found, expected), step
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(step_attention, "takes", lambda *_: False)
            other = two.run(apart | {"positions": positions})["y"]
        assert (found.double() - other.double()).norm() / other.double().norm() < 2e-2
    for name in ("k_cache0", "v_cache0", f"k_cache{layers - 1}", f"v_cache{layers - 1}"):
        assert torch.equal(mine[name], tensors[name]), name
    for name in ("k_cache0", "v_cache0"):
        assert torch.equal(mine[name], apart[name]), name
