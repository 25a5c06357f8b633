"""Texts that an engine can't take are refused before any rank starts, and by a rank before it reads
weights, in the same words.
"""

import json
import re
from pathlib import Path

import pytest

import distmega
from distmega.cli.main import main
from distmega.engine.ranks import jobs
from distmega.engine.requests import ScoreRequest, TraceRequest
from distmega.errors import DistmegaError, RequestError
from distmega.generation import check_request
from distmega.launch.contract import LauncherOptions
from tests.e2e.test_library import CPU_RANK
from tests.models.files import TINY, save_tokenizer

CPU = LauncherOptions(launcher="local", device="cpu")
SHORT = distmega.EngineOptions(max_context=16)


@pytest.fixture
def few_tokens(tmp_path: Path) -> str:
    """A model of fewer tokens than its tokenizer has, which takes nothing from spaces and tabs."""
    config = TINY | {"model_type": "llama", "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    stripped = {"type": "Replace", "pattern": {"String": "#"}, "content": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": stripped}))
    return str(tmp_path / "config.json")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("generation.launch", "cli.starting.launch", "engine.ranks.jobs.open_engine"):
        monkeypatch.setattr(f"distmega.{name}", lambda *_, **__: pytest.fail("it has started"))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (("a" * 13,), r"a prompt of 13 tokens and 4 new ones; expected at most 16 positions toget"),
        (("a", "b" * 13), r"a prompt of 13 tokens \('b{13}'\) and 4 new ones; expected at most 16"),
        (("a", "##"), r"an empty prompt of the text '##'; expected a token at least"),
        (("a", "c~~"), r"token 126 of the text 'c~~'; expected tokens of 0 to 99; use the model's"),
    ],
)
def test_prompts_are_looked_at_before_ranks_start_and_weights_are_read(
    prompts: tuple[str, ...], message: str, few_tokens: str, capsys: pytest.CaptureFixture[str]
):
    request = distmega.GenerateRequest(
        model=few_tokens, prompts=prompts, max_new_tokens=4, options=SHORT, tp=1
    )
    with pytest.raises(RequestError, match=f"^{message}") as first:
        distmega.generate(request, CPU)
    with pytest.raises(RequestError) as later:
        jobs.generate(CPU_RANK, request, lambda _: None)
    assert str(later.value) == str(first.value)
    few = ("--max-new-tokens", "4", "--max-context", "16", "--tp", "2")
    assert main(["generate", few_tokens, *prompts, *few, "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert re.match(f"distmega: error: {message}", said.err)
    assert said.out == ""


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        ("a", 16, "a text of 1 token; expected at least 2"),
        ("###", 16, "a text of 0 tokens; expected at least 2"),
        ("abc~", 16, "token 126 of the text; expected tokens of 0 to 99"),
        ("abc", 1, "{max_context} 1; expected at least 2, a token and the next one"),
        ("abc", 512, "{max_context} 512; expected at most 256"),
    ],
)
def test_texts_to_score_are_looked_at_before(
    text: str,
    context: int,
    message: str,
    few_tokens: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    options = distmega.EngineOptions(max_context=context)
    request = ScoreRequest(model=few_tokens, text=text, options=options)
    for refuse in (
        lambda: check_request(request, CPU),
        lambda: jobs.score(CPU_RANK, request, lambda _: None),
    ):
        with pytest.raises(RequestError, match="^" + message.format(max_context="max_context")):
            refuse()
    (tmp_path / "text").write_text(text)
    given = ("--max-context", str(context), "--device", "cpu")
    assert main(["perplexity", few_tokens, str(tmp_path / "text"), *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"distmega: error: {message.format(max_context='--max-context')}")


def test_traces_are_looked_at_before(
    few_tokens: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    trace = ("trace", few_tokens, "--steps", "3", "--context", "11", "--max-context", "16")
    assert main([*trace, "--device", "cpu"]) == 2
    assert "error: a trace on cpu; expected a Hopper GPU" in capsys.readouterr().err
    monkeypatch.setattr("distmega.generation.require_gpus", lambda *_: None)
    assert main([*trace, "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith(
        "distmega: error: two launches of 3 steps after 11 positions; expected at most 16 positions"
        " together; lower --steps or --context, or raise --max-context"
    )
    assert main([*trace, "--context", "10", "--device", "cuda", "--out", "/no/folder/t.json"]) == 2
    assert "file '/no/folder/t.json' can't be written" in capsys.readouterr().err
    path = tmp_path / "t.json"
    request = TraceRequest(
        model=few_tokens, path=str(path), num_steps=3, position=10, options=SHORT
    )
    check_request(request, LauncherOptions(device="cuda"))
    assert not path.exists()


def test_files_are_looked_at_before(tmp_path: Path, few_tokens: str):
    request = distmega.GenerateRequest(model=str(tmp_path), prompts=("a",), max_new_tokens=4)
    with pytest.raises(DistmegaError, match=r"has no \*\.safetensors"):
        distmega.generate(request, CPU)
