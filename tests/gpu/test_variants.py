"""Attention windows and large query groups in both decode kernels, against transformers."""

import pytest
import torch

from tests.gpu.engines import open_engine, random_model
from tests.gpu.reference import reference_logits
from tests.gpu.test_batch import require_transformers_logits
from tests.gpu.test_decode import random_ids, relative_error

pytestmark = pytest.mark.gpu

WINDOWS = {
    "mistral, 40": {"architecture": "mistral", "windows": (40,) * 4},
    "mistral, 300": {"architecture": "mistral", "windows": (300,) * 4},
    "qwen2, some layers": {
        "architecture": "qwen2", "qkv_bias": True, "windows": (0, 0, 64, 64),
    },
}  # fmt: skip
GROUPS = {
    "12 queries": {"num_heads": 24, "num_kv_heads": 2},
    "11 queries": {"architecture": "mistral", "num_heads": 11, "num_kv_heads": 1},
    "16 queries, heads of 128": {
        "architecture": "qwen3", "qk_norm": True, "num_heads": 16, "num_kv_heads": 1,
        "head_dim": 128,
    },
    "20 queries and a window": {
        "architecture": "mistral", "num_heads": 40, "num_kv_heads": 2, "windows": (100,) * 4,
    },
}  # fmt: skip
VARIANTS = WINDOWS | GROUPS


def open_variant(name: str, batch: int = 1):
    return open_engine(random_model("smollm2-135m", num_layers=4, **VARIANTS[name]), batch)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("num_prefilled", "num_decoded"), [(25, 40), (700, 12)])
def test_one_sequence(name, num_prefilled, num_decoded):
    engine = open_variant(name)
    ids = random_ids(49152, num_prefilled + num_decoded)
    exact = reference_logits(engine, ids, torch.float32)[num_prefilled:]
    rounded = relative_error(reference_logits(engine, ids, torch.bfloat16)[num_prefilled:], exact)
    engine.prefill(ids[:num_prefilled])
    rows = [engine.decode_step([token])["logits"].clone() for token in ids[num_prefilled:]]
    found = relative_error(torch.cat(rows).float(), exact)
    print(f"{name}, {num_prefilled}+{num_decoded}: {found:.2e}, bf16 {rounded:.2e}")
    assert found < 1.5 * rounded


@pytest.mark.parametrize("name", VARIANTS)
def test_several_sequences(name):
    lengths = [1, 700, 36, 129, 64, 298]
    require_transformers_logits(open_variant(name, len(lengths)), lengths)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_matter(name):
    """Or else the tests above would show nothing."""
    engine, ids = open_variant(name), random_ids(49152, 700)
    exact, full = (
        reference_logits(engine, ids, torch.float32, windows=windows)[600:]
        for windows in (True, False)
    )
    rounded = relative_error(reference_logits(engine, ids, torch.bfloat16)[600:], exact)
    assert relative_error(full, exact) > 3 * rounded


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["mistral, 40", "11 queries"])
def test_steps_repeat_bit_by_bit(name, batch):
    stepping = open_variant(name, batch).stepping
    runs = []
    for launches in ((1,) * 300, (300,), (7, 93, 200)):
        stepping.start([5] * batch, [0] * batch)
        runs.append(torch.cat([stepping.decode(num).clone() for num in launches]))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
