"""NaN and infinities: a ModelError that names where they began, not tokens that mean nothing."""

import math
from dataclasses import replace

import pytest
import torch

from distmega.engine.engine import Engine
from distmega.engine.ranks import jobs
from distmega.engine.ranks.context import RankContext
from distmega.engine.requests import EngineOptions, ScoreRequest
from distmega.engine.soundness import is_sound
from distmega.errors import ModelError, RequestError
from distmega.hostir.comm.collectives import combine_parts
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import launch
from distmega.models.sampling import MOST_LIKELY, Sampling
from distmega.program.ops import sampling as library
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sources.load import open_model
from tests.e2e.unsound import PROMPT, Change, altered

HUGE = 3e38
HUGE_HEAD = Change(weight="head", value=HUGE, first=200)
CASES = {
    "in 'layers.0.k_cache'": Change(weight="layers.0.attn_norm", value=HUGE),
    "in 'layers.1.k_cache'": Change(weight="layers.0.ffn_norm", value=HUGE),
    "behind 'layers.1.v_cache'": Change(weight="norm", value=HUGE),
}
"""Where numbers are first seen to be wrong, by the finite numbers that cause it."""

SAMPLINGS = (
    MOST_LIKELY,
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=20),
    Sampling(temperature=1.0, top_p=0.9),
)


def open_tiny(source=None, sampling: Sampling = MOST_LIKELY, batch: int = 1) -> Engine:
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=32, batch=batch)
    source = source or open_model("tiny-llama")
    return Engine(source, mesh, SingleCommunicator(mesh), options, sampling=sampling)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named_as_it_is_loaded(value: float):
    source = altered(Change(weight="layers.1.w_up", value=value, first=79))
    with pytest.raises(ModelError, match=r"weight 'layers.1.w_up' with 48 of 3840 numbers NaN or"):
        open_tiny(source)


def test_a_rope_base_that_gives_no_angles_is_named():
    source = open_model("tiny-llama")
    config = replace(source.config, rope_base=1e-45)
    readers = {**source.readers, "rope_table": replace(source.weight("rope_table"), config=config)}
    with pytest.raises(ModelError, match=r"weight 'rope_table' with .* \(rope base\)"):
        open_tiny(replace(source, readers=readers))


@pytest.mark.parametrize("where", CASES)
def test_finite_weights_that_overflow_are_named_by_layer(where: str):
    engine = open_tiny(altered(CASES[where]))
    message = f"logits that are NaN or infinite; on rank 0 numbers go wrong (first )?{where}"
    for call in (
        lambda: list(engine.generate(PROMPT)),
        lambda: engine.prefill(PROMPT),
        lambda: engine.logits(PROMPT),
        lambda: engine.prefill_all([PROMPT]),
    ):
        with pytest.raises(ModelError, match=message):
            call()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_decode_step_that_goes_wrong_is_named_and_the_engine_stays(sampling: Sampling):
    engine = open_tiny(sampling=sampling, batch=2)
    prompts = [PROMPT, (9, 8)]
    expected = list(engine.generate_all(prompts, 6))
    for value in (math.nan, math.inf):
        steps = engine.generate_all(prompts, 6)
        next(steps)
        engine.tensor("layers.1.v_cache")[1].fill_(value)
        with pytest.raises(ModelError, match=r"first in .layers\.1\.v_cache."):
            next(steps)
        assert list(engine.generate_all(prompts, 6)) == expected


def test_scores_of_experts_that_are_none_end_all_sequences():
    """A router finds them before there are logits: in a step and in a prompt."""
    engine = open_tiny(open_model("tiny-mixtral"), batch=2)
    prompts = [PROMPT, (9, 8)]
    expected = list(engine.generate_all(prompts, 6))
    steps = engine.generate_all(prompts, 6)
    next(steps)
    engine.tensor("layers.1.v_cache")[1].fill_(math.nan)
    with pytest.raises(
        ModelError, match=r"a router score of row 1 .* first in .layers\.1\.v_cache."
    ):
        next(steps)
    assert list(engine.generate_all(prompts, 6)) == expected

    weight = engine.tensor("layers.0.ffn_norm")
    whole = weight.clone()
    weight.fill_(HUGE)
    with pytest.raises(ModelError, match="a router score of row 0 is not a number; on rank 0"):
        engine.prefill(PROMPT, 1)
    weight.copy_(whole)
    with pytest.raises(RequestError, match="slot 0, in which no sequence has started"):
        engine.decode_step([3, 3])
    assert list(engine.generate_all(prompts, 6)) == expected


def test_a_prompt_that_finds_no_memory_leaves_other_sequences(monkeypatch: pytest.MonkeyPatch):
    engine = open_tiny(batch=2)
    tokens = engine.prefill_all([PROMPT, (9, 8)])
    expected = engine.decode_step(tokens)["next"].tolist()
    engine.prefill_all([PROMPT, (9, 8)])
    problem = RequestError("2 GB for temps", expected="1 GB", remedy="use fewer tokens")

    def refuse(*_: object) -> None:
        raise problem

    with monkeypatch.context() as patched:
        patched.setattr(engine._prefills, "_open", refuse)
        with pytest.raises(RequestError, match="2 GB for temps") as raised:
            engine.prefill([4, 4, 4, 4], 1)
    assert raised.value is problem
    assert engine.decode_step(tokens[:1])["next"].tolist()[:1] == expected[:1]


def test_a_prompt_that_is_interrupted_leaves_no_sequence(monkeypatch: pytest.MonkeyPatch):
    engine = open_tiny(batch=2)
    tokens = engine.prefill_all([PROMPT, (9, 8)])
    expected = engine.decode_step(tokens)["next"].tolist()
    engine.prefill_all([PROMPT, (9, 8)])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._prefills, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.prefill([4, 4, 4], 1)
    with pytest.raises(RequestError, match="slot 1, in which no sequence has started"):
        engine.decode_step(tokens)
    assert engine.decode_step(tokens[:1])["next"].tolist()[:1] == expected[:1]


def test_perplexity_is_a_number_or_an_error(monkeypatch: pytest.MonkeyPatch):
    def score(source) -> float:
        monkeypatch.setattr(jobs, "open_model", lambda model: source)
        context = RankContext(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node="here",
            backend="gloo",
            device="cpu",
        )
        request = ScoreRequest(model="tiny-llama", text="The capital of France is Paris.")
        return jobs.score(context, request, lambda value: None).perplexity

    assert 1 < score(open_model("tiny-llama")) < math.inf
    for change in (*CASES.values(), HUGE_HEAD):
        with pytest.raises(ModelError, match="logits that are NaN or infinite"):
            score(altered(change))


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ranks_name_it_whichever_holds_the_numbers(pp: int):
    """On two ranks, half of the vocabulary or of the layers each: an overflow of the last layers or
    of the last rank's part of the head.
    """
    for change in (CASES["in 'layers.1.k_cache'"], HUGE_HEAD):
        options = LauncherOptions(num_ranks=2)
        with pytest.raises(ModelError, match="logits that are NaN or infinite; on rank "):
            list(launch("tests.e2e.unsound:generate", (pp, (change,)), options))


def test_what_is_chosen_among_numbers_and_nan_is_nan():
    parts = [(torch.tensor([value, 1.0]), torch.tensor([at, at])) for at, value in PARTS]
    for order in (parts, parts[::-1]):
        value, index = combine_parts(order, "argmax")
        assert value.isnan().tolist() == [True, False]
        assert index.tolist() == [4, 0]
    rows = torch.tensor([[1.0, math.nan, 3.0], [1.0, 2.0, 3.0]])
    limits = torch.tensor([[1.0, -math.inf], [1.0, 2.5]])
    zeros = torch.zeros(2, dtype=torch.int64)
    value, index = library.sample_values(rows, limits, zeros, zeros, 0, 3)
    assert value.isnan().tolist() == [True, False]
    assert index.tolist() == [1, 2]


PARTS = ((0, 2.0), (4, math.nan), (8, 7.0))


def test_sound_is_what_has_no_nan_and_no_infinity():
    assert is_sound(torch.tensor([1.0, -3e38]))
    assert is_sound(torch.empty(0))
    assert is_sound(torch.tensor([2**62]))
    for value in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert not is_sound(torch.tensor([[1.0, value]], dtype=dtype))
