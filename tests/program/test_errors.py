"""Words of messages."""

import pytest

from distmega.errors import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "row", "0 rows"), (1, "rank", "1 rank"), (2, "rank", "2 ranks"), (-1, "SM", "-1 SMs"),
        (1, "process", "1 process"), (3, "process", "3 processes"), (1, "kv head", "1 kv head"),
    ],
)  # fmt: skip
def test_one_is_counted_in_the_singular(count: int, noun: str, text: str):
    assert counted(count, noun) == text
