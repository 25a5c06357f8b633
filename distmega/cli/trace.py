"""`distmega trace`: a timeline of decode steps. Next: distmega/engine/ranks/jobs.py."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from distmega.cli.flags import EngineFlags, Model, Out, RankFlags, Ranks
from distmega.cli.starting import launcher_options, run_ranks
from distmega.engine.requests import EngineOptions, TraceRequest, TraceResult
from distmega.errors import RequestError, counted
from distmega.generation import check_request


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Write a timeline of decode steps on Hopper GPUs, and say where the time went.

    ui.perfetto.dev opens the file.
    """

    model: Model
    out: Out = Path("trace.json")
    """File to write."""
    steps: int = 2
    """Decode steps."""
    context: int = 512
    """Cached positions before the first step; what they hold does not matter."""
    ranks: RankFlags = Ranks()
    engine: EngineFlags = EngineOptions()


def run_trace(command: Trace, console: Console) -> None:
    """Starts ranks, which write the file, and prints where the time went."""
    options, tp = launcher_options(command.ranks)
    if command.ranks.pp > 1:
        raise RequestError(
            f"a trace of {counted(command.ranks.pp, 'stage')}",
            expected="one",
            remedy="leave out --pp",
        )
    request = TraceRequest(
        model=command.model,
        path=str(command.out.absolute()),
        num_steps=command.steps,
        position=command.context,
        tp=tp,
        options=command.engine,
    )
    check_request(request, options)
    for value in run_ranks("distmega.engine.ranks.jobs:trace", request, options):
        if isinstance(value, TraceResult):
            end = (
                f"[{counted(value.num_spans, 'span')} in {command.out}; open it in ui.perfetto.dev]"
            )
            console.print(value.summary, end, sep="\n", markup=False)
