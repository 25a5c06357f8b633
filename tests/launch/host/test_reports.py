"""What is said of a process that has ended."""

import pytest

from distmega.launch.host.reports import describe_exit


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL (signal 9)"),
        (-40, "was killed by a signal without a name (signal 40)"),  # one of the real-time ones
    ],
)
def test_an_exit_is_described_whatever_caused_it(code: int, said: str):
    assert describe_exit(code) == said
