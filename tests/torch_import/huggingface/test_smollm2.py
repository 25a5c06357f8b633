"""SmolLM2's real weights as a Hugging Face folder, captured, beside the built-in decoder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import distmega
from distmega.sources.load import ModelSource, open_model
from distmega.torch_import.huggingface.source import read_decoder, read_weights
from tests.e2e.reference import llama_from_source
from tests.torch_import.test_folders import RANK

PROMPT, NUM = "The capital of France is", 64


def tokens(source: ModelSource, ids: list[int], num_ranks: int = 1) -> list[int]:
    options = distmega.EngineOptions(max_context=128)
    engine = distmega.open_engine(RANK, source, num_ranks, options)
    return [int(step[0]) for step in engine.generate_all([ids], NUM)]


@pytest.mark.nightly
def test_tokens_are_those_of_the_built_in_decoder_and_of_transformers(tmp_path: Path):
    built = open_model("smollm2")
    model = llama_from_source(built)
    model.save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path / "config.json", ())
    captured = replace(built, config=decoder, readers=read_weights(tmp_path, decoder))
    ids = built.tokenizer().encode(PROMPT)
    expected = model.generate(
        torch.tensor([ids]), max_new_tokens=NUM, do_sample=False, pad_token_id=0,
        eos_token_id=built.config.vocab + 1, attention_mask=torch.ones(1, len(ids)).long(),
    )[0, len(ids) :].tolist()  # fmt: skip
    found = tokens(captured, ids)
    assert not decoder.opaque
    assert found == expected
    unending = replace(built.config, eos_ids=())
    assert found == tokens(replace(built, config=unending), ids)
