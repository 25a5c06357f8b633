"""What explain says a host program costs the host."""

from dataclasses import replace

from distmega.hostir.ir.matmul_nodes import SymmetricBuffer
from distmega.hostir.run.host_cost import count_instructions, explain_host
from distmega.kernels.gemm.times.rates import H200_RATES
from distmega.kernels.gemm.times.ways import MatmulModel
from distmega.kernels.machines import H200
from tests.hostir.programs import streamed

RATES = MatmulModel(replace(H200_RATES, host_us=10.0, replay_us=0.5))


def test_instructions_of_a_loop_count_once_an_iteration():
    assert count_instructions(streamed().body) == 2 + 3 * 10 + 3


def test_explained_in_a_line():
    machine = replace(H200, overlap=RATES)
    line = "35 instructions a run, about 350 us of the host, 18 us where captured as a graph"
    assert explain_host(streamed(), machine) == line
    host = replace(streamed(), symmetric_buffers=(SymmetricBuffer(mesh_axis="tp", num_bytes=4096),))
    assert explain_host(host, machine) == f"{line}; 2 x 4,096 bytes of peer memory along tp"
