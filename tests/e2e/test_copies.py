"""More ranks than kv heads: the answers of one rank, and what explain says of it."""

import pytest

import distmega
from distmega.cli.main import main
from distmega.launch import LauncherOptions


def answers(tp: int) -> distmega.GenerateResult:
    options = distmega.EngineOptions(max_context=32)
    request = distmega.GenerateRequest(
        model="tiny-qwen3", prompts=("some", "more words"), max_new_tokens=8, logprobs=0, tp=tp,
        options=options,
    )  # fmt: skip
    return distmega.generate(request, LauncherOptions(device="cpu"))


def test_four_ranks_share_two_kv_heads():
    alone, shared = answers(1), answers(4)
    for one, four in zip(alone.answers, shared.answers, strict=True):
        assert one.ids == four.ids
        told = [[step.logprob for step in answer.logprobs] for answer in (one, four)]
        assert told[1] == pytest.approx(told[0], abs=1e-4)


def test_explain_tells_of_copies(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "tiny-qwen3", "--tp", "4"]) == 0
    assert "kv heads: 2, each copied 2 times" in capsys.readouterr().out
