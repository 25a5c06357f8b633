"""What the command and the library say and take alike: names in errors, devices, texts, types."""

import io
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import distmega
from distmega.cli import starting
from distmega.cli.flags import Ranks
from distmega.cli.main import main
from distmega.engine.ranks import jobs
from distmega.engine.ranks.jobs import score, text_windows
from distmega.engine.requests import ScoreRequest, TraceRequest
from distmega.errors import ProgramError, RequestError, argument
from distmega.launch import LauncherOptions
from distmega.program.dtypes import ITEM_BYTES, short_dtype

CPU_RANK = distmega.RankContext(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", backend="gloo",
    device="cpu",
)  # fmt: skip


def test_errors_name_arguments_in_the_library_and_flags_in_the_command(capsys):
    with pytest.raises(RequestError, match=r"^max_context -1; expected at least 0") as found:
        distmega.EngineOptions(max_context=-1)
    assert found.value.with_flags().startswith("--max-context -1; expected at least 0")
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)
    assert main(["generate", "tiny-llama", "x", "--max-context", "-1"]) == 2
    assert capsys.readouterr().err.startswith("distmega: error: --max-context -1; expected")
    nested = RequestError(f"a job ({found.value.found})", expected="b", remedy=argument("tp"))
    assert str(nested) == "a job (max_context -1); expected b; tp"
    assert nested.with_flags({"tp": "ranks"}).endswith("(--max-context -1); expected b; --ranks")


def test_flags_with_names_of_their_own(capsys):
    with pytest.raises(RequestError, match=r"^num_steps 0; expected"):
        TraceRequest(model="m", path="p", num_steps=0)
    assert main(["trace", "tiny-llama", "--steps", "0"]) == 2
    assert "error: --steps 0; expected at least 1" in capsys.readouterr().err


def test_a_trace_file_that_can_not_be_written_is_told_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jobs, "open_model", lambda _name: pytest.fail("it reads the model"))
    (tmp_path / "file").write_text("")
    wrong = [tmp_path, tmp_path / "file" / "trace.json", tmp_path / "no" / "t.json", Path("a\0b")]
    for path in wrong:
        request = TraceRequest(model="tiny-llama", path=str(path))
        with pytest.raises(RequestError, match="can't be written") as found:
            jobs.trace(CPU_RANK, request, lambda _value: None)
        assert found.value.with_flags({"path": "out"}).endswith("give another --out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no folder is made"


def test_every_argument_that_errors_name_is_a_flag(capsys):
    """All options of engines and samplings, so that with_flags tells a flag that exists."""
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    flags = {word for word in capsys.readouterr().out.split() if word.startswith("--")}
    for kind in (distmega.EngineOptions, distmega.Sampling):
        for name in kind.__dataclass_fields__:
            assert "--" + name.replace("_", "-") in flags


def test_launchers_and_devices_are_found_alike():
    assert (LauncherOptions().launcher, LauncherOptions().device) == ("auto", "auto")
    assert (Ranks().launcher, Ranks().device) == ("auto", "auto")


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"distmega {distmega.__version__}\n"


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))


def test_a_dash_is_standard_input(monkeypatch, capsys, tmp_path: Path):
    text = "some words"
    (tmp_path / "text.txt").write_text(text)
    small = ("--max-context", "16")
    assert main(["perplexity", "tiny-llama", str(tmp_path / "text.txt"), *small]) == 0
    expected = capsys.readouterr().out
    standard_input(monkeypatch, text)
    assert main(["perplexity", "tiny-llama", "-", *small]) == 0
    assert capsys.readouterr().out == expected
    standard_input(monkeypatch, "a\n\nb\n")
    assert (
        main(["generate", "tiny-llama", "--prompts-file", "-", "--max-new-tokens", "1", *small])
        == 0
    )
    assert "2 tokens after 2 on 1 rank" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff\xfe")))
    with pytest.raises(RequestError, match=r"^standard input can't be read"):
        starting.read_shared_text(starting.STDIN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(RequestError, match="standard input of ranks that torchrun started"):
        starting.read_shared_text(starting.STDIN)


def test_long_texts_are_read_in_windows():
    text = "It was the best of times, it was the worst of times, it was the age of wisdom"
    options = distmega.EngineOptions(max_context=32)
    request = ScoreRequest(model="tiny-llama", text=text, options=options)
    found = score(CPU_RANK, request, lambda value: None)
    source = distmega.open_model("tiny-llama")
    ids = source.tokenizer().encode(text)
    assert found.num_tokens == len(ids) - 1 > 32
    engine = distmega.open_engine(CPU_RANK, source, 1, options)
    losses = []
    for place in range(1, len(ids)):
        (window,) = [w for w in text_windows(len(ids), 32) if w.first <= place < w.stop]
        row = engine.logits(ids[window.start : place])[-1]
        losses.append(F.cross_entropy(row, torch.tensor(ids[place])))
    expected = torch.stack(losses).mean().exp().item()
    assert found.perplexity == pytest.approx(expected, rel=1e-4)


def test_a_model_that_rules_the_text_out_has_an_infinite_perplexity(
    monkeypatch: pytest.MonkeyPatch,
):
    source = distmega.open_model("tiny-llama")
    norm = source.weight("norm")
    scaled = SimpleNamespace(shape=norm.shape, read=lambda slices=(): norm.read(slices) * 1e4)
    sure = replace(source, readers={**source.readers, "norm": scaled})
    monkeypatch.setattr(jobs, "open_model", lambda _name: sure)
    request = ScoreRequest(model="tiny-llama", text="It was the best of times")
    assert score(CPU_RANK, request, lambda value: None).perplexity == math.inf


@given(st.integers(2, 300), st.integers(2, 64))
def test_windows_predict_each_token_once_with_half_a_window_before_it(num_tokens: int, size: int):
    windows = list(text_windows(num_tokens, size))
    predicted = [place for w in windows for place in range(w.first, w.stop)]
    assert predicted == list(range(1, num_tokens))
    for window in windows:
        assert 0 <= window.start < window.first < window.stop <= num_tokens
        assert window.stop - window.start <= size
        assert window.first - window.start >= min(window.first, size // 2)


@pytest.mark.parametrize(
    ("given", "short"),
    [("f32", "f32"), ("float32", "f32"), ("torch.bfloat16", "bf16"), (torch.float16, "f16"),
     (torch.int64, "i64"), ("int", "i32"), (torch.bool, "bool"), ("double", "f64")],
)  # fmt: skip
def test_types_as_torch_names_them(given: object, short: str):
    assert short_dtype(given) == short
    p = distmega.ProgramBuilder("p")
    x = p.input("x", (2,), given)
    assert p.build(p.pointwise("a0", x, dtype=given)).tensors[0].dtype == short


def test_types_that_programs_lack_are_refused_where_they_are_given():
    p = distmega.ProgramBuilder("p")
    for dtype in (torch.float8_e4m3fn, "complex64", None, 3):
        with pytest.raises(
            ProgramError, match=f"dtype '.*'; expected one of {', '.join(ITEM_BYTES)}"
        ):
            p.input("x", (2,), dtype)


def test_what_is_measured_is_kept_where_the_platform_has_it(tmp_path: Path):
    code = (
        "from distmega.kernels.pipelined.tuning import CHOICES\n"
        "from distmega.kernels.gemm.times.rates_file import FOLDER\n"
        "print(CHOICES.parent, FOLDER)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "distmega")] * 2
