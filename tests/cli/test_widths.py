"""Output on terminals of 80 and of 120 columns: lines fit, and none is broken within a word."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from distmega.cli import explain
from distmega.cli.main import main
from distmega.cli.streams import wrap_text

COMMANDS = {
    "explain": ["explain", "smollm2-135m", "--tp", "2", "--machine", "h200"],
    "full": ["explain", "tiny-qwen3-moe", "--tp", "2", "--full"],
    "host": ["explain", "tiny-llama", "--tp", "2", "--collectives", "host"],
    "--help": ["--help"],
    **{
        f"{name} --help": [name, "--help"]
        for name in ("generate", "explain", "perplexity", "trace", "doctor", "superopt")
    },
}
FRAME = re.compile("[\u2500-\u257f]+")


def words_of(text: str) -> list[str]:
    return [word for word in FRAME.sub(" ", text).split() if word.strip("-")]


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str], int], str]:
    def show(arguments: list[str], columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        if "--help" in arguments:
            with pytest.raises(SystemExit, match=r"^0$"):
                main(arguments)
        else:
            assert main(arguments) == 0
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_broken_within_a_word(
    name: str, shown: Callable[[list[str], int], str], monkeypatch: pytest.MonkeyPatch
):
    planned = cache(explain.collect_decode)  # all widths tell it
    monkeypatch.setattr(explain, "collect_decode", planned)
    wide = shown(COMMANDS[name], 900)
    for columns in (80, 120):
        text = shown(COMMANDS[name], columns)
        too_long = [line for line in text.splitlines() if len(line) > columns]
        assert not [line for line in too_long if len(max(line.split(), key=len)) < columns - 8]
        assert sorted(words_of(text)) == sorted(words_of(wide))


def test_an_error_on_a_terminal_is_broken_between_words():
    program = (
        "import sys; from distmega.cli.main import main; "
        "sys.exit(main(['explain', 'no-such-model-anywhere']))"
    )
    env = {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "TERM": "xterm", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)
    assert max(map(len, plain.splitlines())) <= 80
    assert len(plain.splitlines()) > 1
    assert "no-such-model-anywhere" in plain


def test_lines_are_broken_between_words_alone():
    text = "  a table   with gaps\n" + "  word " * 30 + "x" * 90
    for width in (40, 80, 120):
        lines = wrap_text(text, width).split("\n")
        assert lines[0] == "  a table   with gaps"
        assert all(len(line) <= width or line.strip() == "x" * 90 for line in lines)
        assert wrap_text(text, width).split() == text.split()
    assert wrap_text(text, 0) == text
