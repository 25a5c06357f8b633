"""Models that are no decoders, as their users write them, against eager on one rank and two."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.torch_import.running import check_module


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Mixer(nn.Module):
    """MLP-Mixer: patches, then products over tokens and over channels in turn."""

    def __init__(self, dim: int = 16, num_tokens: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.tokens = nn.ModuleList(self.mlp(num_tokens) for _ in range(depth))
        self.channels = nn.ModuleList(self.mlp(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth + 1))
        self.head = nn.Linear(dim, 10)

    def mlp(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for n, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * n](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * n + 1](x))
        return self.head(self.norms[-1](x).mean(1))


class Tower(nn.Module):
    """A DLRM-like tower: sums of embeddings, a dense part, products of all pairs."""

    def __init__(self, dim: int = 8, num_tables: int = 3) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(20 + n, dim, mode=("sum", "mean", "max")[n]) for n in range(num_tables)
        )
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        num_pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(nn.Linear(dim + num_pairs, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(num_tables + 1, num_tables + 1, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(bag(ids[:, n]) for n, bag in enumerate(self.bags))], 1)
        products = parts @ parts.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([x, pairs], 1)))


class Stem(nn.Module):
    """Convolutions with overlap, batch norm and pooling, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.body(image)), -1)


class T5Step(nn.Module):
    """Encoder and one decoder step over all of its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        return self.model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=targets, use_cache=False
        ).logits


class Hidden(nn.Module):
    """A model of transformers, of which one result is wanted."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any) -> Tensor:
        return getattr(self.model(*args), self.name)


def test_bert_encoder():
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    ids, mask = torch.randint(0, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    model = Hidden(BertModel(config).eval(), "last_hidden_state")
    other = torch.ones_like(mask)
    captured = check_module(model, (ids, mask), (ids.flip(1), other))
    assert not captured.opaque


def test_vision_transformer():
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    model = Hidden(ViTForImageClassification(config).eval(), "logits")
    captured = check_module(model, (torch.randn(2, 3, 16, 16),), (torch.randn(2, 3, 16, 16),))
    assert not captured.opaque


def test_t5_encoder_and_decoder():
    config = T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5Step(T5ForConditionalGeneration(config).eval())
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    ids, targets = torch.randint(0, 40, (2, 7)), torch.randint(0, 40, (2, 4))
    captured = check_module(model, (ids, mask, targets), (ids.flip(0), mask.flip(0), targets))
    assert not captured.opaque


def test_mlp_mixer():
    captured = check_module(Mixer().eval(), (torch.randn(2, 3, 16, 16),))
    assert not captured.opaque


def test_embedding_tower():
    ids = torch.randint(0, 20, (4, 3, 5))
    captured = check_module(Tower().eval(), (torch.randn(4, 5), ids), (torch.randn(4, 5), ids // 2))
    assert not captured.opaque


def test_a_convolutional_stem_is_opaque_and_named():
    captured = check_module(Stem().eval(), (torch.randn(2, 3, 16, 16),))
    assert captured.opaque["aten.convolution.default"] == 2
    explained = captured.plan().explain()
    assert "operators of torch, run whole on every rank\n  2 x aten.convolution" in explained
