"""Logits that are not finite on a GPU: prompts, the decode kernels, and steps one by one."""

import math

import pytest

from distmega.errors import ModelError
from tests.gpu.engines import open_engine

pytestmark = pytest.mark.gpu

PROMPTS = ([5, 6, 7], [9, 8])
NUM_TOKENS = 40


@pytest.mark.parametrize("batch", [1, 4])
def test_a_cache_that_goes_bad_is_named_and_the_engine_stays(batch: int):
    engine = open_engine("smollm2-135m", batch, max_context=256)
    assert engine.stepping is not None
    prompts = PROMPTS[:batch]
    expected = list(engine.generate_all(prompts, NUM_TOKENS, ignore_eos=True))
    for value in (math.nan, math.inf):
        steps = engine.generate_all(prompts, NUM_TOKENS, ignore_eos=True)
        next(steps)
        engine.tensor("layers.3.v_cache").fill_(value)
        with pytest.raises(ModelError, match=r"first in 'layers\.3\.v_cache'"):
            list(steps)
        assert list(engine.generate_all(prompts, NUM_TOKENS, ignore_eos=True)) == expected


def test_weights_that_overflow_are_named_in_prompts_and_steps():
    engine = open_engine("smollm2-135m", max_context=256)
    engine.prefill(PROMPTS[0])
    engine.decode(7)
    engine.tensor("layers.2.ffn_norm").fill_(3e38)
    with pytest.raises(ModelError, match="numbers go wrong"):
        engine.decode(7)
    for call in (
        lambda: engine.prefill(PROMPTS[0]),
        lambda: engine.logits(PROMPTS[0]),
        lambda: list(engine.generate(PROMPTS[0], 4)),
    ):
        with pytest.raises(ModelError, match=r"first in 'layers\.3\.k_cache'"):
            call()
