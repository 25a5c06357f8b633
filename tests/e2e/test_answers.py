"""How answers are chosen and when they end: samplings of each prompt, end tokens, stop texts,
probabilities.
"""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import distmega
from distmega.engine.ranks.answers import GrowingAnswer
from distmega.engine.ranks.jobs import generate, logprobs_of
from distmega.engine.requests import Answer
from distmega.errors import RequestError
from distmega.models.sampling import GREEDY, Method, Sampling, joint_method
from distmega.models.text.tokenizer import Tokenizer, byte_letters, byte_tokenizer

CPU_RANK = distmega.RankContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", backend="gloo",
    device="cpu",
)  # fmt: skip
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.8, top_k=5, seed=6),
    Sampling(temperature=2.0, top_p=0.7, seed=7),
)


def open_tiny(batch: int = 1, **options: object) -> distmega.Engine:
    source = options.pop("source", None) or distmega.open_model("tiny-llama")
    size = distmega.EngineOptions(max_context=24, batch=batch)
    return distmega.open_engine(CPU_RANK, source, 1, size, **options)


@pytest.mark.parametrize(
    "chosen",
    [SAMPLINGS, SAMPLINGS[:2] * 2, (SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[2], SAMPLINGS[0])],
    ids=["all", "plain", "top-k"],
)
def test_each_prompt_is_sampled_as_if_alone(chosen: tuple[Sampling, ...]):
    together = open_tiny(4, sampling=chosen)
    found = list(zip(*together.generate_all(PROMPTS), strict=True))
    for prompt, sampling, tokens in zip(PROMPTS, chosen, found, strict=True):
        alone = open_tiny(sampling=[sampling])
        assert list(alone.generate(prompt))[: len(tokens)] == list(tokens), sampling


def test_one_engine_serves_several_samplings():
    engine = open_tiny(sampling=SAMPLINGS[1:3])
    for sampling in SAMPLINGS[:3]:
        expected = list(open_tiny(sampling=[sampling]).generate([1, 2, 3], 9))
        assert list(engine.generate([1, 2, 3], 9, sampling)) == expected
    with pytest.raises(RequestError, match=r"seed=5\) in an engine for the most likely token"):
        next(open_tiny().generate([1], 1, SAMPLINGS[1]))
    with pytest.raises(RequestError, match="2 samplings of 1 sequence; expected one Sampling"):
        next(engine.generate_all([[1]], 1, SAMPLINGS[:2]))


@pytest.mark.parametrize(
    ("samplings", "method"),
    [
        (SAMPLINGS[:1], GREEDY),
        (SAMPLINGS[:2], Method(kind="plain")),
        (SAMPLINGS[::2], Method(kind="limited", num_candidates=64)),
        (SAMPLINGS[1:3], Method(kind="limited")),
        (
            (SAMPLINGS[2], Sampling(temperature=1.0, top_k=200)),
            Method(kind="limited", num_candidates=256),
        ),
        (SAMPLINGS, Method(kind="limited")),
    ],
)  # fmt: skip
def test_the_cheapest_method_that_serves_all(samplings: tuple[Sampling, ...], method: Method):
    assert joint_method(samplings) == method
    assert all(method.serves(one) for one in samplings)


def test_end_tokens_end_sequences():
    every = list(zip(*open_tiny(2, sampling=SAMPLINGS[1]).generate_all(PROMPTS[:2]), strict=True))
    last = every[0][6]
    assert last not in every[0][:6]
    source = distmega.open_model("tiny-llama")
    source = replace(source, config=replace(source.config, eos_ids=(last,)))
    engine = open_tiny(2, source=source, sampling=SAMPLINGS[1])
    assert list(zip(*engine.generate_all(PROMPTS[:2], ignore_eos=True), strict=True)) == every
    found = list(zip(*engine.generate_all(PROMPTS[:2]), strict=True))
    assert found[0] == (*every[0][:7], *[last] * (len(found[0]) - 7))
    assert found[1] == every[1][: len(found[1])]
    assert len(found[1]) == len(every[1]) or found[1][-1] == last
    alone = open_tiny(source=source, sampling=[SAMPLINGS[1]])
    assert list(alone.generate(PROMPTS[0])) == list(every[0][:7])


def test_logits_of_each_step_are_those_that_it_chose_from():
    engine = open_tiny(2, logits="last")
    steps = list(engine.generate_with_logits(PROMPTS[:2], 5))
    assert [tokens for tokens, _ in steps] == list(engine.generate_all(PROMPTS[:2], 5))
    assert all(logits.argmax(-1).tolist() == list(tokens) for tokens, logits in steps)
    tokens, logits = steps[-1]
    expected = logits.double().softmax(-1).log()
    for row, (token, one) in enumerate(zip(tokens, logprobs_of(logits, tokens, 3), strict=True)):
        assert one.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert one.top[0] == (token, one.logprob)
        assert [index for index, _ in one.top] == expected[row].topk(3).indices.tolist()
    with pytest.raises(RequestError, match='expected an engine that was opened with logits="last"'):
        next(open_tiny().generate_with_logits([[1]]))
    with pytest.raises(RequestError, match="logits='first'; expected one of none, last, all"):
        open_tiny(2, logits="first")


def job(**changes: object) -> tuple[distmega.GenerateResult, list[distmega.Token]]:
    """The job of `generate` on this rank alone."""
    options = distmega.EngineOptions(max_context=32, batch=2)
    request = distmega.GenerateRequest(
        **{"model": "tiny-llama", "prompts": ("a", "bc"), "options": options, **changes}
    )
    emitted: list[object] = []
    result = generate(CPU_RANK, request, emitted.append)
    return result, [value for value in emitted if isinstance(value, distmega.Token)]


def test_a_job_tells_probabilities_and_why_answers_end():
    plain, tokens = job(max_new_tokens=8)
    assert [answer.finish_reason for answer in plain.answers] == ["length"] * 2
    assert {token.logprob for token in tokens} == {None}
    assert plain.random_weights
    told, tokens = job(max_new_tokens=8, logprobs=2)
    assert [answer.ids for answer in told.answers] == [answer.ids for answer in plain.answers]
    first = told.answers[1].logprobs
    assert first == tuple(token.logprob for token in tokens if token.prompt == 1)
    for token, one in zip(plain.answers[1].ids, first, strict=True):
        assert one.top[0] == (token, one.logprob)
    assert all(len(one.top) == 2 and one.logprob < 0 for one in first)
    stop = plain.answers[0].text[3:5]
    stopped, tokens = job(max_new_tokens=8, stop=(stop,))
    answer = stopped.answers[0]
    assert answer.text == plain.answers[0].text.partition(stop)[0]
    assert answer.finish_reason == "stop"
    assert "".join(token.text for token in tokens if token.prompt == 0) + answer.tail == answer.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "x"}, "stop 'x'; expected texts in a tuple"),
        ({"stop": 5}, "stop 5; expected texts in a tuple"),
        ({"stop": ("x", "")}, "an empty text in stop; expected texts of at least one character"),
        ({"stop": ("x", "\ud800")}, r"stop '\\ud800' can't be encoded; expected valid Unicode"),
        ({"prompts": ("a", "\udfff")}, r"prompts '\\udfff' can't be encoded; expected valid"),
        ({"logprobs": -1}, "logprobs -1; expected at least 0"),
        ({"logprobs": 101}, "logprobs 101; expected at most 100"),
        ({"sampling": (Sampling(),)}, "1 sampling of 2 sequences; expected one Sampling for all"),
    ],
)
def test_requests_that_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(RequestError, match=message):
        distmega.GenerateRequest(**{"model": "tiny-llama", "prompts": ("a", "b"), **changes})


def test_the_batch_follows_from_the_prompts():
    request = distmega.GenerateRequest(model="tiny-llama", prompts=("a", "b", "c"))
    assert request.options.batch == 3
    options = distmega.EngineOptions(batch=5)
    assert replace(request, options=options).options.batch == 5
    with pytest.raises(RequestError, match="5000 prompts, so batch 5000; expected at most 4096"):
        distmega.GenerateRequest(model="tiny-llama", prompts=("a",) * 5000)


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop text that is complete first."""
    for end in range(len(text) + 1):
        if places := [text[:end].find(stop) for stop in stops if stop in text[:end]]:
            return text[: min(places)]
    return text


class _OfLetters(Tokenizer):
    """One that knows pairs of letters too, so that a token may bring two characters."""

    def __init__(self) -> None:
        pairs = [a + b for a in "abc" for b in "abc"]
        tokens = [*byte_letters(), *pairs]
        vocab = {token: number for number, token in enumerate(tokens)}
        backend = Backend(models.BPE(vocab=vocab, merges=[(a, b) for a, b in pairs]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend)


@given(
    st.text("abc\u00e9", max_size=12),
    st.lists(st.text("abc\u00e9", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
@example("aabc", ["abc", "b"], True)
def test_an_answer_ends_before_a_stop_text_and_gives_out_nothing_of_it(
    text: str, stops: list[str], in_pairs: bool
):
    tokenizer = _OfLetters() if in_pairs else byte_tokenizer(288)
    answer, pieces = GrowingAnswer(tokenizer, [], (), stops), ""
    for token in tokenizer.encode(text):
        pieces += answer.push(token)
        assert cut(text, stops).startswith(pieces)
        if answer.finish_reason:
            break
    done = answer.finish()
    assert done.text == pieces + done.tail == cut(text, stops)
    assert (done.finish_reason == "stop") == any(stop in text for stop in stops)


def test_an_end_token_is_no_text_and_what_was_held_comes_last():
    tokenizer = byte_tokenizer(288)
    answer = GrowingAnswer(tokenizer, [], (7,), ("stop",))
    assert [answer.push(token) for token in tokenizer.encode("a sto")] == ["a", " ", "", "", ""]
    assert answer.push(7) == ""
    done = answer.finish()
    assert (done.text, done.tail, done.finish_reason) == ("a sto", "sto", "eos")
    assert done.ids[-1] == 7


def test_the_text_of_a_special_token_ends_an_answer_at_the_token():
    """No text of an answer has it."""
    tokenizer = byte_tokenizer(288)
    tokenizer._backend.add_special_tokens(["<270>"])
    answer = GrowingAnswer(tokenizer, [], (), ("<270>", "stop", "<271>"))
    assert [answer.push(token) for token in (*tokenizer.encode("a s"), 270)] == ["a", " ", "", ""]
    done = answer.finish()
    assert (done.text, done.tail, done.finish_reason) == ("a s", "s", "stop")
    answer = GrowingAnswer(tokenizer, [], (), ("<271>",))
    assert (answer.push(271), answer.finish_reason) == ("", "stop")
    assert tokenizer.special_id("<270>") == 270
    assert tokenizer.special_id("<271>") is tokenizer.special_id("a") is None


def test_rates_and_times_stand_apart():
    answer = Answer(ids=(1, 2, 3, 4), text="", tail="", num_prompt_tokens=1, finish_reason="length")
    result = distmega.GenerateResult(
        answers=(answer, replace(answer, ids=(1,))), load_s=9.0, first_token_s=5.0,
        second_token_s=3.0, decode_s=0.5,
    )  # fmt: skip
    assert result.tokens_per_s == 4.0
    assert replace(result, answers=(replace(answer, ids=(1, 2)),)).tokens_per_s == 0.0
