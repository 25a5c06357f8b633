"""The scripts of launch/: what they start, with each argument as it was given."""

import os
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from distmega.cli.main import Command
from distmega.launch.on_ray.token import show_token

ROOT = Path(__file__).parents[2]
PROMPT = 'it\'s $HOME; "two"  words'

RAY = """#!/usr/bin/env bash
while [ "$1" != -- ]; do shift; done
shift
echo "submitted ${RAY_AUTH_MODE:-}"
"$@"
"""
"""A `ray` whose jobs run here."""

COMMAND = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
sys.exit(3)
"""
"""A python3 that says what it was asked."""


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run_script(
    folder: Path, name: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    write_program(folder / "ray", RAY)
    python = write_program(folder / "a python", COMMAND)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        [str(ROOT / "launch" / name), *arguments],
        env={**os.environ, "PATH": path, "PYTHON": str(python), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def as_printed(*arguments: str) -> str:
    quoted = ('"' + a.replace('"', '\\"') + '"' for a in arguments)
    return f"[{', '.join(quoted)}]\n"


def test_a_ray_job_gives_the_command_s_output_and_exit_code(tmp_path: Path) -> None:
    result = tmp_path / "its answer"
    done = run_script(tmp_path, "ray_job.sh", str(result), "generate", "m", PROMPT)
    expected = as_printed("-m", "distmega", "generate", "m", PROMPT, "--launcher", "ray")
    assert (done.stdout, done.returncode) == (expected, 3)
    assert done.stderr.startswith("submitted")
    assert result.read_text() == expected


def test_a_ray_job_shows_the_token_that_there_is(tmp_path: Path) -> None:
    arguments = "ray_job.sh", str(tmp_path / "answer"), "doctor"
    environment = {"HOME": str(tmp_path), "RAY_AUTH_MODE": ""}
    assert run_script(tmp_path, *arguments, **environment).stderr == "submitted \n"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert run_script(tmp_path, *arguments, **environment).stderr == "submitted token\n"
    environment["RAY_AUTH_MODE"] = "disabled"
    assert run_script(tmp_path, *arguments, **environment).stderr == "submitted disabled\n"


def test_the_launcher_shows_the_token_that_there_is(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}

    def shown(**given: str) -> str:
        environment = {**home, **given}
        show_token(environment)
        return environment.get("RAY_AUTH_MODE", "")

    assert shown() == ""
    assert shown(RAY_AUTH_TOKEN="secret") == "token"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert shown() == shown(RAY_AUTH_MODE="") == "token"
    assert shown(RAY_AUTH_MODE="disabled") == "disabled"
    assert shown(HOME="/nowhere") == ""
    assert shown(HOME="/nowhere", RAY_AUTH_TOKEN_PATH=str(tmp_path / ".ray/auth_token")) == "token"


def test_a_ray_job_whose_result_is_elsewhere(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ray_job.sh", str(tmp_path / "no" / "folder"), "doctor")
    assert done.returncode == 1
    assert "expected a job that ran, and a path that the cluster's head shares" in done.stderr


def test_torchrun_and_local(tmp_path: Path) -> None:
    done = run_script(tmp_path, "torchrun.sh", "2", "generate", "m", PROMPT)
    run = "-m", "distmega.launch.agent", "--nnodes", "1", "--nproc-per-node", "2"
    ask = "-m", "distmega", "generate", "m", PROMPT
    assert done.stdout.startswith(as_printed(*run)[:-2])
    assert done.stdout.endswith(as_printed(*ask)[1:])
    done = run_script(tmp_path, "local.sh", "generate", "m", PROMPT)
    command = "-m", "distmega", "generate", "m", PROMPT
    assert done.stdout == as_printed(*command, "--launcher", "local")


@pytest.mark.parametrize("num_ranks", ["generate", "0", "2.5", "-1", ""])
def test_torchrun_without_a_number_of_ranks(num_ranks: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, "torchrun.sh", num_ranks, "generate", "m", PROMPT)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: launch/torchrun.sh NUM_RANKS ")


def commands() -> dict[str, bool]:
    """The commands of distmega; whether they start ranks."""
    return {
        command.__name__.lower(): "ranks" in {field.name for field in fields(command)}
        for command in get_args(Command)
    }


@pytest.mark.parametrize(("command", "starts_ranks"), commands().items())
def test_the_launcher_is_named_to_commands_that_start_ranks(
    command: str, starts_ranks: bool, tmp_path: Path
) -> None:
    for script, launcher in (("local.sh", "local"), ("ray_job.sh", "ray")):
        result = [str(tmp_path / "answer")] if launcher == "ray" else []
        done = run_script(tmp_path, script, *result, command, "m")
        named = ["--launcher", launcher] if starts_ranks else []
        assert done.stdout == as_printed("-m", "distmega", command, "m", *named)


def test_a_script_without_arguments_says_what_it_wants(tmp_path: Path) -> None:
    for name in ("ray_job.sh", "torchrun.sh", "local.sh"):
        done = run_script(tmp_path, name)
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: launch/{name} ")
