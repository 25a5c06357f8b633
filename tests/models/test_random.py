"""Random weights: every slice is a part of the same full weight."""

import numpy as np
import pytest
import torch

from distmega.errors import ModelError
from distmega.models.presets import PRESETS
from distmega.models.weights.random_device import fill_random
from distmega.models.weights.random_source import RandomReader
from distmega.models.weights.tensors import weight_specs
from distmega.sources.load import open_model


@pytest.mark.parametrize("name", ["layers.1.wq", "layers.0.wo", "embed", "norm", "layers.1.wk"])
def test_slices_are_parts(name: str):
    reader = open_model("tiny-llama").weight(name)
    full = reader.read()
    assert full.shape == reader.shape
    rng = np.random.default_rng(0)
    for _ in range(20):
        ends = [sorted(rng.integers(0, extent + 1, 2).tolist()) for extent in reader.shape]
        part = tuple(slice(*bounds) for bounds in ends)
        np.testing.assert_array_equal(reader.read(part), full[part])


def test_deterministic_and_distinct():
    one, again, other = (open_model("tiny-llama", seed=seed) for seed in (1, 1, 2**32))
    full = one.weight("layers.0.w_up").read()
    np.testing.assert_array_equal(full, again.weight("layers.0.w_up").read())
    assert not np.array_equal(full, other.weight("layers.0.w_up").read())
    assert not np.array_equal(full, one.weight("layers.1.w_up").read())


def test_scale():
    specs = weight_specs(PRESETS["qwen3-0.6b"])
    for name, mean, deviation in (
        ("layers.0.wq", 0.0, 1024**-0.5),
        ("layers.0.w_down", 0.0, 3072**-0.5),
        ("layers.0.attn_norm", 1.0, 0.25 / 3**0.5),
    ):
        values = RandomReader(spec=specs[name]).read()
        assert values.mean() == pytest.approx(mean, abs=4 * deviation / values.size**0.5)
        assert values.std() == pytest.approx(deviation, rel=0.05)


def test_neighbours_do_not_correlate():
    values = RandomReader(spec=weight_specs(PRESETS["qwen3-0.6b"])["layers.0.w_up"]).read()
    for shifted in (values[1:, :], values[:, 1:]):
        base = values[: shifted.shape[0], : shifted.shape[1]]
        assert abs(np.corrcoef(base.ravel(), shifted.ravel())[0, 1]) < 0.003


def test_unknown_weight():
    with pytest.raises(ModelError, match="bq"):
        open_model("tiny-llama").weight("layers.0.bq")


@pytest.mark.parametrize("slices", [(), (slice(3, 9), slice(5, 60))])
def test_a_device_makes_the_same_values(slices):
    for spec in list(weight_specs(PRESETS["tiny-qwen2"]).values())[:12]:
        reader = RandomReader(spec=spec, seed=5)
        wanted = slices[: len(reader.shape)]
        expected = reader.read(wanted)
        made = torch.empty(expected.shape)
        padded = torch.empty([extent + 1 for extent in expected.shape])
        part = padded[tuple(slice(extent) for extent in expected.shape)]
        for into in (made, part):
            fill_random(reader, wanted, into)
            np.testing.assert_array_equal(into.numpy(), expected)
