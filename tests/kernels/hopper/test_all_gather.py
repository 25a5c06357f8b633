"""Gathers by pushing: what the kernel does with memory, run by threads that stand for ranks; and
that it compiles for Hopper.
"""

import math
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from distmega.kernels.hopper import all_gather
from distmega.kernels.hopper.all_gather import BLOCK, PushedAllGather
from tests.kernels.at_once import run_at_once
from tests.kernels.hopper.pushing import Pointer, Program, Scalar
from tests.kernels.offline import offline

WORDS = int(BLOCK.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_of_changing_sizes_are_joined_along_any_dim(ranks: int):
    torch.manual_seed(0)
    blocks = 3
    capacity = blocks * WORDS
    peers = [Pointer(torch.zeros(2 * ranks * capacity, dtype=torch.int64)) for _ in range(ranks)]
    words = [Pointer(torch.zeros(2 * ranks * blocks, dtype=torch.int32)) for _ in range(ranks)]
    epochs = [torch.zeros(blocks, dtype=torch.int32) for _ in range(ranks)]
    shapes = [((40, 100), 1), ((2 * WORDS + 9,), 0), ((1,), 0), ((3, 5, 7), 1), ((50, 90), 0)]
    launches = [(torch.randint(-99, 99, (ranks, *shape)), dim) for shape, dim in shapes * 2]
    expected = [torch.cat(tuple(xs), dim) for xs, dim in launches]
    results = [[torch.full_like(want, -1) for want in expected] for _ in range(ranks)]
    changed = threading.Condition()

    def run(rank: int) -> None:
        for (xs, dim), out in zip(launches, results[rank], strict=True):
            x = xs[rank]
            for number in range(-(-x.numel() // WORDS)):
                Program(all_gather, number, changed).scope()["gather_kernel"](
                    Pointer(x.flatten()), Pointer(out.view(-1)), peers[rank], peers, words[rank],
                    words, Pointer(epochs[rank]), Scalar(rank), x.numel(),
                    math.prod(x.shape[dim:]), capacity, ranks,
                )  # fmt: skip

    run_at_once(partial(run, rank) for rank in range(ranks))
    for found in results:
        for want, got in zip(expected, found, strict=True):
            assert torch.equal(want, got)


def test_it_takes_whole_words_up_to_its_capacity():
    memory = SimpleNamespace(tensor=lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))
    team = SimpleNamespace(size=2, team_rank=0, open=lambda num_bytes: memory)
    gather = PushedAllGather(team, 2**20)  # type: ignore[arg-type]
    x = torch.zeros(64, 8192, dtype=torch.bfloat16)
    assert gather.takes(x, 0)
    assert gather.takes(x, 1)
    assert not gather.takes(torch.zeros(65, 8192, dtype=torch.bfloat16), 0)
    assert not gather.takes(x[:, :6], 1), "12 bytes lie together"
    assert gather.takes(x[:4, :6], 0)
    assert not gather.takes(x[:0], 0)


def test_it_compiles(monkeypatch: pytest.MonkeyPatch):
    """16 bytes an access where columns are joined; nothing is kept on the stack."""
    memory = SimpleNamespace(tensor=lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))
    team = SimpleNamespace(size=3, team_rank=0, open=lambda num_bytes: memory)
    x, out = (torch.zeros(64, n, dtype=torch.bfloat16) for n in (2048, 6144))
    with offline(monkeypatch) as found:
        PushedAllGather(team, x.nbytes)(x, out, 1)  # type: ignore[arg-type]
    (kernel,) = found
    assert kernel.stack_bytes == 0
    assert "atom.global.sys.release.exch.b32" in kernel.ptx
    assert "st.global.v2.b64" in kernel.ptx
    assert "st.global.b64" not in kernel.ptx
