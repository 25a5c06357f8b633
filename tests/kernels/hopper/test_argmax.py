"""The largest over ranks by one kernel: its numbers, run by threads that stand for ranks, against
what the communicator combines; and that it compiles for Hopper.
"""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from distmega.hostir.comm.collectives import combine_parts

pytest.importorskip("triton")

from distmega.kernels.hopper import argmax
from distmega.kernels.hopper.argmax import PushedArgmax
from tests.kernels.at_once import run_at_once
from tests.kernels.hopper.pushing import Pointer, Program, Scalar
from tests.kernels.offline import offline

ODD = torch.tensor([0.0, -0.0, 1.5, -1.5, torch.nan, -torch.nan, torch.inf, -torch.inf, -2.5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_have_the_largest_of_all_ranks(ranks: int, dtype: torch.dtype):
    """Values that tie, zeros of both signs, NaN; launches of changing rows."""
    torch.manual_seed(0)
    capacity = 64
    peers = [Pointer(torch.zeros(8 * ranks * capacity, dtype=torch.int64)) for _ in range(ranks)]
    epochs = [torch.zeros(2, dtype=torch.int32) for _ in range(ranks)]
    launches = []
    for rows in (1, 40, 32, 3, 64):
        values = ODD[torch.randint(len(ODD), (ranks, rows))].to(dtype)
        indices = torch.stack([torch.randperm(ranks) for _ in range(rows)], 1)
        indices = indices * 2**31 + torch.randint(2**33, (rows,))  # of 35 bits
        launches.append((values, indices))
    results = [
        [(torch.empty_like(v[0]), torch.empty_like(p[0])) for v, p in launches] for _ in peers
    ]
    changed = threading.Condition()

    def run(rank: int) -> None:
        for (values, indices), (largest, where) in zip(launches, results[rank], strict=True):
            rows = values.shape[1]
            for number in range(-(-rows // 32)):
                Program(argmax, number, changed).scope()["argmax_kernel"](
                    *map(Pointer, (values[rank], indices[rank], largest, where)), None,
                    peers[rank], peers, Pointer(epochs[rank]), Scalar(rank), rows,
                    Scalar(capacity), ranks,
                )  # fmt: skip

    run_at_once(partial(run, rank) for rank in range(ranks))
    for number, (values, indices) in enumerate(launches):
        expected = combine_parts(list(zip(values, indices, strict=True)), "argmax")
        for found in results:
            torch.testing.assert_close(found[number], expected, rtol=0, atol=0, equal_nan=True)


def test_it_compiles(monkeypatch: pytest.MonkeyPatch):
    memory = SimpleNamespace(tensor=lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype))
    team = SimpleNamespace(size=3, team_rank=0, open=lambda num_bytes: memory)
    with offline(monkeypatch) as found:
        run = PushedArgmax(team, 64, 1.0)  # type: ignore[arg-type]
        run(torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64))
    (kernel,) = found
    assert kernel.stack_bytes == 0
    assert "ld.relaxed.sys.global.v2.b64" in kernel.ptx
