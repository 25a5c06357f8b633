"""SmolLM2-135M-Instruct with its real weights, against transformers, on 1 to 4 real ranks."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from distmega.engine.requests import EngineOptions
from distmega.sources.load import open_model
from tests.e2e.reference import llama_from_source
from tests.e2e.running import relative_error, run_measure
from tests.e2e.targets import Logits, Measure, Measured

MODEL = "smollm2-135m-instruct"
PARAGRAPH = Path(__file__).parents[1] / "data" / "paragraph.txt"
PROMPT = "The capital of France is"
NUM_DECODED = 12
NUM_GREEDY = 16
RANKS = (1, 2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4)))
TOLERANCE = 1e-4


@cache
def paragraph_ids() -> list[int]:
    return open_model(MODEL).tokenizer().encode(PARAGRAPH.read_text())


@cache
def expected_logits() -> Logits:
    """Of every position of the paragraph, by transformers in fp32."""
    with torch.no_grad():
        out = llama_from_source(open_model(MODEL))(torch.tensor([paragraph_ids()]))
    return out.logits[0].numpy()


def request(**changes: object) -> Measure:
    tokenizer = open_model(MODEL).tokenizer()
    base = Measure(
        model=MODEL,
        ids=paragraph_ids(),
        num_prefilled=100,
        num_decoded=NUM_DECODED,
        prompt=tokenizer.encode(PROMPT),
        num_greedy=NUM_GREEDY,
    )
    return replace(base, **changes)


@cache
def measured(num_ranks: int) -> Measured:
    return run_measure(request(), num_ranks)


def perplexity(logits: Logits) -> float:
    targets = torch.tensor(paragraph_ids()[1:])
    return float(torch.exp(F.cross_entropy(torch.from_numpy(logits[:-1]), targets)))


def test_the_paragraph_is_long_enough() -> None:
    assert len(paragraph_ids()) >= 300


@pytest.mark.parametrize("num_ranks", RANKS)
def test_logits_of_every_position_equal_transformers(num_ranks: int) -> None:
    assert relative_error(measured(num_ranks).prefill, expected_logits()) < TOLERANCE


@pytest.mark.parametrize("num_ranks", RANKS)
def test_decoded_logits_equal_transformers(num_ranks: int) -> None:
    rows = expected_logits()[100 : 100 + NUM_DECODED]
    assert relative_error(measured(num_ranks).decode[0], rows) < TOLERANCE


def test_perplexity() -> None:
    assert perplexity(measured(1).prefill) < 6.0


def test_the_perplexity_gate_sees_wrong_rotary_pairs() -> None:
    """Logits of the half-split mistake, which still read fluently, do not pass the gate."""
    model = llama_from_source(open_model(MODEL))
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                rows, columns = projection.weight.shape
                halves = projection.weight.reshape(rows // 64, 2, 32, columns)
                projection.weight.copy_(halves.transpose(1, 2).reshape(rows, columns))
        logits = model(torch.tensor([paragraph_ids()])).logits[0].numpy()
    assert perplexity(logits) > 20.0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_stays_within_its_memory(num_ranks: int) -> None:
    """Weights, caches, logits of all positions, torch: one rank holds less than 2.5 GB."""
    assert measured(num_ranks).peak_bytes < 2.5e9


def test_paris() -> None:
    text = open_model(MODEL).tokenizer().decode(measured(1).greedy)
    assert text.startswith(" Paris")


@pytest.mark.parametrize("num_ranks", RANKS[1:])
def test_greedy_tokens_are_those_of_one_rank(num_ranks: int) -> None:
    assert measured(num_ranks).greedy == measured(1).greedy


@pytest.mark.nightly
@pytest.mark.parametrize(("num_ranks", "pp"), [(2, 2), (4, 2), (3, 3)])
def test_a_pipeline_gives_the_same_tokens_and_logits(num_ranks: int, pp: int) -> None:
    """Prefill in four micro-batches, decode from stage to stage."""
    found = run_measure(request(pp=pp, num_decoded=3), num_ranks)
    assert found.greedy == measured(1).greedy
    assert relative_error(found.prefill, expected_logits()) < TOLERANCE
    assert relative_error(found.decode[0], expected_logits()[100:103]) < TOLERANCE


@pytest.mark.nightly  # tests/multigpu/test_decode.py compares them for a small model, on CPUs too
def test_host_collectives_give_the_same_tokens() -> None:
    options = EngineOptions(max_context=512, collectives="host")
    found = run_measure(request(options=options, ids=paragraph_ids()[:110], num_decoded=2), 2)
    assert found.greedy == measured(1).greedy


@pytest.mark.nightly  # small models run in several orders in test_families.py
def test_interleavings_give_the_same_logits() -> None:
    options = EngineOptions(max_context=512, num_sms=5)
    seeds = range(20)
    found = run_measure(
        request(options=options, ids=paragraph_ids()[:11], num_prefilled=10, num_decoded=1,
                seeds=seeds, num_greedy=1),
        2,
    )  # fmt: skip
    assert len(found.decode) == len(seeds)
    for logits in found.decode[1:]:
        np.testing.assert_array_equal(logits, found.decode[0])
