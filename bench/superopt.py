"""The paper's programs: what the search finds, how long it takes, and times on a GPU.

    python -m bench.superopt --search-only                    no GPU: the search's table
    python -m bench.superopt "lora k=4096 n=4096 rank=16 rows=1" ...

A case is a program of superopt/programs.py. On a GPU it times, in one run and in turn, the best
proven graph (its ops as library ops in a CUDA graph, until the kernels have it as a fused op),
torch.compile max-autotune and the unfused program, over copies of the inputs that together exceed
200 MB, so that no cache holds them. The floor is one reading of the inputs and one writing of
the outputs at the rate of a copy. Writes bench/results/superopt-<device>.json.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.records import Record, add_book_options, open_book
from bench.timing import alternating_us, copy_bytes_per_us
from distmega.hostir.library.ops import compile_op, op_operands
from distmega.program.types import Program
from distmega.sharding.search.cost import H200
from distmega.superopt.optimize import Optimizer
from distmega.superopt.programs import PAPER_CASES, read_case
from distmega.superopt.rewrite import graph_program
from distmega.superopt.rules import Rule
from distmega.superopt.text import parse_graph

CASES = tuple(f"{case} rows={rows}" for rows in (1, 16) for case in PAPER_CASES)
ROTATED_BYTES = 200_000_000
ROUNDS = 30


def search(case: str) -> Rule:
    """The best proven rule of a case; prints a row of the search's table."""
    start = time.perf_counter()
    optimizer = Optimizer(read_case(case), H200)
    for _ in optimizer.run():
        pass
    seconds, found = time.perf_counter() - start, optimizer.search
    if not optimizer.rules:
        raise SystemExit(f"case {case!r}: nothing was proven; {optimizer.refused}")
    best = optimizer.rules[0]
    print(
        f"| {case} | {seconds:.0f} | {found.num_states} | {found.num_recipes} | "
        f"{len(optimizer.rules)} | {len(optimizer.refused)} | {best.proof.tests} | "
        f"{len(parse_graph(best.graph).kernels)} | {best.graph_us:.2f} | {best.program_us:.2f} |",
        flush=True,
    )
    return best


def runner(program: Program) -> Callable[[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """The program by library ops, one after another."""
    calls = [(op, compile_op(op, {})) for op in program.ops]

    def run(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        values = dict(inputs)
        for op, call in calls:
            results = call([values[name] for name in op_operands(op)])
            values.update(zip((a.tensor for a in op.writes), results, strict=True))
        return [values[name] for name in program.outputs]

    return run


def draw_inputs(program: Program) -> list[dict[str, torch.Tensor]]:
    """Copies of the inputs that no cache holds together."""
    given = [t for t in program.tensors if t.role != "temp"]
    copies = max(2, -(-ROTATED_BYTES // sum(t.num_bytes for t in given)))
    return [
        {t.name: torch.randn(t.shape, device="cuda").to(torch.bfloat16) * 0.1 for t in given}
        for _ in range(copies)
    ]


def measure(case: str) -> Record:
    """Searches, then times. What peers and floor are stands above."""
    rule, program = search(case), read_case(case)
    inputs = draw_inputs(program)
    made = graph_program(parse_graph(rule.graph))
    plain = runner(program)
    compiled: Any = torch.compile(plain, mode="max-autotune-no-cudagraphs", fullgraph=True)
    runs = {
        "ours": _captured(runner(made), inputs),
        "torch.compile": _captured(compiled, inputs),
        "unfused": _captured(plain, inputs),
    }
    times = alternating_us(runs, ROUNDS, lambda: torch.cuda._sleep(1_000_000))
    shares = {name: us / len(inputs) for name, us in times.items()}
    outputs = [t for t in program.tensors if t.name in program.outputs]
    moved = sum(t.num_bytes for t in (*outputs, *(t for t in program.tensors if t.role != "temp")))
    return Record(
        case=case,
        device=torch.cuda.get_device_name(),
        num_gpus=1,
        ours_us=round(shares.pop("ours"), 2),
        peers={name: round(us, 2) for name, us in shares.items()},
        floor_us=round(moved / copy_bytes_per_us(), 2),
    )


def _captured(
    run: Callable[[dict[str, torch.Tensor]], object], inputs: Sequence[dict[str, torch.Tensor]]
) -> Callable[[], object]:
    """One CUDA graph that runs over all copies of the inputs in turn."""
    side = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(side):
        for _ in range(3):
            run(inputs[0])
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for given in inputs:
                run(given)
    return graph.replay


def main() -> None:
    """Measures the cases that the command line names, all if none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--search-only", action="store_true")
    add_book_options(parser)
    arguments = parser.parse_args()
    print("| case | s | states | recipes | proven | refused | tests | kernels | us | op by op us |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    if arguments.search_only:
        for case in arguments.cases:
            search(case)
        return
    book = open_book(arguments.results, arguments.commit)
    for case in arguments.cases:
        record = measure(case)
        book.write("superopt", record)
        print(record, flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
