"""What is assumed of a GPU whose rates nobody has measured."""

from types import SimpleNamespace

import pytest
import torch

from distmega.kernels.gemm.machine import built_in
from distmega.kernels.runtime import gpus
from distmega.sharding.search.cost import H100, H200


@pytest.mark.parametrize(
    ("name", "num_sms", "alike"), [("NVIDIA H200", 132, H200), ("NVIDIA H100 PCIe", 114, H100)]
)
def test_a_machine_has_the_sms_of_its_gpu(monkeypatch, name, num_sms, alike):
    """Or else a launch would share a last wave that it does not have."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    properties = SimpleNamespace(multi_processor_count=num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    forget()
    machine = built_in(0)
    forget()
    assert (machine.num_sms, machine.overlap.num_sms) == (num_sms, num_sms)
    assert machine.overlap.memory_bytes_per_us == alike.overlap.memory_bytes_per_us
    assert (machine == alike) == (num_sms == alike.num_sms)


def forget() -> None:
    """What was asked of a device before."""
    built_in.cache_clear()
    gpus.num_sms.cache_clear()
