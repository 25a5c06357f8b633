"""The ranks that all tests of this folder share."""

from collections.abc import Callable, Iterator

import pytest

from tests.multigpu.ranks import Groups


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., None]]:
    """Groups.run; all groups end with the session."""
    groups = Groups()
    yield groups.run
    groups.end()
