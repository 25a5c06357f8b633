"""The peer of bench/decode.py and bench/prefill.py: a model as a user of plain torch writes it, for
torch.compile.

In: a ModelConfig and static KV caches. Out: a module that appends tokens to the caches, one of each
sequence or a prompt, and gives the next ones; weights are random bf16. It is compiled with a mode
that also captures CUDA graphs, or a layer of each kind alone (by_layer). Over several ranks it is
Megatron's tensor parallelism: a part of the heads, the feed-forward, each expert and the vocabulary
each, two NCCL all-reduces a layer. Ids are then those of the rank's own vocabulary, which spares it
the exchanges of embedding and argmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from distmega.models.config import ModelConfig

ExpertForm = Literal["gathered", "grouped"]
"""How rows meet the experts that they chose. gathered: each row's own matrices are looked up, which
a compiler does inside of the product; an expert is read once a row. grouped: rows are sorted by
expert and go through one grouped product, in which each expert is read once.
"""

M = TypeVar("M", bound=nn.Module)


class Attention(nn.Module):
    """Queries, keys and values in one matrix; caches [batch, kv heads, context, d]."""

    def __init__(self, config: ModelConfig, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.d
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden, rows, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * self.d, config.hidden, bias=False)
        self.head_norms = nn.ModuleList(
            nn.RMSNorm(self.d, eps=config.norm_eps) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, mask: Tensor | None
    ) -> Tensor:
        batch, num_tokens = x.shape[:2]
        parts = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(self.norm(x)).view(batch, num_tokens, -1, self.d).split(parts, 2)
        q, k = (rotate(norm(t), cos, sin) for norm, t in zip(self.head_norms, (q, k), strict=True))
        self.keys[:, :, position] = k.transpose(1, 2)
        self.values[:, :, position] = v.transpose(1, 2)
        q = q.transpose(1, 2)
        if mask is not None:
            mixed = F.scaled_dot_product_attention(
                q, self.keys, self.values, attn_mask=mask, enable_gqa=True
            )
        else:
            mixed = F.scaled_dot_product_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
        return x + total(self.out(mixed.transpose(1, 2).reshape(batch, num_tokens, -1)))


class Mlp(nn.Module):
    """x + down(silu(gate) * up) of the norm of x."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + total(self.down(F.silu(gate) * up))


class Experts(nn.Module):
    """x + the sum of what each row's chosen experts make of its norm, weighted by the router."""

    def __init__(self, config: ModelConfig, form: ExpertForm) -> None:
        super().__init__()
        num, ffn, hidden = config.num_experts, config.expert_ffn, config.hidden
        self.num_chosen, self.norm_top, self.form = config.experts_per_token, config.norm_top, form
        self.norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.router = nn.Linear(hidden, num, bias=False)
        self.gate_up = nn.Parameter(torch.empty(num, 2 * ffn, hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, ffn))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, ids = self.router(rows).float().softmax(-1).topk(self.num_chosen)
        if self.norm_top:
            weights = weights / weights.sum(-1, keepdim=True)
        results = self.gathered(rows, ids) if self.form == "gathered" else self.grouped(rows, ids)
        return x + total((results * weights.to(x.dtype)[..., None]).sum(1).view_as(x))

    def gathered(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows [m, hidden], ids [m, chosen] -> [m, chosen, hidden]."""
        # no bmm: for a product of its own the compiler would copy the matrices first
        gate, up = (self.gate_up[ids] * rows[:, None, None]).sum(-1).chunk(2, -1)
        return (self.down[ids] * (F.silu(gate) * up)[:, :, None]).sum(-1)

    def grouped(self, rows: Tensor, ids: Tensor) -> Tensor:
        """As gathered."""
        order = ids.flatten().argsort()
        each = torch.arange(len(self.down), device=ids.device)
        ends = (ids.flatten() == each[:, None]).sum(1).cumsum(0).to(torch.int32)
        x = rows[order // self.num_chosen]
        gate, up = F.grouped_mm(x, self.gate_up.mT, offs=ends).chunk(2, -1)
        found = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        return found[order.argsort()].view(*ids.shape, -1)


class TorchDecoder(nn.Module):
    """tokens [batch, 1] at position [1], or a prompt [1, m] at positions 0 to m - 1 -> next tokens
    [batch, 1].
    """

    def __init__(
        self, config: ModelConfig, caches: Sequence[tuple[Tensor, Tensor]], form: ExpertForm
    ) -> None:
        super().__init__()
        context = caches[0][0].shape[2]
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList()
        for layer, (keys, values) in enumerate(caches):
            experts = config.has_experts(layer)
            after = Experts(config, form) if experts else Mlp(config)
            self.layers += [Attention(config, keys, values), after]
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.register_buffer("all_positions", torch.arange(context))
        steps = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(context).float(), config.rope_base**-steps)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x, cos, sin, mask = self.enter(tokens, position)
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask) if isinstance(layer, Attention) else layer(x)
        return self.leave(x)

    def enter(
        self, tokens: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What comes before the layers: rows, angles, and which cached positions count."""
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        mask = None if len(position) > 1 else (self.all_positions <= position)[None, None, None]
        return self.embed(tokens), cos, sin, mask

    def leave(self, x: Tensor) -> Tensor:
        """What comes behind them."""
        return self.head(self.norm(x[:, -1:]))[:, -1].argmax(-1, keepdim=True)

    def compile_by_layer(self, mode: str) -> None:
        """Compiles what comes before the layers, a layer of each kind, and what comes behind: what
        layers are alike in is compiled once, in seconds where the whole takes minutes. Calls are no
        CUDA graph by themselves.
        """
        compiled: Callable[..., Callable[..., Tensor]] = torch.compile
        for name in ("enter", "leave"):
            setattr(self, name, compiled(getattr(self, name), mode=mode, fullgraph=True))
        for layer in self.layers:
            layer.compile(mode=mode, fullgraph=True)


def total(x: Tensor) -> Tensor:
    """The sum over ranks."""
    if not dist.is_initialized():
        return x
    summed: Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", dist.group.WORLD))
    return summed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def make_peer(
    config: ModelConfig,
    caches: Sequence[tuple[Tensor, Tensor]],
    num_ranks: int = 1,
    form: ExpertForm = "grouped",
) -> TorchDecoder:
    """A decoder, or one of num_ranks parts, with random bf16 weights on the current GPU; caches:
    its keys and values of each layer, [batch, kv heads, context, d]; form: of experts. Ends the
    program where a model has an expert that all tokens share.
    """
    if config.shared_ffn:
        raise SystemExit("a peer with a shared expert; expected none; measure with --no-peer")
    with torch.device("cuda"):
        model = in_bf16(lambda: TorchDecoder(part_of(config, num_ranks), caches, form))
    for name in ("cos", "sin"):
        setattr(model, name, getattr(model, name).float())
    return with_random_weights(model)


def make_experts(config: ModelConfig, num_ranks: int, form: ExpertForm) -> Experts:
    """A layer of experts alone, as make_peer has them."""
    with torch.device("cuda"):
        return with_random_weights(in_bf16(lambda: Experts(part_of(config, num_ranks), form)))


def part_of(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """What one of num_ranks ranks has of a model."""
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=config.num_kv_heads // num_ranks,
        ffn=config.ffn // num_ranks,
        expert_ffn=config.expert_ffn // num_ranks,
        vocab=config.vocab // num_ranks,
    )


def in_bf16(make: Callable[[], M]) -> M:
    """A module whose weights are bf16 from the first."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def with_random_weights(model: M) -> M:
    """The module, its matrices random, its vectors as they are."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False).eval()
