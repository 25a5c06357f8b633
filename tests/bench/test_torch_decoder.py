"""The peer of decode benchmarks computes the model: experts in each form, and a part of each."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.torch_decoder import (
    Attention,
    ExpertForm,
    Experts,
    Mlp,
    TorchDecoder,
    make_peer,
    part_of,
    with_random_weights,
)
from distmega.models.presets import PRESETS

CONFIG = replace(PRESETS["tiny-qwen3-moe"], expert_ffn=32)


def by_loops(layer: Experts, x: Tensor) -> Tensor:
    """One expert of one row at a time."""
    out = x.clone()
    for row, normed in zip(out, layer.norm(x), strict=True):
        shares = layer.router(normed[0]).softmax(-1)
        best = shares.argsort(descending=True)[: layer.num_chosen].tolist()
        total = shares[best].sum() if layer.norm_top else 1.0
        for expert in best:
            gate, up = (layer.gate_up[expert] @ normed[0]).chunk(2)
            row += shares[expert] / total * (layer.down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("form", get_args(ExpertForm))
@pytest.mark.parametrize(("rows", "norm_top"), [(1, True), (5, False)])
def test_experts_of_each_form(form: ExpertForm, rows: int, norm_top: bool):
    torch.manual_seed(rows)
    layer = with_random_weights(Experts(replace(CONFIG, norm_top=norm_top), form))
    x = torch.randn(rows, 1, CONFIG.hidden)
    x[-1] = x[0]  # an expert of several rows, and some of none
    torch.testing.assert_close(layer(x), by_loops(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", get_args(ExpertForm))
def test_parts_of_experts_add_up(form: ExpertForm):
    torch.manual_seed(2)
    x = torch.randn(3, 1, CONFIG.hidden)
    whole = with_random_weights(Experts(CONFIG, form))
    total = torch.zeros_like(x)
    for rank in range(2):
        part = Experts(part_of(CONFIG, 2), form)
        part.load_state_dict(
            {
                **whole.state_dict(),
                "gate_up": torch.cat(
                    [half.chunk(2, 1)[rank] for half in whole.gate_up.chunk(2, 1)], 1
                ),
                "down": whole.down.chunk(2, 2)[rank],
            }
        )
        total += part(x) - x
    torch.testing.assert_close(x + total, whole(x), rtol=1e-5, atol=1e-5)


def test_layers_are_of_the_kind_that_the_model_has():
    config = replace(CONFIG, num_layers=2, dense_layers=(1,))
    shape = 2, config.num_kv_heads, 8, config.head_dim
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
    model = with_random_weights(TorchDecoder(config, caches, "gathered"))
    assert [type(layer) for layer in model.layers] == [Attention, Experts, Attention, Mlp]
    found = model(torch.tensor([[3], [5]]), torch.tensor([4]))
    assert found.shape == (2, 1)
    assert caches[1][0][:, :, 4].abs().sum() > 0
    assert caches[1][0][:, :, 5].abs().sum() == 0


def test_a_shared_expert_is_no_peer():
    with pytest.raises(SystemExit, match="a peer with a shared expert; expected none"):
        make_peer(PRESETS["tiny-qwen2-moe"], [])
