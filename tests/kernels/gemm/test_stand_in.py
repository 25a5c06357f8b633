"""What a rehearsal launches for matmuls with a collective: the kernels of a call, without the other
ranks.
"""

from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import Tensor

from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul, SumNorm
from distmega.kernels.machines import H200
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.pairs import PairKind

pytest.importorskip("triton")

from distmega.kernels.gemm import api, host, overlap, peer_collectives, pushed
from distmega.kernels.gemm.device.spec import MatmulSpec
from distmega.kernels.gemm.host import PeerMatmuls
from distmega.kernels.runtime.symmetric import StandInTeam, Team

COLUMNS, DEPTH = 4096, 2048


def node_of(kind: PairKind, norm: SumNorm | None = None) -> FusedMatmul:
    return FusedMatmul(kind=kind, mesh_axis="tp", x="x", w="w", out="y", norm=norm)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What starts the kernel, on a machine that has no GPU and says it was an H200."""
    empty = torch.empty

    def on_host(*sizes: object, device: object = None, **options: object) -> Tensor:
        return empty(*sizes, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    monkeypatch.setattr(api, "_on_hopper", lambda x: True)
    monkeypatch.setattr(api, "measured", lambda comm: H200)
    monkeypatch.setattr(overlap, "num_sms", lambda index: H200.num_sms)
    started = create_autospec(overlap.launch_matmul)
    monkeypatch.setattr(overlap, "launch_matmul", started)
    return started


@pytest.fixture
def stand_in() -> PeerMatmuls:
    """Of the second of two ranks; the first one does not exist."""
    comm = create_autospec(NcclCommunicator, instance=True)
    comm.mesh, comm.rank = DeviceMesh(tp=2), 1
    comm.group.return_value = MagicMock(), (0, 1)
    matmuls = PeerMatmuls(comm)
    matmuls._opened["tp"] = [MagicMock(team=Team(comm=comm, axis="tp"))]
    return matmuls.stand_in()


@pytest.mark.parametrize(
    ("kind", "rows", "out_rows"),
    [
        ("all_gather_matmul", 2048, 4096),
        ("matmul_reduce_scatter", 4096, 2048),
        ("matmul_all_reduce", 4096, 4096),
    ],
)
def test_kernels_of_large_products_are_launched(
    kind: PairKind, rows: int, out_rows: int, launched: MagicMock, stand_in: PeerMatmuls
):
    found = stand_in.compile(node_of(kind))(zeros(rows, DEPTH), zeros(COLUMNS, DEPTH))
    assert found.shape == (out_rows, COLUMNS)
    ((*_, spec, _, peering, _),) = (call.args for call in launched.call_args_list)
    assert isinstance(spec, MatmulSpec)
    assert spec.num_ranks == 2
    assert spec.gathers == (kind == "all_gather_matmul")
    assert bool(spec.sends) != spec.gathers
    assert peering.rank == 1
    ranks_asked = stand_in.comm.all_gather_object  # type: ignore[attr-defined]
    assert not ranks_asked.called


def test_sums_of_few_rows_are_pushed(
    launched: MagicMock, stand_in: PeerMatmuls, monkeypatch: pytest.MonkeyPatch
):
    kernels = create_autospec(pushed.PushedSumNorm)
    kernels.return_value.side_effect = lambda partial, residual, *_: (partial, residual)
    monkeypatch.setattr(pushed, "PushedSumNorm", kernels)
    norm = SumNorm(kind="rms_norm", eps=1e-6, residual="r", total="t", weight="v")
    run = stand_in.compile_normed(node_of("matmul_all_reduce", norm), norm)
    for _ in range(2):
        run(zeros(64, DEPTH), zeros(COLUMNS, DEPTH), (zeros(64, COLUMNS), zeros(COLUMNS)))
    ((team, *sizes),) = (call.args for call in kernels.call_args_list)
    assert sizes == [COLUMNS, 64]
    assert isinstance(team, StandInTeam)
    assert not launched.called


def test_torchs_kernels_and_nccls_need_no_rehearsal(
    launched: MagicMock, stand_in: PeerMatmuls, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "means_of", lambda *_, **__: "nccl")
    for name in ("all_gather", "matmul_reduce_scatter", "matmul_all_reduce"):
        monkeypatch.setattr(peer_collectives, name, None)
    x, w = zeros(64, DEPTH), zeros(COLUMNS, DEPTH)
    for kind, rows in (
        ("all_gather_matmul", 128),
        ("matmul_reduce_scatter", 32),
        ("matmul_all_reduce", 64),
    ):
        assert stand_in.compile(node_of(kind))(x, w).shape == (rows, COLUMNS)  # type: ignore[arg-type]
    norm = SumNorm(kind="rms_norm", eps=1e-6, residual="r", total="t", weight="v")
    run = stand_in.compile_normed(node_of("matmul_all_reduce", norm), norm)
    found = run(x, w, (zeros(64, COLUMNS), zeros(COLUMNS)))
    assert [each.shape for each in found] == [(64, COLUMNS)] * 2
    assert not launched.called
