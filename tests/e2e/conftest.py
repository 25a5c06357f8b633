"""End-to-end tests fork the ranks that they start themselves; their commands start them anew."""

from collections.abc import Iterator

import pytest

from tests.forked import forked_ranks


@pytest.fixture(scope="module", autouse=True)
def _fork_ranks() -> Iterator[None]:
    with forked_ranks():
        yield
