"""The machine that ranks plan for: rank 0's measured rates, or its refusal, on all of them."""

import pytest

from distmega.errors import RequestError
from distmega.hostir.comm import machine as machines
from distmega.hostir.comm.communicator import SingleCommunicator
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap import rates_file
from distmega.sharding.overlap.rates import H100_RATES
from distmega.sharding.overlap.rates_file import Measured, library_versions, write_rates
from distmega.sharding.search.cost import H200


def test_measured_rates_come_from_the_first_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(
        machines, "calibrated", lambda *args: rates_file.calibrated(*args, tmp_path)
    )
    comm = SingleCommunicator(DeviceMesh(tp=1))
    assert machines.machine_of(comm, H200, "GPU") == H200
    measured = Measured(device="GPU", num_ranks=1, libraries=library_versions(), rates=H100_RATES)
    path = write_rates(measured, tmp_path)
    assert machines.machine_of(comm, H200, "GPU").overlap == H100_RATES
    path.write_text("{")
    with pytest.raises(RequestError, match="doctor --calibrate"):
        machines.machine_of(comm, H200, "GPU")
