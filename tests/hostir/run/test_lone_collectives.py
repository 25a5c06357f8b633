"""Which collectives a device may do in its own way: those that nothing runs beside."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import Collective
from distmega.hostir.ir.text import parse_host
from distmega.hostir.library.matmuls import SequentialMatmuls, StartCollective
from distmega.hostir.run.evaluator import Evaluator
from distmega.sharding.layout.mesh import DeviceMesh

PROGRAM = """
host p on mesh(tp=1)
  streams {streams}, events 0
  input x: f32[2, 8]
  temp a: f32[2, 8]
  temp y: f32[2, 8]
  body
    allocate a
    all_reduce tp (x) -> (a) as sum | combine='sum' num_ranks=1
{between}    wait sum
    y = pointwise[i0:2 i1:8] a(i0, i1) -> y(i0, i1) | expr='(a0 * 2.0)'
  return y
"""
BETWEEN = "    y = pointwise[i0:2 i1:8] x(i0, i1) -> y(i0, i1) | expr='(a0 * 3.0)'\n"


class NotingMatmuls(SequentialMatmuls):
    """Notes the collectives that it is asked for."""

    def __init__(self) -> None:
        super().__init__(SingleCommunicator(DeviceMesh(tp=1)))
        self.found: list[str] = []
        self.rehearsed: list[tuple[Tensor, ...]] = []

    def compile_collective(self, node: Collective, otherwise: StartCollective) -> StartCollective:
        """As the base class does."""
        self.found.append(node.handle)
        return super().compile_collective(node, otherwise)

    def stand_in(self) -> "NotingCalls":
        """Notes operands here."""
        return NotingCalls(self.rehearsed)


class NotingCalls(SequentialMatmuls):
    """Notes the operands of collectives."""

    def __init__(self, found: list[tuple[Tensor, ...]]) -> None:
        super().__init__(SingleCommunicator(DeviceMesh(tp=1)))
        self.found = found

    def compile_collective(self, node: Collective, otherwise: StartCollective) -> StartCollective:
        """Communicates nothing."""

        def start(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> CommHandle:
            self.found.append((*xs, *outs))
            return CommHandle(lambda: None)

        return start


@pytest.mark.parametrize(
    ("streams", "between", "expected"), [(1, "", ["sum"]), (1, BETWEEN, []), (2, "", [])]
)
def test_a_collective_is_alone_if_its_wait_is_next(streams: int, between: str, expected: list[str]):
    host = parse_host(PROGRAM.format(streams=streams, between=between))
    matmuls = NotingMatmuls()
    Evaluator(host, matmuls.comm, {}, matmuls=matmuls)
    assert matmuls.found == expected


def test_a_rehearsal_calls_what_is_alone_with_its_operands():
    matmuls, x = NotingMatmuls(), torch.zeros(2, 8)
    for between in ("", BETWEEN):
        host = parse_host(PROGRAM.format(streams=1, between=between))
        Evaluator(host, matmuls.comm, {}, matmuls=matmuls).rehearse({"x": x})
    ((given, out),) = matmuls.rehearsed
    assert given is x
    assert out.shape == x.shape
