"""The plan of one kernel for an H200, made without one."""

import pytest
import torch

from distmega.kernels import whole
from distmega.kernels.machines import H200
from distmega.kernels.whole import WholePlan, plan_whole
from distmega.program.types import Program
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.localize import localize
from distmega.sharding.planner import plan_program
from tests.hostir.threads import ThreadCommunicator, Wires

MESH = DeviceMesh(tp=1)
NUM_SMS = 132


def plan_for_h200(
    program: Program, monkeypatch: pytest.MonkeyPatch, *, forced: bool, num_sms: int = NUM_SMS
) -> WholePlan:
    """On one rank."""
    monkeypatch.setattr(whole, "require_hopper", lambda device: num_sms)
    monkeypatch.setattr("distmega.kernels.runners.require_hopper", lambda device: num_sms)
    local = localize(plan_program(program, MESH, H200))
    comm = ThreadCommunicator(MESH, 0, Wires(MESH))
    return plan_whole(local, comm, torch.device("cuda", 0), forced=forced)
