"""What tests need of the machine (gpu, multigpu(n), ray), and how many were skipped for what.

Nightly sweeps run only when -m names them. Where several processes share the work (`pytest -n 3`),
the tests of a file stay in one, and so do all those of a folder whose tests start ranks, and those
that read the syntax of every file.
"""

import gc
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from distmega.env import read_settings

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that wait for each other need a core each
    os.environ |= {"OMP_NUM_THREADS": "1", "DISTMEGA_THREADS": "1"}
    # the hundred processes that tests start would compile our modules anew each
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the Hugging Face Hub

TOGETHER = re.compile(
    r"tests/(e2e|launch|multigpu)/|tests/repo/(?=test_(devices|layering|words)\.py)"
)
LONG = (
    "tests/repo/test_lint.py",
    "tests/kernels/test_newest_triton.py",
    "tests/repo/test_readme.py",
    "tests/kernels/hopper/one_row/test_decode_code.py",
)
"""Files of few tests that take long. They come first: all others come by their number of tests, the
fewest last, and a long one there would leave the other process nothing to do.
"""

GC_THRESHOLD = 10_000
"""Objects made before the youngest are looked at; Python's own is 700."""

settings.register_profile("distmega", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("distmega")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-steps", type=int, default=5000, help="decode steps of each case of test_soak.py"
    )


@pytest.fixture(autouse=True)
def _plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test takes plans of another one, or of this machine's user, from the disk."""
    monkeypatch.setattr("distmega.engine.kept_plans.FOLDER", None)


def _gpu_problem(num_gpus: int) -> str:
    """Why this machine can't run a test on `num_gpus` GPUs; empty if it can."""
    import torch  # noqa: PLC0415  only when a collected test carries a GPU marker

    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    if torch.cuda.device_count() < num_gpus and not read_settings().share_gpus:
        return f"needs {num_gpus} CUDA GPUs, this machine has {torch.cuda.device_count()}"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs compute capability 9.0, this GPU has {torch.cuda.get_device_capability()}"
    return ""


def _problem(item: pytest.Item) -> str:
    if marker := item.get_closest_marker("multigpu"):
        return _gpu_problem(marker.args[0])
    if item.get_closest_marker("gpu"):
        return _gpu_problem(1)
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        return "ray is not installed (pip install 'distmega[ray]')"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is made by then stays, with all of torch and transformers: the garbage collector looks
    at what tests make alone, in place of a million objects each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 10, 10)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" not in config.option.markexpr:
        sweeps = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if item not in sweeps]
        config.hook.pytest_deselected(items=sweeps)
    for item in items:
        if problem := _problem(item):
            item.add_marker(pytest.mark.skip(reason=problem))


class _FoldersInOneProcess(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        found = TOGETHER.match(nodeid)
        return found[0] if found else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """The next of the queue, or one of LONG as long as there is any."""
        for scope in LONG:
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _FoldersInOneProcess(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"{reasons.total()} tests skipped, by reason")
        for reason, num_tests in reasons.most_common():
            terminalreporter.line(f"{num_tests:5d}  {reason}")
