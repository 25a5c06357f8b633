"""A kernel prepared ahead: its launcher is made beside its compilation, and is the one it needs."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import make_launcher
from triton.runtime import driver

from distmega.kernels.runtime import relaunch, warm_up
from distmega.kernels.runtime.ahead import launching_nothing
from tests.kernels.offline import offline


@triton.jit
def copy(x, y, num, spec: tl.constexpr):
    at = tl.arange(0, spec)
    tl.store(y + at, tl.load(x + at, mask=at < num, other=0.0), mask=at < num)


def code_of(source: object) -> str:
    """The C code of a launcher."""
    constants = {
        (source.fn.arg_names.index(at),) if isinstance(at, str) else at: value
        for at, value in source.constants.items()
    }
    return make_launcher(constants, source.signature, None)


def test_the_launcher_beside_a_kernel_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch):
    arguments, given = (torch.zeros(64), torch.zeros(64), 50), {"spec": 64, "num_warps": 4}
    made: list[str] = []
    with offline(monkeypatch):

        class Launcher(driver.active.launcher_cls):
            def __init__(self, source: object, metadata: object) -> None:
                super().__init__(source, metadata)
                made.append(code_of(source))

        monkeypatch.setattr(type(driver.active), "launcher_cls", Launcher)
        thread = relaunch.make_launcher_beside(copy, arguments, given)
        assert thread is not None
        thread.join()
        assert len(made) == 1
        compiled = copy.warmup(*arguments, grid=(1,), **given)
        assert compiled.run is not None
    assert len(made) == 2
    assert made[0] == made[1]


def test_a_kernel_that_gives_no_source_has_its_launcher_from_triton():
    kernel = SimpleNamespace(device_caches={})
    assert relaunch.make_launcher_beside(kernel, (), {}) is None


def test_nothing_runs_in_a_rehearsal_not_even_what_ran_before(monkeypatch: pytest.MonkeyPatch):
    """Of a kernel that waits for other ranks nobody would come."""
    ran: list[int] = []
    x, y = torch.zeros(64), torch.zeros(64)
    with offline(monkeypatch) as compiled:
        monkeypatch.setattr(
            type(driver.active).launcher_cls, "__call__", lambda self, *given: ran.append(given[-1])
        )
        launch = relaunch.Launcher(copy, 1, {"spec": 64}, num_warps=2)
        with launching_nothing(torch.device("cpu")):
            launch(x, y, 40)
        assert len(compiled) == 1
        assert not ran
        launch(x, y, 50)
        launch(x, y, 50)
        assert len(ran) == 2
        with launching_nothing(torch.device("cpu")):
            launch(x, y, 60)
        assert len(ran) == 2
    assert len(compiled) == 1


def test_warming_up_loads_the_driver(monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []

    class Driver:
        @property
        def utils(self) -> object:
            loaded.append("utils")
            return self

    monkeypatch.setattr(driver, "_active", Driver())
    warm_up._load_driver()
    assert loaded == ["utils"]
