"""Fuzz targets: what reads text or files from outside either succeeds or raises a DistmegaError.

Comes in: a hypothesis strategy and what reads its values. Goes out: a test of 100 examples, and one
of 2,000 that runs at night (make test-nightly).
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distmega.errors import DistmegaError

T = TypeVar("T")

NUM_EXAMPLES, NUM_NIGHTLY = 100, 2000
_SLOW_INPUTS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def fuzz_target(values: st.SearchStrategy[T], read: Callable[[T], object]) -> Callable[[int], None]:
    """A test that `read` takes each value or refuses it; whatever else it raises is a failure."""
    nightly = pytest.param(NUM_NIGHTLY, marks=pytest.mark.nightly)

    @pytest.mark.parametrize("num_examples", [NUM_EXAMPLES, nightly])
    def test(num_examples: int) -> None:
        @settings(max_examples=num_examples, database=None, suppress_health_check=_SLOW_INPUTS)
        @given(values)
        def run(value: T) -> None:
            with suppress(DistmegaError):
                read(value)

        run()

    return test


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[str], words: Sequence[str]) -> str:
    """One of the seeds with a few parts cut out, repeated, or replaced by words or any text."""
    text = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = min(start + draw(st.integers(0, 12)), len(text))
        middle = draw(
            st.sampled_from([*words, text[start:stop] * 3, ""])
            | st.text(max_size=6)
            | st.builds(
                lambda word, times: word * times, st.sampled_from(words), st.integers(0, 3000)
            )
        )
        text = text[:start] + middle + text[stop:]
    return text


@st.composite
def damaged_bytes(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with a few bytes changed, cut out or put in, or its end lost."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["set", "number", "cut", "insert", "end"]))
        if kind == "set" and start < len(data):
            data[start] = draw(st.integers(0, 255))
        elif kind == "number":
            width = draw(st.sampled_from([1, 2, 4, 8]))
            edge = draw(st.sampled_from([0, 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1, 3]))
            data[start : start + width] = edge.to_bytes(width, "little")
        elif kind == "cut":
            del data[start : start + draw(st.integers(1, 16))]
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=16))
        elif kind == "end":
            del data[start:]
    return bytes(data)


_NUMBERS = [0, 1, -1, 2, 3, 2**31, 2**40, 10**30, 0.0, -1.0, 0.5, 1e-45, 1e30, 1e300, float("nan")]
_plain = (
    st.sampled_from([*_NUMBERS, None, True, "", "a", "yarn", "<a b>", ":0", "x" * 100])
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
)
json_values = st.recursive(
    _plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=2)
)


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[object]) -> object:
    """One of some JSON values with up to three parts, at any depth, replaced, left out or added."""
    root = json.loads(json.dumps({"root": draw(st.sampled_from(seeds))}))
    for _ in range(draw(st.integers(1, 3))):
        at, key = root, "root"
        while isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 3)):
            at = at[key]
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if draw(st.booleans()) or at is root:
            at[key] = draw(json_values)
        elif isinstance(at, dict):
            del at[key]
        else:
            at.append(draw(json_values))
    return root["root"]
