"""Requests that are refused before any rank starts, and the settings of the environment."""

import subprocess
import sys

import pytest

from distmega.env import Settings, read_settings
from distmega.errors import LaunchError, RequestError
from distmega.launch.contract import LauncherOptions
from distmega.launch.launchers import launch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "slurm"}, "launcher 'slurm'; expected one of local, torchrun, ray; choose"),
        ({"num_ranks": 0}, "0 ranks; expected at least 1; raise"),
        ({"timeout_s": -1.0}, "a timeout of -1.0 s; expected a positive"),
        ({"start_timeout_s": 0.0}, "a timeout of 0.0 s; expected a positive"),
        ({"max_restarts": -1}, "-1 restarts with launcher local; expected 0 or more"),
        ({"max_restarts": 1, "launcher": "torchrun"}, "give --max-restarts to torchrun itself"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, object], message: str):
    with pytest.raises(RequestError) as refusal:
        launch("module:function", None, LauncherOptions(**options))
    assert message in str(refusal.value)


def test_a_payload_that_cannot_be_pickled_is_refused():
    with pytest.raises(RequestError, match="a payload of type function"):
        launch("module:function", lambda: None, LauncherOptions())


def test_ray_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "distmega.launch.ray", raising=False)
    with pytest.raises(LaunchError, match=r"pip install 'distmega\[ray\]'"):
        launch("module:function", None, LauncherOptions(launcher="ray"))


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
