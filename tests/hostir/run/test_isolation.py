"""Where kernels are told that they are launched for one run behind all work before it; graphs are
recorded on a CPU.
"""

from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import HostProgram, LibraryOp
from distmega.hostir.library.ops import TorchOps
from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.passes.fuse_attention import FUSED
from distmega.hostir.run.cuda_graph import CapturedHost, one_run
from distmega.hostir.run.evaluator import Evaluator
from distmega.hostir.run.isolation import is_isolated, isolated_run
from distmega.program.types import Op
from tests.hostir.graphs import record_graphs
from tests.hostir.passes.test_fuse import lowered
from tests.hostir.passes.test_fuse_attention import Case, tensors_of, whole_step


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)


class Watching(TorchOps):
    """Notes what attention is told; it does not ask the device for positions."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def compile(
        self, op: Op, coordinate: Mapping[str, int], constants: Container[str] = ()
    ) -> OpFunction:
        if op.kind != FUSED:
            return super().compile(op, coordinate)

        def run(operands: object) -> tuple[Tensor, ...]:
            self.told.append(is_isolated())
            return ()

        return run


def told(host: HostProgram, run: Callable[[Evaluator, dict[str, Tensor]], object]) -> list[bool]:
    ops = Watching()
    evaluator = Evaluator(host, SingleCommunicator(host.mesh), {}, ops=ops)
    run(evaluator, tensors_of(host))
    return ops.told


def captured(evaluator: Evaluator, tensors: dict[str, Tensor]) -> CapturedHost:
    graph = CapturedHost(evaluator, tensors)
    assert not is_isolated()
    return graph


def test_a_capture_and_the_runs_before_it_are_isolated():
    """These compile the kernels that it launches."""
    host = lowered(whole_step(Case()))
    assert told(host, captured) == [True] * 3


def test_each_run_before_a_capture_begins_when_the_one_before_is_done(
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: calls.append("wait"))
    run = Evaluator.run
    monkeypatch.setattr(
        Evaluator, "run", lambda self, given: (calls.append("run"), run(self, given))[1]
    )
    told(lowered(whole_step(Case())), captured)
    assert calls == ["wait", "run", "wait", "run", "wait", "run"]


def test_runs_without_a_graph_are_not():
    host = lowered(whole_step(Case()))
    assert told(host, lambda evaluator, tensors: evaluator.run(tensors)) == [False]


def test_a_graph_that_queues_something_before_the_program_is_not():
    """It may write the caches and positions."""
    host = lowered(whole_step(Case()))
    nothing = told(host, lambda e, given: CapturedHost(e, given, before=lambda: None))
    assert nothing == [False] * 3
    assert told(host, lambda e, given: CapturedHost(e, given, after=lambda _: None)) == [True] * 3


def test_a_program_that_writes_a_cache_twice_is_not():
    host = lowered(whole_step(Case()))
    (node,) = [n for n in host.body if isinstance(n, LibraryOp) and n.op.kind == FUSED]
    at = host.body.index(node)
    twice = replace(host, body=(*host.body[:at], node, *host.body[at:]))
    assert told(twice, captured) == [False] * 6
    with one_run(twice):
        assert not is_isolated()


def test_blocks_are_of_a_thread_and_may_stand_in_one_another():
    with ThreadPoolExecutor(1) as pool, isolated_run():
        with isolated_run():
            assert is_isolated()
        assert is_isolated()
        assert not pool.submit(is_isolated).result()
    assert not is_isolated()
    with pytest.raises(ValueError, match="within"), isolated_run():
        raise ValueError("within")
    assert not is_isolated()
