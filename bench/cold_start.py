"""How long a model takes to its first tokens in a new process, part by part.

    python -m bench.cold_start qwen3-8b

Weights stay the zeros that their memory is made of, so nothing hides behind reading them. Three
processes: the caches of Triton and distmega empty, filled by the first, and again. The first token
is that of the prefill, by library ops; the second is the first of the decode kernel, which is
compiled or loaded beside all that comes before. Beside them, what Python, torch, triton and a CUDA
context take alone. The package's bytecode is there, as pip leaves it.
"""

import argparse
import compileall
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton.experimental.gluon  # noqa: F401, counted with torch

import distmega
from bench.options import read_options

PROMPT = range(100, 228)
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Of Python: set where this runs, each process would compile all modules anew."""
PACKAGES = "distmega", "hostir", "kernels", "launch", "sharding"
"""In the repository beside each other, installed within the first."""


class Laps:
    """Seconds of each part, as on a stopwatch that began at `start`, a time.time()."""

    def __init__(self, start: float) -> None:
        self.parts: dict[str, float] = {}
        self._last = start

    def lap(self, name: str) -> None:
        torch.cuda.synchronize()
        now = time.time()
        self.parts[name] = now - self._last
        self._last = now

    def total(self, name: str) -> None:
        """What was measured so far, under a name of its own."""
        whole = [s for part, s in self.parts.items() if not part.startswith("=")]
        self.parts[f"= {name}"] = sum(whole)


def measure(model: str, start: float) -> dict[str, float]:
    """Seconds of each part in this process, which has done nothing since `start` but import torch
    and triton.
    """
    laps = Laps(start)
    torch.cuda.init()
    laps.lap("Python, torch, triton, CUDA")
    engine = importlib.import_module("distmega.engine.engine")
    laps.lap("imports of the engine")
    engine.load_weights = lambda *arguments: None
    mesh = engine.DeviceMesh(tp=1)
    options = engine.EngineOptions(max_context=1024)
    comm = importlib.import_module("distmega.hostir.comm.communicator").SingleCommunicator(mesh)
    source = importlib.import_module("distmega.sources.load").open_model(model)
    made = engine.Engine(source, mesh, comm, options, device="cuda:0")
    laps.lap("plan, memory, queues")
    prompt = list(PROMPT)
    token = made.prefill(prompt)
    laps.lap("plan and run prefill")
    laps.total("first token")
    made.stepping.start([token], [len(prompt)])
    made.stepping.run_steps(1)
    laps.lap("wait for and run decode")
    laps.total("second token")
    made.stepping.run_steps(1)
    laps.lap("(third token)")
    made.prefill(prompt)
    laps.lap("(the same prefill again)")
    made.prefill(list(range(100, 400)))
    laps.lap("(a prefill of another size)")
    return laps.parts


def compile_package() -> None:
    """Writes bytecode of all modules of distmega."""
    for place in map(Path, distmega.__path__):
        for folder in (place / name for name in PACKAGES):
            if folder.is_dir():
                compileall.compile_dir(folder, quiet=1)


def main() -> None:
    """Runs the three processes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--start", type=float, help="of a process that measures itself")
    arguments = read_options(parser, lambda given: 0 if given.start else 1)
    if arguments.start:
        print(json.dumps(measure(arguments.model, arguments.start)))
        return
    compile_package()
    environment = {name: value for name, value in os.environ.items() if name != NO_BYTECODE}
    columns = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(3):
            command = [sys.executable, "-m", "bench.cold_start", arguments.model, "--start"]
            done = subprocess.run(
                [*command, repr(time.time())],
                env={**environment, "TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            columns.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{arguments.model + ', seconds':28} {'cold':>8} {'cached':>8} {'again':>8}")
    for name in columns[0]:
        print(f"{name:28}", *(f"{column[name]:8.2f}" for column in columns))


if __name__ == "__main__":
    main()
