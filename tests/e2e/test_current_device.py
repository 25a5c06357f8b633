"""A compiled program runs on its own GPU, whichever is the current one where it is called: kernels
are launched, and graphs captured, on that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from distmega.compiled import CompiledProgram, program
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import Plan, plan_program
from tests.hostir.programs import attention_block, block_tensors

MESH, OWN = DeviceMesh(tp=1), torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the GPUs that were made current, the last one being so; torch's stand-in."""
    made = [0]

    @contextmanager
    def device(wanted: torch.device | int) -> Iterator[None]:
        made.append(wanted if isinstance(wanted, int) else wanted.index)
        yield
        made.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: made[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return made


def planned() -> Plan:
    return plan_program(attention_block(5), MESH, CPU)


CALLS: dict[str, Callable[[CompiledProgram, dict[str, Tensor]], object]] = {
    "_run": lambda step, given: step(given),
    "_await_calls": lambda step, given: step.wait(),
    "_replay.reset": lambda step, given: step.bind(given),
    "_replay.close": lambda step, given: step.close(),
}
"""Calls, by what they do on the GPU."""


@pytest.mark.parametrize("name", CALLS)
def test_calls_make_its_gpu_the_current_one(
    current: list[int], monkeypatch: pytest.MonkeyPatch, name: str
):
    step = CompiledProgram(planned(), SingleCommunicator(MESH))
    given = step.parts(block_tensors(5))
    step(given)
    step.device, step._guard.gpu = OWN, OWN.index
    where: list[int] = []
    *path, last = name.split(".")
    owner = getattr(step, path[0]) if path else step
    original = getattr(owner, last)

    def watched(*arguments: object) -> object:
        where.append(torch.cuda.current_device())
        return original(*arguments)

    monkeypatch.setattr(owner, last, watched)
    CALLS[name](step, given)
    assert where == [OWN.index]
    assert current == [0], "as before the call"


class Seen(Exception):
    pass


def test_it_is_opened_there(current: list[int], monkeypatch: pytest.MonkeyPatch):
    def lower(*arguments: object, **options: object) -> object:
        raise Seen(torch.cuda.current_device())

    monkeypatch.setattr(program, "find_device", lambda name: OWN)
    monkeypatch.setattr(program.warm_up, "begin", lambda *arguments: None)
    monkeypatch.setattr(program, "lower_plan", lower)
    with pytest.raises(Seen, match="1"):
        CompiledProgram(planned(), SingleCommunicator(MESH), "cuda:1")
