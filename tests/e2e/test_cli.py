"""The command line as a user runs it: answers, launchers, errors and exit codes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psutil
import pytest

from distmega.cli.main import main
from tests.calls import num_calls
from tests.interrupts import interruptible

PROMPT = "The capital of France is"
NUM_TOKENS = "8"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
PATIENT = ENVIRONMENT | {"DISTMEGA_TIMEOUT_S": "10000"}
"""With a limit that no test lives to see: what comes before it comes of itself."""
GENERATE = ("generate", "smollm2", PROMPT, "--max-new-tokens", NUM_TOKENS, "--max-context", "64")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "distmega")


def run(
    *arguments: str, module: Sequence[str] = ("distmega",), timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *module, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize(
    "command", ["generate", "explain", "perplexity", "trace", "doctor", "superopt"]
)
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    ends = re.findall(r"(\w+\S)\s+\(default", text.replace("\u2502", ""))
    assert ends
    assert [end for end in ends if not end.endswith(".")] == []
    assert not re.search(r"\{None\}|\(default: (None)?\)", text), "no default that says nothing"


def answer(done: subprocess.CompletedProcess[str]) -> str:
    """The generated text, without the line of figures."""
    assert done.returncode == 0, done.stderr
    text, found, _ = done.stdout.partition("\n[")
    assert found, done.stdout
    return text


@cache
def local_answer() -> str:
    return answer(run(*GENERATE, "--tp", "2"))


def test_a_local_run_answers_and_gives_its_rate() -> None:
    done = run(*GENERATE)
    assert answer(done).startswith(" Paris")
    figures = re.search(r"\[8 tokens after 5 on 1 rank: ([\d.]+) tokens/s", done.stdout)
    assert figures
    assert float(figures[1]) > 0


def test_draws_are_the_same_on_every_launcher_and_number_of_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    drawing = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", "7")
    command = ("generate", "tiny-llama", PROMPT, "--max-new-tokens", "16", *drawing)

    def answer_here(*arguments: str) -> str:
        code = main(arguments)
        done = subprocess.CompletedProcess(arguments, code, *capfd.readouterr())
        assert "Warning" not in done.stderr, "of torch, for names of before"
        return answer(done)

    drawn = answer_here(*command)
    assert answer_here(*command, "--tp", "2") == drawn
    assert answer(run(*command, module=TORCHRUN)) == drawn
    assert answer_here(*command[:-1], "8") != drawn


@pytest.mark.nightly  # the draws above and the README's commands run under torchrun too
def test_torchrun_gives_the_same_answer() -> None:
    assert answer(run(*GENERATE, module=TORCHRUN)) == local_answer()


@pytest.mark.nightly
def test_a_pipeline_gives_the_same_answer_under_torchrun() -> None:
    assert answer(run(*GENERATE, "--pp", "2", module=TORCHRUN)) == local_answer()


@pytest.mark.nightly  # a request outlives a node of Ray in tests/launch/test_nodes.py
@pytest.mark.ray
def test_ray_gives_the_same_answer() -> None:
    assert answer(run(*GENERATE, "--tp", "2", "--launcher", "ray")) == local_answer()


def test_torchrun_and_tp_that_disagree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that is to report says it, the others end silently."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "distmega: error: 3 ranks are asked for, and WORLD_SIZE=2"
    for reports in (True, False):
        monkeypatch.setattr("distmega.cli.main.should_report", lambda reports=reports: reports)
        assert main([*GENERATE, "--tp", "3"]) != 0
        assert capsys.readouterr().err.count(message) == reports


@pytest.mark.nightly  # which process reports: tests/launch/test_torchrun.py
def test_torchrun_itself_and_tp_that_disagree() -> None:
    done = run(*GENERATE, "--tp", "3", module=TORCHRUN)
    assert done.returncode != 0
    assert done.stderr.count("distmega: error: 3 ranks are asked for, and WORLD_SIZE=2") == 1


def test_a_rank_that_dies_ends_the_others_and_is_named() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "distmega", "generate", "smollm2", PROMPT, "--tp", "2",
         "--max-new-tokens", "1000"],
        env=PATIENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.read(6) == " Paris"
    parent = psutil.Process(process.pid)
    ranks = [child for child in parent.children() if "python" in child.name()]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    _, stderr = process.communicate(timeout=250)
    assert process.returncode == 1
    assert re.search(r"distmega: error: rank [01] of 2", stderr), stderr
    assert not psutil.pid_exists(ranks[0].pid)


def test_an_interrupt_while_the_code_is_loaded_is_quiet(tmp_path: Path) -> None:
    """As by Ctrl-C in the first second."""
    interrupts = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "tyro.py").write_text(interrupts)
    with interruptible():
        done = subprocess.run(
            [sys.executable, "-m", "distmega", "--version"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks_at_once_and_quietly(number: signal.Signals, code: int) -> None:
    with interruptible():
        process = subprocess.Popen(
            [sys.executable, "-m", "distmega", "generate", "tiny-llama", PROMPT, "--tp", "2",
             "--max-context", "512", "--max-new-tokens", "480"],
            env=PATIENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert process.stdout
    assert process.stdout.read(1)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.send_signal(number)
    _, stderr = process.communicate(timeout=250)
    assert (process.returncode, stderr) == (code, "")
    _, left = psutil.wait_procs(ranks, 60)
    assert not left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch", "x"], "no such model: 'nosuch'; expected a path"),
        (["smollm2", " "], "prompt ' ' is empty"),
        (["smollm2", "x", "--tp", "18"], "tp=18 can't divide attention .* use tp=17 or less"),
        (["smollm2", "x", "--tp", "-1"], "--tp -1; expected at least 0"),
        (["smollm2", "x", "--pp", "0"], "--pp 0; expected at least 1"),
        (["smollm2", "x", "--pp", "9", "--tp", "18"], "tp=18 can't divide attention"),
        (
            ["smollm2", "x", "--pp", "999"],
            "999 stages of a model of 30 layers; .* use a smaller --pp",
        ),
        (["smollm2", "x", "--max-new-tokens", "0"], "--max-new-tokens 0; expected at least 1"),
        (["smollm2", "x", "--temperature", "-1"], "--temperature -1.0; expected 0, or from"),
        (["smollm2", "x", "--top-k", "5"], "--top-k with temperature 0.* add --temperature 1"),
        (["smollm2", "x", "--max-context", "9000"], "--max-context 9000; expected at most 8192"),
        (
            ["smollm2", "word " * 60, "--max-context", "64"],
            "a prompt of .* positions together.*model allows 8192",
        ),
    ],
)
def test_wrong_requests(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert re.match(f"distmega: error: {message}", captured.err), captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "0"], "--tp 0; expected at least 1"),
        (["--pp", "0"], "--pp 0; expected at least 1"),
        (["--memory-limit-gb", "nan"], "--memory-limit-gb nan; expected at least 0, and finite"),
        (["--memory-limit-gb", "-1"], "--memory-limit-gb -1.0; expected at least 0"),
        (["--memory-limit-gb", "1e-6"], "program .* expected at most 1000 bytes per rank"),
    ],
)
def test_wrong_requests_to_explain(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "tiny-llama", *arguments]) == 2
    captured = capsys.readouterr()
    assert re.match(f"distmega: error: {message}", captured.err), captured.err
    assert captured.err.count("\n") == 1


def test_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The sun is the star at the center of the solar system.")
    assert main(["perplexity", "smollm2", str(text)]) == 0
    match = re.match(r"perplexity ([\d.]+) over (\d+) tokens", capsys.readouterr().out)
    assert match
    assert 1 < float(match[1]) < 20
    assert main(["perplexity", "smollm2", str(tmp_path / "none.txt")]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("smollm2", "--tp", "2"),
        ("llama-3.2-1b", "--tp", "8", "--machine", "h200"),
        pytest.param(
            ("llama-3-70b", "--tp", "8", "--machine", "h200"), marks=pytest.mark.nightly
        ),  # as the last, but for its size
    ],
)
def test_explain_is_complete(arguments: tuple[str, ...]) -> None:
    done = run("explain", *arguments)
    assert done.returncode == 0, done.stderr
    for part in ("all_reduce", "launch", "tasks", "events", "weights:", "us a token"):
        assert part in done.stdout
    assert "torch" not in done.stderr


@pytest.mark.nightly  # as the last of those above
def test_explain_takes_a_bounded_number_of_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "smollm2"]) == 0  # what is imported is not counted
    arguments = ["explain", "llama-3-70b", "--tp", "8", "--machine", "h200"]
    assert num_calls(lambda: main(arguments)) < 14e6
    assert "us a token" in capsys.readouterr().out


def test_explain_does_not_import_torch() -> None:
    code = (
        "import sys; from distmega.cli.main import main; "
        "assert main(['explain', 'smollm2', '--tp', '2']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", [("explain", "tiny-llama"), GENERATE], ids=lambda c: c[0])
def test_a_reader_that_leaves_ends_the_command_quietly(command: Sequence[str]) -> None:
    arguments = [sys.executable, "-m", "distmega", *command]
    with subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        told = process.stderr.read().splitlines()
        assert not [line for line in told if not line.startswith("loading weights")]
        assert process.wait(250) == 1


def test_a_full_device_is_told_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "distmega", "explain", "tiny-llama"],
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("distmega: error: the output can't be written (No space left")
    assert done.stderr.count("\n") == 1


def test_random_weights_are_announced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words")
    generate = ("generate", "tiny-llama", "a", "--max-new-tokens", "2", "--max-context", "16")
    assert main(generate) == 0
    assert capsys.readouterr().out.startswith("[random weights: the text means nothing]\n")
    assert main(["perplexity", "tiny-llama", str(text)]) == 0
    assert capsys.readouterr().out.startswith("[random weights: the figure means nothing]\nperp")
    assert main(["generate", "smollm2", *generate[2:]]) == 0
    assert "random weights" not in capsys.readouterr().out
