"""Sums over ranks with the norm of their rows, by one kernel: what it does with memory and numbers,
run by threads that stand for ranks, against torch; and that it compiles for Hopper.
"""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from distmega.hostir.library.norms import normalise

pytest.importorskip("triton")

from distmega.kernels.hopper import sum_norm
from distmega.kernels.hopper.sum_norm import PushedSumNorm, SumNormSpec
from tests.kernels.at_once import run_at_once
from tests.kernels.hopper.pushing import Pointer, Program, Scalar
from tests.kernels.offline import offline


def as_fours(x: Tensor) -> Pointer:
    return Pointer(x.view(torch.int64).flatten())


@pytest.mark.parametrize(
    ("ranks", "columns", "kind", "has_bias"),
    [(2, 1024 + 36, "rms_norm", False), (3, 200, "layer_norm", True), (2, 8, "layer_norm", False)],
)
def test_rows_are_summed_and_normalised(ranks: int, columns: int, kind: Any, has_bias: bool):
    """Three launches of two, three and one row over ranks in threads, the same bits on all."""
    torch.manual_seed(0)
    spec = SumNormSpec(kind=kind, fours=columns // 4, ranks=ranks, has_bias=has_bias)
    capacity, slots = 3, 2 * ranks * 3
    peers = [Pointer(torch.zeros(slots * spec.fours, dtype=torch.int64)) for _ in range(ranks)]
    words = [Pointer(torch.zeros(slots, dtype=torch.int32)) for _ in range(ranks)]
    epochs = [torch.zeros(capacity, dtype=torch.int32) for _ in range(ranks)]
    weight, bias = torch.randn(2, columns).bfloat16()
    launches = [torch.randn(ranks + 1, rows, columns).bfloat16() for rows in (2, 3, 1)]
    results = [
        [torch.full((2, *each.shape[1:]), torch.nan).bfloat16() for each in launches]
        for _ in range(ranks)
    ]
    changed = threading.Condition()

    def run(rank: int) -> None:
        for given, out in zip(launches, results[rank], strict=True):
            for row in range(given.shape[1]):
                scope = Program(sum_norm, row, changed).scope()
                scope["sum_norm_kernel"](
                    *map(as_fours, (given[rank], given[-1], weight, bias, out[0], out[1])),
                    peers[rank], peers, words[rank], words,
                    Pointer(epochs[rank]), Scalar(rank), Scalar(capacity), 1e-5, spec,
                )  # fmt: skip

    run_at_once(partial(run, rank) for rank in range(ranks))
    for number, given in enumerate(launches):
        total = sum((part.float() for part in given[1:-1]), given[0].float()).bfloat16()
        expected = normalise(kind, total, given[-1], weight, bias if has_bias else None, 1e-5)
        for rank in range(ranks):
            y, both = results[rank][number]
            assert torch.equal(both, expected[1])
            assert torch.equal(y, results[0][number][0])
            torch.testing.assert_close(y, expected[0], rtol=2**-7, atol=2**-7)


def test_it_compiles(monkeypatch: pytest.MonkeyPatch):
    """Rows that fill no chunk; nothing is kept on the stack."""
    memory = SimpleNamespace(tensor=lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))
    team = SimpleNamespace(size=2, team_rank=0, open=lambda num_bytes: memory)
    x, vector = torch.zeros(8, 2304, dtype=torch.bfloat16), torch.zeros(2304, dtype=torch.bfloat16)
    with offline(monkeypatch) as found:
        run = PushedSumNorm(team, 2304, 8)  # type: ignore[arg-type]
        run(x, x, vector, None, "rms_norm", 1e-5)
    (kernel,) = found
    assert kernel.stack_bytes == 0
    assert "atom.global.sys.release.exch.b32" in kernel.ptx
