"""The command line in surroundings that few have: closed or odd streams, odd names and numbers,
variables of another program. Each ends in an answer or in one line.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from distmega.cli.main import main
from distmega.cli.streams import read_argument, read_text, split_lines
from distmega.env import read_settings
from distmega.errors import RequestError

TINY = ("generate", "tiny-llama", "hi", "--max-new-tokens", "2", "--max-context", "16")


def run(*arguments: str, redirect: str = "", **changes: str) -> subprocess.CompletedProcess[bytes]:
    """The command under a shell that may close streams; `changes` to its environment."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "distmega", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | changes,
        capture_output=True,
        timeout=250,
        check=False,
    )


def one_line(done: subprocess.CompletedProcess[bytes], code: int) -> str:
    """The error that ended it."""
    text = done.stderr.decode()
    assert done.returncode == code, text
    assert text.startswith("distmega: error: "), text
    assert text.count("\n") == 1, text
    return text.removeprefix("distmega: error: ")


@pytest.mark.parametrize("redirect", [">&-", "<&- >&-"])
def test_a_closed_standard_output_is_told(redirect: str) -> None:
    done = run("explain", "tiny-llama", redirect=redirect)
    assert one_line(done, 2).startswith("standard output is closed; expected somewhere to write")


def test_closed_standard_input_and_error_change_nothing() -> None:
    done = run(*TINY, redirect="<&- 2>&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"tokens after" in done.stdout


def test_an_error_that_nobody_can_be_told_keeps_its_exit_code() -> None:
    for redirect in ("2>/dev/full", "2>&-"):
        assert run("explain", "nomodel", redirect=redirect).returncode == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_cut_short_is_told(unbuffered: str, tmp_path: Path) -> None:
    """By a limit here, as where a disk gets full: a part of a write is done, the next refused."""
    path = tmp_path / "facts.json"
    command = [sys.executable, "-m", "distmega", "explain", "tiny-llama", "--json"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 20; exec "$@" >"$0"', str(path), *command],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert one_line(done, 1).startswith("the output can't be written (File too large)")


def test_prompts_of_a_file_end_where_its_lines_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\ftwo\r\nthree\u2028four\n\nfive\rsix".encode())
    text = read_text(path)
    assert split_lines(text) == ["one\ftwo", "three\u2028four", "", "five", "six"]
    assert main([*TINY[:2], "--prompts-file", str(path), *TINY[3:-1], "64"]) == 0
    out = capsys.readouterr().out
    assert sum("\u2500\u2500" in line for line in out.splitlines()) == 4


def test_what_a_terminal_can_not_show_is_replaced() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = run(*TINY[:2], "a", "b\u00e9", *TINY[3:], "--temperature", "5", **ascii_only)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert b"tokens after" in done.stdout
    text = run("generate", "\u00e9", "hi", **ascii_only).stderr
    assert text.startswith(b"distmega: error: no such model: '")


def test_a_prompt_in_utf_8_is_read_in_any_locale() -> None:
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    done = run(*TINY[:2], "caf\u00e9", *TINY[3:], "--echo", "--stop", "\u00e9t\u00e9", **c_locale)
    assert done.returncode == 0, done.stderr
    assert "\ncaf\u00e9".encode() in done.stdout


def test_what_no_encoding_has_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distmega.cli.starting.launch", lambda *given: pytest.fail("ranks started"))
    for text in "caf\udce9", "\ud800", "\udce9" * 5000:
        for given in ["generate", "tiny-llama", text], [*TINY, "--stop", text]:
            assert main(given) == 2
            said = capsys.readouterr().err
            assert re.match(r"distmega: error: text '.* of the command line can't be read", said)
            assert len(said) < 1500
    assert read_argument("\udcc3\udca9t\u00e9") == "\u00e9t\u00e9"


@pytest.mark.parametrize("columns", ["0", "1", "99999999999999999999"])
def test_a_width_of_nothing_is_ignored(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["explain", "tiny-llama"]) == 0
    assert "us a token" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert 10 < capsys.readouterr().out.count("\n") < 1000


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"TORCHELASTIC_RUN_ID": "1"}, 2, "launcher torchrun in a process without RANK, WORLD"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, 1, "GLOO_SOCKET_IFNAME='nosuch0' with no interface"),
        ({"DISTMEGA_THREADS": "4000"}, 2, "DISTMEGA_THREADS=4000; expected at most"),
        ({"DISTMEGA_THREADS": "100000"}, 2, "DISTMEGA_THREADS='100000'; expected a whole number"),
        ({"DISTMEGA_TIMEOUT_S": "1e12"}, 2, "DISTMEGA_TIMEOUT_S='1e12'; expected a positive num"),
    ],
)
def test_a_variable_that_can_not_be_is_named(
    changes: dict[str, str],
    code: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    for name, text in changes.items():
        monkeypatch.setenv(name, text)
    found = main(TINY)
    done = subprocess.CompletedProcess(TINY, found, *capfdbinary.readouterr())
    assert named in one_line(done, code)


@pytest.mark.parametrize("text", ["1e999", "nan", "-1", "", "9" * 5000])
def test_settings_are_bounded(text: str) -> None:
    for name in ("DISTMEGA_TIMEOUT_S", "DISTMEGA_THREADS"):
        with pytest.raises(RequestError, match=f"environment variable {name}=") as caught:
            read_settings({name: text})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "~nouser/m.gguf", "x"], "no such model: '~nouser/m.gguf'"),
        (["generate", "a" * 5000, "x"], "no such model: 'aaaa"),
        (["generate", "a/" * 2500, "x"], "no such model: 'a/a/"),
        (["generate", "a\0b", "x"], "no such model: 'a"),
        (["generate", "tiny-llama", "x", "--tp", "1000000"], "--tp 1000000; expected at most 1024"),
        (["generate", "tiny-llama", "x", "--tp", "9" * 20], "--tp of 67 bits; expected at most"),
        (["generate", "tiny-llama", "x", "--pp", "9" * 20], "--pp of 67 bits; expected at most"),
        (["generate", "tiny-llama", "x", "--batch", "1" + "0" * 11], "--batch 100000000000; exp"),
        (["generate", "tiny-llama", *["x"] * 5000], "5000 prompts"),
        (["generate", "tiny-llama", "--prompts-file", "/dev/zero"], "text file '/dev/zero' can't"),
        (["generate", "tiny-llama", "--prompts-file", "a" * 5000], "text file 'aaa.* too long"),
        (
            ["generate", "tiny-llama", "--prompts-file", "/"],
            "text file '/' can't be read .Is a dir",
        ),
        (["explain", "tiny-llama", "--memory-limit-gb", "1e308"], "--memory-limit-gb 1e.308; exp"),
        (["explain", "tiny-llama", "--tp", "1000000"], "--tp 1000000; expected at most 1024"),
        (["explain", "tiny-llama", "--tp", "1024"], ".* can't divide .* use tp="),
        (["explain", "a:x:b"], "no such model: 'a:x:b'"),
        (["superopt", "/dev/zero"], "text file '/dev/zero' can't be read"),
        (["superopt", "lora k=8 n=8 rank=2 rows=1", "--budget", "9" * 400], "search limit budget"),
    ],
)
def test_odd_values_end_in_one_line(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert re.match(f"distmega: error: {message}", captured.err), captured.err[:500]
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 1500


def test_a_path_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert main(["explain", str(tmp_path / "m.gguf")]) == 2


@pytest.mark.parametrize("command", [["generate", "tiny", "x"], ["trace", "tiny"]])
def test_gpus_are_looked_for_before_anything_is_read(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distmega.generation.locate_model", lambda *_: pytest.fail("model read"))
    monkeypatch.setattr("distmega.launch.launchers.DEVICES", tmp_path)
    monkeypatch.setattr("distmega.launch.late.num_gpus", lambda: 0, raising=False)
    assert main([*command, "--device", "cuda", "--launcher", "local"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("distmega: error: --device cuda for 1 rank, and 0 GPUs"), said
    assert "expected at least 1 NVIDIA GPU, and" in said
    assert "give --device cpu" in said


def test_memory_is_looked_at_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmega.cli.starting.launch", lambda *given: pytest.fail("ranks started"))
    config = {
        "model_type": "llama", "hidden_size": 65536, "num_attention_heads": 64,
        "intermediate_size": 262144, "vocab_size": 2**15, "num_hidden_layers": 100,
        "max_position_embeddings": 128,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for device in ("cpu", "auto"):
        monkeypatch.setattr("distmega.generation.choose_device", lambda *_: "cpu")
        assert main(["generate", str(path), "x", "--device", device]) == 2
        found = capsys.readouterr().err
        named = (
            r"distmega: error: \d+\.\d GB for the weights and caches of 1 rank; expected at most"
        )
        assert re.match(named, found), found
