"""What small collectives take, and what they leave to others: the same on all ranks."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from distmega.hostir.comm.collectives import CommHandle
from distmega.hostir.ir.nodes import CollectiveKind
from distmega.kernels.gemm import late
from distmega.kernels.gemm.host import DONE, PeerMatmuls
from distmega.sharding.layout.mesh import DeviceMesh

pytest.importorskip("triton")

from distmega.kernels.gemm import pushed
from distmega.kernels.gemm.pushed import PushedCollectives
from distmega.kernels.runtime.ahead import launching_nothing
from distmega.kernels.runtime.memory import packed
from distmega.kernels.runtime.symmetric import StandInTeam
from tests.hostir.programs import collective_of
from tests.kernels.offline import offline


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> PushedCollectives:
    """Of four ranks, whose kernels do nothing."""
    for name in ("PushedAllGather", "PushedAllReduce", "PushedArgmax"):
        monkeypatch.setattr(pushed, name, MagicMock(getattr(pushed, name)))
    return PushedCollectives(SimpleNamespace(size=4))  # type: ignore[arg-type]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_gathers_of_even_parts_up_to_16_mb_are_pushed(collectives: PushedCollectives):
    gather = collectives.gather
    assert gather(zeros(512, 4096), zeros(2048, 4096), 0)
    assert gather(zeros(2048, 1024), zeros(2048, 4096), 1)
    assert not gather(zeros(513, 4096), zeros(2052, 4096), 0)
    assert not gather(zeros(3, 8), zeros(10, 8), 0), "the last rank has fewer rows"
    assert not gather(zeros(0, 8), zeros(0, 8), 0)


def test_results_elsewhere_go_through_memory_of_their_own(collectives: PushedCollectives):
    """Words are written at multiples of 16 bytes, into one piece."""
    out = zeros(8, 65)[:, 1:]
    assert collectives.gather(zeros(8, 16), out, 1)
    (_, into, _), _ = collectives._gather.call_args  # type: ignore[union-attr]
    assert into.is_contiguous()
    assert into is not out


def test_words_of_four_are_read_where_they_lie():
    x = torch.arange(24).bfloat16()
    assert packed(x) is x
    assert packed(x[4:12], 8).data_ptr() == x[4:].data_ptr()
    for other in (x[1:9], x.view(3, 8).T):
        found = packed(other, 8)
        assert torch.equal(found, other)
        assert found.flatten().view(torch.int64).numel() == other.numel() // 4


def test_sums_of_few_bf16_are_pushed(collectives: PushedCollectives):
    assert collectives.takes_sum(zeros(1, 4096))
    assert not collectives.takes_sum(zeros(1, 4096, dtype=torch.float32))
    assert not collectives.takes_sum(zeros(3, 5)), "no whole words for each of four ranks"
    assert not collectives.takes_sum(zeros(64, 4096)), "1.5 MB to three peers"


def test_an_argmax_of_floats_up_to_32_bits_is_pushed(collectives: PushedCollectives):
    indices = zeros(7, dtype=torch.int64)
    kernel = MagicMock(return_value=(zeros(7), indices))
    collectives._argmax = kernel
    assert collectives.argmax(zeros(7), indices) is not None
    assert collectives.argmax(zeros(7, dtype=torch.float64), indices) is None
    assert collectives.argmax(zeros(7, dtype=torch.int64), indices) is None
    assert collectives.argmax(zeros(1025), zeros(1025, dtype=torch.int64)) is None
    assert kernel.call_count == 1


def test_a_rehearsal_compiles_what_calls_launch(monkeypatch: pytest.MonkeyPatch):
    """Each kernel as the second of two ranks has it, with nobody else there."""
    empty = torch.empty

    def on_host(*sizes: object, device: object = None, **options: object) -> torch.Tensor:
        return empty(*sizes, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", on_host)
    comm = SimpleNamespace(mesh=DeviceMesh(tp=2), rank=1)
    team = StandInTeam(comm=comm, axis="tp")  # type: ignore[arg-type]
    with offline(monkeypatch) as found, launching_nothing(torch.device("cpu")):
        rehearsed = PushedCollectives(team)
        assert rehearsed.gather(zeros(64, 32), zeros(64, 64), 1)
        rehearsed.sum(zeros(1, 64), zeros(1, 64))
        assert rehearsed.argmax(zeros(3), zeros(3, dtype=torch.int64)) is not None
    names = "".join(kernel.ptx for kernel in found)
    assert all(name in names for name in ("gather_kernel", "reduce_one_shot", "argmax_kernel"))


def test_what_is_not_pushed_is_the_communicators(monkeypatch: pytest.MonkeyPatch):
    taken = MagicMock(**{"gather.return_value": True, "takes_sum.return_value": True})
    monkeypatch.setattr(late, "pushed_by", lambda workspace: taken)
    comm = SimpleNamespace(mesh=DeviceMesh(tp=2))
    matmuls, theirs = PeerMatmuls(comm), CommHandle(lambda: None)  # type: ignore[arg-type]
    xs = outs = [zeros(8)]

    def start(kind: CollectiveKind, combine: str = "sum") -> CommHandle:
        node = collective_of(kind, combine=combine)
        return matmuls.compile_collective(node, lambda xs, outs: theirs)(xs, outs)

    assert start("all_gather") is theirs, "the program has no workspace"
    matmuls._opened["tp"] = [MagicMock()]
    assert start("all_gather") is DONE
    assert start("all_reduce") is DONE
    assert start("all_reduce", "max") is theirs
    assert start("reduce_scatter") is theirs
    comm.mesh = DeviceMesh(pp=2, tp=2)
    assert start("all_gather") is theirs, "stages open no memory together"
    comm.mesh = DeviceMesh(tp=2)
    taken.configure_mock(
        **{
            "gather.return_value": False,
            "takes_sum.return_value": False,
            "argmax.return_value": None,
        }
    )
    assert start("all_gather") is theirs
    assert start("all_reduce") is theirs
    assert start("all_reduce", "argmax") is theirs
