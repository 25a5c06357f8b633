"""Prompts are read as arrays, but give and refuse what reading a token at a time does."""

import re

import numpy as np
import pytest
import torch

import distmega
from distmega.engine.calls import FEW_TOKENS, prompt_tokens, require_tokens
from distmega.errors import RequestError
from tests.e2e.test_library import CPU_RANK

VOCAB = 300
MANY = [token % VOCAB for token in range(FEW_TOKENS)]
"""One more is read in another way."""


class OnGpu:
    """A whole number as a tensor of a GPU is one: NumPy can't read it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"OnGpu({self.value})"

    def __index__(self) -> int:
        return self.value

    def __array__(self, *arguments: object, **options: object) -> None:
        raise TypeError("can't convert a tensor of a GPU to numpy")


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 299],
        (0,),
        range(5),
        [],
        np.arange(7, dtype=np.uint8),
        np.zeros(0, dtype=np.int32),
        torch.arange(4),
        [np.int32(3), 4],
        [torch.tensor(5), 6],
        [OnGpu(3), OnGpu(4)],
        np.arange(5)[::-1],
        np.arange(8)[::2],
        np.arange(8, dtype=">i8"),
        MANY,
        [*MANY, 299],
        (*MANY, 0),
    ],
    ids=lambda ids: str(ids)[:40],
)
def test_what_is_a_token_at_a_time_is_one_in_many(ids):
    found = prompt_tokens(ids, VOCAB)
    assert found.typecode == "q"
    assert found.tolist() == require_tokens(ids, VOCAB)


@pytest.mark.parametrize(
    "ids",
    [
        [1, 300],
        [-1, 2],
        [2**63],
        [2**70],
        [-(2**63), 2**63],
        [1.0, 2],
        np.ones(3),
        np.array([2**63], dtype=np.uint64),
        [[1, 2], [3]],
        [[1, 2], [3, 4]],
        np.ones((2, 2), dtype=np.int64),
        ["1"],
        [np.True_, 1],
        [True, 2],
        (False,),
        np.ones(3, dtype=bool),
        torch.tensor([True, False]),
        [torch.tensor(True), 1],
        [np.float32(1)],
        torch.ones(2),
        "12",
        b"12",
        {1, 2},
        {1: 2},
        None,
        7,
        np.ma.masked_array([1, 2], mask=[0, 1]),
        [torch.empty((), device="meta")],
        [*MANY, 300],
        [*MANY, -1],
        [*MANY, 2**63],
        [*MANY, True],
        [*MANY[1:], 300],
    ],
    ids=lambda ids: str(ids)[:40],
)
def test_what_is_refused_a_token_at_a_time_is_refused_in_the_same_words(ids):
    with pytest.raises(RequestError) as one:
        require_tokens(ids, VOCAB)
    with pytest.raises(RequestError) as many:
        prompt_tokens(ids, VOCAB)
    assert str(many.value) == str(one.value)


@pytest.mark.parametrize("ids", [[True, False], [1.5], torch.tensor([True])], ids=str)
def test_an_engine_names_what_are_no_tokens(ids):
    engine = distmega.open_engine(
        CPU_RANK, distmega.open_model("tiny-llama"), 1, distmega.EngineOptions(max_context=8)
    )
    named = re.escape(f"tokens {ids}; expected whole numbers in a sequence")
    for call in (engine.prefill, engine.logits, lambda ids: next(engine.generate(ids))):
        with pytest.raises(RequestError, match=named):
            call(ids)
    engine.prefill([np.int64(1)])
    with pytest.raises(RequestError, match=named):
        engine.decode_step(ids)
    assert engine.decode(np.int32(2)) >= 0
