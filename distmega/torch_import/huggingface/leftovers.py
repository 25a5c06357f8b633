"""Arrays of a folder that its model's class does not use: most are a sign of another model.

In: the class, and the names of arrays that nothing was read of. Out: nothing, a warning of parts
that the class leaves out by design, or ModelError. Used by source.py.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from distmega.models.huggingface.safetensors_source import SafetensorsArray
from distmega.models.weights.tensors import require_used, some_of

logger = logging.getLogger(__name__)

_COMPUTED = r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$"
"""What classes of old stored, and make themselves today."""


def check_leftovers(
    model: nn.Module,
    prefix: str,
    unused: Mapping[str, list[str]],
    arrays: Mapping[str, SafetensorsArray],
    folder: Path,
) -> None:
    """ModelError for arrays that belong to a layer, or to a module with weights of its own; of
    others, as a tower or a head that the class does not have, a warning. Accepted are those that
    hold no weights, and those that the class says it leaves out.

    prefix: of names in the class that names in files may lack. unused: each array's name, and those
    that the class may have for it.
    """
    patterns = *_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = {name.removeprefix(prefix) for name, _ in model.named_buffers()}

    def is_ignored(name: str) -> bool:
        return name.removeprefix(prefix) in buffers or any(re.search(p, name) for p in patterns)

    left = {
        stored: [name.removeprefix(prefix) for name in names]
        for stored, names in unused.items()
        if not any(map(is_ignored, names)) and not _is_causal_mask(arrays[stored])
    }
    modules = {name.removeprefix(prefix): module for name, module in model.named_modules()}
    inside = [n for n, names in left.items() if any(_belongs(name, modules) for name in names)]
    require_used(inside, str(folder))
    if left:
        logger.warning(
            "%s holds parts that %s does not have, which are left out: %s",
            folder, type(model).__name__, some_of([*left]),
        )  # fmt: skip


def _belongs(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether an array's name is one inside of a list of layers, or of a module with weights."""
    parts = name.split(".")
    owners = [".".join(parts[:length]) for length in range(1, len(parts))]
    if any(isinstance(modules.get(owner), nn.ModuleList) for owner in owners):
        return True
    owner = modules.get(owners[-1]) if owners else None
    return owner is not None and any(True for _ in owner.parameters(recurse=False))


def _is_causal_mask(array: SafetensorsArray) -> bool:
    """Whether an array is [1, 1, n, n] of ones and zeros: what each token sees before it."""
    shape = array.opened.get_shape()
    if len(shape) != 4 or shape[:2] != [1, 1] or shape[2] != shape[3] or shape[2] < 2:
        return False
    whole = slice(None)
    first, last = (
        array.box((whole, whole, slice(row, row + 1))).flatten() for row in (0, shape[2] - 1)
    )
    return bool(last.all()) and bool(first[0]) and not torch.any(first[1:])
