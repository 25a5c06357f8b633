"""What passes of prompts hand to the host: words with the number of their pass."""

from array import array
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from distmega.engine import pass_memory
from distmega.engine.packing import PromptPart
from distmega.engine.pass_memory import MOST_PASSES, SentRows, SentTokens
from distmega.hostir.run.deadline import Reached, ends_within
from distmega.models.decoder import PEAKS

CPU = torch.device("cpu")
LAST_TOKEN = (1 << 31) - 1


def outputs(tokens: list[int], values: list[float], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"next": torch.tensor(tokens), PEAKS: torch.tensor(values, dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [1, 2, MOST_PASSES])
def test_tokens_come_with_whether_their_values_are_finite(dtype: torch.dtype, number: int):
    sent, slots = SentTokens(6, CPU), [0, 1, 2, 3, 4, 5]
    infinite = float("inf")
    values = [0.0, -0.0, -1.5, infinite, -infinite, float("nan")]
    answer = sent.answer(slots, number)
    assert not answer.query()
    found = outputs([0, 1, 7, 8, LAST_TOKEN, 9], values, dtype)
    sent.queue(found, torch.tensor([number]))
    assert answer.query()
    assert answer.read() == {
        0: (0, True), 1: (1, True), 2: (7, True),
        3: (8, False), 4: (LAST_TOKEN, False), 5: (9, False),
    }  # fmt: skip
    assert not sent.answer(slots, number % MOST_PASSES + 1).query(), "a pass behind it"


def test_tokens_are_there_once_both_words_of_every_asked_slot_are():
    sent = SentTokens(3, CPU)
    sent.queue(outputs([1, 2, 3], [1.0, -1.0, 1.0], torch.float32), torch.tensor([1]))
    before = [row.clone() for row in sent._mapped]
    sent.queue(outputs([4, 5, 6], [-1.0, 1.0, -1.0], torch.float32), torch.tensor([2]))
    after = [row.clone() for row in sent._mapped]
    for row in range(2):
        for slot in range(3):
            sent._mapped[row][slot] = before[row][slot]
            others = [n for n in range(3) if n != slot]
            assert not sent.answer([0, 1, 2], 2).query()
            assert sent.answer(others, 2).query()
            sent._mapped[row][slot] = after[row][slot]
    assert sent.answer([2, 0], 2).read() == {2: (6, True), 0: (4, True)}


def sent_rows() -> SentRows:
    """Rows whose copy never ran."""
    rows = SentRows(2, 1, 4, CPU)
    rows.lay([PromptPart(slot=0, position=0, ids=array("q", (1, 2)), ends=True)])
    rows.note_sent()
    return rows


@pytest.mark.parametrize(
    "make", [lambda: SentTokens(1, CPU).answer([0], 1), sent_rows], ids=["tokens", "rows"]
)
def test_a_gpu_that_has_failed_ends_the_wait_with_its_own_error(make: Callable[[], Reached]):
    """Words of a kernel that never ran don't come; the driver knows why."""

    class Stream:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with (
        patch.object(pass_memory.torch.cuda, "is_available", lambda: True),
        patch.object(pass_memory.torch.cuda, "current_stream", Stream),
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        ends_within(make(), 10.0)
