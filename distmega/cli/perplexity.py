"""`distmega perplexity`: how well a model predicts a text. Next: distmega/engine/ranks/jobs.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from distmega.cli.flags import EngineFlags, Model, RankFlags, Ranks
from distmega.cli.starting import (
    announce_random_weights,
    launcher_options,
    read_shared_text,
    run_ranks,
)
from distmega.engine.requests import EngineOptions, Opened, ScoreRequest, ScoreResult
from distmega.errors import counted
from distmega.generation import check_request


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Perplexity of a text file under a model."""

    model: Model
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """UTF-8 text; - is standard input. One longer than the context is read in windows of its size,
    each token with at least half of one before it.
    """
    ranks: RankFlags = Ranks()
    engine: EngineFlags = EngineOptions()


def run_perplexity(command: Perplexity, console: Console) -> None:
    """Starts ranks and prints the figure."""
    options, tp = launcher_options(command.ranks)
    request = ScoreRequest(
        model=command.model,
        text=read_shared_text(command.file),
        tp=tp,
        pp=command.ranks.pp,
        options=command.engine,
    )
    check_request(request, options)
    for value in run_ranks("distmega.engine.ranks.jobs:score", request, options):
        if value == Opened(random_weights=True):
            announce_random_weights("figure", console)
        elif isinstance(value, ScoreResult):
            console.print(
                f"perplexity {value.perplexity:.3f} over {counted(value.num_tokens, 'token')}"
            )
