"""Flags that several commands have: which model, who runs, what sets an engine, which files.

Comes in: nothing. Goes out: types of the fields of commands, as tyro reads them. Used by the files
of commands beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from distmega.engine.requests import EngineOptions

EngineFlags = Annotated[EngineOptions, tyro.conf.arg(name="", prefix_name=False)]
MODEL_HELP = (
    "Preset (a wrong name lists them), GGUF file, Hugging Face folder, config.json (random "
    "weights), or org/name of the Hugging Face Hub."
)
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL_HELP)]
Out = Annotated[Path, tyro.conf.arg(metavar="FILE")]
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who runs."""

    tp: int = 0
    """Tensor-parallel ranks of each stage; 0 is all that torchrun started, else 1."""
    pp: int = 1
    """Pipeline stages, each with a part of the layers and tp ranks; 1 is no pipeline."""
    launcher: Literal["auto", "local", "torchrun", "ray"] = "auto"
    """Who starts them; auto is torchrun in a process that torchrun started, else local."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run; auto is cuda on a machine with an NVIDIA GPU, else cpu."""
    max_restarts: int = 0
    """Start all ranks again, up to so many times, after one has failed (local and ray)."""


RankFlags = Annotated[Ranks, tyro.conf.arg(name="", prefix_name=False)]
