"""A kernel that is launched again and again, and prepared ahead."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from distmega.kernels.runtime import relaunch, warm_up
from distmega.kernels.runtime.ahead import launching_nothing
from tests.kernels.offline import offline


@triton.jit
def copy(x, y, num, spec: tl.constexpr):
    at = tl.arange(0, spec)
    tl.store(y + at, tl.load(x + at, mask=at < num, other=0.0), mask=at < num)


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
