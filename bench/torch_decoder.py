"""The peer of bench/decode.py and bench/prefill.py: a model as a user of plain torch writes it, for
torch.compile.

In: a ModelConfig and static KV caches. Out: a module that appends tokens to the caches, one of each
sequence or a prompt, and gives the next ones; weights are random bf16. It is compiled with a mode
that also captures CUDA graphs. Over several ranks it is Megatron's tensor parallelism: a part of
the heads, the feed-forward and the vocabulary each, two NCCL all-reduces a layer. Ids are then
those of the rank's own vocabulary, which spares it the exchanges of embedding and argmax.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from distmega.models.config import ModelConfig


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


class TorchDecoder(nn.Module):
    """tokens [batch, 1] at position [1], or a prompt [1, m] at positions 0 to m - 1 -> next tokens
    [batch, 1].
    """

    def __init__(self, config: ModelConfig, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        context = caches[0][0].shape[2]
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList()
        for keys, values in caches:
            self.layers += [Attention(config, keys, values), Mlp(config)]
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.register_buffer("all_positions", torch.arange(context))
        steps = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(context).float(), config.rope_base**-steps)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        mask = None if len(position) > 1 else (self.all_positions <= position)[None, None, None]
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask) if isinstance(layer, Attention) else layer(x)
        return self.head(self.norm(x[:, -1:]))[:, -1].argmax(-1, keepdim=True)


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
    config: ModelConfig, caches: Sequence[tuple[Tensor, Tensor]], num_ranks: int = 1
) -> TorchDecoder:
    """A decoder, or one of num_ranks parts, with random bf16 weights on the current GPU; caches:
    its keys and values of each layer, [batch, kv heads, context, d].
    """
    config = replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=config.num_kv_heads // num_ranks,
        ffn=config.ffn // num_ranks,
        vocab=config.vocab // num_ranks,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = TorchDecoder(config, caches)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("cos", "sin"):
        setattr(model, name, getattr(model, name).float())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False).eval()
