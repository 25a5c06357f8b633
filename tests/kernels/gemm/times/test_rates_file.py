"""Measured rates: kept, read back, refused where they do not fit."""

import errno
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import pytest

from distmega.errors import RequestError
from distmega.kernels.gemm.times.rates import H200_RATES
from distmega.kernels.gemm.times.rates_file import (
    VERSION,
    Measured,
    calibrated,
    rates_path,
    write_rates,
)
from distmega.kernels.machines import H200
from distmega.sharding.overlap.products import Collective, Extents, Product
from tests.fuzz import changed, fuzz_target

DEVICE = "NVIDIA H200"
LIBRARIES = {"torch": "2.11.0", "triton": "3.6.0"}
MEASURED = Measured(
    device=DEVICE,
    num_ranks=2,
    libraries=LIBRARIES,
    rates=replace(H200_RATES, peer_us=17.5, slice_us=((256, 0.7), (128, 0.4))),
)


def test_what_is_written_is_read_back(tmp_path: Path):
    path = write_rates(MEASURED, tmp_path)
    assert path == rates_path(DEVICE, 2, tmp_path)
    assert path.name == "overlap-nvidia-h200-2.json"
    assert calibrated(H200, DEVICE, 2, LIBRARIES, tmp_path).overlap.rates == MEASURED.rates


def test_built_in_rates_where_the_folder_is_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As for a service that was started with the home of who started it."""

    def refused(path: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    assert calibrated(H200, DEVICE, 2, LIBRARIES, tmp_path) == H200


def test_built_in_rates_where_nothing_was_measured(tmp_path: Path):
    write_rates(MEASURED, tmp_path)
    assert calibrated(H200, DEVICE, 4, LIBRARIES, tmp_path) == H200
    assert calibrated(H200, "NVIDIA H100", 2, LIBRARIES, tmp_path) == H200


def test_rates_of_other_libraries_are_stale(tmp_path: Path):
    write_rates(MEASURED, tmp_path)
    newer = LIBRARIES | {"torch": "2.12.0"}
    with pytest.raises(RequestError, match=r"2\.11\.0.*expected.*2\.12\.0.*doctor --calibrate"):
        calibrated(H200, DEVICE, 2, newer, tmp_path)


def change(stored: dict, name: str, value: object) -> None:
    if value is None:
        del stored["rates"][name]
    else:
        stored["rates"][name] = value


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("peer_us", None, "its fields .*peer_us"),
        ("speed", 3, "its fields .*speed"),
        ("peer_us", "fast", "peer_us = 'fast'"),
        ("peer_us", -1, "peer_us = -1"),
        ("launch_us", True, "launch_us = True"),
        ("copy_us", float("nan"), "copy_us = nan"),
        ("nccl_us", [[1, 2]], r"nccl_us = \(\(1, 2\),\)"),
        ("slice_us", [[256, "x"]], "slice_us = "),
        ("kernel_dtypes", [16], "kernel_dtypes = "),
        ("kernel_multiples", [128, 0, 8], "kernel_multiples = "),
        ("kernel_multiples", [128, 128, 8, 8], "kernel_multiples = "),
        ("nccl_us", [[1, 2], [1, 3]], "nccl_us = "),
        ("nccl_us", [[1, 2, 3], [2, 3, 4]], "nccl_us = "),
        ("memory_bytes_per_us", 0, "memory_bytes_per_us = 0"),
        ("num_sms", 0, "num_sms = 0"),
        ("tile_us", 10**30, "tile_us = 10000"),
        ("slice_us", [[128, 0.4], [64, 0.2]], "slice_us = "),
        ("slice_us", [[256, 0.7], [128, 0.4], [128, 0.5]], "slice_us = "),
        ("nccl_us", [[1e6, 20.0], [2e6, 60.0]], "nccl_us = "),
        ("nccl_reduce_us", [[0.0, 20.0], [1e6, 40.0], [2e6, 30.0]], "nccl_reduce_us = "),
        ("num_sms", 66, "num_sms 66; expected num_sms 132"),
        ("kernel_multiples", [1, 1, 1], r"kernel_multiples \(1, 1, 1\); expected"),
        ("kernel_dtypes", ["f16"], "kernel_dtypes .*expected"),
        ("kernel_ranks", 64, "kernel_ranks 64; expected"),
    ],
)
def test_a_field_that_does_not_fit_is_named(tmp_path: Path, name: str, value: object, words: str):
    path = write_rates(MEASURED, tmp_path)
    stored = json.loads(path.read_text())
    change(stored, name, value)
    path.write_text(json.dumps(stored))
    with pytest.raises(RequestError, match=words + ".*doctor --calibrate"):
        calibrated(H200, DEVICE, 2, LIBRARIES, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 0}', '{"version": 1}', "[" * 10**5, "[9" + "9" * 5000],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str):
    path = write_rates(MEASURED, tmp_path)
    path.write_text(text)
    with pytest.raises(RequestError, match="doctor --calibrate"):
        calibrated(H200, DEVICE, 2, LIBRARIES, tmp_path)


def test_a_pipe_or_a_flood_is_refused(tmp_path: Path):
    path = rates_path(DEVICE, 2, tmp_path)
    os.mkfifo(path)
    with pytest.raises(RequestError, match="it is not a regular file"):
        calibrated(H200, DEVICE, 2, LIBRARIES, tmp_path)
    path.unlink()
    with path.open("w") as file:
        file.truncate(2**40)
    with pytest.raises(RequestError, match="it has 1099511627776 bytes"):
        calibrated(H200, DEVICE, 2, LIBRARIES, tmp_path)


def read_stored(data: object) -> None:
    with TemporaryDirectory() as folder:
        write_rates(MEASURED, Path(folder))
        rates_path(DEVICE, 2, Path(folder)).write_text(json.dumps(data))
        machine = calibrated(H200, DEVICE, 2, LIBRARIES, Path(folder))
    extents = Extents(rows=512, columns=1024, depth=256, num_ranks=2, item_bytes=2)
    for collective in get_args(Collective):
        product = Product(collective=collective, extents=extents, dtype="bf16")
        times, _ = machine.overlap.way_times_us(product, (2, 4))
        assert all(0 <= time < math.inf for time in times.values())


STORED = {"version": VERSION, **asdict(MEASURED)}
test_files = fuzz_target(changed([STORED]), read_stored)
