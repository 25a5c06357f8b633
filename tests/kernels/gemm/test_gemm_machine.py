"""The machine that ranks plan for: what is assumed of a GPU whose rates nobody has measured; rank
0's measured rates, or its refusal, on all of them."""

from types import SimpleNamespace

import pytest
import torch

from distmega.errors import RequestError
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.kernels.gemm import machine
from distmega.kernels.gemm.machine import built_in
from distmega.kernels.gemm.times.rates import H100_RATES
from distmega.kernels.gemm.times.rates_file import (
    Measured,
    calibrated,
    library_versions,
    write_rates,
)
from distmega.kernels.machines import H100, H200
from distmega.kernels.runtime import gpus
from distmega.sharding.layout.mesh import DeviceMesh


@pytest.mark.parametrize(
    ("name", "num_sms", "alike"), [("NVIDIA H200", 132, H200), ("NVIDIA H100 PCIe", 114, H100)]
)
def test_a_machine_has_the_sms_of_its_gpu(monkeypatch, name, num_sms, alike):
    """Or else a launch would share a last wave that it does not have."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    properties = SimpleNamespace(multi_processor_count=num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    forget()
    found = built_in(0)
    forget()
    assert (found.num_sms, found.overlap.rates.num_sms) == (num_sms, num_sms)
    assert found.overlap.rates.memory_bytes_per_us == alike.overlap.rates.memory_bytes_per_us
    assert (found == alike) == (num_sms == alike.num_sms)


def forget() -> None:
    """What was asked of a device before."""
    built_in.cache_clear()
    gpus.num_sms.cache_clear()


def test_measured_rates_come_from_the_first_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "calibrated", lambda *args: calibrated(*args, tmp_path))
    comm = SingleCommunicator(DeviceMesh(tp=1))
    assert machine.machine_of(comm, H200, "GPU") == H200
    measured = Measured(device="GPU", num_ranks=1, libraries=library_versions(), rates=H100_RATES)
    path = write_rates(measured, tmp_path)
    assert machine.machine_of(comm, H200, "GPU").overlap.rates == H100_RATES
    path.write_text("{")
    with pytest.raises(RequestError, match="doctor --calibrate"):
        machine.machine_of(comm, H200, "GPU")
