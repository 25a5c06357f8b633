"""Rotary frequencies and the rope_table weight of the decoder: a ModelConfig comes in, float32
cosines and sines go out.

Frequencies are rounded to float32 and multiplied by positions in float32, as the models were
trained and as transformers does, so that long positions agree with it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from distmega.models.config import ModelConfig, RopeScaling

IGNORE_OVERFLOW = np.errstate(over="ignore", invalid="ignore")
"""A base for which angles are no numbers is named as the table is loaded: engine/soundness.py."""


@IGNORE_OVERFLOW
def rope_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Radians per position of each of the head_dim / 2 rotary pairs, after scaling."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain = config.rope_base**-exponents
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        plain = plain / scaling.factor
    elif scaling.kind == "factors":
        plain = plain / np.asarray(scaling.factors)
    elif scaling.kind == "llama3":
        plain = _llama3(plain, scaling)
    elif scaling.kind == "yarn":
        plain = _yarn(plain, scaling, config)
    return plain.astype(np.float32)


@IGNORE_OVERFLOW
def rope_table(config: ModelConfig, start: int, stop: int) -> NDArray[np.float32]:
    """Rows start to stop of the table: [stop - start, head_dim], cosines of the pairs and then
    their sines.
    """
    angles = np.arange(start, stop, dtype=np.float32)[:, None] * rope_frequencies(config)[None, :]
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return (table * np.float32(config.rope_scaling.attention_factor)).astype(np.float32)


def _llama3(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Keeps frequencies that turn high_freq_factor times in the original context, divides those
    below low_freq_factor.
    """
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(
    plain: NDArray[np.float64], scaling: RopeScaling, config: ModelConfig
) -> NDArray[np.float64]:
    """Keeps pairs that turn more than beta_fast times, divides those below beta_slow, and ramps in
    between.
    """

    def pair_of(num_turns: float) -> float:
        period = scaling.original_max_positions / (num_turns * 2 * math.pi)
        return config.head_dim * math.log(period) / (2 * math.log(config.rope_base))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    span = high - low or 0.001
    divided = np.clip((np.arange(len(plain)) - low) / span, 0.0, 1.0)
    ramped: NDArray[np.float64] = plain / scaling.factor * divided + plain * (1 - divided)
    return ramped
