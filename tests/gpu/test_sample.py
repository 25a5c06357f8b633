"""Drawing inside the decode kernel: the library's tokens for the same logits and seed."""

import itertools

import pytest
import torch
from torch import Tensor

from distmega.kernels.hopper.batch.bodies.limits import list_words
from distmega.kernels.hopper.plan.words import (
    LIMITED,
    MAX_SMS,
    SAMPLE_CHUNK,
    SAMPLED,
    SEARCH_CHUNKS,
    SEARCHED,
    UNIT_ROWS,
    RowSample,
    pack,
)
from distmega.kernels.runtime.alarm import LOCAL_LIMIT_S, Alarm
from distmega.models.sampling import MAX_CANDIDATES, MOST_LIKELY, Sampling, joint_method
from distmega.program.ops import sampling as drawing
from tests.gpu import sample_kernel
from tests.gpu.engines import open_engine

pytestmark = pytest.mark.gpu

NUM_SAMPLES = 200


def sampled_by_kernel(
    logits: Tensor, settings: list[float], seed: int, num_ranks: int = 1, first_id: int = 0
) -> list[int]:
    """Tokens at NUM_SAMPLES positions; settings of two values are limits, of three are looked for.

    num_ranks: that share the logits where limits are looked for, else only make way for others'
    candidates. first_id: of the logits, where they are not all.
    """
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    vocab, kind = 0, kind_of(settings)
    if num_ranks > 1 and kind != SAMPLED:
        vocab = -(-len(logits) // num_ranks)
        logits = in_slots(logits, num_ranks, vocab)
    units = -(-len(logits) // UNIT_ROWS)
    starts = [units * sm // num_sms * UNIT_ROWS for sm in range(num_sms + 1)]
    rows = max(256 * (2 if vocab else 1), UNIT_ROWS * -(-units // num_sms))
    chunks_at = sample_kernel.BEST_WORDS.value + 2 * MAX_SMS * num_ranks
    src = chunks_at + max(2 + rows // SAMPLE_CHUNK + 1, SEARCH_CHUNKS) * SAMPLE_CHUNK * MAX_SMS
    queues = [
        pack(
            RowSample(
                name="sample",
                generation=0,
                row0=first,
                num_rows=min(last, len(logits)),
                src=src,
                rank_logits=vocab,
            )
        )
        for first, last in itertools.pairwise(starts)
    ]
    symmetric = torch.zeros(src + len(logits), dtype=torch.int64, device="cuda")
    alarm = Alarm(symmetric, LOCAL_LIMIT_S)
    tokens = torch.full((NUM_SAMPLES,), -1, dtype=torch.int32, device="cuda")
    sample_kernel.sample[(num_sms,)](
        torch.tensor(queues, dtype=torch.int32, device="cuda"),
        logits,
        first_id,
        torch.tensor(settings, device="cuda"),
        torch.tensor([seed], device="cuda"),
        symmetric,
        tokens,
        NUM_SAMPLES,
        0,
        chunks_at,
        KIND=kind,
        ROWS=1 << (rows - 1).bit_length(),
        RANKS=num_ranks,
        num_warps=8,
        launch_cooperative_grid=True,
    )
    sampled = tokens.tolist()
    assert alarm.take() is None
    return sampled


def in_slots(logits: Tensor, num_ranks: int, vocab: int) -> Tensor:
    """As ranks push them that have `vocab` ones each: whole units of each rank."""
    slots = torch.full((num_ranks, -(-vocab // UNIT_ROWS) * UNIT_ROWS), float("-inf"))
    for rank, part in enumerate(logits.split(vocab)):
        slots[rank, : len(part)] = part
    return slots.flatten().cuda()


def sampled_apart(
    logits: Tensor, settings: list[float], seed: int, num_ranks: int = 1
) -> list[int]:
    """As sampled_by_kernel by what draws for one of several sequences, 50 programs at once.
    num_ranks: by so many ranks' logits of 100 SMs each, the last of which may have none.
    """
    size, programs, num_sms = list_words(len(logits)), 50, 100
    row_maxima = torch.full((num_ranks, MAX_SMS), float("nan"))
    row_maxima[:, :num_sms] = float("-inf")
    for rank, own in enumerate(logits.cpu().chunk(num_ranks)):
        parts = torch.stack([part.max() for part in own.chunk(num_sms)])
        row_maxima[rank, : len(parts)] = parts
    tokens = torch.full((NUM_SAMPLES,), -1, dtype=torch.int32, device="cuda")
    sample_kernel.sample_apart[(programs,)](
        logits,
        row_maxima.cuda(),
        torch.tensor(settings, device="cuda"),
        torch.tensor([seed], device="cuda"),
        torch.empty(programs * size, dtype=torch.int64, device="cuda"),
        tokens,
        len(logits),
        num_sms,
        size,
        NUM_SAMPLES // programs,
        RANKS=num_ranks,
        num_warps=8,
    )
    return tokens.tolist()


def kind_of(settings: list[float]) -> int:
    if len(settings) < 3:
        return SAMPLED
    return LIMITED if 0 < settings[1] <= MAX_CANDIDATES else SEARCHED


def sampled_by_library(
    logits: Tensor, settings: list[float], seed: int, first_id: int = 0
) -> list[int]:
    limits = torch.tensor([settings], device=logits.device)
    if len(settings) == 3:
        limits = drawing.cutoff_values(logits[None], limits)
    positions = torch.arange(NUM_SAMPLES, device=logits.device)
    rows = logits.expand(NUM_SAMPLES, -1)
    seeds = torch.full_like(positions, seed)
    limits = limits.expand(NUM_SAMPLES, -1)
    last = first_id + len(logits)
    return drawing.sample_values(rows, limits, seeds, positions, first_id, last)[1].tolist()


def make_logits(kind: str, vocab: int) -> Tensor:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    match kind:
        case "in order":  # the largest all lie on one SM
            logits = logits.sort().values
        case "in groups":  # 12 of the largest on each of some SMs
            logits[:120] += 12
            logits[vocab // 2 : vocab // 2 + 12] += 20
        case "with ties":
            logits = logits.bfloat16().float()
        case "equal":
            logits = torch.full((vocab,), -2.5)
        case "far below":  # as masks are
            logits[::2] = -1e9
        case "one peak":
            logits[vocab // 3] = 60.0
    return logits.cuda()


# a top-k above the vocabulary is all of it; so is a least logit above all others none, and token 0
@pytest.mark.parametrize("vocab", [128256, 151936, 49152, 1000])
@pytest.mark.parametrize(
    "kind", ["random", "in order", "in groups", "with ties", "equal", "one peak", "far below"]
)
@pytest.mark.parametrize(
    "settings",
    [
        (0.7, float("-inf")), (1.5, 1.0), (0.8, 50.0, 0.9), (1.0, 1.0, 1.0), (1.3, 1024.0, 0.5),
        (2.0, 40.0, 1.0), (0.05, 200.0, 0.99), (0.9, 0.0, 0.9),
        (1.0, 5000.0, 0.95), (4.0, 3000.0, 1.0),
    ],
)  # fmt: skip
def test_tokens_are_the_librarys(kind, vocab, settings):
    logits, values = make_logits(kind, vocab), list(settings)
    seed = 2**40 + vocab
    found = sampled_by_kernel(logits, values, seed)
    assert found == sampled_by_library(logits, values, seed)
    assert found == sampled_by_kernel(logits, values, seed)
    if len(values) == 3:
        assert found == sampled_apart(logits, values, seed)


@pytest.mark.parametrize("vocab", [151936, 49152, 1003])
@pytest.mark.parametrize("kind", ["random", "in order", "with ties", "far below"])
@pytest.mark.parametrize("settings", [(0.8, 50.0, 0.9), (1.3, 1024.0, 0.5), (0.9, 0.0, 0.9)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_of_all_ranks_are_those_of_one(kind, vocab, settings, num_ranks):
    """The last rank of 1003 tokens has fewer than the others, and none has whole units."""
    logits, values = make_logits(kind, vocab), list(settings)
    found = sampled_by_kernel(logits, values, vocab, num_ranks)
    assert found == sampled_by_library(logits, values, vocab)
    assert found == sampled_apart(logits, values, vocab, num_ranks)


@pytest.mark.parametrize("settings", [(0.8, 50.0, 0.9), (1.0, 400.0, 0.95), (0.9, 0.0, 0.9)])
def test_eight_ranks_share_the_places_of_four(settings):
    """Of maxima, for one of several sequences."""
    logits, values = make_logits("random", 128256), list(settings)
    assert sampled_apart(logits, values, 7, 8) == sampled_by_library(logits, values, 7)


def test_a_part_of_the_vocabulary_draws_with_its_own_noise():
    """The second rank's candidate is the library's for a base of 24576 tokens."""
    logits, settings = make_logits("random", 24576), [0.7, float("-inf")]
    found = sampled_by_kernel(logits, settings, 7, num_ranks=2, first_id=24576)
    assert found == sampled_by_library(logits, settings, 7, first_id=24576)
    assert found != [24576 + token for token in sampled_by_library(logits, settings, 7)]


SAMPLES = {
    "plain": Sampling(temperature=15.0, seed=5),
    "limited": Sampling(temperature=40.0, top_k=50, top_p=0.9, seed=6),
    "top-p alone": Sampling(temperature=15.0, top_p=0.9, seed=7),
    "a large top-k": Sampling(temperature=15.0, top_k=5000, seed=8),
}
"""At which the most likely token of the random model has some percent of the probability, and no
token comes twice in a row except by chance: its logits have a deviation of 24.
"""


@pytest.mark.parametrize("batch", [3, 16])
@pytest.mark.parametrize("name", SAMPLES)
def test_sequences_draw_from_their_logits(name, batch):
    """As below, each sequence by its own seed and position."""
    sampling = SAMPLES[name]
    engine = open_engine("smollm2-135m", batch, sampling=sampling)
    prompts = [list(range(7, 12 + 5 * slot)) for slot in range(batch)]
    many = list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 12))
    one = [tuple(engine.prefill_all(prompts))]
    settings = torch.tensor([sampling.settings] * batch, device="cuda")
    seeds = torch.tensor([sampling.seed_of(slot) for slot in range(batch)], device="cuda")
    while len(one) < len(many):
        outputs = engine.decode_step(one[-1])
        one.append(tuple(outputs["next"].tolist()))
        logits = engine.stepping.logits[:batch] if engine.stepping else outputs["logits"]
        limits = drawing.cutoff_values(logits, settings) if settings.shape[1] == 3 else settings
        cached = [len(prompt) + len(one) - 2 for prompt in prompts]
        positions = torch.tensor(cached, device="cuda")
        sampled = drawing.sample_values(logits, limits, seeds, positions, 0, logits.shape[1])[1]
        assert one[-1] == tuple(sampled.tolist())
    assert many == one
    assert len({token for tokens in many for token in tokens}) > 3 * batch


MIXED = {
    "plain": (MOST_LIKELY, SAMPLES["plain"], MOST_LIKELY, SAMPLES["plain"]),
    "top-k": (SAMPLES["limited"], MOST_LIKELY, Sampling(temperature=15.0, top_k=3, seed=9)),
    "all": (MOST_LIKELY, *SAMPLES.values()),
}
"""Samplings of sequences that are decoded together."""


@pytest.mark.parametrize("name", MIXED)
def test_each_sequence_draws_its_own_way(name):
    """In one launch and in single steps, as the library does with its logits; those at temperature
    0 take the most likely token.
    """
    samplings = MIXED[name]
    batch, method = len(samplings), joint_method(samplings)
    engine = open_engine("smollm2-135m", batch, sampling=samplings)
    prompts = [list(range(7, 12 + 5 * slot)) for slot in range(batch)]
    many = list(itertools.islice(engine.generate_all(prompts, ignore_eos=True), 12))
    one = [tuple(engine.prefill(prompt, slot) for slot, prompt in enumerate(prompts))]
    settings = torch.tensor([method.settings_of(one) for one in samplings], device="cuda")
    seeds = torch.tensor([sampling.seed for sampling in samplings], device="cuda")
    while len(one) < len(many):
        outputs = engine.decode_step(one[-1])
        one.append(tuple(outputs["next"].tolist()))
        logits = engine.stepping.logits[:batch] if engine.stepping else outputs["logits"]
        limits = drawing.cutoff_values(logits, settings) if settings.shape[1] == 3 else settings
        cached = [len(prompt) + len(one) - 2 for prompt in prompts]
        positions = torch.tensor(cached, device="cuda")
        sampled = drawing.sample_values(logits, limits, seeds, positions, 0, logits.shape[1])[1]
        assert one[-1] == tuple(sampled.tolist())
        for slot, sampling in enumerate(samplings):
            assert sampling.temperature or one[-1][slot] == int(logits[slot].argmax())
    assert many == one


def test_one_engine_serves_sequences_of_several_samplings():
    """One after the other, as engines of their own do."""
    samplings, prompt = (MOST_LIKELY, *SAMPLES.values()), list(range(7, 40))
    engine = open_engine("smollm2-135m", sampling=samplings)
    for sampling in samplings:
        alone = open_engine("smollm2-135m", sampling=sampling)
        expected = list(alone.generate(prompt, 20, ignore_eos=True))
        assert list(engine.generate(prompt, 20, sampling, ignore_eos=True)) == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_steps_draw_from_their_logits(name):
    """Several steps a launch give the tokens of single steps, and these are the library's."""
    engine, sampling = open_engine("smollm2-135m", sampling=SAMPLES[name]), SAMPLES[name]
    prompt = list(range(7, 40))
    many = list(itertools.islice(engine.generate(prompt, ignore_eos=True), 40))
    one = [engine.prefill(prompt)]
    settings = torch.tensor([sampling.settings], device="cuda")
    while len(one) < len(many):
        outputs = engine.decode_step([one[-1]])
        one.append(int(outputs["next"][0]))
        logits = engine.stepping.logits[None] if engine.stepping else outputs["logits"]
        limits = drawing.cutoff_values(logits, settings) if settings.shape[1] == 3 else settings
        seeds = torch.tensor([sampling.seed], device="cuda")
        positions = torch.tensor([len(prompt) + len(one) - 2], device="cuda")
        sampled = drawing.sample_values(logits, limits, seeds, positions, 0, logits.shape[1])[1]
        assert one[-1] == int(sampled)
    assert many == one
    assert len(set(many)) > 10
