"""What ends a CUDA graph is said by name, of every kind; what doesn't is not."""

from pathlib import Path

import pytest
import torch

from distmega.errors import ProgramError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.ir.text import parse_host
from distmega.hostir.library.ops import TorchOps, attention, masked_attention
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.run.cuda_graph import CapturedHost
from distmega.hostir.run.evaluator import Evaluator
from distmega.hostir.run.graph_breaks import graph_breaks, tensor_breaks
from distmega.kernels.library.device_ops import KernelOps
from distmega.program.builder import ProgramBuilder
from distmega.sharding.layout.mesh import DeviceMesh
from tests.hostir.programs import chain, local

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")

SIGNALS = """
host signals on mesh(tp=2)
  streams 1, events 0
  input x: f32[4]
  body
    signal free to tp[+1]
    wait signal free from tp[-1]
  return x
"""


def attending(in_order: bool) -> HostProgram:
    p = ProgramBuilder("attending")
    q, at = p.input("q", (2, 1, 1, 4)), p.input("at", (2,), "i64")
    k, v = (p.state(name, (1, 8, 4)) for name in "kv")
    mixed = p.attention(q, k, v, at, 0.5, in_order=in_order, name="mixed")
    return lower_program(local(p.build(mixed)), megakernel=False, peer_memory=False)


def breaks(host: HostProgram, device: torch.device = GPU, **options: object) -> list[str]:
    ops = options.pop("ops", TorchOps())
    return [*graph_breaks(host, device, ops, **({"signals_on_device": False} | options))]


def test_a_program_that_only_queues_work_has_no_breaks():
    host = lower_program(local(chain()), megakernel=False, peer_memory=False)
    assert breaks(host) == []


def test_a_program_on_the_cpu_has_no_graph():
    host = lower_program(local(chain()), megakernel=False, peer_memory=False)
    assert breaks(host, CPU) == ["its tensors are on the CPU, which has no graphs"]


def test_outputs_that_the_host_reads_are_named():
    told = ["op 'mixed' (attention): the host reads positions"]
    assert breaks(attending(in_order=False)) == told
    assert breaks(attending(in_order=False), ops=KernelOps()) == told
    assert breaks(attending(in_order=True)) == []
    assert breaks(attending(in_order=False), ops=KernelOps(masked=True)) == []


def test_experts_whose_rows_the_host_reads_are_named():
    p = ProgramBuilder("experts")
    x, w = p.input("x", (4, 8)), p.weight("w", (2, 6, 8))
    weights, chosen = p.top_k(p.input("scores", (4, 2)), 1)
    routing = p.route(chosen, 2)
    rows = p.grouped_linear(p.gather_rows(x, routing), w, routing, name="up")
    host = lower_program(
        local(p.build(p.scatter_add(rows, weights, routing))), megakernel=False, peer_memory=False
    )
    told = "op 'up' (grouped_linear): the host reads where groups start"
    assert breaks(host) == breaks(host, ops=KernelOps(groups="torch")) == [told]
    assert breaks(host, ops=KernelOps()) == []


def test_signals_that_hosts_send_are_named():
    host = parse_host(SIGNALS)
    assert breaks(host) == [
        "'signal free to tp[+1]': the host sends it",
        "'wait signal free from tp[-1]': the host sends it",
    ]
    assert breaks(host, signals_on_device=True) == []


def test_kernels_whose_state_is_on_the_host_are_named():
    host = lower_program(local(chain()), megakernel=True, peer_memory=False)
    (kernel,) = (segment.name for segment in host.segments)
    assert breaks(host, bound_kernels=[kernel]) == [
        f"kernel {kernel!r}: the host keeps its position"
    ]
    assert breaks(host) == []


def test_tensors_on_another_device_are_named():
    host = attending(in_order=True)
    tensors = {"k": torch.zeros(1, 8, 4), "q": torch.zeros(2, 1, 1, 4, device="meta")}
    assert [*tensor_breaks(host, GPU, tensors)] == [
        "input 'q' is on the META", "state 'k' is on the CPU",
    ]  # fmt: skip
    assert [*tensor_breaks(host, CPU, {"k": tensors["k"]})] == []


def test_a_capture_refuses_what_it_can_not_hold():
    host = lower_program(local(chain()), megakernel=False, peer_memory=False)
    evaluator = Evaluator(host, SingleCommunicator(DeviceMesh(tp=1)), {})
    with pytest.raises(ProgramError, match=r"its tensors are on the CPU.* run it without capture"):
        CapturedHost(evaluator, {})


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize(
    ("q", "cache"),
    [((3, 2, 2, 8), (2, 16, 8)), ((3, 2, 2, 8), (3, 2, 16, 8)), ((1, 4, 1, 8), (4, 16, 8))],
)
def test_attention_under_a_mask_is_attention(
    q: tuple[int, ...], cache: tuple[int, ...], window: int
):
    torch.manual_seed(0)
    given = torch.randn(q), torch.randn(cache), torch.randn(cache)
    positions = torch.tensor([5, 9, 3])[: q[0]]
    found = masked_attention(*given, positions, 0.3, window)
    torch.testing.assert_close(found, attention(*given, positions, 0.3, window))
    assert found.is_contiguous()


def test_the_page_has_what_is_told():
    page = (Path(__file__).resolve().parents[3] / "docs" / "host-ir.md").read_text()
    told = [*breaks(attending(in_order=False)), *breaks(attending(in_order=True), CPU)]
    assert len(told) == 2
    assert all(f"`{each}`" in page for each in told)
