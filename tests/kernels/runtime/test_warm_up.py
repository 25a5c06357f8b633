"""What is done beside planning: once for a GPU, waited for, and never the cause of an error."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from distmega.kernels.runtime import warm_up


def keep(key: object, make: Callable[[], str]) -> str:
    return make()


def test_triton_hashes_itself_once_for_all_processes(tmp_path: Path):
    known: dict[object, str] = {}
    hashed: list[str] = []

    def keep_known(key: object, make: Callable[[], str]) -> str:
        if key not in known:
            known[key] = make()
        return known[key]

    def hash_all() -> str:
        hashed.append("all")
        return f"key {len(hashed)}"

    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "cache.py").write_text("")
    for new in ("", "", "more.py"):
        if new:
            (folder / new).write_text("")
        module = SimpleNamespace(__file__=str(folder / "cache.py"), triton_key=hash_all)
        warm_up.find_key(module, keep_known)
        assert module.triton_key() == f"key {len(known)}"
    assert len(hashed) == 2


def test_the_key_is_what_triton_finds():
    cache = triton.runtime.cache
    module = SimpleNamespace(__file__=cache.__file__, triton_key=lambda: "its own")
    warm_up.find_key(module, keep)
    assert module.triton_key() == "its own"
    files = [*warm_up._files_of(Path(triton.__file__).parent)]
    assert any("libtriton" in file for file in files)
    assert any("nvidia/compiler.py" in file for file in files)


BEGIN_AND_IMPORT = """
import torch
from distmega.kernels.runtime import warm_up
assert "triton" not in __import__("sys").modules
torch.cuda.set_device = lambda index: None
warm_up.begin(torch.device("cuda", 0), lambda key, make: make())
import triton.language
warm_up.finish()
import triton.backends.compiler
assert triton.backends.compiler.GPUTarget and triton.language.core and triton.runtime.cache
"""


def test_threads_and_others_may_import_triton_at_one_time():
    command = [sys.executable, "-c", BEGIN_AND_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_begin_once_and_their_errors_stay_theirs(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def load_torch(device: torch.device) -> None:
        ran.append(f"torch {device}")
        raise RuntimeError("no cuBLAS")

    monkeypatch.setattr(warm_up, "_begun", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(warm_up, "_load_torch", load_torch)
    monkeypatch.setattr(warm_up, "_load_driver", lambda: ran.append("driver"))
    monkeypatch.setattr(warm_up, "_load_key", lambda keep: ran.append("key"))
    for _ in range(2):
        warm_up.begin(torch.device("cuda", 3), keep)
    warm_up.finish()
    assert sorted(ran) == ["driver", "key", "torch cuda:3"]
    assert not [one for one in threading.enumerate() if one.name == "warm-up"]


def test_what_torch_is_asked_for_is_there():
    warm_up._load_torch(torch.device("cpu"))
