"""`distmega doctor`: what it says of machines of all kinds, and of this one."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from distmega.cli.calibration import calibrate_machine
from distmega.cli.findings import Facts, Finding, Gpu, examine, gather_facts
from distmega.cli.main import main
from distmega.errors import RequestError
from distmega.kernels.gemm.times import rates_file

CPU_MACHINE = Facts(
    packages={"torch": "2.13.0+cpu", "ray": "2.60.0"},
    shared_bytes=2**30,
)
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), num_bytes=141 * 10**9)
GPU_MACHINE = Facts(
    packages={
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "ray": "2.60.0",
        "nvidia-nccl-cu13": "2.28.9",
    },
    torch_cuda="13.0",
    nccl="2.28.9",
    num_device_files=2,
    gpus=(replace(H200, peers=(1,)), replace(H200, peers=(0,))),
    symmetric={"CUDA": "", "NCCL": ""},
    shared_bytes=2**30,
)


def of_state(facts: Facts, state: str) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.state == state]


@pytest.mark.parametrize("facts", [CPU_MACHINE, GPU_MACHINE])
def test_a_sound_machine_has_no_problem(facts: Facts) -> None:
    assert not of_state(facts, "problem") + of_state(facts, "note")
    topics = {finding.topic for finding in examine(facts)}
    assert {"Python", "torch", "triton", "ray", "devices", "multicast", "shared memory"} <= topics


def test_a_machine_with_gpus_says_what_they_share() -> None:
    found = {str(finding) for finding in examine(GPU_MACHINE)}
    assert {
        "ok      torch: 2.11.0+cu130 for CUDA 13.0",
        "ok      devices: cuda:1 NVIDIA H200, 141 GB",
        "ok      peer access: between all GPUs",
        "ok      symmetric memory, NCCL: works",
        "ok      NCCL: 2.28.9",
    } <= found


BOTH_NCCL = {"nvidia-nccl-cu12": "2.27", "nvidia-nccl-cu13": "2.28"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(CPU_MACHINE, python=(3, 10, 4)), "Python: 3.10.4.*install Python 3.11 or later"),
        (replace(CPU_MACHINE, packages={}), "torch: not installed; run: pip install torch"),
        (
            replace(CPU_MACHINE, packages={"torch": "2.9.1"}),
            r"torch: 2.9.1 for CPUs; run: pip install 'torch>=2.11'",
        ),
        (
            replace(CPU_MACHINE, broken={"torch": "libc.so.7: cannot open"}),
            "does not load .libc.so.7: cannot open.; install it again",
        ),
        (
            replace(CPU_MACHINE, num_device_files=2),
            "devices: 2 GPUs, but torch was built for CPUs; install a torch for CUDA",
        ),
        (
            replace(GPU_MACHINE, gpus=(), broken={"CUDA": "driver too old"}),
            "devices: 2 GPUs, but driver too old; check that driver and torch fit",
        ),
        (
            replace(GPU_MACHINE, packages={"torch": "2.11.0", "ray": "2.60"}),
            r"triton: not installed; run: pip install 'distmega\[gpu\]'",
        ),
        (
            replace(GPU_MACHINE, packages=GPU_MACHINE.packages | {"triton": "3.5.1"}),
            r"triton: 3.5.1; run: pip install 'triton>=3.6'",
        ),
        (
            replace(GPU_MACHINE, packages=GPU_MACHINE.packages | BOTH_NCCL),
            "write the same file; run: pip uninstall nvidia-nccl-cu12; pip install .*-cu13$",
        ),
        (
            replace(
                GPU_MACHINE, packages=GPU_MACHINE.packages | BOTH_NCCL, torch_cuda="12.8"
            ),
            "write the same file; run: pip uninstall nvidia-nccl-cu13; pip install .*-cu12$",
        ),
        (replace(GPU_MACHINE, broken={"NCCL": "no symbol"}), "NCCL: does not load .no symbol."),
        (
            replace(CPU_MACHINE, environment={"NCCL_NVLS_ENABLE": "1"}),
            "multicast: NCCL_NVLS_ENABLE=1; unset NCCL_NVLS_ENABLE",
        ),
        (replace(GPU_MACHINE, shared_bytes=2**20), "1 MiB free in /dev/shm; .* --shm-size"),
        (
            replace(CPU_MACHINE, environment={"DISTMEGA_LOG": "loud"}),
            "settings: environment variable DISTMEGA_LOG='loud'; correct or unset",
        ),
    ],
)  # fmt: skip
def test_a_problem_comes_with_its_remedy(facts: Facts, words: str) -> None:
    (problem,) = of_state(facts, "problem")
    assert re.search(words, str(problem)), str(problem)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(CPU_MACHINE, packages={"torch": "2.13"}), "for --launcher ray run: pip install"),
        (replace(CPU_MACHINE, shared_bytes=2**20), "--shm-size"),
        (replace(CPU_MACHINE, processor="aarch64"), "their collectives go over gloo"),
        (
            replace(CPU_MACHINE, packages=CPU_MACHINE.packages | BOTH_NCCL),
            "write the same file",
        ),
        (
            replace(GPU_MACHINE, gpus=(H200, H200)),
            "peer access: none from cuda:0 to cuda:1, cuda:1 to cuda:0; ranks there .* NCCL",
        ),
        (
            replace(GPU_MACHINE, symmetric={"CUDA": "no handle", "NCCL": ""}),
            "symmetric memory, CUDA: no handle; another backend or NCCL",
        ),
        (
            replace(GPU_MACHINE, gpus=(replace(H200, capability=(8, 0)),)),
            "compute capability 8.0; the decode kernel needs 9.0; library ops run instead",
        ),
        (
            replace(GPU_MACHINE, gpus=(replace(H200, capability=(10, 0)),)),
            "compute capability 10.0; the decode kernel needs 9.0; library ops run instead",
        ),
    ],
)
def test_what_is_only_slower_or_not_needed_is_noted(facts: Facts, words: str) -> None:
    (note,) = of_state(facts, "note")
    assert re.search(words, str(note)), str(note)
    assert not of_state(facts, "problem")


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = 1 if of_state(gather_facts(), "problem") else 0
    assert main(["doctor"]) == expected
    assert "torch: " in capsys.readouterr().out
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "multicast: NCCL_NVLS_ENABLE=1; unset NCCL_NVLS_ENABLE" in captured.out
    assert captured.err.startswith("distmega: error: ")
    assert captured.err.count("\n") == 1


def test_calibration_needs_gpus() -> None:
    with pytest.raises(RequestError, match=r"--calibrate on 0 GPUs \(none\)"):
        list(calibrate_machine(CPU_MACHINE))
    older = replace(GPU_MACHINE, gpus=(replace(H200, capability=(8, 0)),) * 2)
    with pytest.raises(RequestError, match="two or more Hopper GPUs of one kind"):
        list(calibrate_machine(older))


def test_calibration_looks_for_its_folder_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file")
    required = partial(rates_file.require_rates_folder, folder=folder)
    monkeypatch.setattr("distmega.cli.calibration.require_rates_folder", required)
    with pytest.raises(RequestError, match=r"measured rates can't be written to .*XDG_CACHE_HOME"):
        list(calibrate_machine(GPU_MACHINE))


def test_a_torch_that_does_not_load_is_reported_and_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')")
    done = subprocess.run(
        [sys.executable, "-m", "distmega", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"problem torch: .* does not load \(libtorch.so: no such file", done.stdout)
    assert "shared memory" in done.stdout
