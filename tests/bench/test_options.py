"""What the benchmarks' commands refuse before they measure: missing GPUs, numbers out of range."""

import importlib
from pathlib import Path

import pytest
import torch

COMMANDS = {
    "attention": [],
    "blocks": [],
    "captured": [],
    "cold_start": ["tiny"],
    "collectives": [],
    "decode": [],
    "overlap": [],
    "pipelined": [],
    "prefill": [],
    "prefill_kernels": ["tiny prompt=16 batch=1"],
    "programs": [],
    "serve_like": ["tiny", "2"],
    "superopt": [],
}
NO_COMMANDS = {"__init__", "cases", "llama", "models", "options", "ranks", "records", "tables",
               "timing", "torch_decoder", "turns"}  # fmt: skip


def run(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str | int | None:
    """Runs `python -m bench.COMMAND` in this process; how it ends."""
    monkeypatch.setattr("sys.argv", [f"{command}.py", *arguments])
    module = importlib.import_module(f"bench.{command}")
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


def test_every_command_is_here() -> None:
    folder = Path(__file__).resolve().parents[2] / "bench"
    files = {path.stem for path in folder.glob("*.py")}
    assert files - NO_COMMANDS == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_gpus_it_lacks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = run(command, COMMANDS[command], monkeypatch)
    assert isinstance(said, str)
    assert said.startswith(f"{command}.py: 0 GPUs that torch can use; expected at least ")
    assert "; run it on a machine" in said
    assert "\n" not in said


def test_as_many_gpus_as_the_cases_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cases = ["tiny batch=1 ctx=8", "tiny batch=1 ctx=8 tp=4"]
    assert "2 GPUs that torch can use; expected at least 4" in str(
        run("decode", cases, monkeypatch)
    )


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("blocks", "--ranks 1"),
        ("blocks", "--rows 0"),
        ("captured", "--longest -1"),
        ("captured", "--longest nan"),
        ("collectives", "--kb 0"),
        ("collectives", "--ranks 1"),
        ("decode", "--rounds 0"),
        ("decode", "--rounds x"),
        ("overlap", "--ranks 1"),
        ("overlap", "--seconds 0"),
        ("pipelined", "--sizes-mb 0"),
        ("prefill_kernels", "--layers -1"),
        ("programs", "--processes -1"),
        ("programs", "--at-once 0"),
    ],
)
def test_a_number_out_of_range_is_refused(
    command: str,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flag, number = option.split()
    given = [*COMMANDS[command], f"{flag}={number}"]
    assert run(command, given, monkeypatch) == 2
    assert f"argument {flag}: {number!r}; expected " in capsys.readouterr().err


@pytest.mark.parametrize("given", ["blocks --trace", "programs --keep", "superopt --keep"])
def test_a_file_that_can_not_be_written_is_told_before_anything_is_measured(
    given: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, flag = given.split()
    for path in tmp_path, tmp_path / "missing" / "file":
        assert run(command, [flag, str(path)], monkeypatch) == 2
        assert f"argument {flag}: {str(path)!r} can't be written" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("command", "case"),
    [
        ("decode", "tiny batch=0 ctx=8"),
        ("decode", "tiny batch=1 ctx=8 tp=0"),
        ("attention", "0 1 1: 1 x 1"),
    ],
)
def test_a_case_of_nothing_is_refused(
    command: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = run(command, [case], monkeypatch)
    assert isinstance(said, str)
    assert said.startswith(f"case {case!r}; expected ")
