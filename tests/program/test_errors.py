"""Words of messages, and errors on their way to another process."""

import pickle

import pytest

from distmega.errors import RequestError, counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "row", "0 rows"), (1, "rank", "1 rank"), (2, "rank", "2 ranks"), (-1, "SM", "-1 SMs"),
        (1, "process", "1 process"), (3, "process", "3 processes"), (1, "kv head", "1 kv head"),
    ],
)  # fmt: skip
def test_one_is_counted_in_the_singular(count: int, noun: str, text: str):
    assert counted(count, noun) == text


class NumberError(RequestError):
    """Takes other arguments than the errors here."""

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}", expected="another", remedy="choose one")
        self.number = number


def test_an_error_of_a_users_class_is_pickled_as_it_is():
    error = pickle.loads(pickle.dumps(NumberError(3)))
    assert isinstance(error, NumberError)
    assert (str(error), error.number) == (str(NumberError(3)), 3)
