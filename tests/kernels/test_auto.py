"""What megakernel="auto" leaves to library ops since a kernel would do it later."""

import pytest
import torch

from distmega.errors import UnsupportedError
from distmega.kernels import whole
from distmega.kernels.machines import H200
from distmega.kernels.whole import WholePlan, plan_whole
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.threads import ThreadCommunicator, Wires
from tests.kernels import row_programs

MESH = DeviceMesh(tp=1)
NUM_SMS = 132


def on_h200(program: Program, monkeypatch: pytest.MonkeyPatch, *, forced: bool) -> WholePlan:
    monkeypatch.setattr(whole, "require_hopper", lambda device: NUM_SMS)
    monkeypatch.setattr("distmega.kernels.runners.require_hopper", lambda device: NUM_SMS)
    local = localize(plan_program(program, MESH, H200))
    comm = ThreadCommunicator(MESH, 0, Wires(MESH))
    return plan_whole(local, comm, torch.device("cuda", 0), forced=forced)


def prompt(rows: int, num_keys: int, monkeypatch: pytest.MonkeyPatch, window: int = 0) -> Program:
    """Of 4 query heads, two layers."""
    monkeypatch.setattr(row_programs, "CONTEXT", num_keys)
    return row_programs.prompt(rows, window=window)


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_over_a_short_cache_are_one_kernel(rows, monkeypatch):
    assert on_h200(prompt(rows, 96, monkeypatch), monkeypatch, forced=False).queues


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_over_a_long_cache_are_library_ops_unless_asked_for(rows, monkeypatch):
    program = prompt(rows, 8192, monkeypatch)
    with pytest.raises(UnsupportedError, match="predicted 434 us slower than library ops"):
        on_h200(program, monkeypatch, forced=False)
    assert on_h200(program, monkeypatch, forced=True).queues


def test_a_window_bounds_the_keys_that_count(monkeypatch):
    program = prompt(4, 8192, monkeypatch, window=64)
    assert on_h200(program, monkeypatch, forced=False).queues
