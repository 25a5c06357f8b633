"""The weights of a model whose kv heads are copied (kv_copies.py), out of those of the one without.

A copy has the weights of its kv head; query heads that fill up the last copy of each are zeros, in
front of attention and behind it, so that they add nothing. Next: engine/weight_loading.py.
"""

from dataclasses import dataclass, replace

import numpy as np

from distmega.models.config import ModelConfig
from distmega.models.weights.kv_copies import copy_kv_heads
from distmega.models.weights.tensors import (
    Array,
    Range,
    Slices,
    WeightReader,
    WeightSpec,
    resolve_slices,
    weight_specs,
)
from distmega.sources.load import ModelSource

HEADS, GROUP = "h", "g"
"""Letters of ModelConfig.extents."""


def open_copies(source: ModelSource, copies: int) -> ModelSource:
    """The model with `copies` of each kv head."""
    if copies == 1:
        return source
    config = copy_kv_heads(source.config, copies)
    assert isinstance(config, ModelConfig), config
    assert isinstance(source.config, ModelConfig), source.config
    readers = dict(source.readers)
    for name, spec in weight_specs(config).items():
        if any(HEADS in group for group in spec.dims):
            readers[name] = CopiedReader(
                spec=spec, copies=copies, group=source.config.group, stored=source.weight(name)
            )
    return replace(source, config=config, readers=readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedReader:
    """A weight of heads. spec: with the copies; stored: without them; group: query heads of a kv
    head without them.
    """

    spec: WeightSpec
    copies: int
    group: int
    stored: WeightReader

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def read(self, slices: Slices = ()) -> Array:
        """The part that `slices` select: a copied head at a time, so that only what is needed is
        read.
        """
        ranges = resolve_slices(self.shape, slices)
        letters = [letter for group in self.spec.dims for letter in group]
        dim = letters.index(HEADS)
        grouped = letters.index(GROUP) if GROUP in letters else None
        out = np.zeros([max(stop - start, 0) for start, stop in ranges], np.float32)
        if not out.size:
            return out
        for head in range(*ranges[dim]):
            source, into = list(ranges), [slice(None)] * len(ranges)
            source[dim] = (head // self.copies, head // self.copies + 1)
            into[dim] = slice(head - ranges[dim][0], head - ranges[dim][0] + 1)
            if grouped is not None:
                source[grouped] = self._query_heads(head % self.copies, ranges[grouped])
                start, stop = source[grouped]
                if start >= stop:
                    continue
                into[grouped] = slice(stop - start)
            out[tuple(into)] = self.stored.read(tuple(slice(*part) for part in source))
        return out

    def _query_heads(self, copy: int, part: Range) -> Range:
        """Of the stored kv head, those that a part of the query heads of a copy are; the others are
        zeros, which come last.
        """
        first = copy * -(-self.group // self.copies)
        return first + part[0], min(first + part[1], self.group)
