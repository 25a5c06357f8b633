"""The wheel holds the packages, the licence and metadata, and nothing else."""

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.repo.source import PACKAGES


def test_wheel_holds_exactly_the_packages(wheel: Path):
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in PACKAGES.items()
        for path in folder.glob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    metadata = {name for name in held if ".dist-info/" in name}
    data = {"distmega/py.typed", "distmega/superopt/rules.json"}
    assert held - metadata == expected | data
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in metadata)


def test_wheel_metadata_names_licence_and_command(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.rpartition("/")[2]: name for name in archive.namelist()}
        metadata = email.message_from_bytes(archive.read(names["METADATA"]))
        scripts = archive.read(names["entry_points.txt"]).decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "distmega = distmega.__main__:run" in scripts


def test_installed_packages_import_outside_the_repository(installed: Path, tmp_path: Path):
    code = (
        "import distmega, distmega.sharding, distmega.hostir, distmega.kernels, distmega.launch\n"
        "import importlib.util\n"
        f"assert distmega.__file__.startswith({str(installed)!r}), distmega.__file__\n"
        "assert not any(map(importlib.util.find_spec, ('sharding', 'hostir', 'launch')))\n"
    )
    path = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=path, check=True)
