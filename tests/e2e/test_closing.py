"""Programs, engines and modules that are closed let go of their memory, and say so when called."""

import gc
import weakref

import pytest
import torch
from torch import nn

import distmega
from distmega.compiled import CompiledProgram
from distmega.engine.engine import Engine
from distmega.engine.requests import EngineOptions
from distmega.errors import ProgramError, RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.machines import CPU
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.planner import plan_program
from distmega.sources.load import open_model
from tests.hostir.programs import attention_block, block_tensors

MESH = DeviceMesh(tp=1)


class Counted(SingleCommunicator):
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("megakernel", [False, True])
@pytest.mark.parametrize("closes_comm", [False, True])
def test_a_closed_program_lets_go(megakernel: bool, closes_comm: bool):
    comm = Counted(MESH)
    plan = plan_program(attention_block(5), MESH, CPU)
    step = CompiledProgram(plan, comm, megakernel=megakernel, closes_comm=closes_comm)
    parts = step.parts(block_tensors(5))
    step(parts)
    gone = [weakref.ref(step._evaluator), *(weakref.ref(x) for x in parts.values())]
    parts.clear()
    for _ in range(2):
        step.close()
    gc.collect()
    assert not any(ref() for ref in gone)
    assert comm.num_closed == closes_comm
    assert not step.tensors
    assert "it is closed" in step.explain()
    assert step.stats.reason == "it is closed"
    for call in (
        lambda: step({}),
        lambda: step.bind({}),
        lambda: step.parts(block_tensors(5)),
        step.wait,
    ):
        with pytest.raises(ProgramError, match=r"after its close\(\); expected calls before"):
            call()


def test_a_closed_engine_lets_go():
    comm = Counted(MESH)
    options = EngineOptions(max_context=32, batch=2)
    engine = Engine(open_model("tiny-llama"), MESH, comm, options, logits="last", closes_comm=True)
    steps = engine.generate_all([[1, 2], [3]], ignore_eos=True)
    next(steps)
    names = engine.decode_plan.weights.tensors
    gone = [weakref.ref(engine.tensor(name)) for name in names]
    gone += [weakref.ref(engine._arenas.weights), weakref.ref(engine._decode.runner)]
    for _ in range(2):
        engine.close()
    with pytest.raises(RequestError, match="resumed after another call"):
        next(steps)
    gc.collect()
    assert not any(ref() for ref in gone)
    assert comm.num_closed == 1
    for call in (
        lambda: engine.prefill([1]),
        lambda: engine.decode(1),
        lambda: engine.logits([1]),
        lambda: next(engine.generate([1])),
        lambda: engine.tensor(next(iter(names))),
        lambda: engine.trace(1, 0),
        lambda: engine.uses_megakernel,
        lambda: engine.reseed(1),
    ):
        with pytest.raises(RequestError, match=r"after its close\(\); expected calls before"):
            call()


def test_a_closed_module_takes_no_call():
    """Nor one of other shapes, which an open module would be captured for."""
    step = distmega.capture(nn.Linear(4, 3), (torch.ones(2, 4),), dynamic=True).compile()
    step(torch.ones(2, 4))
    for _ in range(2):
        step.close()
    for rows in (2, 5):
        with pytest.raises(ProgramError, match=r"Linear after its close\(\)"):
            step(torch.ones(rows, 4))
