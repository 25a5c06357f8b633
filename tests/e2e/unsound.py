"""A model whose numbers go wrong, and what ranks do with it; imported on the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmega.engine.ranks.context import Emit, RankContext
from distmega.engine.ranks.jobs import open_engine
from distmega.engine.requests import EngineOptions
from distmega.sources.load import open_model

PROMPT = (5, 6, 7)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Numbers of a weight, from row `first` on, become `value`."""

    weight: str
    value: float
    first: int = 0


@dataclass(frozen=True)
class AlteredReader:
    reader: Any
    change: Change

    def read(self, slices: Sequence[slice]) -> Any:
        found = np.array(self.reader.read(slices))
        found[max(0, self.change.first - slices[0].start) :] = self.change.value
        return found


@dataclass(frozen=True)
class Altered:
    """A model source with changes."""

    source: Any
    changes: Sequence[Change]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def weight(self, name: str) -> Any:
        reader = self.source.weight(name)
        for change in self.changes:
            reader = AlteredReader(reader, change) if change.weight == name else reader
        return reader


def altered(*changes: Change) -> Any:
    return Altered(open_model("tiny-llama"), changes)


def generate(context: RankContext, payload: tuple[int, Sequence[Change]], emit: Emit) -> list[int]:
    """Tokens after PROMPT on pp stages."""
    pp, changes = payload
    options = EngineOptions(max_context=32)
    tp = context.world_size // pp
    engine = open_engine(context, altered(*changes), tp, options, pp=pp)
    return list(engine.generate(PROMPT, 3))
