"""What the functions for users call, by each means that the planner may choose: checked against the
signatures of the functions that start kernels, which run on GPUs alone."""

from contextlib import nullcontext
from unittest.mock import Mock, create_autospec

import pytest
import torch

from distmega.errors import ProgramError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.gemm import api, late
from distmega.kernels.gemm.times.matmul_ways import MatmulChoice
from distmega.kernels.gemm.times.tile_times import Tiles
from distmega.kernels.machines import H200
from distmega.kernels.runtime.memory import has_tma_rows
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.products import Extents

pytest.importorskip("triton")

A, B = torch.ones(256, 64, dtype=torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16)
TILES = Tiles(tile_n=128, stages=6)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands in for the launch of the kernel, which is chosen as on an H200."""
    start = create_autospec(late.start.launch_matmul)
    monkeypatch.setattr(late.start, "launch_matmul", start)
    monkeypatch.setattr(api, "_on_hopper", lambda x: True)
    monkeypatch.setattr(api, "built_in", lambda index: H200)
    monkeypatch.setattr(api, "choose_tiles", lambda extents, rates: TILES)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return start


def test_a_matmul_starts_its_kernel(start: Mock):
    out = torch.zeros(256, 128, dtype=torch.bfloat16)
    assert api.matmul(A, B, out=out) is out
    (call,) = start.call_args_list
    assert call.args[0] is A
    assert call.args[1] is B
    assert call.args[2] is out
    assert call.args[4] == TILES.group


def test_operands_that_tma_cannot_address_are_copied(start: Mock):
    """Rows that lie in each other, as those of an expanded tensor do, or at odd places."""
    a, b = A[:1].expand(256, 64), torch.ones(128 * 64 + 1, dtype=torch.bfloat16)[1:].view(128, 64)
    api.matmul(a, b, out=torch.zeros(256, 128, dtype=torch.bfloat16))
    for given, x in zip(start.call_args.args[:2], (a, b), strict=True):
        assert has_tma_rows(given)
        assert torch.equal(given, x)
    same = torch.zeros(1, 128, dtype=torch.bfloat16).expand(256, 128)
    with pytest.raises(RuntimeError, match="more than one element"):  # torch's own product
        api.matmul(A, B, out=same)
    assert start.call_count == 1


def test_two_weights_go_to_one_kernel(monkeypatch: pytest.MonkeyPatch):
    start = create_autospec(late.start.launch_matmul)
    monkeypatch.setattr(late.start, "launch_matmul", start)
    monkeypatch.setattr(api, "_on_hopper", lambda x: True)
    monkeypatch.setattr(api, "built_in", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    a, b = torch.ones(512, 2048, dtype=torch.bfloat16), torch.ones(4096, 2048, dtype=torch.bfloat16)
    other = b.clone()
    out = api.matmul(a, b, mixes="silu(a0) * a1", other=other)
    assert out.shape == (512, 4096)
    (call,) = start.call_args_list
    assert call.args[1] is b
    assert call.kwargs["other"] is other
    assert call.args[3].apart
    with pytest.raises(ProgramError, match=r"a second weight of shape \[4095, 2048\]"):
        api.matmul(a, b, mixes="a0 + a1", other=other[:4095])


def test_sums_of_few_rows_are_pushed_to_few_ranks():
    is_pushed = late.peer_collectives.is_pushed
    assert is_pushed(64, 2048, 2)
    assert is_pushed(256, 2048, 2)
    assert not is_pushed(264, 2048, 2)
    assert is_pushed(64, 2048, 4)
    assert not is_pushed(256, 2048, 4)


def test_sums_are_normalised_by_their_kernel_where_that_was_quicker():
    takes, x = late.peer_collectives.sums_rows, torch.ones(8, dtype=torch.bfloat16)

    def sums(rows: int, columns: int, num_ranks: int, x: torch.Tensor = x) -> bool:
        extents = Extents(rows=rows, columns=columns, depth=64, num_ranks=num_ranks)
        return takes(extents, x, (x, x))

    assert sums(64, 2048, 2)
    assert sums(1024, 2048, 2)
    assert sums(16, 8192, 2)
    assert sums(1, 2048, 2)
    assert not sums(0, 2048, 2)
    assert not sums(1025, 2048, 2), "more bytes were not timed"
    assert not sums(64, 2048, 4), "four ranks send each other more than two shots do"
    assert not sums(64, 2050, 2), "a thread reads four elements"
    assert not sums(64, 2**15, 2), "a row is in registers"
    assert not sums(64, 2048, 2, x.float())


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("means", ["tiles", "peer"])
def test_a_norm_is_of_the_sum_by_either_way(
    means: str, joins: bool, monkeypatch: pytest.MonkeyPatch
):
    room = late.peer_collectives
    whole = create_autospec(room.matmul_sum_norm, return_value=(A, B))
    summed = create_autospec(api.matmul_all_reduce, return_value=A)
    normed = create_autospec(api.normalise_rows, return_value=(A, B))
    monkeypatch.setattr(room, "matmul_sum_norm", whole)
    monkeypatch.setattr(room, "sums_rows", lambda *args: joins)
    monkeypatch.setattr(api, "matmul_all_reduce", summed)
    monkeypatch.setattr(api, "normalise_rows", normed)
    monkeypatch.setattr(
        api, "_choose", lambda *args: MatmulChoice(means=means, us=1.0, tiles=TILES)
    )
    monkeypatch.setattr(api, "_workspace", lambda *args: "workspace")
    comm, vector = SingleCommunicator(DeviceMesh(tp=1)), torch.ones(128)
    found = api.matmul_sum_norm(A, B, A, vector, None, comm, kind="rms_norm", eps=1e-5)
    assert found == (A, B)
    as_one = joins and means == "peer"
    assert (whole.call_count, summed.call_count, normed.call_count) == (
        as_one,
        not as_one,
        not as_one,
    )


@pytest.mark.parametrize("means", ["tiles", "peer"])
@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def test_a_collective_runs_by_the_chosen_means(
    name: str, means: str, monkeypatch: pytest.MonkeyPatch
):
    choice = MatmulChoice(means=means, us=1.0, tiles=TILES)
    room, called = late.overlap if means == "tiles" else late.peer_collectives, name
    if name == "all_gather_matmul" and means == "peer":
        called = "all_gather"
    made = create_autospec(getattr(room, called), return_value=A)
    monkeypatch.setattr(room, called, made)
    monkeypatch.setattr(api, "_choose", lambda *args: choice)
    monkeypatch.setattr(api, "_workspace", lambda *args: "workspace")
    getattr(api, name)(A, B, SingleCommunicator(DeviceMesh(tp=1)))
    (call,) = made.call_args_list
    assert torch.equal(call.args[0], A)
    assert "workspace" in call.args
    assert means == "peer" or call.args[-1] is choice


def test_an_overlap_that_can_not_be_is_named_by_its_extents():
    comm = SingleCommunicator(DeviceMesh(tp=1))
    found = "overlap forced for 2 rows, 4 columns and depth 3 over 1 rank, of torch.float32 on cpu"
    with pytest.raises(ProgramError, match=f"^{found}; expected bf16 on Hopper GPUs"):
        api.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), comm, overlap=True)
