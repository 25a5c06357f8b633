"""`distmega superopt`: searches a program's equivalents, proves them, writes the rules file.

Comes in: a case of superopt/programs.py or a file with a printed program. Goes out: lines of
progress on stderr, a table of what was found on stdout, a file. Ctrl-C ends the search; what it has
found is proven and written; so does the limits' budget. Next: superopt/optimize.py.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from distmega.cli.flags import Out
from distmega.cli.streams import open_console, read_text
from distmega.errors import RequestError, counted
from distmega.kernels.machines import MACHINES
from distmega.program.text import parse_program
from distmega.program.types import Program
from distmega.superopt.optimize import Optimizer, Refusal
from distmega.superopt.programs import FAMILIES, read_case
from distmega.superopt.rules import RewriteRule, require_writable_rules, write_rules
from distmega.superopt.search.schedule import SearchLimits
from distmega.superopt.search.search import Progress

LINE_S = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, kw_only=True)
class Superopt:
    """Search equivalents of a tensor program, prove them, keep them as rules.

    Ctrl-C ends the search, and so does its budget; what it has found is kept.
    """

    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROGRAM")]
    """A file with a printed program, - for standard input, or a case such as
    "lora k=4096 n=4096 rank=16 rows=1".
    """
    out: Out = Path("rules.json")
    """Rules file to write."""
    machine: Literal["h100", "h200"] = "h200"
    """Whose cost model predicts."""
    slack: int = 1
    """Ops beyond the least that a graph may have."""
    kernels: int = 3
    """Kernels that a graph may have."""
    kept: int = 12
    """Graphs, of different structure, that are proven at most."""
    budget: int = 600
    """Seconds of search, after which the best graph found so far is proven; 0 sets no limit."""
    seed: int = 0
    """Of the proofs' random tests; the search has no chance in it."""
    full: bool = False
    """Print all graphs, not the best alone."""


def read_program(text: str) -> Program:
    """The program of a case or of a file."""
    if text.split(" ")[0] in FAMILIES:
        return read_case(text)
    try:
        found = read_text(Path(text))
    except RequestError as error:
        raise RequestError(
            f"{error.found}, and is no case",
            expected=f"a file with a printed program, or a case of {', '.join(FAMILIES)}",
            remedy='such as "lora k=4096 n=4096 rank=16 rows=1"',
        ) from error
    return parse_program(found)


def run_superopt(command: Superopt, console: Console) -> None:
    """Searches, proves, prints and writes."""
    numbers = command.slack, command.kernels - 1, command.kept - 1, command.budget, command.seed
    if min(numbers) < 0:
        raise RequestError(
            f"--slack {command.slack} --kernels {command.kernels} --kept {command.kept} "
            f"--budget {command.budget} --seed {command.seed}",
            expected="kernels and kept of at least 1, none below 0",
            remedy="correct these",
        )
    limits = SearchLimits(
        slack=command.slack,
        max_kernels=command.kernels,
        num_kept=command.kept,
        budget_s=command.budget,
    )
    machine, errors = MACHINES[command.machine], open_console(stderr=True)
    optimizer = Optimizer(read_program(command.program), machine, limits, command.seed)
    require_writable_rules(command.out)
    start = time.monotonic()
    try:
        _follow(optimizer.run(), errors, start)
    except KeyboardInterrupt:
        errors.print("interrupted; proving what was found", markup=False)
        _follow(optimizer.prove_found(), errors, start)
    for line in summary(optimizer, time.monotonic() - start, full=command.full):
        console.print(line, markup=False)
    if not optimizer.rules:
        raise RequestError(
            f"no graph of program {optimizer.program.name!r} was proven",
            expected="at least one",
            remedy="allow more by --budget, --slack or --kept",
        )
    write_rules(command.out, optimizer.rules)
    console.print(f"{counted(len(optimizer.rules), 'rule')} in {command.out}", markup=False)


def _follow(
    events: Iterator[Progress | RewriteRule | Refusal], errors: Console, start: float
) -> None:
    """A line now and then while it searches, one for each proof."""
    last = start - LINE_S
    for event in events:
        now = time.monotonic()
        match event:
            case Progress() if now - last >= LINE_S:
                last = now
                errors.print(f"{now - start:.0f} s: {describe(event)}", markup=False)
            case RewriteRule():
                text = f"{event.name} proven by {counted(event.proof.tests, 'test')}"
                errors.print(f"{now - start:.0f} s: {text}", markup=False)
            case Refusal():
                errors.print(f"{now - start:.0f} s: refused: {event.reason}", markup=False)


def describe(progress: Progress) -> str:
    """A line of progress."""
    where = f"axis {progress.divided} divided" if progress.divided else "no axis divided"
    best = f", best {progress.best_us:.2f} us" if progress.best_us < math.inf else ""
    return (
        f"{where}, {counted(progress.num_nodes, 'node')}, {counted(progress.num_states, 'state')}, "
        f"{progress.num_scheduled} of {counted(progress.num_recipes, 'recipe')} scheduled{best}"
    )


def summary(optimizer: Optimizer, seconds: float, *, full: bool) -> Iterator[str]:
    """What was found, line by line; all graphs if `full`, else the best."""
    search = optimizer.search
    yield (
        f"{optimizer.program.name}: {counted(search.num_states, 'state')},"
        f" {counted(search.num_recipes, 'recipe')}, {len(optimizer.rules)} proven,"
        f" {len(optimizer.refused)} refused, {seconds:.1f} s"
    )
    for rule in optimizer.rules:
        speedup = rule.program_us / rule.graph_us
        yield (
            f"  {rule.name}: {rule.graph_us:.2f} us predicted on {rule.machine}, op by op "
            f"{rule.program_us:.2f} ({speedup:.2f}x); {counted(rule.proof.tests, 'test')}, "
            f"2^-{rule.proof.log2_bound}; error {100 * rule.proof.worst:.0f}% of what is allowed"
        )
    if search.budget.was_short:
        yield (
            f"  stopped at its budget of {search.limits.budget_s} s; what it did not come to may "
            "be faster: raise --budget"
        )
    for rule in optimizer.rules if full else optimizer.rules[:1]:
        yield rule.graph.rstrip()
