"""Prompts packed into passes, whole or in parts, each as it is alone."""

import itertools
from array import array
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmega.engine.engine import Engine
from distmega.engine.packing import (
    ROWS,
    PassRows,
    pack_prompts,
    row_lengths,
)
from distmega.engine.pass_memory import SentRows
from distmega.engine.requests import EngineOptions
from distmega.errors import HangError, RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.launch.contract import LauncherOptions, Result
from distmega.launch.launchers import launch
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.e2e.running import relative_error
from tests.e2e.targets import MeasurePacked, Packed
from tests.e2e.test_smollm2 import MODEL, TOLERANCE, expected_logits, paragraph_ids
from tests.models.files import FAMILIES

CONTEXT = 64
NUM_DECODED = 3


def open_tiny(
    name: str, batch: int, budget: int = 8192, sampling: Sampling = MOST_LIKELY
) -> Engine:
    mesh, comm = DeviceMesh(tp=1), SingleCommunicator(DeviceMesh(tp=1))
    options = EngineOptions(max_context=CONTEXT, batch=batch, max_batched_tokens=budget)
    return Engine(open_model(name), mesh, comm, options, sampling=sampling)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 288, (n,), generator=generator).tolist() for n in lengths]


def run_packed(request: MeasurePacked, num_ranks: int) -> Packed:
    options = LauncherOptions(launcher="local", num_ranks=num_ranks, timeout_s=120.0, device="cpu")
    *_, last = launch("tests.e2e.targets:measure_packed", request, options)
    assert isinstance(last, Result)
    assert isinstance(last.value, Packed)
    return last.value


def flip(ids: "array[int]") -> "array[int]":
    return array("q", (9 - token for token in ids))


@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=9)),
    st.integers(1, 12),
    st.integers(0, 4),
)
def test_passes_hold_each_token_once_and_in_order(prompts, budget, spare):
    passes = pack_prompts({slot: array("q", ids) for slot, ids in prompts.items()}, budget)
    cached = dict.fromkeys(prompts, 0)
    kept: dict[int, PassRows] = {}
    for number, parts in enumerate(passes):
        size = sum(len(part.ids) for part in parts)
        assert size == budget or number == len(passes) - 1
        if size not in kept:
            kept[size] = PassRows(size + spare, 6, 9)
            kept[size].memory.fill_(-7)
        laid = kept[size]
        for flipped in (True, False):  # other tokens in the same rows, then these
            laid.lay([replace(part, ids=flip(part.ids)) if flipped else part for part in parts])
        numbers = laid.memory[:-1].split(row_lengths(size + spare, 6))
        rows = dict(zip(ROWS, (part.tolist() for part in numbers), strict=True))
        starts = rows["starts"]
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        assert (starts[0], starts[-1]) == (0, size + spare)
        sequences = [slot for slot, count in enumerate(counts) for _ in range(count)]
        assert rows["sequences"] == sequences
        assert rows["tokens"][size:] == [0] * spare
        for part in parts:
            assert part.position == cached[part.slot], "what came before is in the cache"
            cached[part.slot] = part.stop
            first, stop = starts[part.slot : part.slot + 2]
            extra = spare if part is parts[-1] else 0
            assert rows["positions"][first:stop] == [*range(part.position, part.stop + extra)]
            assert rows["tokens"][first : stop - extra] == list(part.ids)
            assert rows["last"][part.slot] == stop - extra - 1
            assert rows["last_positions"][part.slot] == part.stop - 1
            assert part.ends == (part.stop == len(prompts[part.slot]))
        absent = {*range(6)} - {part.slot for part in parts}
        assert all(rows["last"][slot] == 0 for slot in absent)
    assert cached == {slot: len(ids) for slot, ids in prompts.items()}


def test_rows_that_were_half_laid_are_laid_again():
    """As where a user interrupts a call and makes the one before again."""
    (first,) = pack_prompts({0: array("q", (1, 2)), 1: array("q", (3,))}, 8)
    (second,) = pack_prompts({1: array("q", (4, 5, 6))}, 8)
    rows, expected = PassRows(4, 2, 8), PassRows(4, 2, 8)
    expected.lay(first)
    rows.lay(first)
    with (
        patch("distmega.engine.packing.accumulate", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        rows.lay(second)
    rows.lay(first)
    assert torch.equal(rows.memory, expected.memory)


@pytest.mark.nightly  # small models below, on one rank and on two
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_real_weights_give_what_each_prompt_gives_alone(num_ranks: int):
    """A pass of 100 tokens at a time: the longest prompt is taken in three parts, the second pass
    holds three prompts. Logits are those of transformers, who sees each prompt alone.
    """
    ids, lengths = paragraph_ids(), (230, 33, 1, 60)
    request = MeasurePacked(
        model=MODEL,
        sequences=[ids[: length + 1] for length in lengths],
        num_decoded=1,
        options=EngineOptions(max_context=256, batch=4, max_batched_tokens=100),
    )
    found, expected = run_packed(request, num_ranks), expected_logits()
    assert found.tokens == [int(expected[length - 1].argmax()) for length in lengths]
    for length, rows in zip(lengths, found.decode, strict=True):
        assert relative_error(rows, expected[length : length + 1]) < TOLERANCE
    assert relative_error(found.prefill, expected[: lengths[0] + 1]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("mistral", 2), pytest.param("qwen2", 1, marks=pytest.mark.nightly), ("qwen3", 1)],
)
def test_families_packed_in_parts_equal_transformers(name: str, num_ranks: int, tmp_path: Path):
    """Windows, biases, norms of heads. A pass takes 17 tokens at a time: the longest prompt comes
    in parts, others together.
    """
    model = FAMILIES[name].build()
    model.save_pretrained(tmp_path / name)
    sequences = random_prompts(44, 5, 30)
    request = MeasurePacked(
        model=str(tmp_path / name),
        sequences=sequences,
        num_decoded=NUM_DECODED,
        options=EngineOptions(max_context=CONTEXT, batch=3, max_batched_tokens=17),
    )
    found = run_packed(request, num_ranks)
    for ids, rows in zip(sequences, found.decode, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].float().numpy()
        assert relative_error(rows, expected[-NUM_DECODED:]) < TOLERANCE


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, seed=4), Sampling(temperature=0.8, top_p=0.9)]
)
def test_drawn_tokens_are_those_of_each_prompt_alone(sampling: Sampling):
    prompts = random_prompts(9, 20, 4)
    packed = open_tiny("tiny-llama", 3, 16, sampling)
    alone = open_tiny("tiny-llama", 3, sampling=sampling)
    found = packed.prefill_all(prompts)
    assert found == [alone.prefill(prompt, slot) for slot, prompt in enumerate(prompts)]
    steps = [engine.decode_step(found)["next"].tolist() for engine in (packed, alone)]
    assert steps[0] == steps[1]


def test_other_slots_keep_what_they_have():
    """A prompt for one slot, filled up to its program's size, leaves the others alone."""
    engine, other = open_tiny("tiny-qwen3", 3), open_tiny("tiny-qwen3", 3)
    prompts = random_prompts(12, 30, 7)
    tokens = engine.prefill_all(prompts)
    other.prefill_all(prompts)
    with patch("distmega.engine.prefill.prefill_size", lambda decode_plan, num, most: num + 16):
        assert engine.prefill(prompts[1], 1) == tokens[1]
    for _ in range(3):
        steps = [each.decode_step(tokens)["next"].tolist() for each in (engine, other)]
        assert steps[0] == steps[1]
        tokens = steps[0]


def test_a_cache_filled_to_its_end_is_no_larger_program():
    engine = open_tiny("tiny-llama", 2)
    sizes: list[tuple[int, int]] = []

    def size_of(decode_plan: object, num_tokens: int, most: int) -> int:
        sizes.append((num_tokens, most))
        return num_tokens

    with patch("distmega.engine.prefill.prefill_size", size_of):
        engine.prefill_all(random_prompts(10, CONTEXT))
        engine.prefill_all(random_prompts(CONTEXT, 10))
    assert sizes == [(10 + CONTEXT, 10 + CONTEXT), (CONTEXT + 10, 2 * CONTEXT)]


def test_rows_may_be_written_once_those_that_were_sent_have_arrived():
    rows = SentRows(4, 1, 8, torch.device("cpu"))
    parts = pack_prompts({0: array("q", (1, 2, 3))}, 8)[0]
    for _ in range(2):
        assert rows.query()
        rows.lay(parts)
        assert rows.query(), "nothing is sent: what came between them has failed"
        rows.lay(parts)
        rows.note_sent()
        assert not rows.query()
        rows.queue_copy()
        assert rows.query()
    assert rows.parts[0].tolist() == [1, 2, 3, 0]


def test_rows_that_a_gpu_never_takes_end_the_wait_and_stay_as_they_are():
    """The pass before waits in vain, so that the next one's rows can't be laid."""
    engine = open_tiny("tiny-llama", 1)
    token = engine.prefill([1, 2, 3])
    (program,) = engine._prefills._programs.values()
    rows = [part.clone() for part in program.memory.rows.parts]
    with (
        patch.object(program.memory.rows, "query", lambda: False),
        patch.object(engine._prefills, "_limit_s", 0.05),
        pytest.raises(HangError, match="a prompt of rank 0: still under way"),
    ):
        engine.prefill([4, 5, 6])
    assert all(map(torch.equal, program.memory.rows.parts, rows))
    assert engine.prefill([1, 2, 3]) == token


def test_what_does_not_fit_is_named_and_nothing_runs():
    engine = open_tiny("tiny-llama", 2)
    for prompts, found in (
        ([[1], []], "an empty prompt in slot 1"),
        ([[1], [2], [3]], "a sequence for slot 2"),
        (
            [[1], [0] * (CONTEXT + 1)],
            f"{CONTEXT + 1} tokens after 0 in slot 1; expected at most {CONTEXT} positions",
        ),
        ([[1], [2, 288]], "token 288 in slot 1; expected tokens of 0 to 287"),
        ([[1], [-1]], "token -1 in slot 1"),
        ([[1], ["a"]], r"tokens \['a'\]; expected whole numbers"),
    ):
        with pytest.raises(RequestError, match=found):
            engine.prefill_all(prompts)
    assert not engine._prefills._programs, "nothing was planned"
    with pytest.raises(RequestError, match="max_batched_tokens 0; expected at least 1"):
        EngineOptions(max_batched_tokens=0)
