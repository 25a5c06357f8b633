"""Drawing inside the decode kernel: the library's tokens for the same logits and seed."""

import itertools

import pytest
import torch
from torch import Tensor

from distmega.hostir import sampling
from distmega.kernels.hopper.alarm import LOCAL_LIMIT_S, Alarm
from distmega.kernels.hopper.batch_limits import list_words
from distmega.kernels.hopper.words import (
    DRAWN,
    LIMITED,
    MAX_SMS,
    REPORT_WORDS,
    SAMPLE_CHUNK,
    SEARCH_CHUNKS,
    SEARCHED,
)
from distmega.models.sampling import MAX_CANDIDATES, Sampling
from tests.gpu import sample_kernel
from tests.gpu.engines import open_engine

pytestmark = pytest.mark.gpu

NUM_DRAWS = 200


def drawn_by_kernel(logits: Tensor, settings: list[float], seed: int) -> list[int]:
    """Tokens at NUM_DRAWS positions; settings of two values are limits, of three are looked for."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows = -(-len(logits) // num_sms)
    chunks_at = REPORT_WORDS + 2 * MAX_SMS
    num_chunks = max(2 + rows // SAMPLE_CHUNK + 1, SEARCH_CHUNKS)
    words = chunks_at + num_chunks * SAMPLE_CHUNK * MAX_SMS
    exchange = torch.zeros(words, dtype=torch.int64, device="cuda")
    alarm = Alarm(exchange, LOCAL_LIMIT_S)
    tokens = torch.full((NUM_DRAWS,), -1, dtype=torch.int32, device="cuda")
    sample_kernel.draw[(num_sms,)](
        logits,
        torch.tensor(settings, device="cuda"),
        torch.tensor([seed], device="cuda"),
        exchange,
        tokens,
        len(logits),
        rows,
        NUM_DRAWS,
        0,
        chunks_at,
        KIND=kind_of(settings),
        ROWS=max(256, 1 << (rows - 1).bit_length()),
        num_warps=8,
        launch_cooperative_grid=True,
    )
    drawn = tokens.tolist()
    assert alarm.take() is None
    return drawn


def drawn_apart(logits: Tensor, settings: list[float], seed: int) -> list[int]:
    """As drawn_by_kernel by what draws for one of several sequences, 50 programs at once."""
    size, programs = list_words(len(logits)), 50
    highs = torch.stack([part.max() for part in logits.chunk(132)])
    tokens = torch.full((NUM_DRAWS,), -1, dtype=torch.int32, device="cuda")
    sample_kernel.draw_apart[(programs,)](
        logits,
        highs,
        torch.tensor(settings, device="cuda"),
        torch.tensor([seed], device="cuda"),
        torch.empty(programs * size, dtype=torch.int64, device="cuda"),
        tokens,
        len(logits),
        len(highs),
        size,
        NUM_DRAWS // programs,
        num_warps=8,
    )
    return tokens.tolist()


def kind_of(settings: list[float]) -> int:
    if len(settings) < 3:
        return DRAWN
    return LIMITED if 0 < settings[1] <= MAX_CANDIDATES else SEARCHED


def drawn_by_library(logits: Tensor, settings: list[float], seed: int) -> list[int]:
    limits = torch.tensor([settings], device=logits.device)
    if len(settings) == 3:
        limits = sampling.cutoff(logits[None], limits)
    positions = torch.arange(NUM_DRAWS, device=logits.device)
    rows = logits.expand(NUM_DRAWS, -1)
    seeds = torch.full_like(positions, seed)
    limits = limits.expand(NUM_DRAWS, -1)
    return sampling.sample(rows, limits, seeds, positions, 0, len(logits))[1].tolist()


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
    found = drawn_by_kernel(logits, values, seed)
    assert found == drawn_by_library(logits, values, seed)
    assert found == drawn_by_kernel(logits, values, seed)
    if len(values) == 3:
        assert found == drawn_apart(logits, values, seed)


DRAWS = {
    "plain": Sampling(temperature=15.0, seed=5),
    "limited": Sampling(temperature=40.0, top_k=50, top_p=0.9, seed=6),
    "top-p alone": Sampling(temperature=15.0, top_p=0.9, seed=7),
    "a large top-k": Sampling(temperature=15.0, top_k=5000, seed=8),
}
"""At which the most likely token of the random model has some percent of the probability, and no
token comes twice in a row except by chance: its logits have a deviation of 24.
"""


@pytest.mark.parametrize("batch", [3, 16])
@pytest.mark.parametrize("name", DRAWS)
def test_sequences_draw_from_their_logits(name, batch):
    """As below, each sequence by its own seed and position."""
    sampling = DRAWS[name]
    engine = open_engine("smollm2-135m", batch, sampling=sampling)
    prompts = [list(range(7, 12 + 5 * slot)) for slot in range(batch)]
    many = list(itertools.islice(engine.generate_all(prompts), 12))
    one = [tuple(engine.prefill(prompt, slot) for slot, prompt in enumerate(prompts))]
    settings = torch.tensor([sampling.settings] * batch, device="cuda")
    seeds = torch.tensor([sampling.seed_of(slot) for slot in range(batch)], device="cuda")
    while len(one) < len(many):
        outputs = engine.decode_step(one[-1])
        one.append(tuple(outputs["next"].tolist()))
        logits = engine.stepping.logits[:batch] if engine.stepping else outputs["logits"]
        limits = sampling.cutoff(logits, settings) if settings.shape[1] == 3 else settings
        cached = [len(prompt) + len(one) - 2 for prompt in prompts]
        positions = torch.tensor(cached, device="cuda")
        drawn = sampling.sample(logits, limits, seeds, positions, 0, logits.shape[1])[1]
        assert one[-1] == tuple(drawn.tolist())
    assert many == one
    assert len({token for tokens in many for token in tokens}) > 3 * batch


@pytest.mark.parametrize("name", DRAWS)
def test_steps_draw_from_their_logits(name):
    """Several steps a launch give the tokens of single steps, and these are the library's."""
    engine, sampling = open_engine("smollm2-135m", sampling=DRAWS[name]), DRAWS[name]
    prompt = list(range(7, 40))
    many = list(itertools.islice(engine.generate(prompt), 40))
    one = [engine.prefill(prompt)]
    settings = torch.tensor([sampling.settings], device="cuda")
    while len(one) < len(many):
        outputs = engine.decode_step([one[-1]])
        one.append(int(outputs["next"][0]))
        logits = engine.stepping.logits[None] if engine.stepping else outputs["logits"]
        limits = sampling.cutoff(logits, settings) if settings.shape[1] == 3 else settings
        seeds = torch.tensor([sampling.seed], device="cuda")
        positions = torch.tensor([len(prompt) + len(one) - 2], device="cuda")
        drawn = sampling.sample(logits, limits, seeds, positions, 0, logits.shape[1])[1]
        assert one[-1] == int(drawn)
    assert many == one
    assert len(set(many)) > 10
