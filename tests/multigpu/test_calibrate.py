"""Rates measured on GPUs: the same on all ranks, and near those that are built in."""

from dataclasses import asdict
from importlib import import_module

import pytest

from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.kernels.gemm.times.rates import H200_RATES
from distmega.kernels.runtime.streams.copy_engines import CopyCommunicator
from tests.multigpu.ranks import ON_GPUS, TIMEOUT_S

HERE = "tests.multigpu.test_calibrate"
FACTOR = 6.0
"""Between a rate and the built-in one: links and clocks differ, orders of magnitude do not."""


def measure(comm: NcclCommunicator) -> None:
    pytest.importorskip("triton")
    calibrate = import_module("distmega.kernels.gemm.calibrate")
    rates = calibrate.measure_rates(CopyCommunicator(comm.mesh, comm.rank, TIMEOUT_S), "tp")
    found = asdict(rates)
    host = {found.pop("host_us"), found.pop("replay_us")}
    assert all(0 < us < 200 for us in host)
    assert set(map(str, comm.all_gather_object(found))) == {str(found)}
    for name in ("memory_bytes_per_us", "library_flops_per_us", "copy_bytes_per_us"):
        ratio = found[name] / getattr(H200_RATES, name)
        assert 1 / FACTOR < ratio < FACTOR, (name, found[name])
    for name in ("nccl_us", "nccl_reduce_us", "slice_us"):
        (*_, (_, us)), (*_, (_, known)) = found[name], getattr(H200_RATES, name)
        assert 1 / FACTOR < us / known < FACTOR, (name, found[name])
    assert rates.peers_us < 100
    assert rates.copy_us < 100
    assert 1 <= rates.beside_factor <= 3
    assert 1 <= rates.ring_factor <= 3


@pytest.mark.parametrize(("device", "num_ranks"), ON_GPUS)
def test_rates_are_near_those_built_in(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:measure", device, num_ranks)
