"""Every kind of work of the kernels of 1 to 16 rows over random extents: one launch, and floats as
exact as torch's own. Workers compile and run beside each other.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from distmega.errors import UnsupportedError
from tests.gpu.test_row_programs import check
from tests.kernels.random_bodies import BODIES, random_body

pytestmark = pytest.mark.gpu

LEAST_TAKEN = 0.7
"""Of random programs, those that the kernels take at least."""


def found_wrong(seed: int) -> tuple[int, str]:
    """What is wrong with a program; "" if nothing is, "refused" if no kernel takes it."""
    torch.set_num_threads(1)
    try:
        check(random_body(seed))
    except UnsupportedError:
        return seed, "refused"
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}"
    return seed, ""


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 200), marks=pytest.mark.nightly)], ids=len
)
def test_every_body_is_as_exact_as_torch(seeds):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        results = dict(pool.map(found_wrong, seeds))
    wrong = {seed: text for seed, text in results.items() if text not in ("", "refused")}
    refused = [seed for seed, text in results.items() if text == "refused"]
    for nth, body in enumerate(BODIES):
        mine = [seed for seed in seeds if seed % len(BODIES) == nth]
        taken = len(mine) - len([seed for seed in mine if seed in refused])
        bad = [seed for seed in mine if seed in wrong]
        print(f"{body.__name__}: {taken} of {len(mine)} in one launch, wrong: {bad}")
    assert not wrong
    assert len(refused) <= (1 - LEAST_TAKEN) * len(seeds), refused
