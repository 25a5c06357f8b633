"""The paper's programs: what the search finds, how long it takes, and times on a GPU.

    python -m bench.superopt --search-only                    no GPU: the search's table
    python -m bench.superopt "lora k=4096 n=4096 rank=16 rows=1" ... [--rules FILE] [--keep FILE]
                             [--again]

A case is a program of superopt/programs.py; its proven graphs come from rules files, or a search
where none has it. On a GPU a rule that was measured is launched as it was then; of other graphs the
ways to divide and launch them that are predicted to take least are measured first, with --again of
all graphs. The best one is timed in one run and in turn with torch.compile max-autotune and the
unfused program, each a CUDA graph over copies of the inputs that together exceed 200 MB, so that no
cache holds them. Results are compared with the program's in float64. Before, everything is compiled
by processes of their own, one a case, so that the GPU is measured alone. --keep writes the fastest
plans as rules, proven once more. The floor is one reading of the inputs and one writing of the
outputs at the rate of a copy. Writes bench/results/superopt-<device>.json.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from bench.options import read_options, writable_file
from bench.records import Record, add_book_options, open_book
from bench.timing import alternating_us, copy_bytes_per_us, elapsed_us
from distmega.errors import UnsupportedError
from distmega.hostir.library.ops import (
    compile_op,
    contract_axes,
    linear_spec,
    op_operands,
)
from distmega.hostir.library.pointwise import OpFunction
from distmega.kernels.machines import H200
from distmega.kernels.ugraphs.geometry import GraphPlan, graph_plans, rule_plan
from distmega.kernels.ugraphs.runner import GraphRunner
from distmega.program.types import Op, Program
from distmega.superopt.graph.text import parse_graph
from distmega.superopt.optimize import Optimizer, divided_rule
from distmega.superopt.programs import PAPER_CASES, read_case
from distmega.superopt.rules import SHIPPED, RewriteRule, read_rules, write_rules
from distmega.superopt.search.schedule import SearchLimits

CASES = tuple(f"{case} rows={rows}" for rows in (1, 16) for case in PAPER_CASES)
ROTATED_BYTES = 200_000_000
ROUNDS = 30
MOST_PROCESSES = 12
MOST_RESIDENT = 4
"""Blocks of an SM that take others in turn, of plans that are measured."""
MEASURED = 16
MEASURED_OF_GRAPH = 6
"""Plans of a case that are measured, and of each of its graphs that no one measured yet, beside one
that loads all at once.
"""


Plans = list[tuple[RewriteRule, GraphPlan]]
"""Ways to run a case, and the rule of each."""


def search(case: str) -> list[RewriteRule]:
    """Proven rules of a case, the fastest first; prints a row of the search's table."""
    start = time.perf_counter()
    optimizer = Optimizer(read_case(case), H200, SearchLimits(budget_s=0))
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
    return optimizer.rules


def library_function(op: Op) -> OpFunction:
    return compile_op(op, {})


def traced_function(op: Op) -> OpFunction:
    """An op in a form that torch.compile traces: products side by side are an einsum, which the
    library op writes into a view.
    """
    spec = linear_spec(op) if op.kind == "linear" else None
    if spec is None or spec.batch is None or spec.bias:
        return library_function(op)
    return lambda operands: (contract_axes(*operands, spec),)


def runner(
    program: Program, function_of: Callable[[Op], OpFunction] = library_function
) -> Callable[[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """The program by library ops, or by other calls of its ops, one after another."""
    calls = [(op, function_of(op)) for op in program.ops]

    def run(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        values = dict(inputs)
        for op, call in calls:
            results = call([values[name] for name in op_operands(op)])
            values.update(zip((a.tensor for a in op.writes), results, strict=True))
        return [values[name] for name in program.outputs]

    return run


def sample_inputs(program: Program, copies: int = 0) -> list[dict[str, torch.Tensor]]:
    """Copies of the inputs: so many, or as many as no cache holds together."""
    given = [t for t in program.tensors if t.role != "temp"]
    copies = copies or max(2, -(-ROTATED_BYTES // sum(t.num_bytes for t in given)))
    torch.manual_seed(0)
    return [
        {t.name: torch.randn(t.shape, device="cuda").to(torch.bfloat16) * 0.1 for t in given}
        for _ in range(copies)
    ]


def likely_plans(rules: Sequence[RewriteRule], *, again: bool = False) -> Plans:
    """Those of the least time by the model, with their rules: the best of each graph, then the
    others. again: those of rules that were measured too, beside the plan that was the fastest then.
    """
    found: list[tuple[bool, float, RewriteRule, GraphPlan]] = []
    for rule in rules:
        if rule.launches:
            found.append((False, 0.0, rule, rule_plan(rule)))
            if not again:
                continue
        graph = parse_graph(rule.graph)
        try:
            plans = graph_plans(graph, H200, MEASURED_OF_GRAPH)
        except UnsupportedError as error:
            print(f"  {rule.name}: {error}")
            continue
        with suppress(UnsupportedError):
            plans[1:1] = graph_plans(graph, H200, 1, (1,))
        plans += [other for plan in plans[:2] for other in with_other_residents(plan)]
        found += [(position > 1, plan.time_us, rule, plan) for position, plan in enumerate(plans)]
    found.sort(key=lambda item: item[:2])
    first = {plan.describe(): (rule, plan) for _, _, rule, plan in reversed(found)}
    return [*reversed(first.values())][:MEASURED]


def with_other_residents(plan: GraphPlan) -> Iterator[GraphPlan]:
    """A plan whose blocks are taken in turn, by other numbers of blocks on each SM, and all of them
    launched at once.
    """
    if not any(x.resident for x in plan.launches):
        return
    for count in range(MOST_RESIDENT + 1):
        resident = H200.num_sms * count
        launches = [
            replace(x, resident=resident, early=count > 0, eager=True) if x.resident else x
            for x in plan.launches
        ]
        yield replace(plan, launches=tuple(launches))


def plan_runner(plan: GraphPlan) -> GraphRunner:
    """The plan's kernels; nothing writes its weights."""
    weights = frozenset(t.name for t in plan.graph.tensors if t.role == "weight")
    return GraphRunner.of(plan.graph, [replace(x, constant=weights) for x in plan.launches])


def prepare(case: str, known: Sequence[RewriteRule], peers: bool, again: bool) -> Plans:
    """The plans of a case, from its rules or a search; in a process of its own, which compiles them
    and, with `peers`, the program by torch. What torch measures meanwhile it does not keep.
    """
    program = read_case(case)
    plans = likely_plans([r for r in known if r.program == program] or search(case), again=again)
    if not torch.cuda.is_available():
        return plans
    inputs = sample_inputs(program, copies=1)[0]
    for _, plan in plans:
        with suppress(Exception):  # a plan that the compiler refuses is none, as tune() tells
            plan_runner(plan)(inputs)
    if peers:
        with (
            TemporaryDirectory() as folder,
            patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
        ):
            compiled_by_torch(program)(inputs)
    torch.cuda.synchronize()
    return plans


def compiled_by_torch(program: Program, **options: Any) -> Any:
    """The program by torch.compile, max-autotune unless options say otherwise."""
    options = options or {"mode": "max-autotune-no-cudagraphs"}
    return torch.compile(runner(program, traced_function), fullgraph=True, **options)


def prepare_all(
    cases: Sequence[str], known: Sequence[RewriteRule], *, peers: bool, again: bool
) -> list[Plans]:
    """prepare() of all cases at once."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    others = ([x] * len(cases) for x in (known, peers, again))
    with (
        patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
        ProcessPoolExecutor(MOST_PROCESSES, get_context("spawn")) as pool,
    ):
        return list(pool.map(prepare, cases, *others))


def tune(
    plans: Sequence[GraphPlan],
    inputs: Sequence[dict[str, torch.Tensor]],
    exact: Sequence[torch.Tensor],
) -> tuple[GraphPlan, Callable[[], object]]:
    """The fastest plan as measured, captured; prints what each took."""
    runners = [plan_runner(plan) for plan in plans]

    def first(run: GraphRunner) -> str:
        try:
            found = list(run(inputs[0]).values())
            return f"error {error_of(found, exact):.1e}"
        except Exception as error:  # a plan that the compiler refuses is none
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"

    with ThreadPoolExecutor(8) as pool:
        reported = list(pool.map(first, runners))
    best: tuple[float, GraphPlan, Callable[[], object]] | None = None
    for plan, run, text in zip(plans, runners, reported, strict=True):
        shown = plan.describe()
        if not text.startswith("error"):
            print(f"  {plan.time_us:7.2f} predicted, refused: {text}: {shown}", flush=True)
            continue
        call = _captured(run, inputs)
        call()
        us = sorted(elapsed_us(call, len(inputs)) for _ in range(7))[3]
        print(f"  {plan.time_us:7.2f} predicted {us:7.2f} us, {text}: {shown}", flush=True)
        if best is None or us < best[0]:
            best = us, plan, call
    if best is None:
        raise SystemExit("no plan ran")
    return best[1], best[2]


def error_of(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    return max(
        float((x.double() - y).abs().max() / y.abs().max())
        for x, y in zip(found, exact, strict=True)
    )


def exact_outputs(program: Program, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The program's outputs in float64."""
    wide = replace(program, tensors=tuple(replace(t, dtype="f64") for t in program.tensors))
    return runner(wide)({name: x.double() for name, x in inputs.items()})


def measure(
    case: str, plans: Plans, *, peers: bool
) -> tuple[RewriteRule, GraphPlan, Record | None]:
    """The fastest plan with its rule; and its times beside peers. What peers and floor are stands
    above.
    """
    program = read_case(case)
    inputs = sample_inputs(program)
    exact = exact_outputs(program, inputs[0])
    plain = runner(program)
    print(f"{case}: {len(plans)} plans", flush=True)
    plan, ours = tune([plan for _, plan in plans], inputs, exact)
    rule = next(rule for rule, mine in plans if mine is plan)
    print(f"  unfused: error {error_of(plain(inputs[0]), exact):.1e}", flush=True)
    if not peers:
        return rule, plan, None
    runs = {
        "ours": ours,
        "torch.compile": _captured(compiled_by_torch(program), inputs),
        "unfused": _captured(plain, inputs),
    }
    times = alternating_us(runs, ROUNDS, lambda: torch.cuda._sleep(1_000_000))
    shares = {name: us / len(inputs) for name, us in times.items()}
    outputs = [t for t in program.tensors if t.name in program.outputs]
    moved = sum(t.num_bytes for t in (*outputs, *(t for t in program.tensors if t.role != "temp")))
    return (
        rule,
        plan,
        Record(
            case=case,
            device=torch.cuda.get_device_name(),
            num_gpus=1,
            ours_us=round(shares.pop("ours"), 2),
            peers={name: round(us, 2) for name, us in shares.items()},
            floor_us=round(moved / copy_bytes_per_us(), 2),
        ),
    )


def kept_rule(case: str, rule: RewriteRule, plan: GraphPlan, record: Record | None) -> RewriteRule:
    """The rule divided and launched by a plan, proven once more, named after the case, with its
    times of the record.
    """
    launches = [(x.num_warps, x.stages, x.resident) for x in plan.launches]
    kept = divided_rule(rule, plan.graph, launches, H200)
    return replace(
        kept,
        name=".".join(word.replace("=", "") for word in case.split()),
        library_us=min(record.peers.values()) if record else 0.0,
        measured_us=record.ours_us if record else 0.0,
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
    parser.add_argument("--rules", type=Path, nargs="*", default=[SHIPPED], help="rules files")
    parser.add_argument("--no-peers", action="store_true", help="only measure plans")
    parser.add_argument("--again", action="store_true", help="measure other plans once more")
    parser.add_argument(
        "--keep", type=writable_file, help="file for the fastest rules, others of it stay"
    )
    add_book_options(parser)
    arguments = read_options(parser, lambda given: 0 if given.search_only else 1)
    if arguments.search_only:
        print("| case | s | states | recipes | proven | refused | tests | kernels | us | unfused |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for case in arguments.cases:
            search(case)
        return
    book = open_book(arguments.results, arguments.commit)
    known = [rule for path in arguments.rules for rule in read_rules(path)]
    peers = not arguments.no_peers
    prepared = prepare_all(arguments.cases, known, peers=peers, again=arguments.again)
    for case, plans in zip(arguments.cases, prepared, strict=True):
        rule, plan, record = measure(case, plans, peers=peers)
        if arguments.keep:
            kept = kept_rule(case, rule, plan, record)
            others = read_rules(arguments.keep) if arguments.keep.exists() else []
            write_rules(
                arguments.keep, [*(rule for rule in others if rule.name != kept.name), kept]
            )
        if record:
            book.write("superopt", record)
            print(record, flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
