"""Presets with few layers: what queues of four layers say holds for eighty, which are as these.

The whole models are for the nightly sweep: WHOLE names one.
"""

from dataclasses import replace

from distmega.models.config import ModelConfig
from distmega.models.presets import PRESETS

NUM_LAYERS = 4
"""The first, the last, and two whose neighbours are alike."""
WHOLE = " whole"
"""Behind a preset's name: with all its layers."""


def short_model(name: str) -> ModelConfig:
    """A preset with NUM_LAYERS layers, or whole if its name says so."""
    if name.endswith(WHOLE):
        return PRESETS[name.removesuffix(WHOLE)]
    return replace(PRESETS[name], num_layers=NUM_LAYERS)
