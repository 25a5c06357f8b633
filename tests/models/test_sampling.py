"""What may be asked of sampling, and the programs that it takes."""

import math

import pytest

from distmega.errors import RequestError
from distmega.models.sampling import GREEDY, MOST_LIKELY, Method, Sampling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1; expected 0, or from 1e-30 to 1e30; choose"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k -1; expected at least 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0.0; expected more than 0, at most 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p 1.1"),
        ({"temperature": 1.0, "seed": -1}, "seed -1; expected at least 0, below"),
        ({"temperature": 1.0, "seed": 2**63}, f"seed {2**63}"),
        ({"top_k": 5}, "top_k with temperature 0, where .* add temperature 1"),
        ({"top_p": 0.5}, "top_p with temperature 0"),
        ({"seed": 3}, "seed with temperature 0"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k 2.5; expected a whole number"),
        ({"temperature": 1.0, "top_k": True}, "top_k True; expected a whole number"),
        ({"temperature": 1.0, "top_k": 2**31}, "top_k 2147483648; expected below 2.31"),
        ({"temperature": 1.0, "seed": "1"}, "seed '1'; expected a whole number"),
        ({"temperature": True}, "temperature True; expected a number"),
        ({"temperature": None}, "temperature None; expected a number"),
        ({"temperature": math.inf}, "temperature inf; expected 0, or from 1e-30 to 1e30"),
        ({"temperature": 1e-40}, "temperature 1e-40; expected 0, or from 1e-30"),
        ({"temperature": 1.0, "top_p": "x"}, "top_p 'x'; expected a number"),
    ],
)
def test_refused(values: dict[str, float], message: str):
    with pytest.raises(RequestError, match=message):
        Sampling(**values)


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({}, GREEDY),
        ({"temperature": 0.7}, Method(kind="plain")),
        ({"temperature": 0.7, "top_p": 0.9}, Method(kind="limited")),
        ({"temperature": 0.7, "top_k": 1}, Method(kind="limited", num_candidates=64)),
        ({"temperature": 0.7, "top_k": 64}, Method(kind="limited", num_candidates=64)),
        ({"temperature": 0.7, "top_k": 65}, Method(kind="limited", num_candidates=128)),
        ({"temperature": 0.7, "top_k": 1024}, Method(kind="limited", num_candidates=1024)),
        ({"temperature": 0.7, "top_k": 1025, "top_p": 0.9}, Method(kind="limited")),
    ],
)
def test_method(values: dict[str, float], method: Method):
    assert Sampling(**values).method == method


def test_settings_are_what_the_program_takes():
    assert Sampling(temperature=0.5, seed=3).settings == (0.5, -math.inf)
    assert Sampling(temperature=0.5, top_k=7, top_p=0.25).settings == (0.5, 7.0, 0.25)
    assert not MOST_LIKELY.method.samples
