"""What kernels are told that they may read early; graphs are recorded on a CPU."""

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
from distmega.hostir.run.early_reads import (
    early_reads,
    reads_constants_early,
    reads_states_early,
)
from distmega.hostir.run.evaluator import Evaluator
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
        self.told: list[tuple[bool, bool]] = []

    def compile(
        self, op: Op, coordinate: Mapping[str, int], constants: Container[str] = ()
    ) -> OpFunction:
        if op.kind != FUSED:
            return super().compile(op, coordinate)

        def run(operands: object) -> tuple[Tensor, ...]:
            self.told.append(early())
            return ()

        return run


def early() -> tuple[bool, bool]:
    """Whether constants and states are read early."""
    return reads_constants_early(), reads_states_early()


NOTHING, CONSTANTS, ALL = (False, False), (True, False), (True, True)


def told(
    host: HostProgram, run: Callable[[Evaluator, dict[str, Tensor]], object]
) -> list[tuple[bool, bool]]:
    ops = Watching()
    evaluator = Evaluator(host, SingleCommunicator(host.mesh), {}, ops=ops)
    run(evaluator, tensors_of(host))
    return ops.told


def captured(evaluator: Evaluator, tensors: dict[str, Tensor]) -> CapturedHost:
    graph = CapturedHost(evaluator, tensors)
    assert early() == NOTHING
    return graph


def test_a_capture_and_the_runs_before_it_read_all_early():
    """These compile the kernels that it launches."""
    host = lowered(whole_step(Case()))
    assert told(host, captured) == [ALL] * 3


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


def test_runs_without_a_graph_read_nothing_early():
    host = lowered(whole_step(Case()))
    assert told(host, lambda evaluator, tensors: evaluator.run(tensors)) == [NOTHING]


def test_a_graph_that_queues_something_before_the_program_reads_constants_early():
    """It may write the caches and positions."""
    host = lowered(whole_step(Case()))
    found = told(host, lambda e, given: CapturedHost(e, given, before=lambda: None))
    assert found == [CONSTANTS] * 3
    assert told(host, lambda e, given: CapturedHost(e, given, after=lambda _: None)) == [ALL] * 3


def test_a_program_that_writes_a_cache_twice_reads_constants_early():
    host = lowered(whole_step(Case()))
    (node,) = [n for n in host.body if isinstance(n, LibraryOp) and n.op.kind == FUSED]
    at = host.body.index(node)
    twice = replace(host, body=(*host.body[:at], node, *host.body[at:]))
    assert told(twice, captured) == [CONSTANTS] * 6
    with one_run(twice):
        assert early() == CONSTANTS


def test_blocks_are_of_a_thread_and_may_stand_in_one_another():
    with ThreadPoolExecutor(1) as pool, early_reads(states=True):
        with early_reads(states=False):
            assert early() == CONSTANTS
        assert early() == ALL
        assert pool.submit(early).result() == NOTHING
    assert early() == NOTHING
    with pytest.raises(ValueError, match="within"), early_reads(states=True):
        raise ValueError("within")
    assert early() == NOTHING
