"""Requests that are refused before any rank starts, and the settings of the environment."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distmega.env import Settings, read_settings
from distmega.errors import LaunchError, RequestError
from distmega.launch import late, launchers
from distmega.launch.contract import LauncherOptions, RayOptions
from distmega.launch.launchers import choose_device, launch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"launcher": "slurm"},
            "launcher 'slurm'; expected one of auto, local, torch",
        ),
        ({"num_ranks": 0}, "num_ranks 0; expected at least 1; raise"),
        ({"num_ranks": "2"}, "num_ranks '2'; expected a whole number"),
        ({"num_ranks": True}, "num_ranks True; expected a whole number"),
        ({"num_ranks": 10**5000}, "num_ranks of 16610 bits; expected at most 65536"),
        ({"device": "tpu"}, "device 'tpu'; expected one of auto, cpu, cuda; choose"),
        ({"device": "tpu" * 10**6}, "device 'tputpu"),
        ({"timeout_s": -1.0}, "timeout_s -1.0; expected more than 0"),
        ({"timeout_s": "60"}, "timeout_s '60'; expected more than 0"),
        ({"start_timeout_s": 0.0}, "start_timeout_s 0.0; expected more than 0"),
        ({"start_timeout_s": None}, "start_timeout_s None; expected more than 0"),
        ({"max_restarts": -1}, "max_restarts -1; expected at least 0"),
        ({"ray": {}}, "ray {}; expected RayOptions"),
        ({"max_restarts": 1, "launcher": "torchrun"}, "give --max-restarts to torchrun"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, object], message: str):
    with pytest.raises(RequestError) as refusal:
        launch("module:function", None, LauncherOptions(**options))
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "pack"}, "strategy 'pack'; expected one of PACK, STRICT_PACK"),
        ({"cpus_per_rank": -1}, "cpus_per_rank -1; expected at least 0"),
        ({"cpus_per_rank": "1"}, "cpus_per_rank '1'; expected at least 0"),
        ({"ranks_per_bundle": 0}, "ranks_per_bundle 0; expected at least 1"),
        ({"ranks_per_bundle": 1.0}, "ranks_per_bundle 1.0; expected a whole number"),
        ({"placement_timeout_s": float("nan")}, "placement_timeout_s nan; expected more than 0"),
    ],
)
def test_bad_options_of_ray_are_refused_when_they_are_made(
    options: dict[str, object], message: str
):
    with pytest.raises(RequestError, match=f"^{message}"):
        RayOptions(**options)
    assert RayOptions(cpus_per_rank=0).cpus_per_rank == 0


@pytest.mark.parametrize(("num_ranks", "size"), [(3, 2), (1, 2)])
def test_ranks_that_do_not_fill_their_bundles_are_refused_before_ray_is_asked(
    num_ranks: int, size: int
):
    options = LauncherOptions(
        launcher="ray", num_ranks=num_ranks, device="cpu", ray=RayOptions(ranks_per_bundle=size)
    )
    with pytest.raises(RequestError, match=rf"^{num_ranks} ranks? in bundles of {size}; "):
        launch("module:function", None, options)


@pytest.mark.parametrize("options", [None, {}, "local", LauncherOptions])
def test_what_are_no_options_is_refused(options: object):
    with pytest.raises(RequestError, match=r"^options .*; expected LauncherOptions"):
        launch("module:function", None, options)  # type: ignore[arg-type]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Gives this machine so many files of GPUs, and so many GPUs that torch finds."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def have(num_files: int, num_found: int) -> None:
        for number in range(num_files):
            (tmp_path / f"nvidia{number + 3}").touch()
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(launchers, "DEVICES", tmp_path)
        monkeypatch.setattr(launchers.late, "num_gpus", lambda: num_found, raising=False)

    return have


def test_gpus_that_are_missing_are_named_before_a_rank_starts(gpus: Callable[..., None]):
    gpus(0, 0)
    options = LauncherOptions(device="cuda", launcher="local", num_ranks=2)
    with pytest.raises(LaunchError) as refusal:
        launch("module:function", None, options)
    assert "device cuda for 2 ranks, and 0 GPUs that torch finds; expected" in str(refusal.value)
    assert "give device cpu or ask for fewer ranks" in str(refusal.value)


@pytest.mark.parametrize(
    ("num_files", "num_found", "launcher", "shared"),
    [(2, 0, "local", "0"), (0, 2, "local", "0"), (0, 1, "local", "1"), (0, 0, "ray", "0")],
)
def test_ranks_may_start_where_gpus_may_be(
    gpus: Callable[..., None],
    num_files: int,
    num_found: int,
    launcher: Any,
    shared: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("DISTMEGA_SHARE_GPUS", shared)
    gpus(num_files, num_found)
    launchers.require_gpus(LauncherOptions(device="cuda", launcher=launcher), 2)


def test_the_usual_device_is_a_gpu_where_one_has_a_file(gpus: Callable[..., None]):
    gpus(0, 0)
    assert choose_device("auto", "local") == "cpu"
    gpus(1, 1)
    assert choose_device("auto", "local") == "cuda"


@pytest.mark.parametrize(
    ("shown", "num"),
    [("", 0), ("-1", 0), ("none", 0), ("0", 1), (" 1 , 0", 2), ("0,-1,1", 1), ("0,2", 1),
     ("GPU-8932f937,MIG-2", 2), ("0,1,0", 2)],
)  # fmt: skip
def test_gpus_that_are_hidden_do_not_count(
    gpus: Callable[..., None], shown: str, num: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    gpus(2, num)
    assert choose_device("auto", "local") == ("cuda" if num else "cpu")
    assert choose_device("auto", "ray") == "cuda"
    options = LauncherOptions(device="cuda", launcher="local")
    launchers.require_gpus(options, num)
    with pytest.raises(LaunchError, match=f"{num + 1} ranks?, and {num} GPU"):
        launchers.require_gpus(options, num + 1)


def test_a_payload_that_cannot_be_pickled_is_refused():
    with pytest.raises(RequestError, match="a payload of type function"):
        launch("module:function", lambda: None, LauncherOptions(device="cpu"))


class Unwilling:
    def __reduce__(self) -> tuple[object, ...]:
        raise ValueError("it stays here")


def test_a_payload_whose_class_refuses_to_be_pickled_is_named():
    with pytest.raises(RequestError, match=r"a payload of type Unwilling \(it stays here\)"):
        launch("module:function", Unwilling(), LauncherOptions(device="cpu"))


def test_ray_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "distmega.launch.on_ray.actors", raising=False)
    monkeypatch.delitem(vars(late), "run_ray", raising=False)  # of a test before this one
    with pytest.raises(LaunchError, match=r"pip install 'distmega\[ray\]'"):
        launch("module:function", None, LauncherOptions(launcher="ray", device="cpu"))


def test_a_caller_that_starts_no_ranks_loads_neither_torch_nor_ray():
    code = (
        "import sys, distmega.launch.launchers, distmega.launch.local\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_are_typed():
    assert read_settings({}) == Settings(log="warning", timeout_s=300.0, num_threads=None)
    given = {"DISTMEGA_LOG": "debug", "DISTMEGA_TIMEOUT_S": "1.5", "DISTMEGA_THREADS": "3"}
    assert read_settings(given) == Settings(log="debug", timeout_s=1.5, num_threads=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DISTMEGA_LOG", "loud"),
        ("DISTMEGA_TIMEOUT_S", "soon"),
        ("DISTMEGA_TIMEOUT_S", "nan"),
        ("DISTMEGA_TIMEOUT_S", "0"),
        ("DISTMEGA_THREADS", "0"),
        ("DISTMEGA_THREADS", "1.5"),
        ("DISTMEGA_TIMEOUT", "5"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, text: str):
    with pytest.raises(RequestError, match=f"environment variable {name}='{text}'; expected"):
        read_settings({name: text})


def main_of(path: Path, lines: str) -> subprocess.CompletedProcess[str]:
    """A script that defines a target and calls launch."""
    path.write_text(
        "import os\n"
        "from dataclasses import dataclass\n"
        "from distmega.launch import LauncherOptions, launch\n"
        "@dataclass\n"
        "class Request: number: int\n"
        "def double(context, payload, emit): return 2 * payload\n" + lines
    )
    command = [sys.executable, path.name]
    return subprocess.run(
        command, cwd=path.parent, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_function_of_the_script_that_runs_is_a_target(tmp_path: Path):
    lines = (
        "if __name__ == '__main__':\n"
        "    (last,) = launch(double, 21, LauncherOptions(device='cpu'))\n"
        "    print(last.value)\n"
    )
    done = main_of(tmp_path / "my_script.py", lines)
    assert done.stdout == "42\n", done.stderr


def test_a_function_of_no_file_is_refused():
    code = (
        "from distmega.launch import LauncherOptions, launch\n"
        "def double(context, payload, emit): return 2 * payload\n"
        "launch(double, 21, LauncherOptions(device='cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable], input=code, capture_output=True, text=True, check=False, timeout=60
    )
    assert "target 'double'; expected a function of a module, or of the script" in done.stderr


def test_a_process_of_torchrun_starts_no_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(RequestError, match="local in a process that torchrun started"):
        launch("module:function", None, LauncherOptions(launcher="local", device="cpu"))


def test_a_script_that_starts_ranks_when_imported_is_told_to_guard_it(tmp_path: Path):
    lines = "print(list(launch(double, 21, LauncherOptions(device='cpu'))))\n"
    done = main_of(tmp_path / "bare.py", lines)
    assert done.returncode == 1
    assert "launch is called while the module of 'bare:double' is imported" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_a_payload_that_ranks_cannot_read_is_refused(tmp_path: Path):
    lines = (
        "if __name__ == '__main__':\n"
        "    list(launch(double, Request(1), LauncherOptions(device='cpu')))\n"
    )
    done = main_of(tmp_path / "own_type.py", lines)
    assert "a payload of a type that the ranks don't find" in done.stderr


def test_a_function_without_a_name_is_refused():
    def inner(context: object, payload: object, emit: object) -> None: ...

    for target in (inner, lambda context, payload, emit: None):
        with pytest.raises(RequestError, match="expected a function of a module, or of the script"):
            launch(target, None, LauncherOptions(device="cpu"))
