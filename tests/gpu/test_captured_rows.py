"""Decode steps of several sequences of captured decoders, as one kernel: as exact as torch."""

import pytest

from distmega.torch_import.huggingface.decoders import open_decoder
from tests.gpu.test_row_programs import check
from tests.torch_import.small_decoders import CONTEXT, DECODERS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", DECODERS)
def test_a_captured_decoder_is_one_launch(name, batch):
    decoder = open_decoder(DECODERS[name]())
    check(decoder.build(1, CONTEXT, batch=batch, dtype="bf16", logits="last"))
