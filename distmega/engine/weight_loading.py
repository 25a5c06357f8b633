"""Weights into the arena of a rank, one after another, each rank its own part.

Comes in: a ModelSource, allocations, views of the arena. Goes out: the arena filled, straight from
files, so that the GPU holds each weight once; what is read is widened and narrowed on the host, a
weight at a time. Next on the walk: engine.py.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from distmega.engine.soundness import require_sound_weight
from distmega.models.weights.random_device import fill_random
from distmega.models.weights.random_source import RandomReader
from distmega.sharding.layout.allocation import AllocationDomain
from distmega.sources.load import ModelSource

Progress = Callable[[int, int], None]
"""Called with the bytes that are loaded, and all bytes there are, after each weight."""


Tell = Callable[[str], None]
"""Called with what is done from now on, in words."""


def tell_nobody(what: str) -> None:
    """Tells nobody."""


def no_progress(done_bytes: int, all_bytes: int) -> None:
    """Tells nobody."""


def load_weights(
    source: ModelSource,
    allocations: Mapping[str, AllocationDomain],
    coordinate: Mapping[str, int],
    views: Mapping[str, Tensor],
    progress: Progress = no_progress,
) -> None:
    """Fills `views`, by name, with the parts of the weights that `coordinate` stores. ModelError
    for one that holds NaN or infinite numbers.
    """
    all_bytes, done_bytes = sum(view.nbytes for view in views.values()), 0
    for name, view in views.items():
        load_shard(source, name, allocations[name], coordinate, view)
        done_bytes += view.nbytes
        progress(done_bytes, all_bytes)


def load_shard(
    source: ModelSource,
    name: str,
    domain: AllocationDomain,
    coordinate: Mapping[str, int],
    into: Tensor,
) -> None:
    """Reads the part of a weight that `coordinate` stores; the rest of `into` becomes zeros."""
    slices = domain.local_slices(coordinate)
    extents = [each.stop - each.start for each in slices]
    if list(into.shape) != extents:
        into.zero_()
    if not all(extents):
        return
    reader, part = source.weight(name), into[tuple(slice(extent) for extent in extents)]
    if isinstance(reader, RandomReader) and into.is_cuda:
        fill_random(reader, slices, part)
    else:
        part.copy_(torch.from_numpy(reader.read(slices)))
        require_sound_weight(name, part)
