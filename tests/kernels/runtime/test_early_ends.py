"""A process that ends while its kernels are still prepared ends as if they were not."""

import subprocess
import sys

import pytest

from tests.repo.source import ROOT

pytest.importorskip("triton", reason="triton is not installed (pip install 'distmega[gpu]')")

ENDS = """
import torch
from types import SimpleNamespace
from distmega.kernels.runtime import relaunch, warm_up

def work():
    x = torch.ones(512, 512)
    for _ in range(300):  # in C++, without the interpreter, as compilers are
        x = x @ x / 512
    print("worked")

class Kernel:
    arg_names = ["x", "constant"]

    def warmup(self, *arguments, **options):
        work()
        return SimpleNamespace(run=None)

torch.cuda.set_device = lambda index: None
{begin}
print("ends")
"""
BEGIN = {
    "kernel": "relaunch.Launcher(Kernel(), 1, {'constant': 0}).prepare(1)",
    "warm-up": "warm_up._start(0, work)",
}


@pytest.mark.parametrize("begin", BEGIN)
def test_what_is_prepared_comes_to_its_end(begin):
    """A thread that Python cuts off in C++ aborts the process, and its memory is dumped."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(begin=BEGIN[begin])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["ends", "worked"]), done.stderr
