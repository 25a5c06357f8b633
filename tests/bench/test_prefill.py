"""What the floor of a prompt counts: products of a pass, attention, experts that are hit."""

import pytest

from bench import prefill
from bench.prefill import floor_us, parse_case
from distmega.models.presets import PRESETS


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 1e9 FLOP and 1e7 bytes a microsecond."""
    monkeypatch.setattr(prefill, "product_us", lambda m, n, k: 2.0 * m * n * k / 1e9)
    monkeypatch.setattr(prefill, "copy_bytes_per_us", lambda: 1e7)


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize(("batch", "num_ranks"), [(1, 1), (16, 1), (16, 2)])
def test_a_dense_floor_is_its_products_and_attention(batch: int, num_ranks: int):
    """However many passes there are."""
    config = PRESETS["qwen3-8b"]
    case = parse_case(f"qwen3-8b prompt=2048 batch={batch}" + f" tp={num_ranks}" * (num_ranks > 1))
    columns = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weights = columns * config.hidden + config.num_heads * config.head_dim * config.hidden
    weights = config.num_layers * (weights + 3 * config.hidden * config.ffn)
    expected = 2.0 * 2048 * batch * weights / 1e9 + 2.0 * batch * config.vocab * config.hidden / 1e9
    heads = config.num_heads * config.head_dim
    expected += config.num_layers * batch * 2.0 * 2048**2 * heads / 600e6
    assert floor_us(config, case) == pytest.approx(expected / num_ranks)


@pytest.mark.usefixtures("rates")
def test_experts_take_the_longer_of_their_products_and_bytes():
    config = PRESETS["qwen3-30b-a3b"]
    router = 2.0 * config.num_experts * config.hidden / 1e9
    an_expert = 3 * config.hidden * config.expert_ffn
    one, many = (prefill.experts_us(config, rows, 1) for rows in (1, 8192))
    assert one == pytest.approx(config.experts_per_token * an_expert * 2 / 1e7 + router)
    products = 2.0 * 8192 * config.experts_per_token * an_expert / 1e9
    assert many == pytest.approx(products + 8192 * router)
    case = parse_case("qwen3-30b-a3b prompt=8192 batch=1")
    assert floor_us(config, case) > config.num_layers * many
