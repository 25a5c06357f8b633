"""A rehearsal calls kernels as a run does, once for each kind, and computes nothing."""

import math
from collections.abc import Container, Mapping, Sequence
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor

from distmega.engine.decode_planner import lower_decode, plan_decode
from distmega.engine.prefill_planner import lower_prefill
from distmega.engine.requests import EngineOptions
from distmega.hostir.comm.communicator import Communicator, SingleCommunicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm
from distmega.hostir.ir.nodes import HostProgram
from distmega.hostir.library.matmuls import Matmuls, SequentialMatmuls
from distmega.hostir.library.pointwise import OpFunction
from distmega.hostir.library.torch_types import empty_tensor
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.library.device_ops import KernelOps
from distmega.kernels.machines import H200
from distmega.models.config import ModelConfig
from distmega.program.types import Op
from distmega.program.types import Tensor as Buffer
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.superopt.rules import shipped_rules

ALONE = DeviceMesh(tp=1)
LAYERS = 3
DENSE = ModelConfig(
    architecture="qwen3", hidden=64, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=16,
    ffn=96, vocab=80, max_positions=64, qk_norm=True,
)  # fmt: skip
EXPERTS = ModelConfig(
    architecture="qwen3_moe", hidden=64, num_layers=LAYERS, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn=96, vocab=80, max_positions=64, qk_norm=True, num_experts=4,
    experts_per_token=2, expert_ffn=32,
)  # fmt: skip


class Watched(KernelOps):
    """Notes what is done by kernels: the op's kind and extents, and what its operands are like."""

    def __init__(self) -> None:
        super().__init__(rules=shipped_rules)
        self.seen: list[tuple[object, ...]] = []

    def by_kernel(
        self, op: Op, coordinate: Mapping[str, int], constants: Container[str] = ()
    ) -> OpFunction | None:
        function = super().by_kernel(op, coordinate, constants)
        if function is None:
            return None

        def call(xs: Sequence[Tensor]) -> Sequence[Tensor]:
            likes = [(x.shape, x.stride(), x.dtype) for x in xs]
            self.seen.append((op.kind, op.attrs, op.axes, *likes))
            return function(xs)

        return call


def prompt_program(config: ModelConfig, batch: int, mesh: DeviceMesh = ALONE) -> HostProgram:
    options = EngineOptions(max_context=64, batch=batch)
    staged = plan_decode(config, mesh, H200, options)
    return lower_prefill(lower_decode(config, staged, options, peer_memory=True), 32, "none")


def tensors_of(host: HostProgram) -> dict[str, Tensor]:
    given = {b.name: empty_tensor(b, torch.device("cpu")) for b in host.buffers if b.role != "temp"}
    for x in given.values():
        x.copy_(torch.rand(x.shape) / 8 if x.is_floating_point() else torch.zeros(x.shape))
    if "starts" in given:
        given["starts"][1:] = 32
    return given


def memory_of_others(buffer: Buffer, device: torch.device) -> Tensor:
    """New memory as it may be: with numbers that are none, and places far away."""
    made = empty_tensor(buffer, device)
    return made.fill_(math.nan if made.is_floating_point() else 2**30)


@pytest.mark.parametrize(("config", "batch"), [(DENSE, 1), (DENSE, 3), (EXPERTS, 1)])
def test_kernels_see_what_a_run_gives_them(
    config: ModelConfig, batch: int, monkeypatch: pytest.MonkeyPatch
):
    host = prompt_program(config, batch)
    tensors = tensors_of(host)
    before = {name: x.clone() for name, x in tensors.items()}
    found = []
    for rehearses in (True, False):
        ops = Watched()
        evaluator = Evaluator(host, SingleCommunicator(ALONE), {}, ops=ops)
        if rehearses:
            with monkeypatch.context() as patched:
                patched.setattr("distmega.hostir.run.evaluator.empty_tensor", memory_of_others)
                for refusing in ("top_k_values", "route_values"):  # torch's on CPUs, no kernel
                    patched.setattr(f"distmega.program.ops.experts.{refusing}", lambda *_: ())
                evaluator.rehearse(tensors)
            weights = {b.name for b in host.buffers if b.role == "weight"}
            assert all(torch.equal(tensors[name], before[name]) for name in weights)
        else:
            evaluator.run(tensors)
        found.append(ops.seen)
    rehearsed, run = found
    assert set(rehearsed) == set(run)
    assert len(rehearsed) == len(set(rehearsed)), "each once"
    assert len(rehearsed) * LAYERS / 2 < len(run)


class NotedMatmuls(SequentialMatmuls):
    """Notes the sums over ranks that are rehearsed, and communicates nothing."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.rehearsed: list[torch.Size] = []

    def stand_in(self) -> Matmuls:
        """Itself."""
        return self

    def compile(self, node: FusedMatmul, *, is_final: bool = False) -> object:  # type: ignore[override]
        """A sum."""

        def run(x: Tensor, w: Tensor) -> Tensor:
            self.rehearsed.append(x.shape)
            return x.new_empty(x.shape[0], w.shape[0])

        return run

    def compile_normed(self, node: FusedMatmul, norm: SumNorm) -> object:  # type: ignore[override]
        """A norm and a sum."""

        def run(x: Tensor, w: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            self.rehearsed.append(x.shape)
            return given[0], given[0]

        return run


def test_no_other_rank_is_needed():
    """Matmuls with a collective are rehearsed once for each shape, where they have kernels."""
    host = prompt_program(DENSE, 1, DeviceMesh(tp=2))
    assert len([node for node in host.body if isinstance(node, FusedMatmul)]) == 2 * LAYERS
    comm = create_autospec(Communicator, instance=True)
    comm.mesh, comm.rank = host.mesh, 1
    noted = NotedMatmuls(comm)
    for matmuls in (SequentialMatmuls(comm), noted):
        Evaluator(host, comm, {}, ops=Watched(), matmuls=matmuls).rehearse(tensors_of(host))
    last = torch.Size([32, 48])
    assert noted.rehearsed == [torch.Size([32, 32]), torch.Size([32, 48]), last]
    assert not comm.method_calls, "no rank is asked"
