"""Which collectives a device may do in its own way: those that nothing runs beside."""

import pytest

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

    def compile_collective(self, node: Collective, otherwise: StartCollective) -> StartCollective:
        """As the base class does."""
        self.found.append(node.handle)
        return super().compile_collective(node, otherwise)


@pytest.mark.parametrize(
    ("streams", "between", "expected"), [(1, "", ["sum"]), (1, BETWEEN, []), (2, "", [])]
)
def test_a_collective_is_alone_if_its_wait_is_next(streams: int, between: str, expected: list[str]):
    host = parse_host(PROGRAM.format(streams=streams, between=between))
    matmuls = NotingMatmuls()
    Evaluator(host, matmuls.comm, {}, matmuls=matmuls)
    assert matmuls.found == expected
