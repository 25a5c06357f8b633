"""`distmega doctor --calibrate`: measures on this machine's GPUs what the cost model of overlap
takes from them, and keeps it.

`calibrate_machine` starts ranks, which call calibration_ranks.measure by name, and writes what they
found. Next: kernels/gemm/times/rates_file.py.
"""

from collections.abc import Iterator
from pathlib import Path

from distmega.cli.findings import HOPPER, Facts, Finding
from distmega.errors import RequestError, counted
from distmega.kernels.gemm.times.rates import OverlapRates
from distmega.kernels.gemm.times.rates_file import (
    Measured,
    library_versions,
    require_rates_folder,
    write_rates,
)
from distmega.launch.contract import Emitted, LauncherOptions
from distmega.launch.launchers import launch

TEAMS = (2, 4, 8)
"""Numbers of ranks that are measured, as far as there are GPUs."""
LIMIT_S = 120.0


def calibrate_machine(facts: Facts) -> Iterator[Finding]:
    """Measures teams of 2, 4 and 8 ranks and writes a file for each. RequestError on a machine
    without two Hopper GPUs that are alike, and where files can't be written.
    """
    names = {gpu.name for gpu in facts.gpus}
    fits = len(names) == 1 and all(gpu.capability == HOPPER for gpu in facts.gpus)
    if len(facts.gpus) < TEAMS[0] or not fits:
        raise RequestError(
            f"--calibrate on {counted(len(facts.gpus), 'GPU')}"
            f" ({', '.join(sorted(names)) or 'none'})",
            expected="two or more Hopper GPUs of one kind",
            remedy="leave it out; built-in rates are used",
        )
    require_rates_folder(facts.gpus[0].name)
    for num_ranks in (team for team in TEAMS if team <= len(facts.gpus)):
        options = LauncherOptions(
            num_ranks=num_ranks, device="cuda", timeout_s=LIMIT_S, start_timeout_s=LIMIT_S
        )
        for event in launch("distmega.cli.calibration_ranks:measure", None, options):
            if isinstance(event, Emitted) and isinstance(event.value, OverlapRates):
                measured = Measured(
                    device=facts.gpus[0].name,
                    num_ranks=num_ranks,
                    libraries=library_versions(),
                    rates=event.value,
                )
                path = write_rates(measured)
                yield from _findings(measured.rates, num_ranks, path)


def _findings(rates: OverlapRates, num_ranks: int, path: Path) -> Iterator[Finding]:
    matmul = rates.library_flops_per_us / 1e6
    (_, least), *_, (few, some), (many, more) = rates.nccl_us
    link = f"{least:.0f} us, {(many - few) / (more - some) / 1e3:.0f} GB/s"
    copy = f"{rates.copy_us:.0f} us, {rates.copy_bytes_per_us / 1e3:.0f} GB/s"
    host = f"{rates.host_us:.1f} us an op, {rates.replay_us:.2f} us captured"
    found = {"matmul": f"{matmul:.0f} TFLOP/s", "NCCL": link, "copy engine": copy, "host": host}
    for name, text in found.items():
        yield Finding(topic=f"{counted(num_ranks, 'rank')}, {name}", found=text)
    yield Finding(topic=counted(num_ranks, "rank"), found=f"rates written to {path}")
