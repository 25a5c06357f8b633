"""A model whose numbers go wrong, and what ranks do with it; imported on the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distmega.engine.ranks.context import Emit, RankContext
from distmega.engine.ranks.jobs import open_engine
from distmega.engine.requests import EngineOptions
from distmega.sources.load import ModelSource, open_model

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


def altered(*changes: Change) -> ModelSource:
    """The tiny model with changes."""
    source = open_model("tiny-llama")
    readers = dict(source.readers)
    for change in changes:
        readers[change.weight] = AlteredReader(readers[change.weight], change)
    return replace(source, readers=readers)


def generate(context: RankContext, payload: tuple[int, Sequence[Change]], emit: Emit) -> list[int]:
    """Tokens after PROMPT on pp stages."""
    pp, changes = payload
    options = EngineOptions(max_context=32)
    tp = context.world_size // pp
    engine = open_engine(context, altered(*changes), tp, options, pp=pp)
    return list(engine.generate(PROMPT, 3))
