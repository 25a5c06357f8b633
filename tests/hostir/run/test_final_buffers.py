"""Which gathered rows nobody writes into again, so that copies of them may still be under way when
the next instruction runs.
"""

from collections.abc import Callable

import pytest
from torch import Tensor

from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.text import parse_host
from distmega.hostir.library.matmuls import SequentialMatmuls
from distmega.hostir.run.evaluator import Evaluator
from distmega.sharding.layout.mesh import DeviceMesh


class NotingMatmuls(SequentialMatmuls):
    """Notes for each node whether x is final."""

    def __init__(self) -> None:
        super().__init__(SingleCommunicator(DeviceMesh(tp=1)))
        self.found: list[bool] = []

    def compile(
        self, node: FusedMatmul, *, is_final: bool = False
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """As the base class does."""
        self.found.append(is_final)
        return super().compile(node, is_final=is_final)


HEAD = """
host p on mesh(tp=1)
  streams {streams}, events 0
  input x: f32[2, 8]
  state s: f32[2, 8]
  weight w: f32[8, 8]
  temp a: f32[2, 8]
  temp y: f32[2, 8]
  body
    allocate a
"""
DOUBLE = "    a = pointwise[i0:2 i1:8] {x}(i0, i1) -> {out}(i0, i1) | expr='(a0 * 2.0)'\n"
GATHER = "    all_gather_matmul tp ({x}, w) -> y rows 1\n"


def found(body: str, outputs: str = "y", streams: int = 1) -> list[bool]:
    """Of each matmul of a program whether the rows it gathers are final."""
    text = HEAD.format(streams=streams) + body + f"  return {outputs}\n"
    matmuls = NotingMatmuls()
    Evaluator(parse_host(text), matmuls.comm, {}, matmuls=matmuls)
    return matmuls.found


MADE = DOUBLE.format(x="x", out="a")
AGAIN = DOUBLE.format(x="y", out="a")
SUM = "    matmul_all_reduce tp (x, w) -> a rows 1{borrowed}\n"


@pytest.mark.parametrize(
    ("body", "options", "expected"),
    [
        (MADE + GATHER.format(x="a"), {}, [True]),
        (GATHER.format(x="x"), {}, [False]),
        (GATHER.format(x="s"), {}, [False]),
        (MADE + GATHER.format(x="a"), {"outputs": "y, a"}, [False]),
        (MADE + GATHER.format(x="a"), {"streams": 2}, [False]),
        (MADE + GATHER.format(x="a") + AGAIN, {}, [False]),
        (SUM.format(borrowed="") + GATHER.format(x="a"), {}, [False, True]),
        (SUM.format(borrowed=" borrowed") + GATHER.format(x="a"), {}, [False, False]),
    ],
    ids=["made", "input", "state", "output", "streams", "made again", "sum", "borrowed sum"],
)
def test_rows_are_final_where_nobody_writes_into_them_again(body, options, expected):
    assert found(body, **options) == expected
