"""Programs of all kinds with megakernel=True: one launch on 1, 2 and 4 ranks each, no library op,
and what torch computes. One process stands for all ranks.
"""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distmega.hostir.ir.nodes import LaunchMegakernel, LibraryOp, walk_nodes
from distmega.kernels.machines import CPU
from distmega.kernels.megakernel import Megakernel
from distmega.kernels.whole import plan_whole
from distmega.program.builder import Handle, ProgramBuilder
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.layout.placements import Layout, replicate, shard
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.programs import shard_tensors
from tests.hostir.threads import ThreadCommunicator, Wires
from tests.kernels.running import launch_all, make_ranks

EPS = 1e-5
CONTEXT = 96
"""Cached positions; the first row of a program is at FIRST of them."""
FIRST = 17

Tensors = Mapping[str, Tensor]
InTorch = Callable[[Tensors], Sequence[Tensor]]


class Maker:
    """A program, how ranks divide it, and on the way the same in torch.

    Columns of the weights called "up" and rows of those called "down" are divided.
    """

    def __init__(self) -> None:
        self.p, self.marks = ProgramBuilder("one"), dict[str, Layout]()

    def linear(
        self, x: Handle, name: str, rows: int, *, bias: bool = False, split: int = -1
    ) -> Handle:
        w = self.p.weight(name, (rows, x.shape[-1]))
        if split >= 0:
            self.marks[name] = shard(split, "tp")
        return self.p.linear(x, w, self.p.weight(f"{name}.b", (rows,)) if bias else None)

    def rms(self, x: Handle, name: str) -> Handle:
        return self.p.rms_norm(x, self.p.weight(name, x.shape[-1:]), EPS)

    def layer_norm(self, x: Handle, name: str) -> Handle:
        weight, bias = (self.p.weight(part, x.shape[-1:]) for part in (name, f"{name}.b"))
        return self.p.layer_norm(x, weight, bias, EPS)

    def attention(
        self, x: Handle, kv_heads: int, group: int, dim: int, softcap: float = 0.0
    ) -> Handle:
        """Attention with rotation of x's rows, at positions from FIRST on."""
        p, rows = self.p, x.shape[0]
        at, table = p.input("at", (rows,), "i64"), p.weight("rope", (CONTEXT, dim))
        shapes = {"q": (kv_heads, group, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)}
        made = {}
        for name, shape in shapes.items():
            w = p.weight(name, (*shape, x.shape[-1]))
            self.marks[name] = shard(0, "tp")
            axes = " ".join("hgd" if len(shape) == 3 else "hd")
            made[name] = p.linear(x, w, spec=f"m k, {axes} k -> m {axes}")
        caches = [p.state(f"{name}_cache", (kv_heads, CONTEXT, dim)) for name in "kv"]
        p.kv_append(caches[0], p.rope(made["k"], at, table), at)
        p.kv_append(caches[1], made["v"], at)
        mixed = p.attention(p.rope(made["q"], at, table), *caches, at, dim**-0.5, softcap=softcap)
        out = p.weight("o", (x.shape[-1], *shapes["q"]))
        self.marks["o"] = shard(1, "tp")
        return p.linear(mixed, out, spec="m h g d, k h g d -> m k")


def rms_of(t: Tensors, x: Tensor, name: str) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], t[name], EPS)


def layer_norm_of(t: Tensors, x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], t[name], t[f"{name}.b"], EPS)


def linear_of(t: Tensors, x: Tensor, name: str) -> Tensor:
    return F.linear(x, t[name], t.get(f"{name}.b"))


def rotate_of(t: Tensors, x: Tensor) -> Tensor:
    cos, sin = (
        part.unflatten(0, (-1, *[1] * (x.dim() - 2))) for part in t["rope"][t["at"]].chunk(2, -1)
    )
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention_of(t: Tensors, x: Tensor, softcap: float = 0.0) -> Tensor:
    q, k, v = (torch.tensordot(x, t[name], ([-1], [-1])) for name in "qkv")
    keys, values = t["k_cache"].clone(), t["v_cache"].clone()
    keys[:, t["at"]] = rotate_of(t, k).transpose(0, 1)
    values[:, t["at"]] = v.transpose(0, 1)
    scores = torch.einsum("mhgd,htd->mhgt", rotate_of(t, q), keys) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    hidden = torch.arange(CONTEXT) > t["at"][:, None, None, None]
    mixed = torch.einsum(
        "mhgt,hte->mhge", scores.masked_fill(hidden, -torch.inf).softmax(-1), values
    )
    return torch.tensordot(mixed, t["o"], ([1, 2, 3], [1, 2, 3]))


Made = tuple[Sequence[Handle], InTorch]


def readme_mlp(m: Maker) -> Made:
    x = m.p.input("x", (256, 512))
    h = m.linear(x, "up", 2048, split=0).map("silu(a0)")
    y = m.linear(h, "down", 512, split=1)
    return [y], lambda t: [linear_of(t, F.silu(linear_of(t, t["x"], "up")), "down")]


def gated(
    m: Maker,
    formula: str,
    gate: Callable[[Tensor, Tensor], Tensor],
    hidden: int,
    inner: int,
    rows: int,
) -> Made:
    x = m.p.input("x", (rows, hidden))
    h = m.rms(x, "n")
    mixed = m.p.pointwise(
        formula, m.linear(h, "g", inner, split=0), m.linear(h, "up", inner, split=0)
    )
    y = x + m.linear(mixed, "down", hidden, split=1)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        h = rms_of(t, t["x"], "n")
        return [t["x"] + linear_of(t, gate(linear_of(t, h, "g"), linear_of(t, h, "up")), "down")]

    return [y], in_torch


def tanh_gate(m: Maker) -> Made:
    return gated(m, "tanh(a0) * a1", lambda a, b: a.tanh() * b, 64, 192, 1)


def turned_gate(m: Maker) -> Made:
    return gated(m, "a1 * silu(a0)", lambda a, b: b * F.silu(a), 64, 192, 1)


def hidden_of_160(m: Maker) -> Made:
    return gated(m, "silu(a0) * a1", lambda a, b: F.silu(a) * b, 160, 448, 1)


def odd_sizes(m: Maker) -> Made:
    return gated(m, "silu(a0) * a1", lambda a, b: F.silu(a) * b, 72, 200, 7)


def ungated(m: Maker) -> Made:
    x = m.p.input("x", (1, 64))
    h = m.linear(m.rms(x, "n"), "up", 256, split=0).map("gelu(a0)")
    y = x + m.linear(h, "down", 64, split=1)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        h = F.gelu(linear_of(t, rms_of(t, t["x"], "n"), "up"))
        return [t["x"] + linear_of(t, h, "down")]

    return [y], in_torch


def layer_norms(m: Maker) -> Made:
    x = m.p.input("x", (1, 64))
    h = m.linear(m.layer_norm(x, "n"), "up", 256, bias=True, split=0).map("gelu(a0)")
    y = x + m.linear(h, "down", 64, bias=True, split=1)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        h = F.gelu(linear_of(t, layer_norm_of(t, t["x"], "n"), "up"))
        return [t["x"] + linear_of(t, h, "down")]

    return [y], in_torch


def parallel(m: Maker) -> Made:
    x = m.p.input("x", (1, 64))
    h = m.rms(x, "n")
    up = m.linear(h, "up", 256, split=0).map("gelu(a0)")
    y = x + m.attention(h, 4, 2, 16) + m.linear(up, "down", 64, split=1)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        h = rms_of(t, t["x"], "n")
        up = F.gelu(linear_of(t, h, "up"))
        return [t["x"] + attention_of(t, h) + linear_of(t, up, "down")]

    return [y], in_torch


def post_norms(m: Maker) -> Made:
    x = m.p.input("x", (1, 64))
    x = m.rms(x + m.attention(x, 4, 2, 16), "n0")
    up = m.linear(x, "up", 256, split=0).map("gelu(a0)")
    y = m.rms(x + m.linear(up, "down", 64, split=1), "n1")

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        x = rms_of(t, t["x"] + attention_of(t, t["x"]), "n0")
        up = F.gelu(linear_of(t, x, "up"))
        return [rms_of(t, x + linear_of(t, up, "down"), "n1")]

    return [y], in_torch


def attends(m: Maker, rows: int, kv_heads: int, group: int, dim: int) -> Made:
    x = m.p.input("x", (rows, 64))
    y = x + m.attention(m.rms(x, "n"), kv_heads, group, dim)
    return [y], lambda t: [t["x"] + attention_of(t, rms_of(t, t["x"], "n"))]


def heads_of_96(m: Maker) -> Made:
    return attends(m, 1, 4, 4, 96)


def prompt_of_4(m: Maker) -> Made:
    return attends(m, 4, 4, 2, 16)


def prompt_of_64(m: Maker) -> Made:
    return attends(m, 64, 4, 2, 16)


def three_linears(m: Maker) -> Made:
    y = m.p.input("x", (2, 64))
    for name, rows, split in (("a", 192, 0), ("b", 320, 1), ("c", 64, 0)):
        y = m.linear(y, name, rows, split=split)
    return [y], lambda t: [linear_of(t, linear_of(t, linear_of(t, t["x"], "a"), "b"), "c")]


def batched_linear(m: Maker) -> Made:
    x, w = m.p.input("x", (8, 3, 64)), m.p.weight("w", (8, 96, 64))
    m.marks["w"] = shard(0, "tp")
    y = m.p.linear(x, w, spec="b m k, b n k -> b m n")
    return [y.map("a0 * 2.0")], lambda t: [2 * t["x"] @ t["w"].mT]


def classifier(m: Maker) -> Made:
    x = m.p.input("x", (2, 64))
    y = m.p.softmax(m.linear(x, "up", 96, bias=True, split=0))
    return [y], lambda t: [linear_of(t, t["x"], "up").softmax(-1)]


def hidden_state_too(m: Maker) -> Made:
    p = m.p
    ids, table = p.input("ids", (1,), "i64"), p.weight("table", (88, 64))
    x = p.embedding(ids, table)
    x = x + m.attention(m.rms(x, "n0"), 4, 2, 16)
    state = m.rms(x, "n1")
    logits = p.linear(state, table)
    next_token = p.argmax(logits)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        x = t["table"][t["ids"]]
        x = x + attention_of(t, rms_of(t, x, "n0"))
        state = rms_of(t, x, "n1")
        logits = state @ t["table"].T
        return [logits, logits.argmax(-1), state]

    return [logits, next_token, state], in_torch


def windows_of_rows(m: Maker) -> Made:
    """Moves, reductions and a broadcast."""
    x = m.p.input("x", (6, 32))
    top = m.p.reduce(x, 1, "max")
    far = m.p.concat([m.p.slice(x, 0, 0, 2), m.p.slice(x, 0, 4, 6)], 0)
    y = m.p.pointwise("a0 - a1", m.p.transpose(x, (1, 0)), top)
    return [y, far], lambda t: [t["x"].T - t["x"].amax(1), t["x"][[0, 1, 4, 5]]]


def capped_scores(m: Maker) -> Made:
    x = m.p.input("x", (3, 64))
    y = x + m.attention(m.rms(x, "n"), 4, 2, 16, softcap=0.5)
    return [y], lambda t: [t["x"] + attention_of(t, rms_of(t, t["x"], "n"), 0.5)]


def other_types(m: Maker) -> Made:
    """A mask, whole numbers, and rows that are repeated."""
    p = m.p
    x, y = p.input("x", (6, 32)), p.input("y", (1, 32))
    repeated = p.expand(m.linear(y, "up", 32, split=0), (6, 32))
    mask = p.pointwise("lt(a0, a1)", x, repeated, dtype="bool")
    chosen = p.pointwise("where(a0, a1, a2)", mask, x, repeated, dtype="f32")
    whole = p.pointwise("floor(a0 * 4.0)", chosen, dtype="i64")

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        repeated = linear_of(t, t["y"], "up").expand(6, 32)
        chosen = t["x"].minimum(repeated)
        return [t["x"] < repeated, chosen, (4 * chosen).floor().long()]

    return [mask, chosen, whole], in_torch


def self_attention(m: Maker) -> Made:
    """Of rows that see each other, causally and all, without a cache."""
    p, rows, heads, dim = m.p, 7, 4, 16
    x = p.input("x", (rows, 64))
    made = []
    for name in "qkv":
        m.marks[name] = shard(0, "tp")
        y = p.linear(x, p.weight(name, (heads, dim, 64)), spec="m k, h d k -> m h d")
        made.append(p.reshape(p.transpose(y, (1, 0, 2), view=True), (1, heads, rows, dim)))
    mask = p.input("mask", (1, 1, rows, rows), "bool")
    outs = [p.attend(*made, seen, dim**-0.5) for seen in (mask, None)]

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        q, k, v = (torch.einsum("mk,hdk->hmd", t["x"], t[name])[None] for name in "qkv")
        return [F.scaled_dot_product_attention(q, k, v, mask) for mask in (t["mask"], None)]

    return outs, in_torch


def parts_of_sums(m: Maker) -> Made:
    """A sum over ranks of which each keeps its part, then the other dim of it."""
    x = m.p.input("x", (10, 24))
    y = m.p.linear(x, m.p.weight("w", (13, 24)), name="y")
    m.marks |= {"x": shard(1, "tp"), "w": shard(1, "tp"), "y": shard(1, "tp")}
    m.marks["z"] = shard(0, "tp")
    z = m.p.softmax(m.p.pointwise("a0 * 2.0", y, name="z"))
    return [z], lambda t: [(2 * t["x"] @ t["w"].T).softmax(-1)]


def chosen_elements(m: Maker) -> Made:
    """The largest of rows, elements picked by number, sums so far, and eight operands at once."""
    p = m.p
    x, ids = p.input("x", (9, 30)), p.input("ids", (9, 12), "i64")
    m.marks["x"] = shard(0, "tp")
    values, where = p.topk(x, 5)
    picked = p.gather(x, ids, 1)
    parts = [p.slice(x, 1, n, n + 12) for n in range(7)]
    mixed = p.pointwise(" + ".join(f"a{n} * a7" for n in range(7)), *parts, picked)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        values, where = t["x"].topk(5)
        picked = t["x"].gather(1, t["ids"])
        mixed = sum(t["x"][:, n : n + 12] * picked for n in range(7))
        return [values, where, picked, mixed, t["x"].cumsum(-1)]

    return [values, where, picked, mixed, p.cumsum(x)], in_torch


def experts(m: Maker, split: Mapping[str, int]) -> Made:
    """Rows that each go to 2 of 6 experts, whose matrices ranks divide."""
    p = m.p
    x = p.input("x", (5, 16))
    weights, chosen = p.top_k(m.linear(x, "router", 6), 2)
    routing = p.route(chosen, 6)
    shapes = {"gate": (6, 24, 16), "up": (6, 24, 16), "down": (6, 16, 24)}
    matrices = {name: p.weight(name, shape) for name, shape in shapes.items()}
    m.marks |= {name: shard(split[name], "tp") for name in shapes}
    rows = p.gather_rows(x, routing)
    products = (p.grouped_linear(rows, matrices[name], routing) for name in ("gate", "up"))
    h = p.grouped_pointwise("silu(a0) * a1 + 1.0", *products, routing=routing)
    y = p.scatter_add(p.grouped_linear(h, matrices["down"], routing), weights, routing)

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        weights, chosen = linear_of(t, t["x"], "router").softmax(-1).topk(2)
        gate, up, down = (t[name][chosen] for name in shapes)
        gate, up = (torch.einsum("mcnk,mk->mcn", w, t["x"]) for w in (gate, up))
        return [torch.einsum("mcnk,mck,mc->mn", down, F.silu(gate) * up + 1.0, weights)]

    return [y], in_torch


def experts_in_parts(m: Maker) -> Made:
    return experts(m, {"gate": 1, "up": 1, "down": 2})


def whole_experts_a_rank(m: Maker) -> Made:
    return experts(m, {"gate": 0, "up": 0, "down": 0})


PROGRAMS: Sequence[Callable[[Maker], Made]] = (
    readme_mlp, tanh_gate, turned_gate, hidden_of_160, odd_sizes, ungated, layer_norms, parallel,
    post_norms, heads_of_96, prompt_of_4, prompt_of_64, three_linears, batched_linear, classifier,
    hidden_state_too, windows_of_rows, capped_scores, other_types, self_attention, parts_of_sums,
    chosen_elements, experts_in_parts, whole_experts_a_rank,
)  # fmt: skip


def random_values(program: Program) -> dict[str, Tensor]:
    torch.manual_seed(0)
    values: dict[str, Tensor] = {}
    for tensor in program.tensors:
        if tensor.role == "temp":
            continue
        if tensor.name == "ids" and tensor.num_elements > 1:
            values[tensor.name] = torch.randint(0, 30, tensor.shape)
        elif tensor.dtype == "bool":
            values[tensor.name] = torch.ones(tensor.shape, dtype=torch.bool).tril()
        elif tensor.dtype == "i64":
            values[tensor.name] = torch.arange(FIRST, FIRST + tensor.num_elements)
        else:
            scale = tensor.shape[-1] ** -0.5 if tensor.role == "weight" else 1.0
            values[tensor.name] = scale * torch.randn(tensor.shape)
    return values


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_one_launch_on_each_rank_gives_what_torch_does(make, num_ranks):
    require_torchs(make, DeviceMesh(tp=num_ranks))


def rows_and_columns(m: Maker) -> Made:
    """A sum over one mesh axis of rows that ranks along another have, which are gathered then."""
    x = m.p.input("x", (8, 16))
    h = m.linear(x, "up", 32, split=0).map("silu(a0)")
    y = m.p.linear(h, m.p.weight("down", (16, 32)), name="y")
    m.marks |= {"x": shard(0, "dp"), "down": shard(1, "tp"), "z": replicate()}
    z = m.p.pointwise("a0 + a1", y, x, name="z")

    def in_torch(t: Tensors) -> Sequence[Tensor]:
        return [t["x"] + F.silu(t["x"] @ t["up"].T) @ t["down"].T]

    return [z], in_torch


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 3), (3, 2)])
def test_ranks_along_two_mesh_axes_run_one_kernel_together(dp, tp):
    kernel = require_torchs(rows_and_columns, DeviceMesh(dp=dp, tp=tp))
    assert kernel.team_axes == ("dp", "tp")
    assert kernel.team(1) == tuple(range(dp * tp))
    over_two = DeviceMesh(pp=2, dp=dp, tp=tp)
    kernel = require_torchs(rows_and_columns, over_two)
    assert kernel.team(dp * tp) == tuple(range(dp * tp, 2 * dp * tp))


def require_torchs(make: Callable[[Maker], Made], mesh: DeviceMesh) -> Megakernel:
    """One launch and no library op on each rank, and what torch gives."""
    maker = Maker()
    outs, in_torch = make(maker)
    program = maker.p.build(*outs)
    values = random_values(program)
    expected = in_torch(
        {name: x.double() if x.is_floating_point() else x for name, x in values.items()}
    )
    local = localize(plan_program(program, mesh, CPU, maker.marks))
    whole = plan_whole(local, ThreadCommunicator(mesh, 0, Wires(mesh)), torch.device("cpu"))
    nodes = list(walk_nodes(whole.host.body))
    assert sum(isinstance(node, LaunchMegakernel) for node in nodes) == 1
    assert not any(isinstance(node, LibraryOp) and not node.op.is_view for node in nodes)
    assert whole.kernel is not None
    ranks = make_ranks(whole.kernel)
    for number, rank in enumerate(ranks):
        parts = shard_tensors(values, local, number)
        rank.fill({name: x for name, x in parts.items() if name in rank.tensors})
    launch_all(ranks)
    for out, wanted in zip(program.outputs, expected, strict=True):
        domain = local.allocations[out]
        for number, rank in enumerate(ranks):
            part = wanted[domain.local_slices(mesh.coordinate(number))]
            found = rank.tensors[out][tuple(map(slice, part.shape))]
            torch.testing.assert_close(found, part.to(found.dtype), rtol=1e-4, atol=1e-4)
    return whole.kernel
