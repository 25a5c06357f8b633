"""Tiny random models with experts, saved by transformers: logits of prefill and decode by engines
on one rank and on several, experts divided by tensor and by expert. All families run on threads in
tests/models/test_experts.py.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from distmega.engine.requests import EngineOptions, Experts
from tests.e2e.running import relative_error, run_measure, token_ids
from tests.e2e.targets import Logits, Measure
from tests.models.files import SPARSE_FAMILIES

TOLERANCE = 1e-4
NUM_TOKENS, NUM_PREFILLED = 40, 32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@cache
def expected_logits(name: str, root: Path) -> Logits:
    """By transformers; saves the model to root/name on the way."""
    model = SPARSE_FAMILIES[name].build()
    model.save_pretrained(root / name)
    with torch.no_grad():
        return model(torch.tensor([token_ids(NUM_TOKENS)])).logits[0].float().numpy()


def assert_equal_logits(
    name: str, root: Path, num_ranks: int, experts: Experts, seeds: Sequence[int]
) -> None:
    expected = expected_logits(name, root)
    request = Measure(
        model=str(root / name),
        ids=token_ids(NUM_TOKENS),
        num_prefilled=NUM_PREFILLED,
        num_decoded=NUM_TOKENS - NUM_PREFILLED,
        seeds=seeds,
        options=EngineOptions(max_context=64, num_sms=4, experts=experts),
    )
    found = run_measure(request, num_ranks)
    assert relative_error(found.prefill, expected) < TOLERANCE
    for decoded in found.decode:
        assert relative_error(decoded, expected[NUM_PREFILLED:]) < TOLERANCE
        assert (decoded == found.decode[0]).all()


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPARSE_FAMILIES)
def test_twenty_interleavings_on_one_rank(name: str, root: Path):
    assert_equal_logits(name, root, 1, "auto", range(20))


def test_one_rank(root: Path):
    assert_equal_logits("qwen2_moe", root, 1, "auto", range(3))


def test_two_ranks(root: Path):
    assert_equal_logits("qwen3_moe", root, 2, "expert", (0, 1))


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPARSE_FAMILIES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("experts", ["tensor", "expert"])
def test_ranks(name: str, num_ranks: int, experts: Experts, root: Path):
    assert_equal_logits(name, root, num_ranks, experts, (0, 1))
