"""How long a model takes to its first tokens in a new process, part by part.

    python -m bench.cold_start qwen3-8b

Random weights are made between the parts and not counted: what counts starts with a Python process
and weights on the GPU. Three processes: Triton's cache empty, Triton's cache filled by the first,
and again. "first token" is that of the prefill, by library ops; "second token" the first of the
decode kernel, which is compiled or loaded there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

PROMPT_TOKENS = 128
START = time.perf_counter()


def measure(model: str) -> dict[str, float]:
    """Seconds of each part in this process, which has done nothing else yet."""
    parts: dict[str, float] = {}
    last = START

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[name] = round(now - last, 3)
        last = now

    import torch  # noqa: PLC0415  what is timed

    lap("import torch")
    import distmega.kernels.hopper.runner  # noqa: PLC0415, F401
    from distmega import engine, weight_loading  # noqa: PLC0415
    from distmega.hostir.comm import SingleCommunicator  # noqa: PLC0415
    from distmega.models.load import open_model  # noqa: PLC0415
    from distmega.requests import EngineOptions  # noqa: PLC0415
    from distmega.sharding.mesh import DeviceMesh  # noqa: PLC0415

    lap("import distmega and triton")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    lap("CUDA context")
    load, loading = weight_loading.load_weights, [0.0]

    def timed_load(*arguments: object) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        load(*arguments)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        loading[0] += time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()

    engine.load_weights = timed_load  # type: ignore[assignment]
    mesh = DeviceMesh(tp=1)
    options = EngineOptions(max_context=1024)
    made = engine.Engine(
        open_model(model), mesh, SingleCommunicator(mesh), options, device="cuda:0"
    )
    torch.cuda.synchronize()
    lap("plan, schedule, memory")
    parts["plan, schedule, memory"] -= round(loading[0], 3)
    prompt = list(range(100, 100 + PROMPT_TOKENS))
    token = made.prefill(prompt)
    lap("first token: plan and run prefill")
    parts["to the first token"] = round(sum(parts.values()), 3)
    assert made.stepping is not None
    made.stepping.start([token], [len(prompt)])
    made.stepping.decode(1).tolist()
    lap("second token: decode kernel")
    parts["to the second token"] = (
        parts["to the first token"] + parts["second token: decode kernel"]
    )
    made.stepping.decode(1).tolist()
    lap("third token")
    made.prefill(prompt)
    lap("the same prefill again")
    parts["(making random weights)"] = round(loading[0], 3)
    return parts


def main() -> None:
    """Runs the three processes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.model)))
        return
    columns = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(3):
            command = [sys.executable, "-m", "bench.cold_start", arguments.model, "--child"]
            done = subprocess.run(
                command,
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            columns.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{arguments.model}, seconds: {'cold':>29} {'warm':>9} {'again':>9}")
    for name in columns[0]:
        print(f"{name:40}", *(f"{column[name]:9.3f}" for column in columns))


if __name__ == "__main__":
    main()
