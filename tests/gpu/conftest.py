"""Each test begins with the memory of a GPU free."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
